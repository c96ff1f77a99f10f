"""Lowering: from a plan to a placed model and a program, for each role of the plan.

A role is the plan itself, a replica of it (the plan on other devices), or a failure plan (for the time after a
failure). For each role:

    Model + LayerGraph + Plan ──routing──► Routing ──placement──► PlacedGraph ──► placed Model ──segmentation──► Program

The nodes of a placed model are annotated with their devices. For a plan that is only simulated, `build_program_only`
leaves out the models, so that no ONNX is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import onnx
from onnx import helper

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import MIN_WEIGHT_BYTES, Weight, make_placeholder
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.recurrent_states import write_state_pieces
from dicompiler.ir.regions import region_shape
from dicompiler.ir.routing import Routing
from dicompiler.partition.annotations import NodeAnnotation, write_annotation, write_source_and_copies
from dicompiler.partition.placement import (
    Constant,
    ModelFacts,
    PlacedGraph,
    PlacedNode,
    PlacedTensor,
    WeightSlice,
    check_wire_dtypes,
    place_parts,
)
from dicompiler.partition.routing import format_region, route, route_on_platform
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.tiling import single_device_plan

log = logging.getLogger("dicompiler")

DEFAULT_OPSET = 13
"""Version of the standard operators in placed (partitioned) models, if the original model states none."""


def partition(state: PipelineState, quiet: bool = False, check_narrowing: bool = True) -> PipelineState:
    """Rewrite the model by its plan: nodes for all parts, and slices and concatenations between devices.

    The new state has this placed model, in which each node has a device, and its routing.

    Args:
        state: State with layers. Without a plan, all layers are placed on the device d0.
        quiet: True to omit the warnings about parts with results that nothing reads.
        check_narrowing: True to check that sent tensors can be converted to the plan's wire types (the element types in
            which tensors are sent). Simulation does not need this check.

    Returns:
        The new state.
    """
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
    """Run `partition` without warnings, and raise DicompilerError if the placed model is not valid ONNX."""
    placed = partition(state, quiet=True)
    placed.model.check("after pass 'partition'")
    return placed


def write_placed_model(model: Model, placed: PlacedGraph) -> Model:
    """Return a placed graph (nodes with devices) as a model.

    The model has the header and inputs of `model`, and the initializers that are read.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    # Slices, concatenations and sums are standard operators, so the model needs a version of these.
    if not any(entry.domain in ("", "ai.onnx") for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid("", DEFAULT_OPSET))
    graph = proto.graph
    del graph.node[:], graph.value_info[:], graph.output[:], graph.initializer[:]
    graph.node.extend(_node_proto(node) for node in placed.nodes)
    written_states = (piece.written_name for piece in placed.state_pieces)
    graph.output.extend(_value_info(placed, name) for name in dict.fromkeys((*placed.model_outputs, *written_states)))
    if placed.states:
        states = [(state.name, state.dtype, state.shape or ()) for state in placed.states]
        kept = [value for value in graph.input if value.name not in [name for name, *_ in states]]
        del graph.input[:]
        graph.input.extend((*kept, *(_value_info(placed, piece.read_name) for piece in placed.state_pieces)))
        write_state_pieces(proto, placed.state_pieces, states)
    declared = {v.name for v in (*graph.input, *graph.output)}
    graph.value_info.extend(_value_info(placed, name) for name in placed.infos if name not in declared)
    whole = [tensor for tensor in model.proto.graph.initializer if tensor.name in placed.used_names]
    graph.initializer.extend(whole)
    weights = {tensor.name: model.weights[tensor.name] for tensor in whole if tensor.name in model.weights}
    for name, constant in placed.constants.items():
        tensor, weight = _initializer(model, name, constant)
        graph.initializer.append(tensor)
        if weight is not None:
            weights[name] = weight
    copies = {name: output for name, output in placed.model_outputs.items() if name != output}
    write_source_and_copies(proto, placed.source, copies)
    return Model(proto, weights)


def _node_proto(node: PlacedNode) -> onnx.NodeProto:
    proto = onnx.NodeProto()
    if node.template is not None:
        proto.CopyFrom(node.template)
    proto.name, proto.op_type = node.name, node.op or proto.op_type
    proto.input[:], proto.output[:] = node.inputs, node.outputs
    if node.attributes:
        kept = [attribute for attribute in proto.attribute if attribute.name not in node.attributes]
        kept += [helper.make_attribute(k, v) for k, v in node.attributes.items() if v is not None]
        del proto.attribute[:]
        proto.attribute.extend(kept)
    place = node.placement
    region = "" if node.region is None else format_region(node.region)
    write_annotation(proto, NodeAnnotation(place.device, node.origin, region, place.part, place.lane))
    return proto


def _value_info(placed: PlacedGraph, name: str) -> onnx.ValueInfoProto:
    info = placed.infos[name]
    if isinstance(info, PlacedTensor):
        return helper.make_tensor_value_info(name, info.dtype, region_shape(info.region))
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    copy.name = name
    return copy


def _initializer(model: Model, name: str, constant: Constant) -> tuple[onnx.TensorProto, Weight | None]:
    """Return the initializer of a constant, and its data if the data is not in the initializer.

    The data of a large region of a weight is not copied into the initializer, which is then a placeholder. For all
    other constants, the second result is None.
    """
    if not isinstance(constant, WeightSlice):
        array = np.array(constant, np.int64) if isinstance(constant, tuple) else constant
        return onnx.numpy_helper.from_array(array, name), None
    stored = model.weights.get(constant.weight)
    whole = Weight.from_array(model.array(constant.weight)) if stored is None else stored
    weight = whole.take_region(constant.region)
    if weight.nbytes < MIN_WEIGHT_BYTES:
        return onnx.numpy_helper.from_array(weight.array(), name), None
    return make_placeholder(name, weight), weight


T = TypeVar("T")
Rewrite = Callable[[PipelineState], PipelineState]


def lower(state: PipelineState, rewrite: Rewrite = partition_checked) -> PipelineState:
    """Add routing, placed model and program to a state with a plan.

    A placed model is the partitioned model, in which each node has a device. If the state has no `reference` yet (the
    model with which outputs are compared), its model becomes the reference.

    Args:
        state: State with layers, platform and plan.
        rewrite: Function that partitions the model: `partition_checked`, or the pass `partition`, run by a pass manager
            with its instruments.

    Returns:
        The new state.
    """
    plan, platform = state.plan, state.platform
    assert plan is not None and platform is not None
    devices = _plan_devices(platform, plan)

    def lower_role(role_plan: Plan) -> tuple[PipelineState, Routing, Program]:
        placed = rewrite(replace(state, plan=role_plan))
        assert placed.routing is not None
        return placed, placed.routing, _build_program(placed.model, devices, platform)

    roles = _for_each_role(plan, lower_role)
    routing, program = _combine_roles(plan, [(routing, program) for _, routing, program in roles])
    reference = state.reference or state.model
    return replace(roles[0][0], plan=plan, routing=routing, program=program, reference=reference)


lower_unchecked = partial(lower, rewrite=partial(partition, quiet=True, check_narrowing=False))
"""Function `lower` for programs that are not run. The placed model is not checked, and there are no warnings."""


def build_program_only(
    facts: ModelFacts, layers: LayerGraph, platform: Platform, plan: Plan
) -> tuple[Routing, Program]:
    """Return routing and program of a plan that is only simulated, without writing ONNX."""
    devices = _plan_devices(platform, plan)

    def lower_role(role_plan: Plan) -> tuple[Routing, Program]:
        routing = route_on_platform(platform, layers, role_plan)
        return routing, _build_program(place_parts(facts, routing, role_plan), devices, platform)

    return _combine_roles(plan, _for_each_role(plan, lower_role))


def _build_program(placed: Model | PlacedGraph, devices: Sequence[str], platform: Platform) -> Program:
    """Return the program of a partitioned model or graph, with the hosts and engines of the platform's devices."""
    program = build_program(placed, devices, platform.host_of)
    engines = platform.engines
    with_engines = (replace(entry, engine=engines.get(entry.device, entry.engine)) for entry in program.devices)
    return replace(program, devices=tuple(with_engines)) if engines else program


def _plan_devices(platform: Platform, plan: Plan) -> list[str]:
    """Return the devices that the plan names, in platform order."""
    named = set(plan.devices)
    return [device.name for device in platform.devices if device.name in named]


def _for_each_role(plan: Plan, make: Callable[[Plan], T]) -> list[T]:
    """Call `make` for the plan of each role, and return the results. It is called once for equal plans.

    A role is the plan itself, a replica of it, or a failure plan.
    """
    role_plans = plan.roles
    results: list[T] = []
    for i, role_plan in enumerate(role_plans):
        before = role_plans.index(role_plan)
        results.append(results[before] if before < i else make(role_plan))
    return results


def _combine_roles(plan: Plan, roles: list[tuple[Routing, Program]]) -> tuple[Routing, Program]:
    """Combine the routings of all roles in one Routing, and their programs in one Program.

    A role is one way in which the devices can compute a frame: by the plan, a replica or a failure plan. Routing and
    Program are returned for the first role. The field `other_roles` of each contains the objects of all other roles.
    """
    failed = plan.role_failures[1:]
    (routing, program), *others = roles
    return (
        replace(routing, other_roles=tuple(replace(r, failed=f) for (r, _), f in zip(others, failed, strict=True))),
        replace(program, other_roles=tuple(replace(p, failed=f) for (_, p), f in zip(others, failed, strict=True))),
    )
