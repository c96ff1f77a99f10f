"""Facts about a graph: readers of tensors, constant operands, and attributes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from support.exact_models import from_text

from dicompiler.verify.exact.graph_facts import facts_for_model, gather_facts, get_attribute, set_attribute

BRANCHES = """<ir_version: 8, opset_import: ["": 17]>
g (bool c, float[2] x, int64[2] n) => (float[2] y)
<float[2] k = {1, 2}, int64[2] m = {3, 4}>
{ a = Add (x, k)
  b = Mul (a, a)
  o = Add (n, m)
  y = If (c) <then_branch = t () => (float[2] p) { p = Neg (a) },
              else_branch = e () => (float[2] q) { q = Abs (b) }> }"""


def test_lists_all_places_that_read_a_tensor() -> None:
    known = gather_facts(from_text(BRANCHES))
    assert known.uses["x"] == ((0, 0),)
    assert known.uses["a"] == ((1, 0), (1, 1))
    assert known.opset == 17
    assert known.outputs == {"y"}


def test_readers_are_unknown_for_captured_and_output_tensors() -> None:
    known = gather_facts(from_text(BRANCHES))
    assert {"a", "b"} <= known.captured
    assert [known.readers(name) for name in ("a", "b", "y")] == [None, None, None]
    assert known.readers("k") == ((0, 1),)
    assert known.readers("nobody") == ()


def test_float_constants_exclude_integers() -> None:
    known = gather_facts(from_text(BRANCHES))
    added, squared, integers, _ = known.nodes
    assert [known.has_float_constant(added, index) for index in range(3)] == [False, True, False]
    assert [known.has_float_constant(integers, index) for index in range(2)] == [False, False]
    assert [known.computed_input_count(node) for node in (added, squared, integers)] == [1, 2, 1]
    assert (known.is_float("x"), known.is_float("n"), known.is_float("unknown")) == (True, False, True)
    assert known.constants["m"] == (TensorProto.INT64, (2,))


def test_facts_for_model_have_its_constants() -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Add (x, k) }'
    known = gather_facts(from_text(text, {"k": np.float32([1, 2])}))
    other = facts_for_model(known, from_text(text, {"k": np.float16([1, 2])}))
    assert (known.constants["k"][0], other.constants["k"][0]) == (TensorProto.FLOAT, TensorProto.FLOAT16)
    assert other.uses == known.uses


def test_set_attribute_replaces_in_place_or_appends() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=2, pads=[1, 1])
    before = [entry.name for entry in node.attribute]
    set_attribute(node, "group", 3)
    set_attribute(node, "strides", [2, 2])
    assert [entry.name for entry in node.attribute] == [*before, "strides"]
    assert [get_attribute(node, name, None) for name in ("group", "pads", "strides", "none")] == [
        3,
        [1, 1],
        [2, 2],
        None,
    ]
