"""Copies in a tflm program's loop, which replace Slice and Concat nodes, compared with numpy."""

from __future__ import annotations

import math

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dicompiler.ir.program import Segment
from dicompiler_targets.tflm.lowering import hoist_segment_copies, make_wire_copies, to_wire_shape
from dicompiler_targets.tflm.run import copy_strided

TYPES = {"int8": TensorProto.INT8, "float32": TensorProto.FLOAT}
Array = NDArray[np.generic]


def on_wire(array: Array) -> Array:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1) if array.ndim == 4 else array)


@st.composite
def moved(draw: st.DrawFn) -> tuple[Segment, dict[str, Array], Array]:
    """Draw a segment that slices and joins two inputs at random, values of the inputs, and the output."""
    rank, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(TYPES)))
    values: dict[str, Array] = {}
    for name in ("a", "b"):
        shape = [draw(st.integers(1, 5)) for _ in range(rank)]
        start = draw(st.integers(0, 50))
        values[name] = np.arange(start, start + math.prod(shape)).reshape(shape).astype(dtype)
    inputs, nodes, constants = dict(values), [], []
    for i in range(draw(st.integers(1, 6))):
        axis, source = draw(st.integers(0, rank - 1)), draw(st.sampled_from(sorted(values)))
        others = [
            n
            for n, v in values.items()
            if np.delete(v.shape, axis).tolist() == np.delete(values[source].shape, axis).tolist()
        ]
        if draw(st.booleans()):
            start = draw(st.integers(0, values[source].shape[axis] - 1))
            stop = draw(st.integers(start + 1, values[source].shape[axis]))
            operands = [f"{key}{i}" for key in ("starts", "ends", "axes")]
            numbers = [np.array([n], np.int64) for n in (start, stop, axis)]
            constants += [numpy_helper.from_array(n, name) for name, n in zip(operands, numbers, strict=True)]
            nodes.append(helper.make_node("Slice", [source, *operands], [f"t{i}"]))
            values[f"t{i}"] = values[source].take(range(start, stop), axis)
        else:
            pair = [source, draw(st.sampled_from(sorted(others)))]
            nodes.append(helper.make_node("Concat", pair, [f"t{i}"], axis=axis))
            values[f"t{i}"] = np.concatenate([values[name] for name in pair], axis)
    last = nodes[-1].output[0]
    infos = [helper.make_tensor_value_info(name, TYPES[dtype], value.shape) for name, value in inputs.items()]
    out = helper.make_tensor_value_info(last, TYPES[dtype], values[last].shape)
    model = helper.make_model(helper.make_graph(nodes, "g", infos, [out], constants))
    return Segment("s", "d", model, tuple(inputs), (last,)), inputs, values[last]


@given(moved())
def test_slices_and_joins_alone_are_copies_that_numpy_agrees_with(
    given_: tuple[Segment, dict[str, Array], Array],
) -> None:
    segment, inputs, expected = given_
    peeled = hoist_segment_copies(segment)
    assert peeled.segment is None
    (name,) = segment.outputs
    target = np.zeros(expected.nbytes, np.uint8)
    for one in make_wire_copies(name, peeled.output_tensors[name], peeled.values):
        source = on_wire(inputs[str(one.source)]).reshape(-1).view(np.uint8)
        assert one.end_offsets[0] <= len(source) and one.end_offsets[1] <= len(target) and len(one.loops) <= 3
        copy_strided(
            {
                "source_offset": one.source_offset,
                "target_offset": one.target_offset,
                "run_bytes": one.run_bytes,
                "loops": one.loops,
            },
            source,
            target,
        )
    found = target.view(expected.dtype).reshape(to_wire_shape(expected.shape))
    assert np.array_equal(found, on_wire(expected))


def test_computed_nodes_stay_and_border_slices_and_joins_are_hoisted() -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]>
        g (float[1,2,6,4] x) => (float[1,2,2,4] y, float[1,2,4,4] z)
        <int64[1] two = {2}, int64[1] six = {6}, int64[1] four = {4}> {
            tile = Slice(x, two, six, two)
            z = Relu(tile)
            y = Slice(z, two, four, two)
        }"""
    segment = Segment("s", "d", onnx.parser.parse_model(text), ("x",), ("y", "z"))
    peeled = hoist_segment_copies(segment)
    assert peeled.segment is not None
    assert [node.op_type for node in peeled.segment.model.graph.node] == ["Relu"]
    assert (peeled.segment.inputs, peeled.segment.outputs) == (("tile",), ("z",))
    (gather,) = make_wire_copies(0, peeled.input_tensors["tile"], peeled.values)
    assert (gather.source, gather.source_offset, gather.target_offset, gather.run_bytes, gather.loops) == (
        "x",
        2 * 32,
        0,
        4 * 32,
        (),
    )
    (place,) = make_wire_copies("y", peeled.output_tensors["y"], peeled.values)
    assert (place.source, place.source_offset, place.run_bytes) == ("z", 2 * 32, 2 * 32)
