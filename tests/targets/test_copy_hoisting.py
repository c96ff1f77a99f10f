"""Copies at the borders of segments: they are removed from the models, and numpy copies the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpp_copies import prepared
from support.generators import integers
from support.handmade import segment as handmade
from test_random_plans import compiled

import dicompiler
from dicompiler import networks
from dicompiler.ir.program import DeviceProgram, DeviceState, Program, Segment, TensorSpec
from dicompiler.ir.regions import region_shape
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import OrtSession, ProgramExecutor, to_ort
from dicompiler_targets.artifact_files import (
    CopiedRegion,
    CopiedTensor,
    describe_copies,
    hoist_device_copies,
    make_box_copy,
)
from dicompiler_targets.sockets.runtime.segments import RegionCopy, SegmentIO, make_value, run_copies


@st.composite
def moves(draw: st.DrawFn) -> tuple[Any, ...]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ends = []
    for _ in range(2):
        region = [(begin := draw(st.integers(0, 2)), begin + count) for count in counts]
        ends.append(([end + draw(st.integers(0, 2)) for _, end in region], region))
    return (*ends, draw(st.sampled_from(["u1", "f2", "f4", "f8"])))


@given(moves())
def test_a_region_goes_to_its_place_and_nothing_else_changes(drawn: tuple[Any, ...]) -> None:
    (shape, region), (wider, place), dtype = drawn
    source = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    target = np.zeros((*wider, np.dtype(dtype).itemsize), np.uint8)
    expected = target.copy()
    expected[tuple(slice(*one) for one in place)] = source[tuple(slice(*one) for one in region)]
    move = RegionCopy((shape, region), (wider, place), np.dtype(dtype).itemsize)
    run_copies([move.views(source.reshape(-1), target.reshape(-1))])
    assert np.array_equal(target, expected)


@settings(deadline=None)  # There is no deadline, because the first example builds a library.
@given(moves())
def test_in_bytes_it_is_the_same_box_for_programs_in_cpp(drawn: tuple[Any, ...]) -> None:
    (shape, region), (wider, place), dtype = drawn
    width = np.dtype(dtype).itemsize
    source = np.random.default_rng(0).integers(0, 256, (*shape, width), np.uint8)
    target = np.zeros((*wider, width), np.uint8)
    expected = target.copy()
    expected[tuple(slice(*one) for one in place)] = source[tuple(slice(*one) for one in region)]
    ends = [(sizes, [begin for begin, _ in own]) for sizes, own in ((shape, region), (wider, place))]
    box = make_box_copy("a", "b", (ends[0], ends[1]), region_shape(region), width)
    assert len(box.loops) < len(shape) and box.end_offsets[0] <= source.nbytes and box.end_offsets[1] <= target.nbytes
    assert prepared([box], {"a": source, "b": target})() and np.array_equal(target, expected)
    short = source.reshape(-1)[: box.end_offsets[0] - 1]
    assert not prepared([box], {"a": short, "b": target})() and not prepared([box], {"a": source, "b": short[:0]})()


class Bare:
    """A segment as the runtime computes it: its model in a session, and its copies outside of the model."""

    def __init__(self, own: Segment, program: Program, bound: bool) -> None:
        device = next(one for one in program.devices if one.device == own.device)
        bare = next(
            s for one, s in zip(device.segments, hoist_device_copies(device), strict=True) if one.name == own.name
        )
        self.session = None
        if bare.segment is not None:
            self.session = OrtSession(bare.segment.model, program.weights, own.name)
        ends = {"inputs": list(own.inputs), "outputs": list(own.outputs)}
        engine = None if self.session is None else self.session._session
        self.seam, self.bound = SegmentIO(ends | describe_copies(bare), engine), bound
        self.values = {v.name: v for v in (*own.model.graph.input, *own.model.graph.output)}

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self._in_place(inputs) if self.bound else self._anew(inputs)

    def _anew(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {n: np.ascontiguousarray(array) for n, array in inputs.items()}
        given = {n: to_ort(array) for n, array in arrays.items()}
        given |= {n: arrays[n].reshape(-1).view(np.uint8) for n in self.seam.copy_sources}
        read = self.seam.join_inputs(given)
        given_ = {n: np.array(read[n].numpy()) for n in self.seam.session_entry["inputs"]}
        made = {} if self.session is None else self.session.run(given_)
        found = self.seam.cut_outputs({n: to_ort(array) for n, array in made.items()}, given)
        return {n: made[n] if n in made else self._array(n, raw) for n, raw in found.items()}

    def _array(self, name: str, raw: Any) -> Any:
        tensor = self.values[name].type.tensor_type
        return raw.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).reshape(_shape(tensor))

    def _in_place(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        arrays = dict[str, Any]()
        if self.session is not None:
            own = self.session._session
            arrays = {v.name: np.zeros(v.shape, np.float32) for v in (*own.get_inputs(), *own.get_outputs())}
        arrays |= {n: np.zeros(_shape(v.type.tensor_type), np.float32) for n, v in self.values.items()}
        arrays |= {n: np.ascontiguousarray(array) for n, array in inputs.items()}
        before, after = self.seam.bind_copies(lambda name: arrays[name].reshape(-1).view(np.uint8))
        run_copies(before)
        if self.session is not None:
            for name, array in self.session.run({n: arrays[n] for n in self.seam.session_entry["inputs"]}).items():
                arrays[name][...] = array
        run_copies(after)
        return {name: arrays[name] for name in self.seam.outputs}


def _shape(tensor: Any) -> list[int]:
    return [dim.dim_value for dim in tensor.shape.dim]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_random_plans_compute_the_same_bits(seed: int, bound: bool) -> None:
    placed, model, _ = compiled(9000 + seed)
    assert placed.plan is not None
    program = build_program(placed.model, placed.plan.devices)
    inputs = integers(Random(seed), model.proto)
    expected = ProgramExecutor(program).run(inputs, keep_values=True).values
    found = (
        ProgramExecutor(program, make_runner=lambda own: Bare(own, program, bound)).run(inputs, keep_values=True).values
    )
    for device, values in expected.items():
        assert found[device].keys() == values.keys()
        assert all(np.array_equal(found[device][name], value) for name, value in values.items())


def test_segments_of_tiles_keep_no_slice_and_no_join() -> None:
    made = dicompiler.compile(networks.build("lenet", 1), platform="rpi4x4", strategy="modnn")
    assert made.program is not None
    before = after = 0
    for device in made.program.devices:
        for segment, seam in zip(device.segments, hoist_device_copies(device), strict=True):
            before += _copies(segment)
            after += 0 if seam.segment is None else _copies(seam.segment)
            assert {*seam.output_tensors} == {*segment.outputs}
    assert before > 40 and after == 0


def _copies(segment: Segment) -> int:
    return sum(node.op_type in ("Slice", "Concat") for node in segment.model.graph.node)


def device(text: str, **more: Any) -> DeviceProgram:
    return DeviceProgram("a", "a", (handmade("one", "a", text, {}),), (), (), **{"model_outputs": {}, **more})


FLOAT = onnx.TensorProto.FLOAT
NUMBERS = "int64[1] b = {1}, int64[1] e = {3}, int64[1] axis = {2}, int64[1] two = {2}"
BASIC = f"""(float[1, 2, 4] x) => (float[1, 2, 4] y, float[1, 2, 2] z) <{NUMBERS}> {{ y = Relu (x)
 z = Slice (y, b, e, axis) }}"""


def test_slice_of_an_output_that_only_others_read_is_a_cut() -> None:
    (seam,) = hoist_device_copies(device(BASIC))
    assert seam.copied_outputs == {
        "z": CopiedTensor((1, 2, 2), FLOAT, (CopiedRegion("y", (0, 0, 1), (0, 0, 0), (1, 2, 2)),))
    }
    assert seam.segment is not None
    graph = seam.segment.model.graph
    assert [v.name for v in graph.output] == ["y"] and [n.op_type for n in graph.node] == ["Relu"]
    assert not graph.initializer and not seam.copied_inputs


def test_removes_tensor_that_is_sent_only_in_pieces() -> None:
    (seam,) = hoist_device_copies(device(BASIC.replace("float[1, 2, 4] y, ", "")))
    assert list(seam.copied_outputs) == ["z"] and seam.outputs == ("y",)


def test_output_is_assembled_from_computed_and_received_pieces() -> None:
    (seam,) = hoist_device_copies(
        device("(float[1, 2] x) => (float[1, 6] y) { a = Abs (x)  y = Concat <axis = 1> (x, a, x) }")
    )
    assert [piece.source for piece in seam.copied_outputs["y"].pieces] == ["x", "a", "x"] and seam.outputs == ("a",)


def test_segment_that_only_moves_has_no_model() -> None:
    text = f"(float[1, 2, 4] x) => (float[1, 2, 2] z) <{NUMBERS}> {{ z = Slice (x, b, e, axis) }}"
    (seam,) = hoist_device_copies(device(text))
    assert seam.segment is None and list(seam.copied_outputs) == ["z"] and not seam.copied_inputs


def _state(made: str) -> DeviceState:
    return DeviceState(TensorSpec("past", 1, (1, 2, 2)), made, "past", "present", ((0, 1), (0, 2), (0, 2)))


STAYING = {
    "it is delivered": device(BASIC, model_outputs={"z": "out"}),
    "it is kept for the next frame": device(BASIC, states=(_state("z"),)),
    "a node reads it": device(BASIC.replace("e, axis) }", "e, axis)\n w = Relu (z) }")),
    "it takes steps": device(BASIC.replace("b, e, axis)", "b, e, axis, two)")),
    "nobody knows the shape": device(BASIC.replace("float[1, 2, 4]", "float[1, 2, n]")),
    "where it is cut is computed": device(
        BASIC.replace("y = Relu (x)", "y = Relu (x)\n c = Abs (b)").replace("y, b", "y, c")
    ),
}


@pytest.mark.parametrize("why", STAYING)
def test_slice_is_not_hoisted_if(why: str) -> None:
    (seam,) = hoist_device_copies(STAYING[why])
    assert not seam.copied_outputs and seam.segment == STAYING[why].segments[0]


def test_pieces_that_came_are_joined_in_one_tensor_and_cut_before() -> None:
    text = f"""(float[1, 2, 4] x, float[1, 1, 2] c, float[1, 1, 4] d) => (float[1, 3, 6] y) <{NUMBERS}> {{
        s = Slice (x, b, e, axis)  t = Concat <axis = -1> (x, s)  u = Concat <axis = 2> (d, c)
        v = Concat <axis = 1> (t, u)  y = Relu (v) }}"""
    (seam,) = hoist_device_copies(device(text))
    pieces = (
        CopiedRegion("x", (0, 0, 0), (0, 0, 0), (1, 2, 4)),
        CopiedRegion("x", (0, 0, 1), (0, 0, 4), (1, 2, 2)),
        CopiedRegion("d", (0, 0, 0), (0, 2, 0), (1, 1, 4)),
        CopiedRegion("c", (0, 0, 0), (0, 2, 4), (1, 1, 2)),
    )
    assert seam.copied_inputs == {"v": CopiedTensor((1, 3, 6), FLOAT, pieces)} and seam.segment is not None
    assert [v.name for v in seam.segment.model.graph.input] == ["v"]


@pytest.mark.parametrize(
    "text",
    [
        "(float[1, 2] x) => (float[1, 6] y) { a = Abs (x)  z = Concat <axis = 1> (x, a, x)  y = Relu (z) }",
        "(bool c, float[2] x) => (float[2] y) { z = Concat <axis = 0> (x)  y = If (c) <then_branch ="
        " g () => (float[2] t) { t = Identity (z) }, else_branch = h () => (float[2] f) { f = Neg (z) }> }",
        "(string[2] x, float[2] z) => (string[2] y, float[4] w) { y = Identity (x)"
        " v = Concat <axis = 0> (z, z)  w = Abs (v) }",
    ],
    ids=["of what is made", "control flow", "words"],
)
def test_segments_stay_as_they_are(text: str) -> None:
    (seam,) = hoist_device_copies(made := device(text))
    assert not seam.copied_inputs and not seam.copied_outputs and seam.segment is made.segments[0]


def test_session_that_makes_another_shape_is_named() -> None:
    bare = Bare(device(BASIC).segments[0], Program((device(BASIC),), (), (), (), {}, ()), False)
    with pytest.raises(ValueError, match=r"'y': computed tensor\(float\) \[1, 2, 3\], expected FLOAT \[1, 2, 4\]"):
        bare.seam.cut_outputs({"y": make_value(np.zeros(24, np.uint8), "FLOAT", [1, 2, 3])}, {})
