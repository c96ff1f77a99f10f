"""Compile time is linear in the number of nodes: steps are counted instead of timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import pytest
from support.wide_graphs import GRAPHS

import dicompiler


def steps(work: Callable[[], object]) -> int:
    """Return the number of executed Python lines, including each turn of a comprehension."""
    count = 0

    def trace(_frame: FrameType, event: str, _given: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
def test_steps_grow_linearly_with_nodes(make: Callable[[int], onnx.ModelProto], tmp_path: Path) -> None:
    models = {count: make(count) for count in (30, 90, 180, 360)}

    def compiled(count: int) -> int:
        return steps(lambda: dicompiler.compile(models[count], "rpi4x2", "single", output=tmp_path / str(count)))

    compiled(30)  # The first compilation does work that is needed only once, so it is not counted.
    few, more, most = (compiled(count) for count in (90, 180, 360))
    assert most - more < 2.2 * (more - few)
