"""Seeded weights: each tensor has its own random generator, made from the seed and the tensor's name.

Adding a layer to a network therefore does not change other weights.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.rng import named_generator

Role = Literal["filter", "bias", "scale", "shift", "mean", "variance"]
#: Roles that training frameworks do not count as parameters: running statistics of a BatchNormalization.
STATISTIC_ROLES: frozenset[Role] = frozenset({"mean", "variance"})


def make_weight(
    seed: int, name: str, shape: tuple[int, ...], role: Role, fan_in: int = 1, gain: float = 1.0
) -> NDArray[np.float32]:
    """Return a float32 tensor that resembles a trained one.

    Args:
        seed: Seed of the network.
        name: Name of the tensor.
        shape: Shape of the tensor.
        role: `filter`: normal with variance 2 * gain² / fan_in (He et al. 2015, eq. 10); `bias`, `shift`, `mean`:
            normal with deviation 0.1; `scale`: gain times uniform in 0.8…1.2; `variance`: uniform in 0.7…1.3.
        fan_in: Number of products that are summed for one output element.
        gain: Scale of filters and scales.

    Returns:
        The tensor.
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
