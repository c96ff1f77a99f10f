"""Networks in QDQ form: every reader has its own DequantizeLinear, and weights stay in 8 bits."""

from __future__ import annotations

import numpy as np
import onnx

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.executor import run_model
from dicompiler_passes.normalise import normalise

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[2,3] x) => (float[2,3] y, float[2,3] d) <float s = {0.5}, int8 z = {1}, int8[3,3] w = {1,2,3,4,5,6,7,8,9}>
{ q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  v = DequantizeLinear(w, s, z)
  a = MatMul(d, v)  b = Add(d, a)  y = Mul(b, d) }"""


def test_each_reader_has_own_dequantize_node() -> None:
    source = Model.load(onnx.parser.parse_model(TEXT))
    model = normalise(source)
    nodes = {node.output[0]: node for node in model.proto.graph.node}
    readers = [name for node in model.proto.graph.node for name in node.input if name in nodes]
    dequantised = [name for name, node in nodes.items() if node.op_type == "DequantizeLinear"]
    assert len(dequantised) == 5 and "d" in dequantised
    assert all(readers.count(name) == (0 if name == "d" else 1) for name in dequantised)
    inputs = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    reference, got = run_model(source, inputs), run_model(model, inputs)
    assert all(np.array_equal(got[name], value) for name, value in reference.items())
    assert normalise(model).to_bytes() == model.to_bytes()


def test_quantized_weight_stays_quantized() -> None:
    model = normalise(Model.load(onnx.parser.parse_model(TEXT)))
    assert model.array("w").dtype == np.int8
