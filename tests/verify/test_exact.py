"""The check model is exact, keeps the graph, and sees what it must see."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from support import splits
from support.layer_graphs import rules
from support.operator_cases import Case, Draw, check_stand_in, integers, run_split

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight
from dicompiler.ir.plan import Part
from dicompiler.ir.regions import Interval, Region, full
from dicompiler.operators import Operation, Piece
from dicompiler.verify.exact import DOMAIN, STAND_INS, check_model, coverage, measure, seeds_needed
from dicompiler.verify.exact.magnitudes import every_tensor
from dicompiler.verify.exact.normalised import NORMALISED
from dicompiler.verify.exact.patterns import WEIGHTED, Extent, sparse, unified
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers

SMALL: dict[str, dict[str, Any]] = {
    "tiny": {},
    "lenet": {},
    "quirks": {},
    "squeezenet": {"size": 64},
    "mobilenet_v2": {"size": 64, "width": 0.5},
    "resnet18": {"size": 64, "width": 0.25},
    "light/squeezenet": {},
}
_loaded: dict[str, Model] = {}


def network(name: str) -> Model:
    """A network of SMALL, as a Model; made once."""
    if name not in _loaded:
        _loaded[name] = Model.load(networks.build(name, 1, **SMALL[name]))
    return _loaded[name]


def from_text(text: str, constants: Mapping[str, NDArray[Any]] | None = None) -> Model:
    """A Model in ONNX's text form, with `constants` as initializers."""
    proto = parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (constants or {}).items())
    return Model.load(proto)


def halved(model: Model) -> Model:
    """The same network in float16."""
    proto = model.to_proto()
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return Model.load(proto)


# --- what stays, and what becomes a whole number ------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_the_graph_stays_and_only_domains_change(name: str) -> None:
    model = network(name)
    checked, inputs = check_model(model, 0)
    checked.check("the check model")
    for old, new in zip(model.proto.graph.node, checked.proto.graph.node, strict=True):
        assert (old.name, old.op_type, list(old.input), list(old.output)) == (
            new.name,
            new.op_type,
            list(new.input),
            list(new.output),
        )
        assert {a.name for a in old.attribute} <= {a.name for a in new.attribute}
        assert new.domain in (old.domain, DOMAIN)
    assert model.initializers() == checked.initializers()
    assert list(inputs) == [v.name for v in model.proto.graph.input if v.name not in model.initializers()]


@pytest.mark.parametrize("name", SMALL)
def test_every_sum_is_exact_and_every_weight_a_small_whole_number(name: str) -> None:
    checked, inputs = check_model(network(name), 1)
    assert measure(checked, inputs).share < 1
    for node in checked.proto.graph.node:
        if node.op_type in WEIGHTED:
            assert {-1, 1} <= set(np.unique(checked.array(node.input[1]))) <= {-1, 0, 1}
    for array in (*every_tensor(checked, inputs).values(), *inputs.values()):
        scaled = array * 64
        assert np.array_equal(scaled, np.rint(scaled))
        assert np.abs(array).max() < 2**24


@pytest.mark.parametrize("name", ["tiny", "lenet", "resnet18"])
def test_another_engine_that_sums_in_another_order_gives_the_same_bits(name: str) -> None:
    checked, inputs = check_model(network(name), 2)
    output = next(iter(run_model(checked, inputs).values()))
    (other,) = ReferenceEvaluator(checked.to_proto()).run(None, inputs)
    assert np.array_equal(output, other)


@pytest.mark.parametrize("name", ["quirks", "squeezenet", "mobilenet_v2"])
def test_all_optimisation_levels_give_the_same_bits(name: str) -> None:
    checked, inputs = check_model(network(name), 0)
    plain = run_model(checked, inputs, optimization="none")["output"]
    for level in ("basic", "extended", "all"):
        assert np.array_equal(run_model(checked, inputs, optimization=level)["output"], plain)


@pytest.mark.parametrize("name", ["tiny", "quirks", "lenet"])
def test_float16_networks_stay_below_its_exact_range(name: str) -> None:
    checked, inputs = check_model(halved(network(name)), 0)
    assert all(array.dtype == np.float16 for array in inputs.values())
    assert all(np.abs(array).max() < 2**11 for array in every_tensor(checked, inputs).values())
    output = run_model(checked, inputs)["output"]
    assert output.dtype == np.float16
    assert np.unique(output).size > 3


@pytest.mark.parametrize("name", SMALL)
def test_most_channels_of_every_layer_vary_over_the_image(name: str) -> None:
    checked, inputs = check_model(network(name), 0)
    tensors = every_tensor(checked, inputs)
    for node in checked.proto.graph.node:
        array = tensors[node.output[0]]
        if node.op_type == "Conv" and array.shape[2] * array.shape[3] > 1:
            assert (array.max((2, 3)) != array.min((2, 3))).mean() > 0.5


# --- coverage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "first"), [(name, first) for name in SMALL for first in (0, 5)])
def test_the_seeds_that_are_needed_read_everything(name: str, first: int) -> None:
    model = network(name)
    needed = seeds_needed(model)
    assert 1 <= needed <= 4
    read = coverage(check_model(model, seed)[0] for seed in range(first, first + needed))
    assert read.complete
    assert str(read) == f"{read.taps} of {read.taps} taps and {read.channels} of {read.channels} input channels read"


def test_a_seed_too_few_is_seen_in_the_coverage() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "wide")
    size = Extent(1, 16, 832, 1)
    assert (size.covering(), size.seeds) == (13, 4)
    weights = [sparse(node, 1, (16, 832, 1, 1), np.dtype(np.float32), seed, 1, np.ones(16)) for seed in range(4)]
    read = [(np.stack(weights[:count]) != 0).any((0, 1)).mean() for count in (3, 4)]
    assert read[0] < 1
    assert read[1] == 1


@given(
    groups=st.integers(1, 3),
    filters=st.integers(1, 6),
    channels=st.integers(1, 40),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    first=st.integers(0, 50),
    taps=st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_consecutive_seeds_read_all_however_many_taps_each_takes(
    groups: int, filters: int, channels: int, kernel: tuple[int, int], first: int, taps: list[int]
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", group=groups)
    shape = (groups * filters, channels, *kernel)
    size = Extent(groups, filters, channels, kernel[0] * kernel[1])
    arrays = [
        sparse(node, 1, shape, np.dtype(np.float32), first + number, taps[number], np.ones(groups * filters))
        for number in range(size.seeds)
    ]
    read = np.any([unified(node, 1, array) != 0 for array in arrays], axis=0)
    assert read.any((0, 1, 2)).all()
    assert read.any((1, 3)).all()
    assert all((unified(node, 1, array) != 0).any((2, 3)).all() for array in arrays)


@pytest.mark.parametrize("name", ["tiny", "quirks"])
def test_a_tap_or_an_input_channel_that_is_left_out_shows_in_the_output(name: str) -> None:
    model = network(name)
    runs = [check_model(model, seed) for seed in range(seeds_needed(model))]
    for node in model.proto.graph.node:
        if node.op_type in WEIGHTED:
            size = Extent(*unified(node, 1, model.array(node.input[1])).shape)
            for place in [(slice(None), slice(None), slice(None), tap) for tap in range(size.taps)]:
                assert any(_without(*run, node, place) for run in runs)
            for group, channel in np.ndindex(size.groups, size.channels):
                assert any(_without(*run, node, (group, slice(None), channel)) for run in runs)


def _without(checked: Model, inputs: dict[str, Any], node: onnx.NodeProto, place: tuple[Any, ...]) -> bool:
    """Whether the output changes when that place of the node's weight is made zero."""
    name, array = node.input[1], checked.array(node.input[1]).copy()
    unified(node, 1, array)[place] = 0
    proto = onnx.ModelProto()
    proto.CopyFrom(checked.proto)
    weights = dict(checked.weights)
    if name in weights:
        weights[name] = Weight.of(array)
    for tensor in proto.graph.initializer:
        if tensor.name == name and name not in weights:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    changed = run_model(Model(proto, weights), inputs, optimization="none")["output"]
    return not np.array_equal(changed, run_model(checked, inputs, optimization="none")["output"])


# --- stand-ins ------------------------------------------------------------------------------------------------------

ATTRIBUTES = {
    "AveragePool": "<kernel_shape = [3, 3], pads = [1, 0, 1, 0], strides = [2, 1]>",
    "LRN": "<size = 5>",
    "LpPool": "<kernel_shape = [3, 3]>",
    "LogSoftmax": "<axis = 2>",
    "ReduceMean": "<keepdims = 0>",
}
TWO = ("Div", "Pow", "Mean")


@pytest.mark.parametrize("opset", [7, 9, 12, 13, 17, 21])
@pytest.mark.parametrize("op", sorted(STAND_INS.keys() - NORMALISED.keys()))
def test_a_stand_in_gives_whole_numbers_of_the_operators_own_shape(op: str, opset: int) -> None:
    if not onnx.defs.has(op, opset, ""):
        assert not onnx.defs.has(op, 7, "")
        return
    operands = "x, z" if op in TWO else "x"
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[2, 6, 7, 8] x, float[2, 6, 7, 8] z) => (float[a, b, c, d] y) {{
          ["node"] y = {op} {ATTRIBUTES.get(op, "")} ({operands}) }}""")
    if op.startswith("Reduce"):
        del model.proto.graph.output[0].type.tensor_type.shape.dim[:]
    checked, inputs = check_model(model, 0)
    checked.check("the check model")
    assert (checked.proto.graph.node[0].op_type, checked.proto.graph.node[0].domain) == (op, DOMAIN)
    assert {entry.domain: entry.version for entry in checked.proto.opset_import} == {"": opset, DOMAIN: opset}
    result, original = (run_model(each, inputs)["y"] for each in (checked, model))
    assert np.array_equal(result, np.rint(result))
    assert result.shape == original.shape
    assert np.unique(result).size > 1 or result.size == 1 or op.startswith("Global")


def test_the_stand_in_of_lrn_counts_the_channels_of_the_window() -> None:
    for size in (3, 5, 7):
        model = from_text(f"""<ir_version: 8, opset_import: ["": 17]>
            g (float[1, 9, 4, 4] x) => (float[1, 9, 4, 4] y) {{ y = LRN <size = {size}> (x) }}""")
        checked, inputs = check_model(model, 3)
        x = inputs["x"]
        count = np.stack([(x[:, max(0, c - size // 2) : c + size // 2 + 1] != 0).sum(1) for c in range(9)], 1)
        assert np.array_equal(run_model(checked, inputs)["y"], x + np.floor(32 * np.sign(x) / (1 + count) + 0.5))


@pytest.mark.parametrize("opset", [9, 13, 17, 21])
def test_the_stand_in_of_an_average_sums_bounded_numbers(opset: int) -> None:
    """A sum shows what a maximum hides: a pad, a row or a column in the wrong place."""
    attributes = "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 0, 0, 1]"
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[1, 2, 6, 8] x) => (float[1, 2, 3, 4] y, float[1, 2, 1, 1] z) {{
          y = AveragePool <{attributes}> (x)  z = GlobalAveragePool (x) }}""")
    checked, inputs = check_model(model, 0)
    x = np.pad(inputs["x"] % 16, ((0, 0), (0, 0), (1, 0), (0, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::2, ::2]
    results = run_model(checked, inputs)
    assert np.array_equal(results["y"], windows.sum((-1, -2)))
    assert np.array_equal(results["z"], (inputs["x"] % 16).sum((2, 3), keepdims=True))


@pytest.mark.parametrize(
    ("opset", "attributes", "maximum"),
    [(11, "ceil_mode = 1", True), (18, "ceil_mode = 1", False), (17, "count_include_pad = 1, ceil_mode = 0", False)],
)
def test_an_average_that_rounds_up_before_opset_18_becomes_a_maximum(
    opset: int, attributes: str, maximum: bool
) -> None:
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[1, 1, 5, 5] x) => (float[a, b, c, d] y) {{
          y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], {attributes}> (x) }}""")
    checked, inputs = check_model(model, 0)
    windows = np.lib.stride_tricks.sliding_window_view(inputs["x"], (3, 3), (2, 3))[:, :, ::2, ::2]
    expected = windows.max((-1, -2)) if maximum else (windows % 16).sum((-1, -2))
    assert np.array_equal(run_model(checked, inputs)["y"], expected)


@pytest.mark.parametrize(("opset", "axes"), [(11, (2, 3)), (13, (2,))])
def test_the_stand_in_of_softmax_reads_the_axes_that_softmax_reads(opset: int, axes: tuple[int, ...]) -> None:
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) {{ y = Softmax <axis = 2> (x) }}""")
    checked, inputs = check_model(model, 0)
    x = inputs["x"]
    assert np.array_equal(run_model(checked, inputs)["y"], x - x.max(axes, keepdims=True))


def test_a_piece_of_a_stand_in_may_have_attributes_that_the_whole_has_not() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2, 9, 9] x) => (float[a, b, c, d] y) { y = AveragePool <kernel_shape = [3, 3]> (x) }""")
    checked, inputs = check_model(model, 0)
    checked.proto.graph.node[0].attribute.append(helper.make_attribute("pads", [1, 0, 0, 0]))
    checked.proto.graph.node[0].attribute.append(helper.make_attribute("strides", [2, 1]))
    assert run_model(checked, inputs)["y"].shape == (1, 2, 4, 7)


def test_an_average_by_a_power_of_two_stays() -> None:
    def domain(attributes: str) -> str:
        model = from_text(f"""<ir_version: 8, opset_import: ["": 17]>
            g (float[1, 2, 8, 8] x) => (float[a, b, c, d] y) {{ y = AveragePool <{attributes}> (x) }}""")
        return str(check_model(model, 0)[0].proto.graph.node[0].domain)

    assert domain("kernel_shape = [2, 2]") == ""
    assert domain("kernel_shape = [2, 4], pads = [1, 1, 0, 0], count_include_pad = 1") == ""
    assert domain("kernel_shape = [2, 4], pads = [1, 1, 0, 0]") == DOMAIN
    assert domain("kernel_shape = [3, 3]") == DOMAIN
    assert domain("kernel_shape = [2, 2], ceil_mode = 1") == DOMAIN


# --- stand-ins of what normalises -----------------------------------------------------------------------------------

RANKS = {"GroupNormalization": (3, 4), "InstanceNormalization": (3, 4), "MeanVarianceNormalization": (4, 4)}
NORM_OPSETS = {
    "GroupNormalization": (18, 21),
    "InstanceNormalization": (9, 13, 22),
    "LayerNormalization": (17, 21),
    "LpNormalization": (9, 11, 13, 22),
    "MeanVarianceNormalization": (9, 11, 13),
    "RMSNormalization": (23,),
}


def normalisation(draw: Draw, op: str) -> Case:
    """A node of that operator, its scale and shift being constants."""
    opset = draw(st.sampled_from(NORM_OPSETS[op]))
    low, high = RANKS.get(op, (1, 4))
    shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(low, high)))]
    vectors: list[int] | None = None
    attributes: dict[str, Any] = {}
    if op == "GroupNormalization":
        attributes["num_groups"] = draw(st.integers(1, 4))
        shape[1] = attributes["num_groups"] * draw(st.integers(1, 3))
        vectors = [attributes["num_groups"] if opset < 21 else shape[1]]
    elif op == "InstanceNormalization":
        vectors = [shape[1]]
    elif op == "MeanVarianceNormalization":
        if draw(st.booleans()):
            attributes["axes"] = sorted(draw(st.sets(st.integers(0, 3), min_size=1)))
    elif draw(st.booleans()):
        attributes["axis"] = draw(st.integers(0 if opset < 11 else -len(shape), len(shape) - 1))
    count = 0 if vectors is None else 2
    if op in ("LayerNormalization", "RMSNormalization"):
        vectors = shape[attributes.get("axis", -1) % len(shape) :]
        count = 1 if op == "RMSNormalization" or draw(st.booleans()) else 2
    values = [integers(draw, *shape, most=9), *(integers(draw, *(vectors or ())) for _ in range(count))]
    return Case(op, tuple(values), attributes, opset, shape=tuple(shape))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", sorted(NORMALISED))
def test_a_region_of_what_stands_in_for_what_normalises(op: str, data: st.DataObject) -> None:
    case = normalisation(data.draw, op)
    check_stand_in(case, data.draw)
    checked, feed = check_model(case.model(), data.draw(st.integers(0, 3)))
    assert checked.proto.graph.node[0].domain == DOMAIN
    output = run_model(checked, feed)["y"]
    assert np.array_equal(output, np.rint(output))
    assert np.abs(output).max() <= 4 * 15 + 8


NUMBERS = np.random.default_rng(5)
NORM_FAULTS = [
    # operator, attributes, shape of x, of its vectors; the axis that is cut, and where; the input and its axis, how far
    ("InstanceNormalization", {}, (1, 6, 5, 4), (6,), 1, 2, (0, 1, 1)),
    ("InstanceNormalization", {}, (1, 6, 5, 4), (6,), 1, 2, (1, 0, 1)),
    ("InstanceNormalization", {}, (1, 6, 5, 4), (6,), 1, 2, (2, 0, 1)),
    ("InstanceNormalization", {}, (4, 3, 5, 4), (3,), 0, 2, (0, 0, 1)),
    ("GroupNormalization", {"num_groups": 3}, (1, 6, 5, 4), (6,), 1, 2, (0, 1, 2)),
    ("GroupNormalization", {"num_groups": 3}, (1, 6, 5, 4), (6,), 1, 2, (1, 0, 1)),
    ("GroupNormalization", {"num_groups": 3}, (1, 6, 5, 4), (6,), 1, 2, (2, 0, 1)),
    ("LayerNormalization", {}, (1, 7, 8), (8,), 1, 3, (0, 1, 1)),
    ("LayerNormalization", {"axis": 2}, (1, 5, 3, 4), (5, 3, 4), 1, 3, (1, 0, 1)),
    ("LayerNormalization", {"axis": 2}, (1, 5, 3, 4), (5, 3, 4), 1, 3, (2, 0, 1)),
    ("RMSNormalization", {}, (1, 7, 8), (8,), 1, 3, (0, 1, 1)),
    ("LpNormalization", {"axis": 1}, (1, 7, 8), None, 2, 3, (0, 2, 1)),
    ("MeanVarianceNormalization", {}, (1, 6, 5, 4), None, 1, 2, (0, 1, 1)),
]


@pytest.mark.parametrize(("op", "attributes", "shape", "vector", "axis", "at", "fault"), NORM_FAULTS)
def test_a_wrong_slice_of_what_normalises_is_caught(
    op: str,
    attributes: dict[str, Any],
    shape: tuple[int, ...],
    vector: tuple[int, ...] | None,
    axis: int,
    at: int,
    fault: tuple[int, int, int],
) -> None:
    """A piece of the input, of the scale or of the shift that lies by some elements too far up (or down at the end)."""
    count = 0 if vector is None else 1 if op == "RMSNormalization" else 2
    values = [NUMBERS.standard_normal(own).astype(np.float32) for own in (shape, *[vector or ()] * count)]
    case = Case(op, tuple(values), attributes, 23 if op == "RMSNormalization" else 21, shape=shape)
    regions = [(*full(shape)[:axis], cut, *full(shape)[axis + 1 :]) for cut in ((0, at), (at, shape[axis]))]
    parts = [Part(device, region) for device, region in zip("ab", regions, strict=True)]
    index, along, by = fault

    def wrong(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
        piece, extent = right.piece(operation, region, reduce), operation.shape(index)[along]
        need = piece.needs[index]
        assert need is not None
        start, stop = need[along]
        if stop - start == extent:  # the whole, which the operator is given where nothing is cut
            return piece
        step = by if stop + by <= extent else -by
        moved = (*need[:along], (start + step, stop + step), *need[along + 1 :])
        return replace(piece, needs=(*piece.needs[:index], moved, *piece.needs[index + 1 :]))

    model, feed = check_model(case.model(), 0)
    expected = run_model(model, feed)["y"]
    right = rules()[DOMAIN, op] if (DOMAIN, op) in rules() else rules()["", op]
    assert np.array_equal(run_split(model, form_layers(model, rules()), parts, feed), expected)
    spoiled = form_layers(model, {**rules(), (right.domain, op): replace(right, piece=wrong)})
    assert not np.array_equal(run_split(model, spoiled, parts, feed), expected)


@pytest.mark.parametrize("op", ["InstanceNormalization", "LayerNormalization"])
def test_each_element_changes_all_of_its_group(op: str) -> None:
    model = from_text(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) {{
          y = {op} {"<axis = 2>" if op == "LayerNormalization" else ""} (x, s, b) }}""",
        dict.fromkeys("sb", np.ones((4, 5) if op == "LayerNormalization" else 3, np.float32)),
    )
    checked, feed = check_model(model, 0)
    before = run_model(checked, feed)["y"]
    for place in ((0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 2, 3)):
        changed = feed["x"].copy()
        changed[place] += 1
        differs = run_model(checked, {"x": changed})["y"] != before
        expected = np.zeros((2, 3, 4, 5), bool)
        expected[place[:2]] = True
        expected[place] = differs[place]
        assert np.array_equal(differs, expected)


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_a_network_that_normalises_is_proven_in_every_kind_of_split(dtype: str) -> None:
    model = from_text(
        f"""<ir_version: 8, opset_import: ["": 17]> net ({dtype}[1, 4, 9, 8] x) => ({dtype}[1, 6, 9, 4] y) {{
          ["c1"] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
          ["in"] b = InstanceNormalization (a, s1, b1)
          ["r"] c = Relu (b)
          ["c2"] d = Conv <pads = [1, 1, 1, 1]> (c, w2)
          ["mvn"] e = MeanVarianceNormalization <axes = [2, 3]> (d)
          ["add"] f = Add (e, d)
          ["ln"] g = LayerNormalization (f, s2, b2)
          ["mm"] y = MatMul (g, w3) }}""",
        {
            name: NUMBERS.standard_normal(shape).astype(np.float16 if dtype == "float16" else np.float32)
            for name, shape in {
                "w1": (6, 4, 3, 3), "s1": (6,), "b1": (6,), "w2": (6, 6, 3, 3), "s2": (8,), "b2": (8,), "w3": (8, 4),
            }.items()
        },
    )  # fmt: skip
    case = splits.Case.of(model.to_proto())
    tried = 0
    for split in splits.splits(case.layers, ("pipeline", "height", "lop", "lip"), sets=0):
        check, _, sent = case.verify(split, seeds=[0, 1])
        assert check.passed and check.applies, check.detail
        assert sent.passed
        tried += 1
    assert tried == 4


# --- other operators -------------------------------------------------------------------------------------------------

GROUPED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 4, 9, 9] x) => (float[1, 6, a, b] y) {{ y = {op} <group = 2> (x, w) }}"""


LIMITS = {"low": -1.0, "high": 1.0}


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("y = ConvTranspose <strides = [2, 2]> (x, w, b)", {"w": (4, 3, 3, 3), "b": (3,)}),
        ("f = Flatten (x) y = Gemm <alpha = 0.3, beta = 0.7> (f, w, b)", {"w": (144, 5), "b": (5,)}),
        ("f = Flatten (x) y = Gemm <transA = 1, transB = 1> (w, f)", {"w": (144, 5)}),
        ("y = MatMul (x, w)", {"w": (6, 3)}),
        ("y = MatMul (w, x)", {"w": (1, 4, 5, 6)}),
        ("m = MatMul (x, w) y = Add (m, b)", {"w": (4, 6, 3), "b": (3,)}),
        ("y = PRelu (x, w)", {"w": (4, 1, 1)}),
        ("y = LeakyRelu <alpha = 0.1> (x)", {}),
        ("m = Mul (x, w) y = Add (m, b)", {"w": (4, 1, 1), "b": (4, 1, 1)}),
        ("y = Concat <axis = 1> (x, w)", {"w": (1, 2, 6, 6)}),
        ("y = Clip (x, low, high)", {"low": (), "high": ()}),
        ("s = Sigmoid (x) y = Mul (x, s)", {}),
        ("y = Div (x, w)", {"w": ()}),
        ("c = Cast <to = 7> (x) z = Sub (c, c) g = Gather <axis = 0> (w, z) y = Mul (g, x)", {"w": (9,)}),
    ],
)
def test_other_operators_become_exact(body: str, constants: dict[str, tuple[int, ...]]) -> None:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in constants.items()}
    arrays |= {name: np.array(limit, np.float32) for name, limit in LIMITS.items() if name in arrays}
    model = from_text(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 6, 6] x) => (float y) {{ {body} }}', arrays
    )
    model.proto.graph.output[0].type.tensor_type.ClearField("shape")
    for seed in (0, 1):
        checked, inputs = check_model(model, seed)
        output = run_model(checked, inputs)["y"]
        assert np.array_equal(output, np.rint(output))
        assert np.unique(output).size > 2
        (other,) = ReferenceEvaluator(checked.to_proto()).run(None, inputs)
        assert np.array_equal(output, other)
    assert coverage(check_model(model, seed)[0] for seed in range(seeds_needed(model))).complete


@pytest.mark.parametrize(("op", "shape"), [("Conv", (6, 2, 3, 3)), ("ConvTranspose", (4, 3, 3, 3))])
def test_a_grouped_layers_filter_makes_one_output_channel(op: str, shape: tuple[int, ...]) -> None:
    model = from_text(GROUPED.format(op=op), {"w": np.ones(shape, np.float32)})
    node, checked = model.proto.graph.node[0], check_model(model, 0)[0]
    x = np.arange(1, 325, dtype=np.float32).reshape(1, 4, 9, 9)
    for filter_ in range(6):
        weight = np.zeros(shape, np.float32)
        unified(node, 1, weight)[divmod(filter_, 3)] = unified(node, 1, checked.array("w"))[divmod(filter_, 3)]
        y = run_model(from_text(GROUPED.format(op=op), {"w": weight}), {"x": x})["y"]
        assert [channel for channel in range(6) if y[0, channel].any()] == [filter_]


def test_a_batch_normalization_does_not_shut_a_channel_behind_relu() -> None:
    checked, _ = check_model(network("tiny"), 0)
    nodes = {node.name: node for node in checked.proto.graph.node}
    weight, scale, variance = (
        checked.array(nodes[name].input[index]) for name, index in (("stem", 1), ("stem.bn", 1), ("stem.bn", 4))
    )
    assert set(scale / np.sqrt(variance)) == {-1, 1}
    assert set(variance) == {1, 4, 16}  # so that another channel's variance shows
    assert all((scale[channel] * weight[channel] > 0).any() for channel in range(scale.size))


def test_a_constant_that_two_layers_share_becomes_two() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    model = from_text(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 9, 9] x) => (float[1, 4, 5, 5] y) {
            ["a"] h = Conv (x, w)
            ["b"] y = Conv (h, w) }""",
        {"w": weight},
    )
    checked, inputs = check_model(model, 0)
    names = [node.input[1] for node in checked.proto.graph.node]
    assert names == ["w", "w@1.1"]
    assert not np.array_equal(checked.array(names[0]), checked.array(names[1]))
    assert run_model(checked, inputs)["y"].shape == (1, 4, 5, 5)


def test_other_types_of_inputs_are_small_numbers_of_their_type() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (int64[5] i, bool[5] b, double[5] d) => (int64[5] y, bool[5] c, double[5] e) {
          y = Identity (i)
          c = Not (b)
          e = Neg (d) }""")
    _, inputs = check_model(model, 0)
    assert {name: array.dtype.name for name, array in inputs.items()} == {"i": "int64", "b": "bool", "d": "float64"}
    assert inputs["i"].min() >= 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Shrink <bias = 0.3> (x)", "tensor 'y', made by Shrink 'y', is no whole number"),
        (
            "a = Mul (x, x) b = Mul (a, a) c = Mul (b, b) d = Mul (c, c) e = Mul (d, d) y = Mul (e, e)",
            "tensor 'y', made by Mul 'y', grows to",
        ),
    ],
)
def test_what_cannot_be_exact_is_an_error_that_names_the_operator(body: str, message: str) -> None:
    model = from_text(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 5, 5] x) => (float[1, 3, 5, 5] y) {{ {body} }}',
        {"s": np.ones(3, np.float32)},
    )
    with pytest.raises(DicompilerError) as caught:
        check_model(model, 0)
    assert str(caught.value).startswith(f"exact check: {message}")
    assert "\n" not in str(caught.value)


def test_an_input_of_unknown_shape_is_an_error_that_names_it() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 3] x) => (float[n, 3] y) { y = Relu (x) }""")
    with pytest.raises(DicompilerError, match="input 'x' has no static shape: give one"):
        check_model(model, 0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="seed is -1"):
        check_model(network("tiny"), -1)


def test_the_check_model_does_not_depend_on_the_process() -> None:
    program = (
        "import hashlib; from dicompiler import networks; from dicompiler.verify.exact import check_model\n"
        "from dicompiler.ir.onnx.model import Model\n"
        "checked, inputs = check_model(Model.load(networks.build('quirks', 1)), 2)\n"
        "print(hashlib.sha256(checked.to_bytes() + inputs['input'].tobytes()).hexdigest())"
    )
    checked, inputs = check_model(network("quirks"), 2)
    here = hashlib.sha256(checked.to_bytes() + inputs["input"].tobytes()).hexdigest()
    for seed in ("1", "2"):
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == here
