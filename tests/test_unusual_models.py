"""Unusual but legal models and plans: each is split, run, and equal to the whole byte by byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.generators import random_plan
from support.weighing import check_unwritten

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import Execution, ProgramExecutor, run_model
from dicompiler_passes import infer_shapes
from dicompiler_passes.partition import PartitionPass

RNG = np.random.default_rng(0)
POOL = "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
CONV = "Conv <pads = [1, 1, 1, 1]>"


def network(body: str, opset: int = 17, **weights: Any) -> onnx.ModelProto:
    """Return a model from the text of its graph, with initializers of small integers or of given values."""
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {body}')
    for name, value in weights.items():
        array = value if isinstance(value, np.ndarray) else RNG.integers(-2, 3, value).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def rows(device: str, start: int, stop: int, lane: int = 0) -> Part:
    return Part(device, ((0, 1), (0, 4), (start, stop), (0, 6)), lane=lane)


def inputs_of(proto: onnx.ModelProto) -> dict[str, Any]:
    return {
        v.name: RNG.integers(-4, 5, [d.dim_value for d in v.type.tensor_type.shape.dim]).astype(
            helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)
        )
        for v in proto.graph.input
    }


def split(proto: onnx.ModelProto, plan: Plan) -> tuple[PipelineState, Program]:
    before = replace(prepare(Model.load(proto)), plan=plan)
    placed = PartitionPass().run(before)
    placed.model.check("partition")
    assert placed.routing is not None
    program = build_program(placed.model, plan.devices)
    check_unwritten(before.model, placed.routing, plan, program)
    return placed, program


def check_same(proto: onnx.ModelProto, plan: Plan, inputs: dict[str, Any] | None = None) -> Execution:
    """Split, run and compare every output of every device, and the bytes."""
    inputs = inputs_of(proto) if inputs is None else inputs
    reference = run_model(Model.load(proto), inputs)
    placed, program = split(proto, plan)
    execution = ProgramExecutor(program).run(inputs)
    assert placed.routing is not None
    assert sum(execution.sent) == placed.routing.total_bytes
    assert set(execution.outputs) == set(reference)
    for outputs in execution.delivered.values():
        for name, value in outputs.items():
            assert np.array_equal(reference[name], value), name
    return execution


RANDOMLY = {
    "a tensor is read twice by one node": network(
        f"n (float[1,4,6,6] x) => (float[1,8,6,6] y) {{ a = {POOL} (x) y = Concat <axis = 1> (a, a) }}"
    ),
    "both operands of a product are one tensor": network(
        "n (float[6,6] x) => (float[6,6] y, float[6,6] z) { a = Relu (x) y = MatMul (a, a) z = MatMul (x, a) }"
    ),
    "layers share a weight and cut it differently": network(
        f"n (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ a = {CONV} (x, w) "
        f"b = Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (a, w) c = Add (b, v) y = {CONV} (c, w) }}",
        w=(4, 4, 3, 3),
        v=(4, 1, 1),
    ),
    "an initializer is an output and a weight": network(
        f"n (float[1,4,6,6] x) => (float[4,4,3,3] w, float[1,4,6,6] y) {{ y = {CONV} (x, w) }}", w=(4, 4, 3, 3)
    ),
    "an input that nobody reads": network("n (float[1,4] x, float[3] u) => (float[1,4] y) { y = Relu (x) }"),
    "weights that are inputs": network(
        "n (float[1,4,6,6] x, float[4,2,3,3] w, float[4] b) => (float[1,4,4,4] y) "
        "{ v = Neg (w) y = Conv <group = 2> (x, v, b) }"
    ),
    "scalars": network(
        "n (float s, float[3] v) => (float y, float[3] z, float u) "
        "{ a = Relu (s) y = Mul (a, s) b = Mul (v, a) z = Neg (b) u = MatMul (v, z) }"
    ),
    "empty tensors": network(
        "n (float[1,0,3] s, float[1,2,3] v) => (float[1,2,3] y, float[1,0,3] z) "
        "{ a = Relu (s) z = Neg (a) y = Concat <axis = 1> (z, v) }"
    ),
    "only the mask of a Dropout": network("n (float[1,4,6,6] x) => (bool[1,4,6,6] m) { y, m = Dropout (x) }", opset=12),
    "only the indices of a MaxPool": network(
        "n (float[1,4,6,6] x) => (int64[1,4,5,5] m) { y, m = MaxPool <kernel_shape = [2, 2]> (x) }", opset=12
    ),
    "outputs that nobody reads but the operator insists on": network(
        f"n (float[2,4,6,6] x) => (float[2,4,6,6] y) {{ a = {CONV} (x, w) "
        "y, m, v = BatchNormalization <training_mode = 1> (a, s, s, s, s) }",
        opset=15,
        w=(4, 4, 3, 3),
        s=np.ones(4, np.float32),
    ),
    "a Dropout in training mode between others": network(
        f"n (float[2,4,6,6] x) => (float[2,4,6,6] y) {{ a = {CONV} (x, w) b = Dropout (a, r, t) c = Relu (b) "
        f"y = {CONV} (c, w) }}",
        w=(4, 4, 3, 3),
        r=np.array(0, np.float32),
        t=np.array(True),
    ),
    "a BatchNormalization with figures for every element": network(
        f"n (float[2,4,6,6] x) => (float[2,4,6,6] y) {{ a = {CONV} (x, w) "
        "y = BatchNormalization <spatial = 0, epsilon = 0.0> (a, s, s, m, s) }",
        opset=8,
        w=(4, 4, 3, 3),
        s=np.ones((4, 6, 6), np.float32),
        m=(4, 6, 6),
    ),
    "a Reshape of before opset 5": network(
        f"n (float[1,4,6,6] x) => (float[1,1,24,6] y) {{ a = {POOL} (x) b = Flatten <axis = 3> (a) "
        "y = Unsqueeze <axes = [0, 1]> (b) }",
        opset=4,
    ),
}
RANDOMLY |= {
    "an input is an output, and an output is listed twice": network(
        f"n (float[1,4,6,6] x) => (float[1,4,6,6] x, float[1,4,6,6] y, float[4,4,3,3] w, float[1,4,6,6] y) "
        f"{{ y = {CONV} (x, w) }}",
        w=(4, 4, 3, 3),
    ),
    "operators of opset 1": network(
        f"n (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ a = {CONV} (x, w) b = Transpose <perm = [0, 1, 3, 2]> (a) "
        f"y = {CONV} (b, w) }}",
        opset=1,
        w=(4, 4, 3, 3),
    ),
    "a Reshape of opset 4, and partial sums": network(
        f"n (float[1,4,6,6] x) => (float[1,4,36] y) {{ a = {CONV} (x, w) y = Reshape <shape = [1, 4, 36]> (a) }}",
        opset=4,
        w=(4, 4, 3, 3),
    ),
    "a convolution without filters": network(
        "n (float[1,4,6,6] x, float[1,3,4,4] z) => (float[1,3,4,4] y) { a = Conv (x, w) y = Concat <axis = 1> (a, z) }",
        w=(0, 4, 3, 3),
    ),
}


def test_outputs_of_artifact_keep_names(tmp_path: Path) -> None:
    proto = RANDOMLY["an input is an output, and an output is listed twice"]
    compiled = dicompiler.compile(proto, "rpi4x2", "modnn", output=tmp_path / "build")
    outputs = dicompiler.run(tmp_path / "build", inputs_of(proto)).outputs[0]
    assert list(outputs) == ["x", "y", "w"]
    assert compiled.verify().passed


@pytest.mark.parametrize("name", ["operators of opset 1", "a convolution without filters"])
def test_artifact_computes_same(name: str, tmp_path: Path) -> None:
    compiled = dicompiler.compile(RANDOMLY[name], "rpi4x2", "modnn", output=tmp_path / "build")
    assert compiled.verify().passed


@pytest.mark.parametrize("proto", RANDOMLY.values(), ids=RANDOMLY.keys())
def test_under_any_plan(proto: onnx.ModelProto) -> None:
    layers = prepare(Model.load(proto)).layers
    assert layers is not None
    for seed in range(12):
        check_same(proto, random_plan(Random(seed), layers))


def renamed(proto: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        value.name = names.get(value.name, value.name)
    return proto


@pytest.mark.parametrize(
    "names",
    [
        {"a": "w[0:2, 0:4, 0:3, 0:3]", "b": "w[2:4, 0:4, 0:3, 0:3]"},
        {"a": "int64[2]", "b": "int64[0]"},
        {"a": "y@a", "b": "y@b"},
        {"x": "in put@a#1", "a": "a/@b&", "b": "n" * 3000, "y": "y@a, é", "w": "wé [0:1]"},
    ],
    ids=["like a cut weight", "like a constant", "like a part", "odd characters"],
)
def test_tensor_names_may_look_like_pieces(names: dict[str, str]) -> None:
    chain = f"n (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ a = {CONV} (x, w) b = {POOL} (a) y = {CONV} (b, w) }}"
    proto = renamed(network(chain, w=(4, 4, 3, 3)), names)
    halves = tuple(Part(d, ((0, 1), c, (0, 6), (0, 6))) for d, c in (("a", (0, 2)), ("b", (2, 4))))
    layers = prepare(Model.load(proto)).layers
    assert layers is not None
    first, pool, last = (layer.name for layer in layers.layers)
    check_same(proto, Plan({first: (Part("a"),), pool: halves, last: halves}, ("a",), ("b",)))
    for seed in range(8):
        check_same(proto, random_plan(Random(seed), layers))


def test_device_name_may_have_comma() -> None:
    proto = network("n (float[1,4,6,6] x) => (float[1,4,6,6] y) { y = Relu (x) }")
    check_same(proto, Plan({"y": (Part("a,b"),)}, ("a,b",), ("c",)))


def value(name: str, shape: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def whole(nodes: Any, inputs: Any, outputs: Any, weights: Any = ()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "n", inputs, outputs, list(weights))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("inner", ["u", "a@a", "a@b", "i@a"])
def test_body_may_use_name_of_captured_piece(inner: str) -> None:
    """A layer with captures runs on two devices, so the captured tensor has another name on each."""
    then = [helper.make_node("Add", ["a", "k"], [inner]), helper.make_node("Neg", [inner], ["t"])]
    other = [helper.make_node("Mul", ["a", "x"], ["e"])]
    branches = {
        "then_branch": helper.make_graph(then, "then", [], [value("t", [1, 4, 6, 6])]),
        "else_branch": helper.make_graph(other, "else", [], [value("e", [1, 4, 6, 6])]),
    }
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    proto = whole(
        [
            helper.make_node("MaxPool", ["x"], ["a"], "first", **window),
            helper.make_node("If", ["c"], ["i"], "if", **branches),
            helper.make_node("MaxPool", ["i"], ["y"], "last", **window),
        ],
        [value("x", [1, 4, 6, 6]), value("c", [], TensorProto.BOOL)],
        [value("y", [1, 4, 6, 6])],
        [numpy_helper.from_array(np.float32([2]), "k")],
    )
    plan = Plan({"if": (Part("a"), Part("b")), "last": (rows("a", 0, 3), rows("b", 3, 6))}, ("a",), ("a",))
    for taken in (True, False):
        check_same(proto, plan, {**inputs_of(proto), "c": np.array(taken)})


def test_output_of_unknown_shape_is_delivered_by_computing_sink() -> None:
    def branch(op: str) -> onnx.GraphProto:
        nodes = [helper.make_node("NonZero", ["x"], [f"{op}1"]), helper.make_node(op, ["x"], [f"{op}2"])]
        return helper.make_graph(nodes, op, [], [value(f"{op}1", None, TensorProto.INT64), value(f"{op}2", [6])])

    proto = whole(
        [
            helper.make_node("If", ["c"], ["nz", "s"], "if", then_branch=branch("Neg"), else_branch=branch("Abs")),
            helper.make_node("Relu", ["s"], ["y"], "last"),
        ],
        [value("x", [6]), value("c", [], TensorProto.BOOL)],
        [value("nz", ["p", "q"], TensorProto.INT64), value("y", [6])],
    )
    copies = (Part("a"), Part("b"), Part("b", lane=1))
    thirds = (Part("a", ((0, 2),)), Part("b", ((2, 4),)), Part("b", ((4, 6),), lane=1))
    inputs = {"x": np.arange(6, dtype=np.float32) - 3, "c": np.array(True)}
    execution = check_same(proto, Plan({"if": copies, "last": thirds}, ("a",), ("b",)), inputs)
    assert set(execution.delivered["b"]) == {"nz", "y"}


def test_segment_does_not_end_at_untyped_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of another domain may make a tensor without a type, so no segment can begin with it.

    Here it is ready for the segment that `mid` begins, but its reader waits for `late` from another device.
    """
    proto = whole(
        [
            helper.make_node("Relu", ["x"], ["q"], "early"),
            helper.make_node("CumSum", ["q", "axis"], ["m"], "mid"),
            helper.make_node("CumSum", ["q", "axis"], ["l"], "late"),
            helper.make_node("Gelu", ["x"], ["g"], "untyped", domain="com.microsoft"),
            helper.make_node("Add", ["g", "l"], ["s"], "add"),
            helper.make_node("Mul", ["s", "m"], ["y"], "last"),
        ],
        [value("x", [6])],
        [value("y", [6])],
        [numpy_helper.from_array(np.int64(0), "axis")],
    )
    monkeypatch.setattr(infer_shapes, "infer_missing_shapes", lambda *_: {})
    here = dict.fromkeys(("early", "mid", "last"), (Part("a"),))
    plan = Plan({**here, "late": (Part("b"),)}, ("a",), ("a",))
    _, program = split(proto, plan)
    own = [[node.name for node in segment.model.graph.node] for segment in program.devices[0].segments]
    assert own == [["early"], ["mid"], ["untyped", "add", "last"]]
    check_same(proto, plan)


@pytest.mark.parametrize("domain", ["com.microsoft", "other"])
def test_names_operator_that_onnxruntime_lacks(domain: str) -> None:
    node = helper.make_node("NewAttention", ["x"], ["y"], "fused", domain=domain)
    proto = whole([node], [value("x", [6])], [value("y", [6])])
    words = rf"^model: 'fused': onnxruntime \S+ has no operator 'NewAttention' of domain '{domain}'"
    with pytest.raises(DicompilerError, match=words):
        prepare(Model.load(proto))


def test_counts_packed_bytes_of_small_types() -> None:
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["x", "s"], ["y"], "dequantize")],
        "n",
        [value("x", [3, 5], TensorProto.INT4)],
        [value("y", [3, 5])],
        [numpy_helper.from_array(np.float32(0.5), "s")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    placed, program = split(proto, Plan({"dequantize": (Part("b"),)}, ("a",), ("b",)))
    assert placed.routing is not None
    assert placed.routing.total_bytes == sum(t.value.nbytes for t in program.transfers) == 8


def test_standard_domain_may_have_long_name() -> None:
    """Before opset 13 Softmax takes all axes from `axis` on, so the version must be found under either name."""
    proto = network(
        "n (float[2,24] x) => (float[2,24,1] y) { a = Hardmax <axis = 0> (x) y = Unsqueeze (a, i) }",
        i=np.array([2]),
    )
    proto.opset_import[0].domain = "ai.onnx"
    layers = prepare(Model.load(proto)).layers
    assert layers is not None
    assert [layer.nodes[0].opset for layer in layers.layers] == [17, 17]
    for seed in range(8):
        check_same(proto, random_plan(Random(seed), layers))
