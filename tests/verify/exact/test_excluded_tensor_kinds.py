"""Pieces from a wrong place behind an excluded layer are found for every kind of tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.layer_graphs import rules

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Interval, Region
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.comparison import Check, check_exact
from dicompiler.verify.exact import DOMAIN, Relaxation, build_check_model
from dicompiler.verify.exact.exactness_check import compute_all_tensors
from dicompiler.verify.exact.excluded_layers import alternating_values
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

DEVICES = ("pi01", "pi02")
FULL = ((0, 4), (0, 6), (0, 5))
ALL = """low = Constant <value_float = -9.0> ()  k = Greater (x, low)  flat = Constant <value_ints = [-1]> ()
  l = Reshape (k, flat)  c = Compress (x, l)"""
"""A node that copies x to c without a static shape."""
SHAPED = 'all = Constant <value_ints = [4, 6, 5]> ()  a = Reshape (n, all)  ["behind"] y = Relu (a)'


def rows(_: Operation, region: Region, __: Interval | None) -> Piece:
    """Return a rule piece that passes rows through."""
    out = (*region[:2], (0, 5))
    return Piece(out, (out,))


OWN = {
    **rules(),
    ("", "Softmax"): OperatorRule("Softmax", rows),
    **{("own", op): OperatorRule(op, rows, "own") for op in ("Two", "Marked")},
}
"""The built-in rules and some rules without stand-ins."""


def text(body: str, opset: int = 17, kind: str = "INT64") -> str:
    """Return the text of a network of x and y, of shape (4, 6, 5).

    own.Two makes two tensors. own.Marked makes integers and rounded values, of which the first are cut.
    """
    return f"""<ir_version: 8, opset_import: ["": {opset}, "own": 1]>
      g (float[4, 6, 5] x) => (float[4, 6, 5] y) {{ {body} }}
      <domain: "own", opset_import: ["": {opset}]> Two (x) => (a, b) {{
        seven = Constant <value_float = 7.0> ()  a = Div (x, seven)  b = Exp (x) }}
      <domain: "own", opset_import: ["": {opset}]> Marked (x) => (m, s) {{
        seven = Constant <value_float = 7.0> ()  s = Div (x, seven)  z = Abs (x)
        m = Cast <to = {TensorProto.DataType.Value(kind)}> (z) }}
      <domain: "own", opset_import: ["": {opset}]> Rounding (c) => (n) {{
        seven = Constant <value_float = 7.0> ()  n = Div (c, seven) }}
      <domain: "own", opset_import: ["": {opset}]> Roots (c) => (n) {{
        one = Constant <value_float = 1.0> ()  p = Abs (c)  q = Add (p, one)  r = Neg (q)  n = Sqrt (r) }}"""


def read(network: str) -> Model:
    """Return the model with inferred shapes."""
    return Model.load(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(network)))


def layers_of(model: Model) -> LayerGraph:
    return form_layers(Model(onnx.shape_inference.infer_shapes(model.proto), model.weights), OWN)


def plan(layers: LayerGraph) -> Plan:
    """Return a plan with layers that can be cut, cut by rows on two devices, and the others on the first."""
    halves = [((0, 4), (0, 3), (0, 5)), ((0, 4), (3, 6), (0, 5))]
    parts = {
        layer.name: (Part("pi01"),)
        if layer.whole_reason or layers.tensors[layer.output].shape != (4, 6, 5)
        else tuple(Part(name, half) for name, half in zip(DEVICES, halves, strict=True))
        for layer in layers.layers
    }
    return Plan(parts, ("pi01",), ("pi01",))


def one_row_off(tensor: str) -> Callable[[onnx.ModelProto], int]:
    """Cut pieces of a tensor one row too far up, and return their number."""

    def change(proto: onnx.ModelProto) -> int:
        cuts = [n for n in proto.graph.node if n.op_type == "Slice" and n.input[0].split("@")[0] == tensor]
        known, changed = {entry.name: entry for entry in proto.graph.initializer}, 0
        for node in cuts:
            starts, ends = (numpy_helper.to_array(known[name]) - 1 for name in node.input[1:3])
            if starts.min() >= 0:
                for place, array in ((1, starts), (2, ends)):
                    node.input[place] = f"fault.{changed}.{place}"
                    proto.graph.initializer.append(numpy_helper.from_array(array, node.input[place]))
                changed += 1
        return changed

    return change


def crosswise(proto: onnx.ModelProto) -> int:
    """Swap the pieces of every join, and return the number of changed nodes."""
    joins = [node for node in proto.graph.node if node.op_type == "Concat"]
    for node in joins:
        node.input[:] = list(node.input)[::-1]
    return len(joins)


def checked(model: Model, change: Callable[[onnx.ModelProto], int] | None, how: Plan | None = None) -> Check:
    """Run the exact check of a network, with changed placed models."""
    layers = layers_of(model)
    parts = how or plan(layers)

    def program(variant: Model) -> Program:
        own = layers_of(variant)
        assert [(one.name, one.whole_reason) for one in own.layers] == [
            (one.name, one.whole_reason) for one in layers.layers
        ]
        placed = PartitionPass().run(PipelineState(variant, own, Platform.load("rpi4x4"), parts)).model
        proto = onnx.ModelProto()
        proto.CopyFrom(placed.proto)
        assert change is None or change(proto)
        return build_program(Model(proto, placed.weights), parts.devices)

    return check_exact(model, program, rules=OWN, layers=layers)


WHOLE = {
    "several outputs": ('["two"] a, b = own.Two (x)  ["behind"] r = Relu (a)  y = Add (r, b)', "a"),
    "the second of several outputs": ('["two"] a, b = own.Two (x)  ["behind"] r = Relu (a)  y = Add (r, b)', "b"),
    "captured by a subgraph": (
        """s = ReduceSum <keepdims = 0> (x)  zero = Constant <value_float = 0.0> ()  c = Greater (s, zero)
        ["shares"] a = Softmax (x)  b = If (c) <then_branch = t () => (float[4, 6, 5] p) { p = Neg (a) },
                                                else_branch = e () => (float[4, 6, 5] q) { q = Identity (a) }>
        ["behind"] r = Relu (a)  y = Add (r, b)""",
        "a",
    ),
    "no static shape": (f"{ALL} n = own.Rounding (c)  {SHAPED}", "a"),
}
"""Networks with a rounding layer that stays whole, and the tensor to be cut one row off."""


@pytest.mark.parametrize("kind", WHOLE)
def test_finds_piece_one_row_off_behind_whole_layer(kind: str) -> None:
    body, tensor = WHOLE[kind]
    right = checked(read(text(body)), None)
    assert right.passed and right.applies and "left out" not in right.detail, right.detail
    assert not checked(read(text(body)), one_row_off(tensor)).passed


def test_finds_piece_one_row_off_behind_layer_without_static_shape() -> None:
    model = read(text(f'{ALL} ["none"] n = own.Roots (c)  {SHAPED}'))
    right = checked(model, None)
    assert right.passed and "left out: tensor 'n', made by Roots 'none', is not an integer" in right.detail
    assert "unseen" not in right.detail
    assert not checked(model, one_row_off("a")).passed


LABELS = '["marks"] m, s = own.Marked (x)  ["behind"] y = Cast <to = 1> (m)'
BESIDE = LABELS + " e = Exp (s)"
TABLE = """["marks"] m, s = own.Marked (x)  far = Constant <value_ints = [0, 1, 2]> ()
  table = Cast <to = 1> (far)  ["behind"] g = Gather (table, m) e = Exp (s)  y = Add (g, e)"""
MARKS = [(LABELS, "INT64"), (LABELS, "INT8"), (LABELS, "BOOL"), (BESIDE, "INT64"), (BESIDE, "INT8"), (BESIDE, "BOOL")]


@pytest.mark.parametrize(("body", "dtype"), [*MARKS, (TABLE, "INT32"), (TABLE, "INT64")])
def test_finds_piece_one_row_off_behind_integers_and_bools(body: str, dtype: str) -> None:
    """The layer also makes rounded values. Unread ones do not matter, otherwise the layer is whole."""
    model = read(text(body, kind=dtype))
    right = checked(model, None)
    assert right.passed and right.applies and "left out" not in right.detail, right.detail
    own = plan(layers_of(model))
    how = replace(own, layers={**own.layers, "marks": (Part("pi01", FULL),)})
    assert checked(model, None, how).passed and not checked(model, one_row_off("m"), how).passed


def test_checks_sequence_element_of_static_shape() -> None:
    """SequenceAt rounds if the sequence's maker does, and the elements of a sequence cannot be counted."""
    body = """e = Exp (x)  z = Constant <value_int = 0> ()  s = SequenceConstruct (e, x)  a = SequenceAt (s, z)
      ["behind"] y = Relu (a)"""
    model = read(text(body))
    model.proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, (4, 6, 5)))
    found = build_check_model(model, 0, relaxation=Relaxation(generic_ops=frozenset({("", "SequenceAt")})))
    assert [node.domain for node in found.model.proto.graph.node if node.op_type == "SequenceAt"] == [DOMAIN]


def test_says_that_pieces_are_unchecked_if_nothing_can_be_added() -> None:
    model = read(text('["two"] a, b = own.Two (x)  ["behind"] y = Relu (a)'))
    right = checked(model, None)
    assert right.passed and right.detail.endswith(
        "has no exact stand-in (ones replace its output, so pieces from a wrong place do not show: Two computes "
        "2 tensors, of which plans split only one)"
    ), right.detail


def test_uses_inferred_shapes() -> None:
    bare = Model.load(onnx.parser.parse_model(text('["shares"] a = Softmax (x)  ["behind"] y = Relu (a)')))
    found = build_check_model(bare, 0, OWN, layers=layers_of(bare))
    assert list(found.excluded) == ["shares"]
    values = compute_all_tensors(found.model, found.inputs)["a"]
    assert (np.diff(values, axis=1) != 0).all() and (np.diff(values, axis=0) != 0).all()
    right = checked(bare, None)
    assert right.passed and "unseen" not in right.detail
    assert not checked(bare, crosswise).passed


def test_keeps_stand_in_if_another_call_has_none() -> None:
    model = read(
        text(
            """g = Constant <value_floats = [1.0, 1.0, 1.0, 1.0, 1.0]> ()
            ["one"] a = LayerNormalization (x, g)  ["two"] y, mean = LayerNormalization (a, g)  e = Exp (mean)"""
        ).replace("(float[4, 6, 5] y)", "(float[4, 6, 5] y, float[4, 6, 1] e)")
    )
    assert not build_check_model(model, 0, layers=form_layers(model, rules())).excluded


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 6), max_size=4),
    st.sampled_from([TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE]),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_replacement_values_differ_from_neighbours(shape: list[int], dtype: int, size: int, seed: int) -> None:
    array = alternating_values(dtype, tuple(shape), seed, "t", size)
    assert array.shape == tuple(shape) and helper.np_dtype_to_tensor_dtype(array.dtype) == dtype
    assert np.abs(array).max() <= size and np.array_equal(array, np.rint(array))
    assert all((np.diff(array, axis=axis) != 0).all() for axis in range(len(shape)))
    assert np.array_equal(array, alternating_values(dtype, tuple(shape), seed, "t", size))


KINDS = {
    "left out": '["shares"] a = Softmax (x)  ["behind"] y = Transpose <perm = [0, 1, 2]> (a)',
    "several": '["shares"] a, b = own.Two (x)  ["behind"] d = Exp (a) y = Add (d, b)',
    "whole numbers": '["shares"] a, b = own.Marked (x)  ["behind"] d = Cast <to = 1> (a) e = Exp (b) y = Add (d, e)',
}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(["INT64", "BOOL"]), st.integers(1, 5))
def test_finds_piece_from_wrong_place_along_every_axis(kind: str, dtype: str, at: int) -> None:
    model = read(text(KINDS[kind], kind=dtype))
    layers = layers_of(model)
    halves = (Part("pi01", ((0, 4), (0, at), (0, 5))), Part("pi02", ((0, 4), (at, 6), (0, 5))))
    parts = {name: (Part("pi01", FULL),) if name == "shares" else halves for name in layers.layer_by_name}
    how = Plan(parts, ("pi01",), ("pi01",))
    right = checked(model, None, how)
    assert right.passed and ("left out" in right.detail) == (kind == "left out"), right.detail
    assert not checked(model, one_row_off("a"), how).passed
