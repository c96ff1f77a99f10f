"""Rules that read some axes in full and let the others pass: reductions, normalisations, sums along an axis, Einsum;
and those that repeat or pick elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.layer_graphs import rules
from support.operator_cases import OPSETS, Case, Draw, broadcastable, check_cut, drawn_computed, integers

from dicompiler.operators.reductions import MERGED, OTHERS
from dicompiler.partition.bounds_inference import reduction
from dicompiler_passes.form_layers import form_layers

EXACT = ("ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")


def shapes(draw: Draw, least: int = 1, most: int = 4) -> list[int]:
    found: list[int] = draw(st.lists(st.integers(1, 5), min_size=least, max_size=most))
    return found


def with_axes(draw: Draw, op: str, x: Any, axes: list[int], opset: int) -> Case:
    """A reduction in the form of the opset: the axes are an input since 13 (ReduceSum) or 18."""
    attributes: dict[str, Any] = {"keepdims": draw(st.sampled_from((0, 1)))} if draw(st.booleans()) else {}
    as_input = opset >= (13 if op == "ReduceSum" else 18)
    if len(axes) == x.ndim and draw(st.booleans()):
        if as_input and draw(st.booleans()):
            attributes["noop_with_empty_axes"] = draw(st.sampled_from((0, 1)))
        return Case(op, (x,), attributes, opset, close=op not in EXACT)
    axes = [axis - x.ndim if opset >= 11 and draw(st.booleans()) else axis for axis in axes]
    if as_input:
        return Case(op, (x, np.array(axes, np.int64)), attributes, opset, close=op not in EXACT)
    return Case(op, (x,), {**attributes, "axes": axes}, opset, close=op not in EXACT)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", [*MERGED, *OTHERS])
def test_a_region_of_a_reduction(op: str, data: st.DataObject) -> None:
    draw = data.draw
    x = integers(draw, *shapes(draw), most=2)
    x = np.abs(x) + 1 if op == "ReduceLogSum" else x
    if op in MERGED and draw(st.integers(0, 4)) == 0:
        x = x.astype(np.int32)
    axes = sorted(draw(st.sets(st.integers(0, x.ndim - 1), min_size=1)))
    check_cut(with_axes(draw, op, x, axes, draw(st.sampled_from((9, 11, 13, 18, 20)))), draw)


@pytest.mark.parametrize(("op", "extent"), [("ReduceSum", 7), ("ReduceMax", 7), ("ReduceMean", None)])
def test_the_first_reduced_axis_is_cut_where_parts_can_be_put_together(op: str, extent: int | None) -> None:
    case = Case(op, (np.zeros((1, 3, 7, 5), np.float32), np.array([2, 3], np.int64)), {}, 18)
    layers = form_layers(case.model(), rules())
    assert reduction(layers, layers.layers[0]) == extent


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("ArgMax", "ArgMin")))
def test_a_region_of_the_place_of_an_extreme(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 11, 12, 13)))
    attributes: dict[str, Any] = {}
    if draw(st.booleans()):
        attributes["axis"] = draw(st.integers(-len(shape) if opset >= 11 else 0, len(shape) - 1))
    if draw(st.booleans()):
        attributes["keepdims"] = draw(st.sampled_from((0, 1)))
    if opset >= 12 and draw(st.booleans()):
        attributes["select_last_index"] = 1
    check_cut(Case(op, (integers(draw, *shape),), attributes, opset), draw)


# --- normalisations -----------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_batch_normalization(data: st.DataObject) -> None:
    draw = data.draw
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), *draw(st.lists(st.integers(1, 4), max_size=3)))
    vectors = [integers(draw, shape[1]) for _ in range(3)]
    ones = np.ones(shape[1], np.float32)
    computed = (0,) if draw(st.integers(0, 3)) else (0, 1, 3)
    values = (integers(draw, *shape), *vectors, ones)
    check_cut(Case("BatchNormalization", values, {"epsilon": 0.0}, draw(st.sampled_from(OPSETS)), computed), draw)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_instance_normalization(data: st.DataObject) -> None:
    draw = data.draw
    channels = draw(st.integers(1, 4))
    x = integers(draw, 2, channels, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    values = (x, integers(draw, channels), integers(draw, channels))
    check_cut(Case("InstanceNormalization", values, {}, draw(st.sampled_from((9, 13, 22))), close=True), draw)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_group_normalization(data: st.DataObject) -> None:
    """Scale and shift are per group in opset 18, per channel since 21."""
    draw = data.draw
    groups, each, opset = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from((18, 21)))
    x = integers(draw, draw(st.integers(1, 2)), groups * each, draw(st.integers(1, 4)), 3)
    length = groups if opset == 18 else groups * each
    values = (x, integers(draw, length), integers(draw, length))
    check_cut(Case("GroupNormalization", values, {"num_groups": groups}, opset, close=True, shape=x.shape), draw)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("LayerNormalization", "RMSNormalization")))
def test_a_region_of_a_layer_normalization(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw, 2)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    attributes = {"axis": axis} if draw(st.booleans()) else {}
    inner = shape[axis:] if attributes else shape[-1:]
    count = draw(st.integers(1, 2)) if op == "LayerNormalization" else 1
    values = (integers(draw, *shape), *(integers(draw, *inner) for _ in range(count)))
    check_cut(Case(op, values, attributes, 17 if op == "LayerNormalization" else 23, close=True), draw)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("MeanVarianceNormalization", "LpNormalization")))
def test_a_region_of_a_normalization_without_weights(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw, 4, 4)
    attributes: dict[str, Any] = {}
    if op == "LpNormalization":
        attributes = {"axis": draw(st.integers(-4, 3)), "p": draw(st.sampled_from((1, 2)))}
    elif draw(st.booleans()):
        attributes = {"axes": sorted(draw(st.sets(st.integers(0, 3), min_size=1)))}
    x = np.abs(integers(draw, *shape)) + 1
    check_cut(Case(op, (x,), attributes, draw(st.sampled_from((9, 13, 22))), close=True, shape=x.shape), draw)


# --- along an axis ------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_running_sum_or_product(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    axis = np.array(draw(st.integers(-len(shape), len(shape) - 1)), draw(st.sampled_from((np.int32, np.int64))))
    attributes = {name: 1 for name in ("exclusive", "reverse") if draw(st.booleans())}
    op, opset = draw(st.sampled_from((("CumSum", 11), ("CumSum", 14), ("CumProd", 26))))
    check_cut(Case(op, (integers(draw, *shape), axis), attributes, opset), draw)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_the_greatest_values(data: st.DataObject) -> None:
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 10, 11, 24)))
    axis = draw(st.integers(0, len(shape) - 1))
    k = draw(st.integers(1, shape[axis]))
    attributes: dict[str, Any] = {"axis": axis}
    if opset >= 11 and draw(st.booleans()):
        attributes["largest"] = 0
    x = integers(draw, *shape)
    case = Case("TopK", (x, np.array([k], np.int64)) if opset > 9 else (x,), attributes, opset, others=("places",))
    check_cut(Case(case.op, case.values, {**attributes, "k": k}, 9, others=case.others) if opset == 9 else case, draw)


EQUATIONS = (
    "ij,jk->ik", "bij,bjk->bik", "...ij,...jk->...ik", "bhid,bhjd->bhij", "bhij,bhjd->bhid", "i,j->ij", "ij->ji",
    "ij->i", "ij,ij->", "bij , bjk", "ij,ij->ij", "ijk->kij", "i,i->", "...i,i->...", "bnd,hde->bhne", "b i j -> b j i",
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_einsum(data: st.DataObject) -> None:
    draw = data.draw
    equation = draw(st.sampled_from(EQUATIONS))
    extents = {letter: draw(st.integers(1, 4)) for letter in "bdehijkn"}
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    values = []
    for term in equation.replace(" ", "").partition("->")[0].split(","):
        own = broadcastable(draw, batch) if "..." in term else ()
        shape = [extents[letter] for letter in term.replace("...", "")]
        values.append(integers(draw, *own, *shape))
    computed = drawn_computed(draw, len(values))
    shape = np.einsum(equation.replace(" ", ""), *values).shape  # onnx infers none where batches differ in rank
    opset = draw(st.sampled_from((12, 21)))
    check_cut(Case("Einsum", tuple(values), {"equation": equation}, opset, computed, shape=shape), draw)


# --- repeating and picking ----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_expanded_tensor(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    wanted = [draw(st.sampled_from((extent, 1))) for extent in shape]
    x = integers(draw, *broadcastable(draw, shape))
    full = np.broadcast_shapes(x.shape, tuple(wanted))
    assume(len(full) == len(shape))
    check_cut(Case("Expand", (x, np.array(wanted, np.int64)), {}, draw(st.sampled_from((9, 13)))), draw)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_tiled_tensor(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    repeats = np.array([draw(st.integers(1, 3)) for _ in shape], np.int64)
    check_cut(Case("Tile", (integers(draw, *shape), repeats), {}, draw(st.sampled_from((9, 13)))), draw)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Gather", "GatherElements")))
def test_a_region_of_gathered_elements(op: str, data: st.DataObject) -> None:
    """Constant indices and computed ones; many constant ones too."""
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 11, 13)))
    assume(op == "Gather" or opset >= 11)
    axis = draw(st.integers(0, len(shape) - 1))
    if op == "Gather":
        count = draw(st.lists(st.integers(1, 4), max_size=2)) if draw(st.integers(0, 4)) else [70]
    else:
        count = [draw(st.integers(1, 6)) if i == axis else draw(st.integers(1, e)) for i, e in enumerate(shape)]
    low = -shape[axis] if opset >= 11 else 0
    random = np.random.default_rng(draw(st.integers(0, 99)))
    indices = random.integers(low, shape[axis], count).astype(draw(st.sampled_from((np.int32, np.int64))))
    computed = draw(st.sampled_from(((0,), (0, 1), (1,))))
    attributes = {"axis": axis - len(shape) if opset >= 11 and draw(st.booleans()) else axis}
    check_cut(Case(op, (integers(draw, *shape), np.asarray(indices)), attributes, opset, computed), draw)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_attention(data: st.DataObject) -> None:
    """With heads as an axis or inside the last one, with fewer heads of keys than of queries, masks, causal or not."""
    draw = data.draw
    batch, shared, heads, rows, columns, depth = (draw(st.integers(1, 3)) for _ in range(6))
    attributes: dict[str, Any] = {"is_causal": 1} if draw(st.integers(0, 3)) == 0 else {}
    shapes = [(batch, heads * n, length, 2 * depth) for n, length in ((shared, rows), (1, columns), (1, columns))]
    if draw(st.booleans()):
        shapes = [(b, length, h * d) for b, h, length, d in shapes]
        attributes |= {"q_num_heads": heads * shared, "kv_num_heads": heads}
    values = [integers(draw, *shape, most=2) for shape in shapes]
    if draw(st.booleans()):
        mask = integers(draw, *broadcastable(draw, (batch, heads * shared, rows, columns))[-4:], most=2)
        assume(mask.ndim >= 2 and mask.shape[-2:] == (rows, columns))
        values.append(mask if draw(st.booleans()) else mask > 0)
    check_cut(
        Case("Attention", tuple(values), attributes, draw(st.sampled_from((23, 24))), (0, 1, 2), close=True), draw
    )
