"""Random number generators that depend only on a seed and a name.

The numbers are equal in every process, and do not depend on other names or on the order of calls.
"""

from __future__ import annotations

import hashlib

import numpy as np


def named_generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
