"""Random number generators by seed and name.

The numbers for one name depend neither on other names nor on the order of calls, and are the same in every process.
"""

from __future__ import annotations

import hashlib

import numpy as np


def named_generator(seed: int, name: str) -> np.random.Generator:
    """Return the random generator for a name under a seed (at least 0)."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
