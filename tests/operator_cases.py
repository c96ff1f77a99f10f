"""What the tests of operator rules share: a node with its inputs, any region of its output as parts on devices, and the
comparison of what they compute with the whole. Only tests import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import assume, reject
from hypothesis import strategies as st
from layer_graphs import rules
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from dicompiler.compilation import Compilation
from dicompiler.cutting import cut, sent_bytes
from dicompiler.errors import DicompilerError
from dicompiler.exact import check_model
from dicompiler.executor import Executor, run_model
from dicompiler.layers import LayerGraph
from dicompiler.model import Model
from dicompiler.plan import Part, Plan
from dicompiler.regions import Interval, Region, contains, full, is_empty, replace
from dicompiler.tasks import cuttable, output_shape, reduction
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import Partition

OPSETS = (9, 11, 13, 17, 21)
Array = NDArray[Any]
Draw = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One node and the values of its inputs (None: omitted); those in `computed` are inputs of the graph, the others
    initializers. `close`: the node rounds, so that results may differ in the last bits. `others`: outputs after the one
    that is cut, which nobody reads. `shape`: the output's, where onnx does not infer it."""

    op: str
    values: tuple[Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17
    computed: tuple[int, ...] = (0,)
    close: bool = False
    others: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None

    def model(self) -> Model:
        """With the output's shape inferred."""
        names = ["" if value is None else f"x{i}" for i, value in enumerate(self.values)]
        node = helper.make_node(self.op, names, ["y", *self.others], "node", **self.attributes)
        constants = [
            numpy_helper.from_array(value, names[i])
            for i, value in enumerate(self.values)
            if value is not None and i not in self.computed
        ]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.feed.items()
        ]
        output = onnx.ValueInfoProto(name="y")
        if self.shape is not None:
            output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, self.shape)
        graph = helper.make_graph([node], "one", inputs, [output], constants)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        return Model.load(onnx.shape_inference.infer_shapes(proto, strict_mode=self.shape is None, data_prop=True))

    @property
    def feed(self) -> dict[str, Array]:
        found = {f"x{i}": self.values[i] for i in self.computed}
        return {name: value for name, value in found.items() if value is not None}


def run(model: Model, feed: Mapping[str, Array]) -> Array | None:
    """The whole node's output; None where onnxruntime refuses the model: such a one need not be split."""
    try:
        return np.asarray(run_model(model, feed, optimization="none")["y"])
    except DicompilerError:
        return None


@st.composite
def intervals(draw: Draw, extent: int) -> Interval:
    start = draw(st.integers(0, extent - 1))
    return start, draw(st.integers(start + 1, extent))


@st.composite
def cuts(draw: Draw, extent: int) -> list[Interval]:
    """The axis in one to three intervals."""
    inner = sorted(draw(st.sets(st.integers(1, extent - 1), max_size=2))) if extent > 1 else []
    return list(zip([0, *inner], [*inner, extent], strict=True))


def around(whole: Region, region: Region) -> list[Region]:
    """Boxes that tile what is left of `whole` without `region`."""
    boxes: list[Region] = []
    for axis, ((low, high), (start, stop)) in enumerate(zip(whole, region, strict=True)):
        boxes += [replace(whole, axis, (a, b)) for a, b in ((low, start), (stop, high)) if a < b]
        whole = replace(whole, axis, (start, stop))
    return boxes


def check_piece(layers: LayerGraph, region: Region, reduce: Interval | None = None) -> None:
    """What holds of a rule whatever the region: nothing of it is left out, and it reads only what there is."""
    (layer,) = layers.layers
    (node,) = layer.nodes
    operation, rule = layers.operation(node), layers.rule(node)
    piece = rule.piece(operation, region, reduce)
    shape = output_shape(layers, layer)
    assert contains(piece.out, region) and contains(full(shape), piece.out)
    assert piece.raw is None or (contains(piece.raw, piece.out) and contains(full(shape), piece.raw))
    assert rule.piece(operation, piece.out, reduce).out == piece.out
    assert len(piece.needs) == len(node.inputs)
    for need, all_of_it in zip(piece.needs, operation.full_needs(), strict=True):
        assert need is None or (all_of_it is not None and contains(all_of_it, need))
        assert need is None or not is_empty(need) or need == all_of_it == ((0, 0),)


def check_whole(layers: LayerGraph, model: Model) -> None:
    """All of the output is the node as it stands, on all of its inputs."""
    (layer,) = layers.layers
    (node,) = layer.nodes
    operation = layers.operation(node)
    piece = layers.rule(node).piece(operation, full(operation.out_shape), None)
    assert piece.out == full(operation.out_shape)
    assert piece.needs == operation.full_needs()
    assert (piece.attributes, piece.constants, piece.raw, piece.op) == ({}, {}, None, None)
    placed = Partition().run(Compilation(model, layers, plan=Plan({"node": (Part("a"),)}, ("a",), ("a",))))
    (proto,) = placed.model.proto.graph.node
    del proto.metadata_props[:]
    proto.output[1:] = model.proto.graph.node[0].output[1:]  # they get names of their own on each device
    assert proto == model.proto.graph.node[0]


def check_cut(case: Case, draw: Draw) -> None:
    """Draws a region, splits the node, compares with the whole; partial sums too where the rule has a reduction."""
    model = case.model()
    expected = run(model, case.feed)
    layers = form_layers(model, rules())
    (layer,) = layers.layers
    assume(layers.tensors["y"].shape is not None)
    shape = output_shape(layers, layer)
    assume(expected is not None and expected.shape == shape)  # where a pool has auto_pad, onnxruntime forgets dilations
    assert expected is not None
    check_whole(layers, model)
    check_piece(layers, tuple(draw(intervals(extent)) for extent in shape))
    got = run_split(model, layers, drawn_parts(draw, layers), case.feed)
    assert got.dtype == expected.dtype
    if case.close:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(got, expected)


def check_stand_in(case: Case, draw: Draw) -> None:
    """The same in the exact check, where what rounds is replaced: bit-equal."""
    assume(run(case.model(), case.feed) is not None)
    try:
        model, feed = check_model(case.model(), draw(st.integers(0, 9)))
    except DicompilerError:  # onnxruntime's MaxPool refuses an auto_pad that its LpPool takes
        reject()
    expected = run(model, feed)
    layers = form_layers(model, rules())
    assume(expected is not None and expected.shape == output_shape(layers, layers.layers[0]))
    np.testing.assert_array_equal(run_split(model, layers, drawn_parts(draw, layers), feed), expected)


def drawn_parts(draw: Draw, layers: LayerGraph) -> list[Part]:
    """A region on device a, which is the sink and takes what its own device computes first, so that all of that part
    is looked at; what is left around it on others."""
    (layer,) = layers.layers
    allowed, shape = cuttable(layers, layer), output_shape(layers, layer)
    region = tuple(draw(intervals(extent)) if axis in allowed else (0, extent) for axis, extent in enumerate(shape))
    parts = [Part("a", region), *(Part("bc"[i % 2], box) for i, box in enumerate(around(full(shape), region)))]
    extent = reduction(layers, layer)
    if extent is None or draw(st.booleans()):
        return parts
    ranges = draw(cuts(extent))
    for reduce in ranges:
        check_piece(layers, region, reduce)
    return [Part("abc"[i % 3], part.region, reduce) for i, reduce in enumerate(ranges) for part in parts] + parts


def run_split(model: Model, layers: LayerGraph, parts: Sequence[Part], feed: Mapping[str, Array]) -> Array:
    """The node's output put together from these parts; what travels is what was predicted."""
    plan = Plan({"node": tuple(parts)}, ("b",), ("a",))
    placed = Partition().run(Compilation(model, layers, plan=plan))
    placed.model.check("partition")
    program = cut(placed.model, plan.devices)
    execution = Executor(program, "none").run(feed)
    assert placed.routing is not None
    assert sum(execution.sent) == placed.routing.total_bytes == sent_bytes(program.transfers)
    return np.asarray(execution.outputs["y"])


def integers(draw: Draw, *shape: int, most: int = 4, dtype: Any = np.float32) -> Array:
    """Small whole numbers, all drawn from one seed: sums of them are exact in any order."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random.integers(-most, most + 1, shape).astype(dtype)


def broadcastable(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: some axes of extent 1, some leading ones left out."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(draw(st.sampled_from((extent, extent, 1))) for extent in kept)


def drawn_computed(draw: Draw, count: int) -> tuple[int, ...]:
    """Which of the inputs are computed: at least one."""
    return tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))))
