"""Casts of sent tensors: their place, their number, and rejected types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from support.layer_graphs import formed
from support.placing import network, place, rows

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.ir.wire_dtype import WireFormat, parse_wire_format
from dicompiler.partition.lowering import partition
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.wire_casts import max_narrowings_on_path
from dicompiler.verify.executor import ProgramExecutor, run_model

TEXT = """<ir_version: 8, opset_import: ["": OPSET]> g (float[1, 2, 4, 4] x) => (float[1, 4, 4, 4] y)
<float[2, 2, 1, 1] w = {1, 2, 3, 4}>
{ a = Conv (x, w)  b = Conv (a, w)  c = MaxPool <kernel_shape = [1, 1]> (a)  y = Concat <axis = 1> (b, c) }"""


LARGEST = {"x": 1.0, "a": 8.0, "b": 50.0, "c": 8.0}


def text(opset: int) -> str:
    return TEXT.replace("OPSET", str(opset))


def split(wire: str, plan: dict[str, str], opset: int = 17, ranges: bool = True) -> tuple[PipelineState, Program]:
    """Return the placed state and the program of a plan (device by layer); int8 uses one range for all tensors."""
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text(opset)))
    for node, name in zip(proto.graph.node, "abcy", strict=True):
        node.name = name
    model, layers = Model.load(proto), formed(proto)
    given = parse_wire_format(wire)
    assert given is not None
    given = replace(given, ranges={name: (-most, most) for name, most in LARGEST.items()} if ranges else {})
    plan_ = Plan({layer.name: (Part(plan[layer.name]),) for layer in layers.layers}, ("p",), ("p",), wire_format=given)
    placed = partition(PipelineState(model=model, layers=layers, plan=plan_))
    placed.model.check("partition")
    return placed, build_program(placed.model, ["p", "q", "r"])


def operators(program: Program, device: str) -> list[list[str]]:
    segments = next(d.segments for d in program.devices if d.device == device)
    return [[node.op_type for node in segment.model.graph.node] for segment in segments]


def test_narrows_once_for_all_receivers_and_widens_once_per_receiver() -> None:
    """A model input that is sent on is narrowed at its source; tensors that stay on their device are not narrowed."""
    placed, program = split("float16", {"a": "p", "b": "q", "c": "r", "y": "q"})
    assert operators(program, "p") == [["Conv", "Cast"], ["Cast", "Identity"]]
    assert operators(program, "q") == [["Cast", "Conv"], ["Cast", "Concat", "Cast"]]
    assert operators(program, "r") == [["Cast", "MaxPool", "Cast"]]
    assert {t.value.dtype for t in program.transfers} == {onnx.TensorProto.FLOAT16}
    assert [t.value.nbytes for t in program.transfers] == [64, 64, 64, 128]
    assert placed.routing is not None and max_narrowings_on_path(placed.routing) == 3
    _, program = split("float16", {"a": "p", "b": "q", "c": "q", "y": "p"})
    # The first Cast converts the received tensor back from float16 once, for both Conv and MaxPool.
    assert operators(program, "q") == [["Cast", "Conv", "Cast"], ["MaxPool", "Cast"]]


def test_slices_for_several_devices_are_sent_together() -> None:
    parts = tuple(rows(name, start, stop) for name, start, stop in (("p", 0, 3), ("q", 3, 6), ("r", 6, 8)))
    plan = Plan({"conv1": (Part("q"),), "conv2": parts}, ("q",), ("r",))
    wide, narrow = (
        operators(build_program(place(network(), replace(plan, wire_format=wire)).model, ["p", "q", "r"]), "q")
        for wire in (WireFormat(), WireFormat((("*", "float16"),)))
    )
    assert wide[0] == ["Conv", "Relu", "Slice", "Slice"]
    assert narrow[0] == [*wide[0], "Cast", "Cast"]


def test_single_layers_can_send_unchanged_tensors() -> None:
    _, program = split("float16,a=float32,x=bfloat16", {"a": "q", "b": "q", "c": "r", "y": "p"})
    assert {(t.sender, t.receiver): onnx.TensorProto.DataType.Name(t.value.dtype) for t in program.transfers} == {
        ("p", "q"): "BFLOAT16",
        ("q", "r"): "FLOAT",
        ("q", "p"): "FLOAT16",
        ("r", "p"): "FLOAT16",
    }


@pytest.mark.parametrize("wire", ["float16", "int8-block"])
def test_keys_and_values_are_computed_in_one_segment(wire: str) -> None:
    """Keys and values from one segment are sent together."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4] x) => (float[2, 4] y)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}>
    { k = MatMul (x, w)  v = MatMul (x, w)  y = Concat <axis = 0> (k, v) }"""
    proto = onnx.parser.parse_model(text)
    for node, name in zip(proto.graph.node, "kvy", strict=True):
        node.name = name
    proto = onnx.shape_inference.infer_shapes(proto)
    layers = formed(proto)
    parts = {layer.name: (Part("q" if layer.name == "y" else "p"),) for layer in layers.layers}
    plan = Plan(parts, ("p",), ("q",), wire_format=WireFormat((("*", wire),)))
    placed = partition(PipelineState(model=Model.load(proto), layers=layers, plan=plan))
    program = build_program(placed.model, ["p", "q"])
    assert len(program.transfers) == 2 and [len(device.segments) for device in program.devices] == [1, 1]


def test_encoders_of_slices_are_in_one_segment() -> None:
    parts = tuple(rows(name, start, stop) for name, start, stop in (("p", 0, 3), ("q", 3, 6), ("r", 6, 8)))
    plan = Plan({"conv1": (Part("q"),), "conv2": parts}, ("q",), ("r",))
    wire = WireFormat((("*", "int8-block"),))
    program = build_program(place(network(), replace(plan, wire_format=wire)).model, ["p", "q", "r"])
    first = operators(program, "q")[0]
    assert first[:4] == ["Conv", "Relu", "Slice", "Slice"] and first.count("Concat") >= 2


@pytest.mark.parametrize(
    ("wire", "close"), [("int8-block", 1.0), ("float16", 0.03), ("bfloat16", 0.3), ("int8", 0.7), ("float32", 1e-6)]
)
def test_narrowed_results_are_close_to_the_reference(wire: str, close: float) -> None:
    placed, program = split(wire, {"a": "q", "b": "r", "c": "q", "y": "p"})
    assert placed.plan is not None
    x = np.random.default_rng(0).uniform(-1, 1, (1, 2, 4, 4)).astype(np.float32)
    model = Model.load(onnx.parser.parse_model(text(17)))
    got, expected = ProgramExecutor(program).run({"x": x}).outputs["y"], run_model(model, {"x": x})["y"]
    difference = float(np.abs(got - expected).max())
    assert difference <= close and (difference > 0 or wire == "float32")


@pytest.mark.parametrize(
    ("wire", "opset", "ranges", "expected"),
    [
        ("int8", 17, False, "wire: the value range of 'b', which is sent as int8, is unknown: give sample inputs"),
        ("int8", 9, True, "wire: int8 needs opset 10, but the model has 9: convert the model (onnx.version_converter)"),
        ("int8-block", 12, True, "wire: int8-block needs opset 13, but the model has 12: convert the model"),
        ("bfloat16", 12, True, "wire: bfloat16 needs opset 13, but the model has 12"),
    ],
)
def test_rejects_narrowing_without_ranges_or_operators(wire: str, opset: int, ranges: bool, expected: str) -> None:
    with pytest.raises(DicompilerError) as caught:
        split(wire, {"a": "p", "b": "q", "c": "p", "y": "p"}, opset, ranges)
    assert str(caught.value).startswith(expected)


def test_plans_without_transfers_need_no_ranges() -> None:
    _, program = split("int8", dict.fromkeys("abcy", "p"), opset=9, ranges=False)
    assert not program.transfers and WireFormat() == parse_wire_format({})
