"""Pipeline states are immutable."""

from __future__ import annotations

import dataclasses

import pytest
from support.onnx_models import small

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import uniform_platform


def test_missing_results_are_none_and_earlier_states_do_not_change() -> None:
    first = PipelineState(Model.load(small()))
    second = dataclasses.replace(first, platform=uniform_platform(2))
    assert second.model is first.model
    assert (first.platform, second.plan, second.program, second.metrics) == (None, None, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.platform = uniform_platform(1)  # type: ignore[misc]
