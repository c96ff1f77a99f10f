"""Groups of consecutive values are combined as numpy's `reduceat` combines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples

from dicompiler_strategies.teams.value_groups import ValueGroups


@pytest.mark.parametrize("function", [np.add, np.maximum])
@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 9), max_size=6), seed=st.integers(0, 99))
def test_combines_each_group(function: Any, lengths: list[int], seed: int) -> None:
    keys = np.repeat(np.arange(len(lengths)), lengths)
    values = np.random.default_rng(seed).integers(-9, 9, (len(keys), 2, 3)).astype(float)
    # Two arrays of keys: a group ends if either key changes.
    groups = ValueGroups.find(keys // 2, keys % 2)
    assert groups.starts.tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
    expected = function.reduceat(values, groups.starts, axis=0) if lengths else values
    assert groups.combine(function, values).tolist() == expected.tolist()
