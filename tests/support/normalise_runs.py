"""Short models, their normal form, and a check that it computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler_passes.normalise import Normalise, normalise


def model(body: str, ir: int = 8, opset: int = 17) -> onnx.ModelProto:
    """Return a model from the text of its graph."""
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}, "other": 1]> {body}')


def normal(source: Any) -> Model:
    """Return the normal form, checked: legal, stable under a second call, and without changes to the input."""
    loaded = Model.load(source)
    before = loaded.proto.SerializeToString()
    result = Normalise().run(PipelineState(loaded)).model
    result.check("normalised")
    assert loaded.proto.SerializeToString() == before
    assert normalise(result).proto == result.proto
    return result


def ops(result: Model) -> list[str]:
    return [node.op_type for node in result.proto.graph.node]


def run(source: Model | onnx.ModelProto, feeds: Mapping[str, Any]) -> list[NDArray[Any]]:
    data = source.to_bytes() if isinstance(source, Model) else source.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {v.name: feeds[v.name] for v in session.get_inputs()}))


def assert_same(original: onnx.ModelProto, result: Model, **feeds: Any) -> None:
    for before, after in zip(run(original, feeds), run(result, feeds), strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.dtype == after.dtype
