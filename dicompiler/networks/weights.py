"""Seeded weights. Each tensor has a random generator that depends on the seed and the tensor's name."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.rng import named_generator

Role = Literal["filter", "bias", "scale", "shift", "mean", "variance"]
#: Roles of the running statistics of a BatchNormalization, which training frameworks do not count as parameters.
STATISTIC_ROLES: frozenset[Role] = frozenset({"mean", "variance"})


def make_weight(
    seed: int, name: str, shape: tuple[int, ...], role: Role, fan_in: int = 1, gain: float = 1.0
) -> NDArray[np.float32]:
    """Return a float32 tensor with random values like those of a trained tensor with this role (use).

    Args:
        seed: Seed of the random values.
        name: Name of the tensor, on which the random values depend too.
        shape: Shape of the tensor.
        role: `filter`: normal with variance 2 · gain² / fan_in (He et al. 2015, eq. 10); `scale`: uniform in 0.8 to
            1.2, multiplied by `gain`; `variance`: uniform in 0.7 to 1.3; `bias`, `shift` and `mean`: normal with
            deviation 0.1.
        fan_in: Number of products that are summed for one output element of a filter.
        gain: Factor of the values of a filter or scale.
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
