"""Lowering: a compilation with a plan becomes a placed model and a program.

Compilation (model, layers, platform, plan) ──partition──► placed Model ──cut──► Program;   with replicas, role by role
LayerGraph + Platform + Plan ──place──► PlacedGraph ──cut──► Program without models, for a plan that is only evaluated
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.partition.onnx_writer import write_placed_model
from dicompiler.partition.placed_graph import ModelFacts
from dicompiler.partition.placement import place_parts
from dicompiler.partition.routing import route, route_on_platform
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.tiling import single_device_plan
from dicompiler.partition.wire_casts import check_wire_dtypes

log = logging.getLogger("dicompiler")

T = TypeVar("T")
Rewrite = Callable[[PipelineState], PipelineState]


def partition(compilation: PipelineState, quiet: bool = False, sound: bool = True) -> PipelineState:
    """Rewrites the model as the plan says: parts on devices, slices and concatenations between them. Adds the routing;
    without a plan every layer is on d0. quiet: nothing is said of parts that nobody reads. sound: DicompilerError
    where what travels cannot be narrowed as the plan says, for want of ranges perhaps; else nobody runs it."""
    layers, platform = compilation.layers, compilation.platform
    assert layers is not None
    plan = compilation.plan or single_device_plan(layers, "d0")
    routing = route(layers, plan) if platform is None else route_on_platform(platform, layers, plan)
    given = ModelFacts.from_model(compilation.model)
    if sound:
        check_wire_dtypes(routing, plan.wire_format, given.opset)
    for layer, index in () if quiet else routing.dropped_tasks:
        log.warning("partition: part %d of layer %r is read by nobody and is left out", index, layer)
    placed = place_parts(given, routing, plan)
    return replace(compilation, plan=plan, routing=routing, model=write_placed_model(compilation.model, placed))


def partition_checked(compilation: PipelineState) -> PipelineState:
    """`partition`, and DicompilerError where the placed model is not legal ONNX. Nothing is said of dropped parts: who
    compiled it was told."""
    placed = partition(compilation, quiet=True)
    placed.model.check("after pass 'partition'")
    return placed


def lower(compilation: PipelineState, rewrite: Rewrite = partition_checked) -> PipelineState:
    """Adds routing, placed model and program to a compilation with a plan, and as `reference` the model before
    (before `trim`, where that changed it).

    rewrite: makes the placed model, role by role; the pass `partition` where passes are watched."""
    plan, platform = compilation.plan, compilation.platform
    assert plan is not None and platform is not None
    devices = _plan_devices(platform, plan)

    def one(role: Plan) -> tuple[PipelineState, Routing, Program]:
        placed = rewrite(replace(compilation, plan=role))
        assert placed.routing is not None
        return placed, placed.routing, build_program(placed.model, devices, platform.host_of)

    roles = _for_each_role(plan, one)
    routing, program = _combine_roles(plan, [(routing, program) for _, routing, program in roles])
    reference = compilation.reference or compilation.model
    return replace(roles[0][0], plan=plan, routing=routing, program=program, reference=reference)


lower_unchecked = partial(lower, rewrite=partial(partition, quiet=True, sound=False))
"""`split` where nobody runs the program: the placed model is not checked, and nothing is said of dropped parts."""


def build_program_only(
    given: ModelFacts, layers: LayerGraph, platform: Platform, plan: Plan
) -> tuple[Routing, Program]:
    """What `split_unchecked` makes, without writing it as ONNX: for a plan that is only evaluated.

    given: of the model that the layers were formed of.
    """
    devices = _plan_devices(platform, plan)

    def one(role: Plan) -> tuple[Routing, Program]:
        routing = route_on_platform(platform, layers, role)
        return routing, build_program(place_parts(given, routing, role), devices, platform.host_of)

    return _combine_roles(plan, _for_each_role(plan, one))


def _plan_devices(platform: Platform, plan: Plan) -> list[str]:
    """Those that the plan names, in platform order."""
    named = set(plan.devices)
    return [device.name for device in platform.devices if device.name in named]


def _for_each_role(plan: Plan, make: Callable[[Plan], T]) -> list[T]:
    """What `make` gives for each role's plan; equal ones are made once."""
    roles = plan.roles
    results: list[T] = []
    for i, role in enumerate(roles):
        before = roles.index(role)
        results.append(results[before] if before < i else make(role))
    return results


def _combine_roles(plan: Plan, roles: list[tuple[Routing, Program]]) -> tuple[Routing, Program]:
    """The first role's routing and program, which hold those of the others."""
    lost = [way.failed for way in plan.roles_by_failure][1:]
    (routing, program), *others = roles
    return (
        replace(routing, other_roles=tuple(replace(r, failed=one) for (r, _), one in zip(others, lost, strict=True))),
        replace(program, other_roles=tuple(replace(p, failed=one) for (_, p), one in zip(others, lost, strict=True))),
    )
