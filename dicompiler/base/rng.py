"""Random numbers by seed and name: what is drawn for one name does not depend on what else is drawn, or in what order.

In: a seed and a name. Out: a numpy generator of its own, the same in every process.
"""

from __future__ import annotations

import hashlib

import numpy as np


def named_generator(seed: int, name: str) -> np.random.Generator:
    """The random generator of `name` under `seed` (a number of at least 0)."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
