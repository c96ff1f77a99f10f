"""In which types tensors travel, on the way from what is asked to a plan: agreed, set, measured, told.

what is asked + a plan → Wire;   Compilation + Wire → one whose layers know it;   … + samples → a plan with ranges
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dicompiler.base.errors import UsageError
from dicompiler.ir import plan as plans
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.wire_dtype import (
    WireFormat,
    effective_wire_dtypes,
    parse_wire_format,
    requested_wire_dtypes,
    with_wire_dtypes,
)
from dicompiler.partition.lowering import lower_unchecked

log = logging.getLogger("dicompiler")


def resolve_wire_types(
    plan: str | Path | Plan | None, wire: str | Mapping[str, str] | WireFormat | None, samples: str | Path | None
) -> tuple[Plan | None, WireFormat]:
    """(the plan, how tensors travel): as `wire` says, else as the plan does. UsageError for an unknown type, for int8
    without samples (or a plan that has its ranges), and for samples that nothing needs."""
    given = plan if isinstance(plan, Plan) or plan is None else plans.load_plan(plan)
    sent = parse_wire_format(wire)
    if given is not None:
        sent = given.wire_format if sent is None else replace(sent, ranges=sent.ranges or given.wire_format.ranges)
        given = replace(given, wire_format=sent)
    sent = sent or WireFormat()
    measures = any(kind == "int8" for _, kind in sent.dtypes)
    if measures and samples is None and not sent.ranges:
        raise UsageError("wire: int8 needs samples of the inputs, to know the range of each tensor (--samples X.npz)")
    if samples is not None and not measures:
        raise UsageError("wire: samples are for int8 alone: leave them out (--samples), or let tensors travel as int8")
    return given, sent


def apply_wire_types(compilation: PipelineState, wire: WireFormat) -> PipelineState:
    """The compilation with layers whose tensors travel so: every cost and strategy counts their bytes by them."""
    assert compilation.layers is not None
    return replace(compilation, layers=with_wire_dtypes(compilation.layers, wire.dtypes))


def measure_wire_ranges(compilation: PipelineState, samples: Path) -> Plan:
    """The compilation's plan with the range of each tensor that travels, over the samples in a file. DicompilerError
    for samples that do not fit."""
    from dicompiler.verify.calibration_samples import read_samples
    from dicompiler.verify.comparison import graph_inputs
    from dicompiler.verify.wire_error import measure_ranges

    plan = compilation.plan
    assert plan is not None
    given = read_samples(samples, graph_inputs(compilation.model))
    log.info("measuring what travels over %d samples", len(given))
    program = lower_unchecked(
        replace(compilation, plan=replace(plan, wire_format=plan.wire_format.with_exact_stand_ins))
    ).program
    assert program is not None
    return replace(plan, wire_format=replace(plan.wire_format, ranges=measure_ranges(program, given)))


def warn_not_narrowed(compilation: PipelineState) -> None:
    """Warns, once for all, of tensors that were to be narrowed on their way and cannot be."""
    routing = compilation.routing
    assert routing is not None
    sent = dict.fromkeys(box.key.tensor for role in routing.roles for box in role.received_boxes)
    kept = sorted(
        sent.keys() & requested_wire_dtypes(routing.layers).keys() - effective_wire_dtypes(routing.layers).keys()
    )
    if kept:
        log.warning(
            "wire: %d of %d tensors that travel are of types that are not narrowed so, and travel as they are "
            "(such as %r)",
            len(kept),
            len(sent),
            kept[0],
        )
