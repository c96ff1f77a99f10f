"""Sequence outputs become tensor outputs with the values of onnxruntime's sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import dicompiler
from dicompiler.ir.onnx.model import Model
from dicompiler_passes.normalise import normalise

SPLITS: dict[str, tuple[Any, dict[str, int]]] = {
    "by sizes": ([1, 3, 2], {"axis": 2}),
    "by a number": (4, {"axis": 2}),
    "one by one": (None, {"axis": 1}),
    "one by one, the axis gone": (None, {"axis": 1, "keepdims": 0}),
    "from behind": ([2, 4], {"axis": -1}),
}


def network(opset: int, split: Any = None, attributes: dict[str, int] | None = None) -> onnx.ModelProto:
    """Return x → Conv → a sequence of two tensors, or of a split."""
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((3, 2, 1, 1)).astype(np.float32), "w")
    nodes, constants = [helper.make_node("Conv", ["x", "w"], ["a"], "conv")], [weight]
    if attributes is None:
        nodes += [helper.make_node("Relu", ["a"], ["b"], "relu")]
        nodes += [helper.make_node("SequenceConstruct", ["a", "b"], ["y"], "pair")]
    else:
        inputs = ["a"]
        if split is not None:
            constants.append(numpy_helper.from_array(np.array(split, np.int64), "sizes"))
            inputs.append("sizes")
        nodes.append(helper.make_node("SplitToSequence", inputs, ["y"], "pair", **attributes))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 6, 6])
    result = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    return helper.make_model(
        helper.make_graph(nodes, "g", [given], [result], constants),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8,
    )


def check(proto: onnx.ModelProto) -> None:
    """Assert that the outputs of the normal form are the elements of onnxruntime's sequence."""
    x = np.random.default_rng(1).standard_normal((1, 2, 6, 6)).astype(np.float32)
    sequence = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]
    made = normalise(Model.load(proto))
    assert [value.name for value in made.proto.graph.output] == [f"y_{i}" for i in range(len(sequence))]
    found = ort.InferenceSession(made.proto.SerializeToString()).run(None, {"x": x})
    for one, expected in zip(found, sequence, strict=True):
        np.testing.assert_array_equal(one, expected)
    assert normalise(made).proto == made.proto


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_constructed_sequence_becomes_its_tensors(opset: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "dicompiler"):
        check(network(opset))
    said = "output 'y' is a sequence, which devices cannot send: you get its tensors as outputs 'y_0', 'y_1'"
    assert said in caplog.text


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_split_to_sequence_becomes_its_tensors(opset: int, name: str) -> None:
    check(network(opset, *SPLITS[name]))


def test_network_with_sequence_output_compiles_and_verifies(tmp_path: Path) -> None:
    compiled = dicompiler.compile(network(17, *SPLITS["by sizes"]), "rpi4x2", output=tmp_path / "out")
    assert [check.detail for check in compiled.verify().checks if not check.passed] == []


def test_sequence_of_unknown_length_stays_a_list(tmp_path: Path) -> None:
    proto = network(17, [1, 5], {"axis": 2})
    del proto.graph.initializer[1]
    proto.graph.input.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [2]))
    made = dicompiler.compile(proto, "rpi4x2", output=tmp_path / "out")
    assert made.program is not None
    assert [(value.name, value.is_fixed_size) for value in made.program.outputs] == [("y", False)]
