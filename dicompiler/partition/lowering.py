"""Lowering: from a plan to a placed model (with a device for each node) and a program, for each role of the plan.

A role is the plan itself, a replica of it (the plan on other devices), or a failure plan (for the time after a
failure). For each role:

    Model + LayerGraph + Plan ──routing──► Routing ──placement──► PlacedGraph ──► placed Model ──segmentation──► Program
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from dicompiler.ir.cluster import computes_layer, engine_layers
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import DeviceProgram, Program, Segment
from dicompiler.ir.routing import Routing
from dicompiler.partition.placed_graph import ModelFacts, PlacedGraph
from dicompiler.partition.placed_model import check_not_placed, write_placed_model
from dicompiler.partition.placement import place_parts
from dicompiler.partition.routing import route, route_on_platform
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.tiling import single_device_plan
from dicompiler.partition.wire_casts import check_wire_dtypes

log = logging.getLogger("dicompiler")


def partition(state: PipelineState, quiet: bool = False, check_narrowing: bool = True) -> PipelineState:
    """Rewrite the model by its plan: nodes for all parts, and slices and concatenations between devices.

    Args:
        state: Pipeline state with layers. Without a plan, all layers are placed on the device d0.
        quiet: True to omit the warnings about parts with results that nothing reads.
        check_narrowing: True to check that sent tensors can be converted to the plan's wire types (the element types in
            which tensors are sent). Simulation does not need this check.

    Returns:
        The new pipeline state. Each node of its model has a device, and its routing has the tensor regions that the
        devices exchange.

    Raises:
        DicompilerError: The model is already split, or the plan is not valid for it.
    """
    check_not_placed(state.model)
    return _partition_whole_model(state, quiet, check_narrowing)


def _partition_whole_model(state: PipelineState, quiet: bool = True, check_narrowing: bool = True) -> PipelineState:
    """Do the same as `partition`, but do not check whether the model is already split."""
    layers, platform = state.layers, state.platform
    assert layers is not None
    plan = state.plan or single_device_plan(layers, "d0")
    routing = route(layers, plan) if platform is None else route_on_platform(platform, layers, plan)
    facts = ModelFacts.from_model(state.model)
    if check_narrowing:
        check_wire_dtypes(routing, plan.wire_format, facts.opset)
    for layer, index in () if quiet else routing.dropped_tasks:
        log.warning("partition: part %d of layer %r is never read and is omitted", index, layer)
    placed = place_parts(facts, routing, plan)
    return replace(state, plan=plan, routing=routing, model=write_placed_model(state.model, placed))


def partition_checked(state: PipelineState) -> PipelineState:
    """Partition the model by its plan without warnings, and raise DicompilerError if the result is not valid ONNX."""
    placed = _partition_whole_model(state)
    placed.model.check("after pass 'partition'")
    return placed


def lower(state: PipelineState) -> PipelineState:
    """Add the routing, the partitioned model and the program to a pipeline state with a plan.

    The routing has the tensor regions that the devices exchange. If the state has no `reference` (the model with which
    outputs are compared), its model becomes the reference.

    Args:
        state: Pipeline state with layers, platform and plan.

    Returns:
        The new pipeline state.
    """
    return build_programs(state, [partition_checked(role) for role in role_states(state)])


def lower_unchecked(state: PipelineState) -> PipelineState:
    """Do the same as `lower` without checks and warnings, for programs that are not run."""
    placed = [_partition_whole_model(role, check_narrowing=False) for role in role_states(state)]
    return build_programs(state, placed)


def role_states(state: PipelineState) -> list[PipelineState]:
    """Return the pipeline state of each role: the state with the plan itself, a replica of it, or a failure plan.

    Roles with equal plans share one state. `build_programs` combines the states after each one is partitioned.
    """
    assert state.plan is not None
    return [replace(state, plan=plan) for plan in _distinct_role_plans(state.plan)]


def build_programs(state: PipelineState, placed: Sequence[PipelineState]) -> PipelineState:
    """Return the pipeline state with the routings and programs of all its partitioned roles.

    A role is the plan itself, a replica of it, or a failure plan.

    Args:
        state: Pipeline state with layers, platform and plan.
        placed: The states that `role_states` returned, after the pass `partition`.
    """
    plan, platform = state.plan, state.platform
    assert plan is not None and platform is not None
    devices = _plan_devices(platform, plan)
    roles = list[tuple[Routing, Program]]()
    for role in placed:
        assert role.routing is not None
        roles.append((role.routing, _build_program(role.model, devices, platform)))
    routing, program = _combine_roles(plan, roles)
    reference = state.reference or state.model
    return replace(placed[0], plan=plan, routing=routing, program=program, reference=reference)


def build_program_only(
    facts: ModelFacts, layers: LayerGraph, platform: Platform, plan: Plan
) -> tuple[Routing, Program]:
    """Return the routing and the program of a plan that is only simulated, without ONNX models.

    The routing has the tensor regions that the devices exchange. The program has the steps of each device.
    """
    devices = _plan_devices(platform, plan)

    roles = list[tuple[Routing, Program]]()
    for role_plan in _distinct_role_plans(plan):
        routing = route_on_platform(platform, layers, role_plan)
        roles.append((routing, _build_program(place_parts(facts, routing, role_plan), devices, platform)))
    return _combine_roles(plan, roles)


def _build_program(placed: Model | PlacedGraph, devices: Sequence[str], platform: Platform) -> Program:
    program = build_program(placed, devices, platform.host_of)
    engines = platform.engines
    with_engines = (_with_engine(entry, engines.get(entry.device, entry.engine)) for entry in program.devices)
    return replace(program, devices=tuple(with_engines)) if engines else program


def _with_engine(device: DeviceProgram, engine: str) -> DeviceProgram:
    segments = device.segments
    if engine_layers(engine):
        segments = tuple(replace(segment, calls=_count_calls(segment, engine)) for segment in segments)
    return replace(device, engine=engine, segments=segments)


def _count_calls(segment: Segment, engine: str) -> int:
    """Return the number of pieces of a segment (ONNX submodel) that an engine and onnxruntime compute in turn.

    The engine computes the layers that its option `layers` names. If the segment has branches, the result is an upper
    bound, because layers of two branches may be in one piece.
    """
    choices = (computes_layer(engine, layer) for (layer, _), _ in segment.node_marks)
    return max(1, sum(1 for _ in groupby(choices)))


def _plan_devices(platform: Platform, plan: Plan) -> list[str]:
    named = set(plan.devices)
    return [device.name for device in platform.devices if device.name in named]


def _distinct_role_plans(plan: Plan) -> list[Plan]:
    roles = plan.roles
    return [role for i, role in enumerate(roles) if roles.index(role) == i]


def _combine_roles(plan: Plan, roles: Sequence[tuple[Routing, Program]]) -> tuple[Routing, Program]:
    """Combine the routings of all roles in one Routing, and their programs in one Program.

    A role is the plan itself, a replica of it, or a failure plan. The results belong to the first role; the others are
    in their field `other_roles`. `roles` has an entry for each plan that `_distinct_role_plans` returns.
    """
    distinct = _distinct_role_plans(plan)
    (routing, program), *others = (roles[distinct.index(role)] for role in plan.roles)
    failed = plan.role_failures[1:]
    return (
        replace(routing, other_roles=tuple(replace(r, failed=f) for (r, _), f in zip(others, failed, strict=True))),
        replace(program, other_roles=tuple(replace(p, failed=f) for (_, p), f in zip(others, failed, strict=True))),
    )
