"""Models that the installed onnxruntime cannot load are refused at compile time, with node, operator and type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import check_loadable
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight


def model(
    *nodes: onnx.NodeProto, dtype: int = TensorProto.FLOAT, opset: int = 17, ir: int = 8, **constants: onnx.TensorProto
) -> onnx.ModelProto:
    for name, tensor in constants.items():
        tensor.name = name
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, [1, 4, 8, 8])],
        [onnx.ValueInfoProto(name="y")],
        list(constants.values()),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def filters(dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones((64, 4, 3, 3), dtype))


CASES: Mapping[str, tuple[onnx.ModelProto, tuple[str, ...]]] = {
    "double-precision Conv": (
        model(helper.make_node("Conv", ["x", "w"], ["y"], "culprit"), dtype=TensorProto.DOUBLE, w=filters(np.float64)),
        ("Conv 'culprit'", "opset 11", "double"),
    ),
    "Add of opset 6": (
        model(helper.make_node("Add", ["x", "x"], ["y"], "culprit"), opset=6),
        ("Add 'culprit'", "opset 6", "float"),
    ),
    "float4 weights": (
        model(
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"], "culprit"),
            helper.make_node("Add", ["x", "d"], ["y"]),
            opset=23,
            ir=11,
            w=helper.make_tensor("", TensorProto.FLOAT4E2M1, [8, 8], np.zeros(64)),
            s=numpy_helper.from_array(np.float32(1)),
        ),
        ("DequantizeLinear 'culprit'", "opset 23", "float4e2m1"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_model_without_kernel_is_refused(name: str, tmp_path: Path) -> None:
    proto, expected = CASES[name]
    with pytest.raises(DicompilerError) as caught:
        dicompiler.compile(proto, "rpi4x2", "single", output=tmp_path / "build")
    message = str(caught.value)
    assert all(text in message for text in (*expected, "onnxruntime", "export the model")) and "\n" not in message
    assert not (tmp_path / "build").exists()


def test_attributes_that_onnxruntime_rejects_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    node = helper.make_node("LRN", ["x"], ["y"], "culprit", size=3, alpha=-1.0)
    with pytest.raises(DicompilerError, match=r"^the model: onnxruntime cannot load it: .*alpha"):
        dicompiler.compile(model(node), "rpi4x2", "single")
    assert capfd.readouterr().err == ""


def test_weights_are_not_read() -> None:
    loaded = Model.load(model(helper.make_node("Conv", ["x", "w"], ["y"], "n"), w=filters()))
    assert list(loaded.weights) == ["w"]
    missing = MappingProxyType(dict[str, Weight]())
    check_loadable(Model(loaded.proto, missing))
