"""Seeded weights: every tensor draws from a generator of its own, made from the seed and the tensor's name.

In: a seed, a name, a shape, a role. Out: a float32 array. Adding a layer to a network leaves all other weights alone.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.rng import named_generator

Role = Literal["filter", "bias", "scale", "shift", "mean", "variance"]
#: Roles that a training framework does not count as parameters: a BatchNormalization's running statistics.
STATISTIC_ROLES: frozenset[Role] = frozenset({"mean", "variance"})


def make_weight(
    seed: int, name: str, shape: tuple[int, ...], role: Role, fan_in: int = 1, gain: float = 1.0
) -> NDArray[np.float32]:
    """A trained-looking float32 tensor.

    filter: normal with variance 2 * gain² / fan_in (He et al. 2015, eq. 10); bias, shift, mean: normal, deviation 0.1;
    scale: gain times a uniform number in 0.8…1.2; variance: uniform in 0.7…1.3, so never near zero.
    `fan_in` is the number of products that are summed to make one output element.
    """
    random = named_generator(seed, name)
    if role == "filter":
        return _normal(random, shape, gain * math.sqrt(2.0 / fan_in))
    if role == "scale":
        return _uniform(random, shape, 0.8 * gain, 1.2 * gain)
    if role == "variance":
        return _uniform(random, shape, 0.7, 1.3)
    return _normal(random, shape, 0.1)


def _normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> NDArray[np.float32]:
    array = random.standard_normal(shape, dtype=np.float32)
    array *= np.float32(deviation)
    return array


def _uniform(random: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> NDArray[np.float32]:
    return (low + (high - low) * random.random(shape, dtype=np.float32)).astype(np.float32)
