"""Sums or maxima of groups of consecutive array entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler_strategies.tables.choice_footprints import Floats


@dataclass(frozen=True, eq=False)
class ValueGroups:
    """Groups of consecutive values, each with at least one value.

    Attributes:
        starts: For each group, the position of its first value.
        count: Number of all values.
    """

    starts: NDArray[np.intp]
    count: int

    @classmethod
    def find(cls, *keys: NDArray[np.intp]) -> ValueGroups:
        """Return groups of consecutive values whose keys are equal. Each array has one key for each value."""
        is_first = np.ones(len(keys[0]), np.bool_)
        is_first[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
        return cls(np.flatnonzero(is_first), len(is_first))

    def combine(self, function: np.ufunc, values: Floats) -> Floats:
        """Return the combined values of each group, such as their sum, shape (groups, …).

        The result is that of `function.reduceat`, which is several times slower, because it reads each column by
        itself. Sums may differ in rounding.

        Args:
            function: The function that combines two values, such as np.add.
            values: Array of shape (values, …).
        """
        if len(self.starts) < len(self._later_values):
            groups = np.split(values, self.starts[1:])
            return np.array([function.reduce(group, axis=0) for group in groups])
        combined: Floats = values[self.starts]
        for groups_with_value, positions in self._later_values:
            combined[groups_with_value] = function(combined[groups_with_value], values[positions])
        return combined

    @cached_property
    def _later_values(self) -> Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """The second value of each group, then the third, and so on.

        Each entry has the groups with such a value, and the positions of these values.
        """
        lengths = np.diff(self.starts, append=self.count)
        longer = [np.flatnonzero(lengths > place) for place in range(1, int(lengths.max(initial=1)))]
        return [(groups, self.starts[groups] + place) for place, groups in enumerate(longer, 1)]
