"""Constants are computed once and become initializers; other nodes stay."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.normalise_runs import assert_same, model, normal, ops

from dicompiler.ir.onnx.model import Model, is_placeholder
from dicompiler_passes.constant_folding import fold_constants
from dicompiler_passes.normalise import normalise


def test_constant_nodes_become_initializers_of_own_type() -> None:
    original = model("g (float[3] x) => (float[3] y) { y = Relu (x) }")
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("", TensorProto.FLOAT, [1], [7.0]), helper.make_tensor("", TensorProto.INT64, [1], [2]), [3]
    )
    kinds: dict[str, Any] = {
        "value": helper.make_tensor("inner", TensorProto.FLOAT16, [2], [1.0, 2.0]),
        "value_float": 0.1,
        "value_floats": [0.1, 0.2],
        "value_int": 3,
        "value_ints": [3, 4],
        "value_string": "a",
        "value_strings": ["a", "b"],
        "sparse_value": sparse,
    }
    for kind, value in kinds.items():
        original.graph.node.append(helper.make_node("Constant", [], [kind], **{kind: value}))
        original.graph.output.append(helper.make_empty_tensor_value_info(kind))
    graph = (loaded := Model.load(original)).graph()
    fold_constants(graph)  # Pass normalise is not used here, because it would add Identity nodes for the outputs.
    result = loaded.with_graph(graph)
    assert ops(result) == ["Relu"]
    types = {name: (dtype, shape) for name, (dtype, shape) in result.initializers().items()}
    assert types == {
        "value": (TensorProto.FLOAT16, (2,)),
        "value_float": (TensorProto.FLOAT, ()),
        "value_floats": (TensorProto.FLOAT, (2,)),
        "value_int": (TensorProto.INT64, ()),
        "value_ints": (TensorProto.INT64, (2,)),
        "value_string": (TensorProto.STRING, ()),
        "value_strings": (TensorProto.STRING, (2,)),
        "sparse_value": (TensorProto.FLOAT, (3,)),
    }
    assert result.array("value_float") == np.float32(0.1)
    np.testing.assert_array_equal(result.array("sparse_value"), [0, 0, 7])


def test_constant_subgraph_becomes_one_initializer() -> None:
    original = model(
        """g (float[2, 3] x) => (float[2, 4] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[1] half = {0.5}>
        { s = Constant <value = int64[2] {3, 4}> ()
          t = Transpose (w)  scaled = Mul (t, half)  ones = ConstantOfShape <value = float[1] {1}> (s)
          k = Sub (scaled, ones)  y = MatMul (x, k) }"""
    )
    result = normal(original)
    assert ops(result) == ["MatMul"]
    assert list(result.initializers()) == ["k"]
    assert_same(original, result, x=np.arange(6, dtype=np.float32).reshape(2, 3))


def test_large_constants_become_weights() -> None:
    original = model("g (float[300] x) => (float[300] y) { a = Add (x, typed)  b = Add (a, made)  y = Add (b, held) }")
    original.graph.initializer.append(helper.make_tensor("typed", TensorProto.FLOAT, [300], list(range(300))))
    made = model("g () => (float[300] made) { s = Constant <value = int64[1] {300}> () made = ConstantOfShape (s) }")
    held = helper.make_node("Constant", [], ["held"], value=numpy_helper.from_array(np.ones(300, np.float32)))
    nodes = [*made.graph.node, held, *original.graph.node]
    del original.graph.node[:]
    original.graph.node.extend(nodes)
    result = normal(original)
    assert set(result.weights) == {"typed", "made", "held"}
    assert all(is_placeholder(t) for t in result.proto.graph.initializer)
    assert_same(original, result, x=np.ones(300, np.float32))


def test_sparse_initializer_becomes_dense() -> None:
    original = model("g (float[2, 4] x) => (float[2, 4] y) { y = Add (x, s) }")
    values, indices = numpy_helper.from_array(np.float32([5, 6]), "s"), numpy_helper.from_array(np.int64([1, 3]), "")
    original.graph.sparse_initializer.add(values=values, indices=indices, dims=[2, 4])
    result = normal(original)
    assert not result.proto.graph.sparse_initializer
    assert_same(original, result, x=np.ones((2, 4), np.float32))


def test_folds_bfloat16_as_far_as_onnxruntime_can() -> None:
    original = model(
        """g (float[4] x) => (float[4] y) { f = Cast <to = 1> (h)  n = Neg (f)  y = Add (x, n) }""",
    )
    original.graph.initializer.append(numpy_helper.from_array(np.ones(4).astype(ml_dtypes.bfloat16), "h"))
    result = normal(original)
    assert ops(result) == ["Add"]
    np.testing.assert_array_equal(result.array("n"), np.float32([-1, -1, -1, -1]))


def test_keeps_nodes_that_onnxruntime_rejects() -> None:
    original = model(
        """g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[3] v = {1, 2, 3}>
        { bad = Add (w, v)  n = Neg (w)  worse = Neg (bad)  y = Sum (x, n, worse) }"""
    )
    result = normal(original)
    assert ops(result) == ["Add", "Neg", "Sum"]
    assert sorted(result.initializers()) == ["n", "v", "w"]


@pytest.mark.parametrize(
    "line",
    [
        "r = RandomNormal <shape = [3]> ()",
        "r = RandomUniformLike (w)",
        "r = Bernoulli (w)",
        "r = other.Strange (w)",
        "r, m = Dropout (w, ratio, yes)",
        """r = If (yes) <then_branch = t () => (float[3] p) { p = RandomNormal <shape = [3]> () },
                         else_branch = e () => (float[3] q) { q = RandomNormal <shape = [3]> () }>""",
        """r = If (yes) <then_branch = t () => (float[3] p) { p = Neg (x) },
                         else_branch = e () => (float[3] q) { q = Abs (w) }>""",
    ],
)
def test_keeps_random_foreign_and_capturing_nodes(line: str) -> None:
    original = model(
        f"""g (float[3] x) => (float[3] y) <float[3] w = {{0.1, 0.2, 0.3}}, bool yes = {{1}}, float ratio = {{0.5}}>
        {{ {line} y = Add (x, r) }}"""
    )
    result = normal(original)
    assert len(ops(result)) == 2
    assert "r" not in result.initializers()


def test_folds_control_flow_of_constants() -> None:
    original = model(
        """g (float[3] x) => (float[3] y) <bool yes = {1}>
        { r = If (yes) <then_branch = t () => (float[3] p) { p = Constant <value = float[3] {1, 2, 3}> () },
                        else_branch = e () => (float[3] q) { q = Constant <value = float[3] {4, 5, 6}> () }>
          y = Add (x, r) }"""
    )
    result = normal(original)
    assert ops(result) == ["Add"]
    np.testing.assert_array_equal(result.array("r"), [1, 2, 3])


def test_keeps_sequences() -> None:
    original = model(
        """g (float[3] x) => (float[6] y) <float[3] w = {1, 2, 3}>
        { s = SequenceConstruct (w, w)  c = ConcatFromSequence <axis = 0> (s)  d = Concat <axis = 0> (x, x)
          y = Add (c, d) }"""
    )
    result = normal(original)
    assert "SequenceConstruct" in ops(result)
    assert_same(original, result, x=np.ones(3, np.float32))


def test_removes_identity_of_weight_also_in_bodies() -> None:
    original = model(
        """g (bool c, float[3] x) => (float[3] y) <float[3] w = {1, 2, 3}>
        { alias = Identity (w)  a = Add (x, alias)
          y = If (c) <then_branch = t () => (float[3] p) { p = Mul (a, alias) },
                      else_branch = e () => (float[3] q) { q = Sub (a, alias) }> }"""
    )
    result = normal(original)
    assert ops(result) == ["Add", "If"]
    assert list(result.initializers()) == ["w"]
    assert_same(original, result, c=np.array(True), x=np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("nodes", "folded"),
    [
        ("t = Expand (c, s)  y = Add (x, t)", False),
        ("t = Tile (c, s)  y = Add (x, t)", False),
        ("t = ConstantOfShape (s)  y = Add (x, t)", False),
        ("t = Expand (c, s)  u = Neg (t)  v = Abs (u)  y = Add (x, v)", False),
        ("t = Expand (c, s)  u = ReduceSum (t)  y = Add (x, u)", True),
        ("t = Expand (c, few)  y = Add (x, t)", True),
        ("t = ConstantOfShape (square)  y = MatMul (x, t)", True),
    ],
)
def test_folding_does_not_make_model_much_larger(nodes: str, folded: bool) -> None:
    original = model(
        f"""g (float[1,1,2,2000] x) => (float[1,?,?,2000] y)
        <float[1,1,1,1] c = {{3}}, int64[4] s = {{1,4,400,2000}}, int64[4] few = {{1,1,2,2000}},
        int64[2] square = {{2000,2000}}> {{ {nodes} }}"""
    )
    result = normal(original)
    assert (len(ops(result)) == 1) == folded
    assert folded or sum(weight.nbytes for weight in result.weights.values()) < 2**20


def test_sum_of_folded_constants_is_limited() -> None:
    large = "".join(f"t{i} = Expand (c, s)  y{i} = Mul (x, t{i})  " for i in range(12))
    outputs = ", ".join(f"float[1,1,500,2000] y{i}" for i in range(12))
    original = model(
        f"""g (float[1,1,1,2000] x) => ({outputs})
        <float[1,1,1,1] c = {{3}}, int64[4] s = {{1,1,500,2000}}> {{ {large} }}"""
    )
    result = normalise(Model.load(original))
    assert 0 < ops(result).count("Expand") < 12
    assert sum(weight.nbytes for weight in result.weights.values()) <= 2**24
