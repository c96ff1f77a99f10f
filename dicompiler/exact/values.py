"""The integer values of every constant that a network computes with: sparse filters, small distinct shifts, signs.

In: the facts of a model, a seed, a schedule. Out: for each place where a constant is read, the array to read there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.exact.facts import FLOATS, Facts, Use, attribute
from dicompiler.exact.patterns import WEIGHTED, extent, sparse
from dicompiler.networks.weights import generator
from dicompiler.regions import Shape

Array = NDArray[Any]


@dataclass(frozen=True)
class Schedule:
    """How large values may grow: `taps[d]` elements of ±1 in a filter that has d weighted layers before it (deeper: the
    last entry), shifts of `shift` different values, inputs of -inputs…inputs.
    """

    taps: tuple[int, ...]
    shift: int = 13
    inputs: int = 4


SCHEDULES = (
    Schedule((3, 3, 2, 2, 1)),
    Schedule((2, 1)),
    Schedule((1,), shift=5, inputs=2),
)
"""Tried in this order until every value is exact."""

#: Operators of whose constant operands each is a shift, a sign, or (Clip) a bound.
_SHIFTED = ("Add", "Concat", "Div", "Max", "Mean", "Min", "Pow", "Sub", "Sum", "Where")
_SIGNED = ("Mul", "PRelu")
_ADDED = ("Add", "Sub", "Sum")


@dataclass(frozen=True)
class Values:
    """Makes the values for one seed. A layer's sign and that of the BatchNormalization behind it cancel, so that an
    activation behind both keeps the channel alive; only the last layer before an addition has free signs.
    """

    known: Facts
    seed: int
    schedule: Schedule
    _partner: dict[int, int] = field(default_factory=dict, repr=False)

    def all(self) -> Iterator[tuple[Use, Array]]:
        """(place, array) for each constant that is replaced; it has the constant's shape and type."""
        depths = _depths(self.known)
        chains = {index: _chain(self.known, index) for index, _ in depths}
        ...
