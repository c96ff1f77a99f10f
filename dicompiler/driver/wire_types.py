"""Wire types: the element types in which tensors are sent between devices."""

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
    UNCHANGED,
    WireFormat,
    effective_wire_dtypes,
    parse_wire_format,
    requested_wire_dtypes,
    with_wire_dtypes,
)
from dicompiler.partition.lowering import lower_unchecked

log = logging.getLogger("dicompiler")


def resolve_wire_types(
    plan: str | Path | Plan | None,
    wire_dtype: str | Mapping[str, str] | WireFormat | None,
    samples: str | Path | None,
) -> tuple[Plan | None, WireFormat]:
    """Return the loaded plan, and the wire format (element types in which tensors are sent).

    The types are taken from `wire_dtype` or, if it is None, from the plan. `samples` is a file of sample
    inputs, from which value ranges for int8 are measured later.

    Raises:
        UsageError: A type is unknown, int8 has neither samples nor value ranges, or samples are given without int8.
    """
    loaded = plan if isinstance(plan, Plan) or plan is None else plans.load_user_plan(plan)
    wire_format = parse_wire_format(wire_dtype)
    if loaded is not None:
        planned = loaded.wire_format
        if wire_format is None:
            wire_format = planned
        wire_format = replace(wire_format, ranges=wire_format.ranges or planned.ranges)
        loaded = replace(loaded, wire_format=wire_format)
    wire_format = wire_format or WireFormat()
    has_int8 = any(dtype == "int8" for _, dtype in wire_format.dtypes)
    if has_int8 and samples is None and not wire_format.ranges:
        raise UsageError(
            "wire: int8 needs the value range of each tensor: give samples of the inputs (--wire-samples X.npz)"
        )
    if samples is not None and not has_int8:
        raise UsageError("wire: samples are used for int8 only: omit --wire-samples, or send tensors as int8")
    return loaded, wire_format


def apply_wire_types(compilation: PipelineState, wire_format: WireFormat, place: str = "wire") -> PipelineState:
    """Set the types in which tensors are sent, so that costs and strategies use the bytes that are really sent.

    Error messages begin with `place`: the option or the key of a plan that states the types.
    """
    assert compilation.layers is not None
    return replace(compilation, layers=with_wire_dtypes(compilation.layers, wire_format.dtypes, place))


def measure_wire_ranges(compilation: PipelineState, samples: Path) -> Plan:
    """Return the plan with the value range of each sent tensor, measured over the samples in a file."""
    from dicompiler.verify.calibration_samples import read_samples
    from dicompiler.verify.comparison import graph_inputs
    from dicompiler.verify.wire_error import measure_ranges

    plan = compilation.plan
    assert plan is not None
    inputs = read_samples(samples, graph_inputs(compilation.model))
    log.info("measuring the ranges of sent tensors over %d samples", len(inputs))
    int8_only = WireFormat(
        tuple((name, kind if kind == "int8" else UNCHANGED) for name, kind in plan.wire_format.dtypes)
    )
    exact_plan = replace(plan, wire_format=int8_only.with_exact_stand_ins)
    program = lower_unchecked(replace(compilation, plan=exact_plan)).program
    assert program is not None
    return replace(plan, wire_format=replace(plan.wire_format, ranges=measure_ranges(program, inputs)))


def warn_not_narrowed(compilation: PipelineState) -> None:
    """Log one warning if some of the sent tensors cannot be converted to the type in which they should be sent."""
    routing = compilation.routing
    assert routing is not None
    sent = {box.key.tensor for role in routing.roles for box in role.received_boxes}
    requested, effective = requested_wire_dtypes(routing.layers), effective_wire_dtypes(routing.layers)
    unchanged = sorted(sent & requested.keys() - effective.keys())
    if unchanged:
        log.warning(
            "wire: %d of %d sent tensors (such as %r) cannot be converted to the requested type: "
            "they are sent unchanged",
            len(unchanged),
            len(sent),
            unchanged[0],
        )
