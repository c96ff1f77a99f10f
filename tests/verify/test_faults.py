"""The exact check catches planted faults: in placed models, and in operator rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import onnx
import pytest
from support.layer_graphs import rules
from support.planted_faults import KINDS, Fault, Placed
from support.splits import Case, splits

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.ir.regions import Interval, Region, full_region
from dicompiler.partition.segmentation import build_program
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.verify.comparison import Check, check_exact
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

NETWORKS: dict[str, dict[str, Any]] = {"tiny": {}, "quirks": {}, "resnet18": {"size": 64, "width": 0.125}}
#: In these plans, every part is read, so every fault must be found. The option merge=all is not used, because then some
#: parts are not read.
PIPELINES = {
    "height": "tile-height{parts=4}",
    "grid": "tile-grid{rows=2 columns=2}",
    "lop": "lop{parts=4}",
    "lip": "lip{parts=3}",
    "scatter": "lip{parts=2 merge=scatter}",
}
PLANS = [(name, kind) for name in ("tiny", "quirks") for kind in (*PIPELINES, "fused-height", "fused-grid")]
PLANS += [("resnet18", "grid"), ("resnet18", "scatter")]
EACH = 3


@cache
def case(name: str) -> Case:
    return Case.of(networks.build(name, 1, **NETWORKS[name]))


@cache
def plan(name: str, kind: str) -> Plan:
    own = case(name)
    if kind not in PIPELINES:
        return own.plan(next(iter(splits(own.layers, [kind], 0))))
    found: Plan | None = PassManager(make_pipeline(PIPELINES[kind])).run(own.compilation).plan
    assert found is not None
    return found


def placed(compilation: PipelineState, how: Plan) -> Model:
    return PartitionPass().run(replace(compilation, plan=how, platform=case("tiny").compilation.platform)).model


def exact_check(name: str, how: Plan, change: Callable[[onnx.ModelProto], None]) -> Check:
    """Run the exact check of the network with changed placed models."""

    def program(variant: Model) -> Program:
        whole = placed(prepare(variant), how)
        proto = onnx.ModelProto()
        proto.CopyFrom(whole.proto)
        change(proto)
        return build_program(Model(proto, whole.weights), how.devices)

    return check_exact(case(name).compilation.model, program)


def caught(name: str, how: Plan, fault: Fault) -> bool:
    """Return True if outputs differ or the program cannot run."""
    try:
        return not exact_check(name, how, fault.change).passed
    except DicompilerError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), PLANS)
def test_catches_fault_in_placed_model(name: str, kind: str) -> None:
    how = plan(name, kind)
    assert exact_check(name, how, lambda _: None).passed
    whole = Placed(placed(case(name).compilation, how).proto)
    tried = 0
    for number, (what, find) in enumerate(KINDS.items()):
        found = list(find(whole))
        for fault in Random(number).sample(found, min(EACH, len(found))):
            assert caught(name, how, fault), f"{what}: {fault.name}"
            tried += 1
    assert tried >= 11


# --- operator rules with a fault ---------------------------------------------------------------------------------

Spoil = Callable[[Operation, Interval | None, Piece], Piece]


def needing(piece: Piece, index: int, need: Region | None, **changes: Any) -> Piece:
    """Return the piece with another need of input `index`."""
    return replace(piece, needs=(*piece.needs[:index], need, *piece.needs[index + 1 :]), **changes)


def moved(region: Region, axis: int, first: int, last: int) -> Region:
    """Return the region with its ends on one axis moved."""
    start, stop = region[axis]
    return (*region[:axis], (start + first, stop + last), *region[axis + 1 :])


def halo_row_dropped(operation: Operation, _: Interval | None, piece: Piece) -> Piece:
    """Put padding in the place of the last row if it is not a border row."""
    need = piece.needs[0]
    assert need is not None
    if need[2][1] == operation.input_shape(0)[2] or need[2][1] - need[2][0] < 2:
        return piece
    pads = list(piece.attributes["pads"])
    pads[len(pads) // 2] += 1
    return needing(piece, 0, moved(need, 2, 0, -1), attributes={**piece.attributes, "pads": pads})


def pad_moved(_: Operation, __: Interval | None, piece: Piece) -> Piece:
    """Move a row of padding to the other end."""
    pads = list(piece.attributes.get("pads", []))
    half = len(pads) // 2
    if pads and pads[0] != pads[half]:
        pads[0], pads[half] = pads[half], pads[0]
    return replace(piece, attributes={**piece.attributes, "pads": pads} if pads else piece.attributes)


def shifted(axis: int) -> Spoil:
    """Shift a needed region by one row (channel) upwards, or downwards at the border."""

    def spoil(operation: Operation, _: Interval | None, piece: Piece) -> Piece:
        need = piece.needs[0]
        assert need is not None
        if need[axis][0] > 0:
            return needing(piece, 0, moved(need, axis, -1, -1))
        return needing(piece, 0, moved(need, axis, 1, 1)) if need[axis][1] < operation.input_shape(0)[axis] else piece

    return spoil


def narrow_halo(_: Operation, __: Interval | None, piece: Piece) -> Piece:
    """Let LRN read one channel less at the lower end of its window."""
    if piece.written_region is None or piece.written_region[1][0] == piece.out[1][0]:
        return piece
    raw = moved(piece.written_region, 1, 1, 0)
    return needing(piece, 0, raw, written_region=raw)


def bias_everywhere(operation: Operation, reduce: Interval | None, piece: Piece) -> Piece:
    """Add the bias in every range of input channels."""
    if reduce is None or not operation.has_input(2):
        return piece
    return needing(replace(piece, constants={}), 2, (piece.out[1],))


def first_weights(_: Operation, __: Interval | None, piece: Piece) -> Piece:
    """Use the first filters of the layer instead of those of the part."""
    weight = piece.needs[1]
    assert weight is not None
    return needing(piece, 1, ((0, weight[0][1] - weight[0][0]), *weight[1:]))


def first_channels(_: Operation, __: Interval | None, piece: Piece) -> Piece:
    """Use shift and scale of the first channels instead of those of the part."""
    count = piece.out[1][1] - piece.out[1][0]
    return replace(piece, needs=(piece.needs[0], *(((0, count),) for _ in piece.needs[1:])))


def shortcut_of_another_tile(operation: Operation, _: Interval | None, piece: Piece) -> Piece:
    """Let an addition read its second operand one row further up."""
    need = piece.needs[1]
    if need is None or len(need) < 4 or need[2][0] == 0 or need[2] == (0, operation.input_shape(1)[2]):
        return piece
    return needing(piece, 1, moved(need, 2, -1, -1))


def inputs_mistaken(operation: Operation, _: Interval | None, piece: Piece) -> Piece:
    """Let a part of a Concat swap the needs of its two inputs."""
    assert operation.input_shape(0) == operation.input_shape(1)
    return replace(piece, needs=tuple(reversed(piece.needs)))


WRONG: dict[str, tuple[tuple[str, ...], Spoil, tuple[tuple[str, str], ...]]] = {
    "halo row dropped": (
        ("Conv", "MaxPool", "AveragePool"),
        halo_row_dropped,
        (("tiny", "height"), ("tiny", "grid"), ("quirks", "height"), ("tiny", "fused-height")),
    ),
    "halo row dropped in pools": (
        ("MaxPool", "AveragePool"),
        halo_row_dropped,
        (("tiny", "height"), ("quirks", "grid")),
    ),
    "pad at the other end": (("Conv",), pad_moved, (("tiny", "height"), ("quirks", "grid"), ("resnet18", "grid"))),
    "pad of a pool at the other end": (("MaxPool", "AveragePool"), pad_moved, (("tiny", "grid"), ("quirks", "height"))),
    "rows shifted": (("Conv",), shifted(2), (("tiny", "height"), ("quirks", "fused-grid"))),
    "columns shifted": (("Conv", "MaxPool"), shifted(3), (("tiny", "grid"), ("quirks", "fused-grid"))),
    "channels shifted": (("Conv", "MaxPool"), shifted(1), (("tiny", "lop"), ("tiny", "scatter"), ("quirks", "lop"))),
    "features shifted": (("Gemm",), shifted(1), (("tiny", "lip"), ("quirks", "scatter"))),
    "flattened one off": (("Flatten",), shifted(1), (("tiny", "lop"), ("quirks", "lop"))),
    "LRN halo too narrow": (("LRN",), narrow_halo, (("quirks", "lop"),)),
    "bias in every partial sum": (("Conv", "Gemm"), bias_everywhere, (("tiny", "lip"), ("quirks", "scatter"))),
    "first filters": (("Conv",), first_weights, (("tiny", "lop"), ("resnet18", "lop"))),
    "first channels": (("BatchNormalization",), first_channels, (("tiny", "lop"), ("resnet18", "lop"))),
    "shortcut of another tile": (("Add",), shortcut_of_another_tile, (("tiny", "height"), ("resnet18", "grid"))),
    "input of a concat mistaken": (("Concat",), inputs_mistaken, (("tiny", "lop"),)),
}
"""Fault → operators with the wrong rule, and networks and plans that reveal it."""


def with_rules(name: str, how: Plan, known: Mapping[tuple[str, str], OperatorRule]) -> Check:
    """Run the exact check of the network, partitioned by these rules."""

    def program(variant: Model) -> Program:
        prepared = prepare(variant)
        return build_program(placed(replace(prepared, layers=form_layers(prepared.model, known)), how), how.devices)

    return check_exact(case(name).compilation.model, program)


def spoiled(rule: OperatorRule, spoil: Spoil) -> OperatorRule:
    """Return the rule with `spoil` applied to each piece that is smaller than the whole."""

    def piece(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
        right = rule.piece(operation, region, reduce)
        return (
            right
            if right.out == full_region(operation.out_shape) and reduce is None
            else spoil(operation, reduce, right)
        )

    return replace(rule, piece=piece)


WRONG_CASES = [
    # resnet18 is slow, and smaller networks reveal the same faults.
    pytest.param(what, name, kind, marks=pytest.mark.slow if name == "resnet18" else ())
    for what, (_, _, where) in WRONG.items()
    for name, kind in where
]


@pytest.mark.parametrize(("what", "name", "kind"), WRONG_CASES)
def test_catches_wrong_rule(what: str, name: str, kind: str) -> None:
    ops, spoil, _ = WRONG[what]
    wrong = {key: spoiled(rule, spoil) if key[1] in ops else rule for key, rule in rules().items()}
    how = plan(name, kind)
    assert with_rules(name, how, rules()).passed
    assert not with_rules(name, how, wrong).passed


def test_catches_softmax_that_reads_part_of_its_axis() -> None:
    """The correct rule rejects the plan."""

    def careless(_: Operation, region: Region, __: Interval | None) -> Piece:
        return Piece(region, (region,))

    wrong = {**rules(), ("", "Softmax"): OperatorRule("Softmax", careless)}
    how = plan("quirks", "height")
    (layer,) = (layer for layer in case("quirks").layers.layers if layer.nodes[0].op == "Softmax")
    parts = tuple(Part(how.devices[i], ((0, 1), (5 * i, 5 * i + 5))) for i in range(2))
    split_softmax = replace(how, layers={**how.layers, layer.name: parts})
    with pytest.raises(DicompilerError, match="axis 1 of this layer cannot be cut"):
        with_rules("quirks", split_softmax, rules())
    assert not with_rules("quirks", split_softmax, wrong).passed
