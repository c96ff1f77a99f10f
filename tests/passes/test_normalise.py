"""The pass `normalise`: the promised form, and no other changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Missing
from support.normalise_runs import assert_same, model, normal, ops, run

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.output_names import read_output_names

DATA = Path(onnx.__file__).parent / "backend/test/data"


def names(result: Model) -> list[str]:
    return [node.name for node in result.proto.graph.node]


@pytest.mark.parametrize(("ir", "expected"), [(3, 4), (4, 4), (8, 8)])
def test_initializers_stop_being_inputs_and_ir_3_becomes_4(ir: int, expected: int) -> None:
    original = model("g (float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}> { y = Add (x, w) }", ir, 9)
    result = normal(original)
    assert [value.name for value in result.proto.graph.input] == ["x"]
    assert result.proto.ir_version == expected
    assert result.proto.opset_import[0].version == 9
    assert_same(original, result, x=np.ones(3, np.float32), w=np.float32([1, 2, 3]))


def test_outputs_without_node_get_identity() -> None:
    original = model(
        """g (float[3] x) => (float[3] w, float[3] y, float[3] c) <float[3] w = {1, 2, 3}>
        { y = Add (x, w)  c = Neg (w) }"""
    )
    result = normal(original)
    assert ops(result) == ["Add", "Identity", "Identity"]
    assert [value.name for value in result.proto.graph.output] == ["w", "y", "c"]
    assert sorted(result.initializers()) == ["c_value", "w_value"]
    assert_same(original, result, x=np.ones(3, np.float32))


def test_input_as_output_gets_identity_and_double_output_is_one() -> None:
    original = model("g (float[3] x) => (float[3] x, float[3] y, float[3] y) { y = Neg (x) }")
    result = normal(original)
    assert ops(result) == ["Neg", "Identity"]
    assert [value.name for value in result.proto.graph.output] == ["x_1", "y"]
    assert read_output_names(result.proto) == {"x_1": "x"}
    made = run(result, {"x": np.float32([1, 2, 3])})
    np.testing.assert_array_equal(made, np.float32([[1, 2, 3], [-1, -2, -3]]))


def split_model(opset: int, sizes: list[int], axis: int, equal: bool) -> onnx.ModelProto:
    """Return x → Split → Neg of each output but the last, which is a graph output; the second is unused."""
    outputs = [f"s{i}" for i in range(len(sizes))]
    attributes: dict[str, Any] = {"axis": axis}
    inputs, initializers = ["x"], []
    if opset >= 18 and equal:
        attributes["num_outputs"] = len(sizes)
    elif opset >= 13 and not equal:
        inputs.append("sizes")
        initializers.append(numpy_helper.from_array(np.array(sizes, np.int64), "sizes"))
    elif not equal:
        attributes["split"] = sizes
    nodes = [helper.make_node("Split", inputs, outputs, name="cut", **attributes)]
    used = [i for i in range(len(sizes)) if i != 1 or len(sizes) == 2]
    nodes += [helper.make_node("Neg", [f"s{i}"], [f"y{i}"]) for i in used]
    results = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in used]
    shape = [2, sum(sizes), 3]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [value], results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@settings(deadline=None)
@given(
    st.sampled_from([7, 9, 10, 11, 12, 13, 17, 18, 21]),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.sampled_from([1, -2]),
)
def test_split_becomes_slices_in_every_opset(opset: int, sizes: list[int], axis: int) -> None:
    axis = axis if opset >= 11 else 1
    original = split_model(opset, sizes, axis, equal=False)
    result = normal(original)
    used = len(sizes) if len(sizes) == 2 else len(sizes) - 1
    assert ops(result) == ["Slice"] * used + ["Neg"] * used
    assert names(result)[0] == "cut_0"
    x = np.arange(2 * sum(sizes) * 3, dtype=np.float32).reshape(2, -1, 3)
    assert_same(original, result, x=x)


@pytest.mark.parametrize("opset", [7, 10, 13, 18])
@pytest.mark.parametrize("shares", [[3, 3], [2, 2, 2], [3, 3, 1], [2, 2, 1]])
def test_equal_split_needs_no_sizes(opset: int, shares: list[int]) -> None:
    if opset < 18:  # Before opset 18, a Split without sizes rejects uneven parts.
        shares = [shares[0]] * len(shares)
    original = split_model(opset, shares, 1, equal=True)
    result = normal(original)
    assert "Split" not in ops(result)
    x = np.arange(2 * sum(shares) * 3, dtype=np.float32).reshape(2, -1, 3)
    assert_same(original, result, x=x)


def test_keeps_split_of_unknown_sizes() -> None:
    original = model(
        """g (float[2, N] x, int64[2] sizes) => (float[2, A] y, float[2, B] z) { y, z = Split <axis = 1> (x, sizes) }"""
    )
    result = normal(original)
    assert ops(result) == ["Split"]


def test_slices_get_unused_names() -> None:
    original = model(
        """g (float[4] x, float[1] cut_0_starts) => (float[2] y, float[2] z, float[1] w)
        { [cut] y, z = Split (x)  [cut_0] w = Neg (cut_0_starts) }"""
    )
    result = normal(original)
    assert names(result) == ["cut_0_1", "cut_1", "cut_0"]
    assert_same(original, result, x=np.arange(4, dtype=np.float32), cut_0_starts=np.ones(1, np.float32))


def test_removes_unread_optional_outputs() -> None:
    original = model(
        """g (float[1, 2, 4, 4] x) => (float[1, 2, 2, 2] y, int64[1, 2, 2, 2] places, float[1, 2, 4, 4] d)
        { d, mask = Dropout (x)  y, places = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
          e, where = MaxPool <kernel_shape = [2, 2]> (x)  p, q = TopK (e, k)  used = Neg (q) }"""
    )
    original.graph.initializer.append(numpy_helper.from_array(np.int64([1]), "k"))
    original.graph.output.append(helper.make_tensor_value_info("used", TensorProto.INT64, None))
    result = normal(original)
    assert [list(node.output) for node in result.proto.graph.node] == [
        ["d"],
        ["y", "places"],
        ["e"],
        ["p", "q"],
        ["used"],
    ]


def test_training_batch_normalization_keeps_outputs() -> None:
    original = model(
        """g (float[2, 2] x, float[2] s) => (float[2, 2] y)
        { y, mean, var = BatchNormalization <training_mode = 1> (x, s, s, s, s) }"""
    )
    assert list(normal(original).proto.graph.node[0].output) == ["y", "mean", "var"]


def test_removes_dead_nodes_except_in_bodies() -> None:
    original = model(
        """g (bool c, float[3] x, float[3] unused) => (float[3] y)
        <float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}, float[3] nobody = {1, 2, 3}>
        { dead = Add (x, v)  deader = Neg (dead)  a = Neg (x)  b = Abs (x)
          y = If (c) <then_branch = t () => (float[3] p) { p = Mul (a, w) },
                      else_branch = e () => (float[3] q) { q = Abs (x) }> }"""
    )
    result = normal(original)
    assert ops(result) == ["Neg", "If"]
    assert list(result.initializers()) == ["w"]
    assert [value.name for value in result.proto.graph.input] == ["c", "x", "unused"]


def test_remaining_nodes_keep_names_and_documentation() -> None:
    original = model("g (float[3] x) => (float[3] y) { [first] a = Neg (x)  [dead] b = Neg (x)  [last] y = Abs (a) }")
    original.graph.node[0].doc_string = "text"
    original.graph.node[0].metadata_props.add(key="k", value="v")
    result = normal(original)
    assert names(result) == ["first", "last"]
    assert result.proto.graph.node[0] == original.graph.node[0]


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted((DATA / "light").glob("*.onnx")), ids=lambda file: file.stem)
def test_weights_of_light_models_become_initializers(file: Path) -> None:
    result = normal(file)
    assert not {"Constant", "ConstantOfShape"} & set(ops(result))
    kernels = [node.input[1] for node in result.proto.graph.node if node.op_type in ("Conv", "Gemm")]
    assert kernels
    assert set(kernels) <= set(result.initializers())
    original = {node.name for node in Model.load(file).proto.graph.node}
    assert set(names(result)) <= original


def test_operator_models_of_onnx_package_compute_same() -> None:
    checked = 0
    for file in sorted([*DATA.glob("simple/*/model.onnx"), *DATA.glob("pytorch-*/*/model.onnx")]):
        original, feeds = onnx.load(file), {}
        for index, value in enumerate(original.graph.input):
            data = file.parent / "test_data_set_0" / f"input_{index}.pb"
            if value.type.HasField("tensor_type") and data.exists():
                feeds[value.name] = numpy_helper.to_array(TensorProto.FromString(data.read_bytes()))
        domains = {opset.domain for opset in original.opset_import}
        if len(feeds) < len(original.graph.input) or "ai.onnx.preview.training" in domains:
            continue
        try:
            expected = run(original, feeds)
        except (Fail, Missing):  # onnxruntime lacks some operators of 2017, and locales that some models name.
            continue
        for before, after in zip(expected, run(normal(original), feeds), strict=True):
            np.testing.assert_array_equal(before, after)
        checked += 1
    assert checked > 50
