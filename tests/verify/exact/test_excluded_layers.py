"""Replacements of excluded layers differ by position, so swapped pieces are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx
import pytest
from support.layer_graphs import rules

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Interval, Region
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.comparison import Check, check_exact
from dicompiler.verify.exact import build_check_model
from dicompiler.verify.exact.exactness_check import compute_all_tensors
from dicompiler.verify.exact.excluded_layers import ZEROS_SUFFIX
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

DEVICES = ("pi01", "pi02")
SHARES = """<ir_version: 8, opset_import: ["": 17]> g (float[4, 6, 5] x) => (float[4, 6, 5] y) {
  ["squares"] a = Mul (x, x)  ["shares"] b = Softmax (a)  ["behind"] r = Relu (b)  ["sum"] y = Add (r, x) }"""
SUMS = """<ir_version: 8, opset_import: ["": 17]> g (float[4, 6, 5] x) => (float[4, 6, 5] y) {
  ["squares"] a = Mul (x, x)  ["shares"] b = ReduceLogSum <axes = [2]> (a)  ["sum"] y = Add (b, x) }"""


def rows(_: Operation, region: Region, __: Interval | None) -> Piece:
    """Return a rule piece that passes rows through."""
    out = (*region[:2], (0, 5))
    return Piece(out, (out,))


OWN = {
    **rules(),
    ("", "Softmax"): OperatorRule("Softmax", rows),
    ("", "ReduceLogSum"): replace(rules()["", "ReduceLogSum"], stand_in="", reduction_length=lambda _: 5),
}
"""The built-in rules and two rules without stand-ins."""
Swap = Callable[[onnx.ModelProto], int]


def read(text: str) -> Model:
    """Return a model from ONNX text, with inferred shapes."""
    return Model.load(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def halves(axis: int) -> tuple[Part, Part]:
    """Return parts with y on two devices, cut along one axis."""
    extents = (4, 6, 5)
    cuts = ((0, extents[axis] // 2), (extents[axis] // 2, extents[axis]))
    full = [(0, extent) for extent in extents]
    first, second = (
        Part(name, (*full[:axis], own, *full[axis + 1 :])) for name, own in zip(DEVICES, cuts, strict=True)
    )
    return first, second


def plan(network: str, shares: tuple[Part, ...]) -> Plan:
    """Return a plan with the excluded layer in `shares` and all else on the first device."""
    alone = {layer.name: (Part("pi01", ((0, 4), (0, 6), (0, 5))),) for layer in form_layers(read(network), OWN).layers}
    return Plan({**alone, "shares": shares}, ("pi01",), ("pi01",))


def swapped(proto: onnx.ModelProto) -> int:
    """Swap the pieces of every join, and return the number of changed nodes."""
    joins = [node for node in proto.graph.node if node.op_type == "Concat"]
    for node in joins:
        node.input[:] = list(node.input)[::-1]
    return len(joins)


def checked(network: str, how: Plan, change: Swap | None) -> Check:
    """Run the exact check of the network by the plan, with changed placed models."""

    def program(variant: Model) -> Program:
        whole = PipelineState(variant, form_layers(variant, OWN), Platform.load("rpi4x4"), how)
        placed = PartitionPass().run(whole).model
        proto = onnx.ModelProto()
        proto.CopyFrom(placed.proto)
        assert change is None or change(proto)
        return build_program(Model(proto, placed.weights), how.devices)

    model = read(network)
    return check_exact(model, program, rules=OWN, layers=form_layers(model, OWN))


@pytest.mark.parametrize("axis", [0, 1])
def test_finds_misplaced_rows_behind_excluded_layer(axis: int) -> None:
    how = plan(SHARES, halves(axis))
    right = checked(SHARES, how, None)
    assert right.passed and "left out: tensor 'b', made by Softmax 'shares'" in right.detail
    assert not checked(SHARES, how, swapped).passed


def test_partial_sums_of_excluded_layer_equal_whole() -> None:
    full = ((0, 4), (0, 6), (0, 1))
    parts = [Part(name, full, reduce) for name, reduce in zip(DEVICES, ((0, 2), (2, 5)), strict=True)]
    right = checked(SUMS, plan(SUMS, (*parts, Part("pi01", full))), None)
    assert right.passed and "made by ReduceLogSum 'shares'" in right.detail, right.detail


@pytest.mark.parametrize(
    "body",
    [
        # The layer of TopK is never cut, because it has two outputs.
        "p, i = TopK <axis = 2> (s, k) q = Cast <to = 1> (i) y = Add (p, q)",
        "y = Softmax (s) c = Cast <to = 1> (i)",
    ],
)
def test_exclusions_keep_layers(body: str) -> None:
    model = read(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[4, 6, 5] x) => (float[4, 6, 5] y) <int64[1] k = {{5}}> {{ s = Mul (x, x) {body.split(" c =")[0]} }}""")
    own = {**OWN, ("", "TopK"): OperatorRule("TopK", rows)}
    found = build_check_model(model, 0, own)
    values = compute_all_tensors(found.model, found.inputs)
    before, after = form_layers(model, own), form_layers(found.model, own)
    assert before.layer_by_name.keys() == after.layer_by_name.keys()
    assert [layer.output for layer in before.layers] == [layer.output for layer in after.layers]
    assert all(not value.any() for name, value in values.items() if name.endswith(ZEROS_SUFFIX))
