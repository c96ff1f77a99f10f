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
    """Positions of groups of consecutive values in an array. Each group has at least one value.

    Attributes:
        starts: For each group, the position of its first value.
        count: Number of values in all groups.
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

        `function.reduceat` gives the same result, but is several times slower, because it handles the columns one after
        the other. Sums may differ in rounding.

        Args:
            function: The function that combines two values, such as np.add.
            values: Array of shape (values, …).
        """
        # If there are few groups, a loop over groups is shorter than a loop over the places in a group.
        if len(self.starts) < len(self._later_positions):
            groups = np.split(values, self.starts[1:])
            return np.array([function.reduce(group, axis=0) for group in groups])
        combined: Floats = values[self.starts]
        for groups_with_place, positions in self._later_positions:
            combined[groups_with_place] = function(combined[groups_with_place], values[positions])
        return combined

    @cached_property
    def _later_positions(self) -> Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Pairs of arrays for the second place in a group, then the third, and so on.

        A pair has the indices of the groups that have this place, and the positions of their values at this place.
        """
        lengths = np.diff(self.starts, append=self.count)
        longer = [np.flatnonzero(lengths > place) for place in range(1, int(lengths.max(initial=1)))]
        return [(groups, self.starts[groups] + place) for place, groups in enumerate(longer, 1)]
