"""Segment boundaries, and the order of sends."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.layer_graphs import rules

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.partition.segmentation import build_program
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

CHAIN = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[1, 4, 8, 6] x) => (float[1, 4, 8, 6] y) {
   [p1] a = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)
   [p2] b = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)
   [p3] c = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (b)
   [join] y = Sum (c, a)
}
"""


def given(text: str, **constants: tuple[int, ...]) -> Model:
    """Return the network with constants of these shapes."""
    proto = onnx.parser.parse_model(text)
    values = (onnx.numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in constants.items())
    proto.graph.initializer.extend(values)
    return Model.load(onnx.shape_inference.infer_shapes(proto))


def rows(device: str, start: int, stop: int, lane: int = 0) -> Part:
    return Part(device, ((0, 1), (0, 4), (start, stop), (0, 6)), lane=lane)


def program(**layers: tuple[Part, ...]) -> Program:
    model = Model.load(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(CHAIN)))
    graph = form_layers(model, rules())
    assert [layer.name for layer in graph.layers] == ["p1", "p2", "p3"]  # The Sum belongs to layer p3.
    placed = PartitionPass().run(PipelineState(model=model, layers=graph, plan=Plan(layers, ("a",), ("a",))))
    return build_program(placed.model, ("a", "b"))


def steps(made: Program, device: str) -> list[str]:
    own = next(d for d in made.devices if d.device == device)
    names = {"run": [s.name for s in own.segments]}
    return [
        f"{s.kind} {names['run'][s.index] if s.kind == 'run' else made.transfers[s.index].value.name}"
        for s in own.steps
    ]


def nodes(made: Program, device: str) -> list[list[str]]:
    own = next(d for d in made.devices if d.device == device)
    return [[node.op_type for node in segment.model.graph.node] for segment in own.segments]


def test_one_device_has_one_segment() -> None:
    made = program(p1=(Part("a"),), p2=(Part("a"),), p3=(Part("a"),))
    assert nodes(made, "a") == [["MaxPool", "MaxPool", "MaxPool", "Sum"]]
    assert nodes(made, "b") == []
    assert not made.transfers


def test_segments_end_after_a_sent_tensor() -> None:
    made = program(p1=(Part("a"),), p2=(Part("b"),), p3=(Part("a"),))
    assert steps(made, "a") == ["receive b", "run a_000", "send a", "run a_001"]
    assert steps(made, "b") == ["receive a", "run b_000", "send b"]


def test_segments_end_before_a_newer_input() -> None:
    halves = rows("a", 0, 4), rows("b", 4, 8)
    made = program(p1=halves, p2=halves, p3=halves)
    for device in made.devices:
        made_here: set[str] = set()
        for segment in device.segments:
            # A segment starts when all of its inputs exist, so it must not need its own outputs.
            assert not set(segment.inputs) & set(segment.outputs)
            made_here |= set(segment.outputs)
        assert device.steps[0].kind == "receive"
    # Device a first computes the slices that it sends to b, because b waits for them.
    assert nodes(made, "a")[0] == ["Slice"]


def test_keys_and_values_are_sent_together() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 13]>
    net (float[1, 6, 4] x) => (float[1, 6, 4] y) {
       [q] a = MatMul (x, w) [relu] b = Relu (a)
       [k] c = MatMul (x, w) [turned] d = Transpose <perm = [0, 2, 1]> (c)
       [s] e = MatMul (b, d) [v] f = MatMul (x, w) [bias] g = Add (f, z) [p] y = MatMul (e, g)
    }"""
    model = given(text, w=(4, 4), z=(4,))
    graph = form_layers(model, rules())
    # Layers k and v are first, because other devices wait for their results.
    assert [layer.name for layer in graph.layers] == ["k", "v", "q", "turned", "s", "p"]
    third = tuple(Part(device, ((0, 1), (2 * i, 2 * i + 2), (0, 4))) for i, device in enumerate("abc"))
    scores = tuple(Part(part.device, (*part.region[:2], (0, 6))) for part in third if part.region)
    plan = {"v": third, "k": third, "q": third, "turned": tuple(Part(d) for d in "abc"), "s": scores, "p": third}
    placed = PartitionPass().run(PipelineState(model=model, layers=graph, plan=Plan(plan, ("a", "b", "c"), ("a",))))
    made = build_program(placed.model, ("a", "b", "c"))
    first, second, *_ = nodes(made, "b")
    assert first == ["Slice", "MatMul", "MatMul", "Add"] and second[:2] == ["MatMul", "Relu"]
    sends = [made.transfers[step.index] for step in made.devices[1].steps if step.kind == "send"][:4]
    pairs = [("c", "c@b"), ("c", "g@b"), ("a", "c@b"), ("a", "g@b")]
    assert [(one.receiver, one.value.name) for one in sends] == pairs


def test_receives_come_first() -> None:
    halves = rows("a", 0, 4), rows("b", 4, 8)
    for device in program(p1=halves, p2=halves, p3=halves).devices:
        kinds = [step.kind for step in device.steps]
        assert kinds == sorted(kinds, key=lambda kind: kind != "receive")


def test_segments_end_at_lane_changes() -> None:
    lanes = rows("a", 0, 6, 0), rows("a", 2, 8, 1)
    made = program(p1=lanes, p2=(rows("a", 0, 5, 0), rows("a", 3, 8, 1)), p3=(rows("a", 0, 4, 0), rows("a", 4, 8, 1)))
    own = made.devices[0].segments
    lane_of = [
        {
            entry.value
            for node in segment.model.graph.node
            for entry in node.metadata_props
            if entry.key.endswith("lane")
        }
        for segment in own
    ]
    assert all(len(lanes) <= 1 for lanes in lane_of)
    assert [len(segment.model.graph.node) > 1 for segment in own].count(True) >= 2
    assert not made.transfers


def test_transfers_have_name_type_and_bytes() -> None:
    made = program(p1=(Part("a"),), p2=(rows("b", 0, 2), rows("a", 2, 8)), p3=(Part("a"),))
    (there, back) = made.transfers
    assert (there.sender, there.receiver, there.value.shape, there.value.nbytes) == ("a", "b", (1, 4, 3, 6), 4 * 72)
    assert (back.sender, back.receiver, back.value.shape) == ("b", "a", (1, 4, 2, 6))
    assert [t.index for t in made.transfers] == [0, 1]


@pytest.mark.parametrize("dtype", ["float", "double", "int64"])
def test_inputs_and_outputs_keep_their_types(dtype: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 13]> n ({dtype}[4] x) => ({dtype}[4] y) {{ y = Neg (x) }}'
    model = Model.load(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    graph = form_layers(model, rules())
    plan = Plan({graph.layers[0].name: (Part("b"),)}, ("a",), ("a",))
    made = build_program(PartitionPass().run(PipelineState(model=model, layers=graph, plan=plan)).model, ("a", "b"))
    size = np.dtype({"float": "f4", "double": "f8", "int64": "i8"}[dtype]).itemsize
    assert [t.value.nbytes for t in made.transfers] == [4 * size, 4 * size]
