"""ONNX models for tests of reading and writing: plain, with bodies, and with all kinds of content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """Return a model from ONNX text with its large initializers."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def small(**weights: np.ndarray) -> onnx.ModelProto:
    """Return a product with a large w (or `weights`), and a sum with a small b."""
    weights = weights or {"w": np.arange(64 * 8, dtype=np.float32).reshape(64, 8)}
    return parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 64] x) => (float[N, 8] y)
        <float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}>
        { h = MatMul (x, w)  y = Add (h, b) }""",
        **weights,
    )


def external(directory: Path, **entries: str) -> Path:
    """Return `small()` with w in weights.bin; `entries` override its reference."""
    model = small()
    array = numpy_helper.to_array(model.graph.initializer[1])
    (directory / "weights.bin").write_bytes(bytes(64) + array.tobytes())
    tensor = model.graph.initializer[1]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "weights.bin", "offset": "64", "length": "2048"} | entries).items():
        tensor.external_data.add(key=key, value=value)
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def body_model() -> onnx.ModelProto:
    """Return an If with branches that capture an outer tensor, and outer initializers that no other node reads."""
    model = parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (bool c, float[300] x) => (float[300] y) <float[1] k = {2}>
        { a = Relu (x)
          y = If (c) <
            then_branch = t () => (float[300] p) { q = Mul (a, k) p = Add (q, w) },
            else_branch = e () => (float[300] r) <float[1] m = {3}, float[1] unread = {4}> { r = Mul (a, m) }> }""",
        w=np.ones(300, np.float32),
    )
    branch = model.graph.node[1].attribute[0].g
    branch.node[0].doc_string = "inside"
    return model


def rich_model() -> onnx.ModelProto:
    """Return a model with all content that graphsurgeon drops, changes or refuses."""
    model = parsed(
        """<ir_version: 11, opset_import: ["": 21, "local": 1, "other": 3], producer_name: "maker",
            producer_version: "7", domain: "org.example", model_version: 12, doc_string: "a model">
        g (float[N, 64] x, float[64, 8] w) => (float[N, 8] y, float[N, 8] z)
        <float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}>
        { h = MatMul (x, w)  y = Add (h, b)  u = other.Thing <hollow: ints = [], mode = "linear"> (y)
          z = local.twice (u) }
        <domain: "local", opset_import: ["": 21], doc_string: "doubles"> twice (v) => (d) { d = Add (v, v) }""",
        w=np.arange(512, dtype=np.float32).reshape(64, 8),
        unread=np.zeros(400, np.float32),
        half=np.ones(600, np.float32).astype(ml_dtypes.bfloat16),
        odd=np.ones(1100, np.float32).astype(ml_dtypes.float8_e4m3fnuz),
        nibbles=np.ones(3001, np.int8).astype(ml_dtypes.int4),
    )
    model.metadata_props.add(key="trained", value="yes")
    model.configuration.add(name="pair", num_devices=2)
    graph = model.graph
    graph.doc_string = "a graph"
    graph.metadata_props.add(key="g", value="1")
    graph.quantization_annotation.add(tensor_name="h").quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="b")
    graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", 8], doc_string="hidden"))
    graph.value_info[0].metadata_props.add(key="v", value="1")
    graph.output[0].type.tensor_type.shape.dim[1].denotation = "DATA_FEATURE"
    values = numpy_helper.from_array(np.array([5, 6], np.float32), "scarce")
    indices = numpy_helper.from_array(np.array([1, 3], np.int64), "")
    graph.sparse_initializer.add(values=values, indices=indices, dims=[2, 4])
    for name in ("half", "odd", "nibbles"):
        cast = helper.make_node("Cast", [name], [f"{name}_out"], name=f"of_{name}", to=TensorProto.FLOAT)
        graph.node.append(cast)
    graph.node.append(helper.make_node("Identity", ["scarce"], ["scarce_out"], name="of_scarce"))
    node = graph.node[0]
    node.name, node.doc_string, node.overload = "product", "a node", "v2"
    node.metadata_props.add(key="dicompiler.device", value="pi01")
    node.device_configurations.add(configuration_id="pair", pipeline_stage=1)
    thing = graph.node[2]
    thing.attribute.add(name="bytes", type=onnx.AttributeProto.STRING, s=b"\xff\xfe")
    thing.attribute.add(name="texts", type=onnx.AttributeProto.STRINGS, strings=[b"a", b"\xff"])
    thing.attribute.add(name="kind", type=onnx.AttributeProto.TYPE_PROTO).tp.tensor_type.elem_type = 1
    thing.attribute.add(name="f", type=onnx.AttributeProto.FLOAT, f=0.1, doc_string="a tenth")
    tensor = thing.attribute.add(name="table", type=onnx.AttributeProto.TENSOR)
    tensor.t.CopyFrom(helper.make_tensor("t", TensorProto.FLOAT, [2], [1, 2]))
    for node in graph.node:
        node.name = node.name or node.output[0]
    return model


def message_of(source: Any) -> str:
    """Return the error of one line with which the loader rejects a model."""
    with pytest.raises(DicompilerError) as caught:
        Model.load(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)
