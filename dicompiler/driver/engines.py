"""The choice of each device's engine: the library, such as onnxruntime or ncnn, that computes ONNX submodels.

A submodel (segment) is split at operators that its device's engine does not support. onnxruntime computes these.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast, get_args

import onnx
from onnx import shape_inference

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.cost.op_counts import count_flops
from dicompiler.ir.cluster import DEFAULT_ENGINE, OTHER_KINDS, Device, engine_layers, engine_name
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import DeviceProgram, Program, Segment, Step
from dicompiler.partition.placed_model import read_annotation
from dicompiler.plugin.registry import registry
from dicompiler.target.engine import FULL_PRECISION, Engine, Precision, excluded_nodes
from dicompiler.target.engine_check import allowed_difference
from dicompiler.target.target_base import Target
from dicompiler.verify.tolerances import RELATIVE_TOLERANCES, Tolerance

log = logging.getLogger("dicompiler")

AUTO_ENGINE = "auto"
"""Value of the option `engine` that selects the fastest engine of each device."""
MIN_STATED_SHARE = 0.5
"""Smallest share of a network's FLOPs with known rates for which "auto" chooses an engine.

A platform may state an engine's rates for some kinds of layers only, such as convolutions.
"""


def check_engine(engine: str | None, target: Target | None, place: str = "engine") -> None:
    """Raise UsageError if the option `engine` is not valid, or if the target cannot use the engine.

    Args:
        engine: Name of an engine, possibly with options, or "auto", or None.
        target: The target; None if there is none.
        place: The option or the key of a plan that names the engine, for the error message.
    """
    if engine in (None, AUTO_ENGINE, DEFAULT_ENGINE):
        return
    assert engine is not None
    try:
        made = make_engine(engine)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
    if made.name == DEFAULT_ENGINE and made.layers:
        raise UsageError(
            f"{place}: option 'layers' is only for other engines, because {DEFAULT_ENGINE} computes all layers that "
            "they omit: give the layers of another engine"
        )
    _check_precision(made, place)
    if target is not None and not _can_use(target, engine):
        usable = (DEFAULT_ENGINE, *target.usable_engines)
        raise UsageError(
            f"{place}: target {target.name!r} computes with {' and '.join(usable)} only, not with {engine}: use "
            f"--engine {' or '.join(usable)}, or --target sockets"
        )


def check_precision(precision: str | None, engine: str | None) -> None:
    """Raise UsageError if the option `precision` is unknown, or if the engine cannot compute with it."""
    known = get_args(Precision)
    if precision is not None and precision not in known:
        raise UsageError(f"precision: unknown precision {precision!r}{did_you_mean(precision, known)}")
    if precision is not None and engine not in (None, AUTO_ENGINE):
        assert engine is not None
        _check_precision(replace(make_engine(engine), precision=cast("Precision", precision)), "precision")


def _check_precision(engine: Engine, place: str) -> None:
    """Raise UsageError if an engine cannot compute with the precision in its options."""
    if engine.precision not in (FULL_PRECISION, *engine.precisions):
        able = [name for name in registry().engines if engine.precision in make_engine(name).precisions]
        remedy = f"use --engine {' or '.join(able)}, or " if able else "use "
        computed = " and ".join((FULL_PRECISION, *engine.precisions))
        raise UsageError(
            f"{place}: {engine.name} computes in {computed} only, not in {engine.precision}: {remedy}"
            f"--precision {FULL_PRECISION}"
        )


def _can_use(target: Target | None, engine: str) -> bool:
    if target is None:
        return True
    return target.can_use_engines and (not target.usable_engines or engine_name(engine) in target.usable_engines)


def choose_engines(
    layers: LayerGraph,
    platform: Platform,
    cost: CostModel,
    target: Target | None = None,
    engine: str | None = None,
    given: Mapping[str, str] | None = None,
    precision: str | None = None,
) -> Platform:
    """Return the platform with an engine for each device.

    Args:
        layers: The layers of the network, for which "auto" finds the fastest engine.
        platform: The platform.
        cost: The cost model with which "auto" compares engines.
        target: The target, which may support some engines only; None if there is none.
        engine: Name of an engine for all devices with CPU cores, or "auto". Default: the engines in `given`, and the
            platform's for other devices.
        given: Engines from a plan, by device name.
        precision: The precision of all engines that can compute with it. Default: the precision that each engine
            states.

    Raises:
        UsageError: An engine is unknown, the target cannot use it, or no engine can compute with the precision.
        DicompilerError: `given` names an unknown device.
    """
    check_engine(engine, target)
    check_precision(precision, engine)
    if engine == AUTO_ENGINE:
        chosen = {device.name: _choose_engine(layers, device, cost, target) for device in list_cpu_devices(platform)}
    elif engine is not None:
        chosen = {device.name: engine for device in list_cpu_devices(platform)}
    else:
        chosen = {platform.device(name).name: value for name, value in (given or {}).items()}
    result = platform.with_engines(chosen)
    for name in sorted(set(result.engines.values())):
        check_engine(name, target)
        _check_layers(layers, name)
    result = _with_precision(result, precision)
    _warn_unknown(result, cost)
    return result


def _check_layers(layers: LayerGraph, engine: str) -> None:
    """Raise UsageError if the option `layers` of an engine has a name or pattern that matches no layer."""
    names = list(layers.layer_by_name)
    for pattern in engine_layers(engine):
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"engine {engine}: layers: no layer {pattern!r}{did_you_mean(pattern, names)}")


def _with_precision(platform: Platform, precision: str | None) -> Platform:
    """Set the precision of all engines that can compute with it; warn about devices whose engine keeps fp32.

    Raises:
        UsageError: No engine can compute with the precision.
    """
    engines = {device.name: make_engine(device.engine) for device in platform.computing_devices}
    if precision is not None:
        chosen = cast("Precision", precision)
        able = {
            name: replace(engine, precision=chosen)
            for name, engine in engines.items()
            if precision in (FULL_PRECISION, *engine.precisions)
        }
        if engines and not able:
            _check_precision(replace(next(iter(engines.values())), precision=chosen), "precision")
        if others := sorted(engines.keys() - able.keys()):
            log.warning("precision %s: the engine of device %s computes in fp32 only", precision, ", ".join(others))
        engines |= able
    if reduced := {str(engine.spec) for engine in engines.values() if engine.precision != FULL_PRECISION}:
        log.warning("engine %s: the prediction uses the times of fp32", ", ".join(sorted(reduced)))
    # `spec` is the canonical text of an engine: "ncnn{precision=fp32}" becomes "ncnn".
    return platform.with_engines({name: str(engine.spec) for name, engine in engines.items()})


def list_cpu_devices(platform: Platform) -> list[Device]:
    return [device for device in platform.computing_devices if not device.gpu]


def _warn_unknown(platform: Platform, cost: CostModel) -> None:
    """Log a warning if the cost model has no times of a device's engine, and predicts those of onnxruntime."""
    unknown = [device for device in platform.computing_devices if not cost.knows_engine(device, device.engine)]
    if unknown:
        log.warning(
            "engine %s: cost model %s has no times of this engine for device %s, and predicts those of onnxruntime: "
            "measure the device with 'dicompiler profile', or state engine_rates in the platform",
            unknown[0].engine,
            cost.name,
            ", ".join(device.name for device in unknown),
        )


def _choose_engine(layers: LayerGraph, device: Device, cost: CostModel, target: Target | None) -> str:
    """Return the installed engine with which a device computes the network fastest."""
    engine, error = find_installed(rank_engines(layers, device, cost, target))
    if error is not None:
        warn_not_installed(device.name, error, engine)
    return engine


def find_installed(engines: Sequence[str]) -> tuple[str, DicompilerError | None]:
    """Return the first engine whose packages this host has, otherwise onnxruntime.

    Args:
        engines: Names of engines, possibly with options, the best one first.

    Returns:
        The engine, and the error that tells how to install the best engine; None if it is installed.
    """
    first_error = None
    for engine in engines:
        try:
            make_engine(engine).check_installed()
        except DicompilerError as error:
            first_error = first_error or error
        else:
            return engine, first_error
    return DEFAULT_ENGINE, first_error


def warn_not_installed(device: str, error: DicompilerError, engine: str) -> None:
    log.warning("device %s: %s; until then, %s computes there", device, error, engine_name(engine))


def list_known_engines(device: Device, cost: CostModel, target: Target | None) -> list[str]:
    """Return the engines other than onnxruntime that the target can use, and whose times the cost model predicts."""
    usable = [name for name in registry().engines if name != DEFAULT_ENGINE and _can_use(target, name)]
    return [name for name in usable if cost.knows_engine(device, name)]


def rank_engines(layers: LayerGraph, device: Device, cost: CostModel, target: Target | None) -> list[str]:
    """Return the engines with comparable speeds, installed or not, the one that computes the network fastest first."""
    default = replace(device, engine=DEFAULT_ENGINE)
    is_default_comparable = cost.is_measured or _stated_share(layers, default) >= MIN_STATED_SHARE
    ranks = {DEFAULT_ENGINE: (1, _network_seconds(layers, default, cost))}
    for name in list_known_engines(device, cost, target):
        with_engine = replace(device, engine=name)
        seconds = _network_seconds(layers, with_engine, cost)
        if is_default_comparable or _has_only_one_rate(with_engine):
            ranks[name] = 1, seconds
        elif _stated_share(layers, with_engine) >= MIN_STATED_SHARE:
            # The platform states several rates of this engine, one for each kind of layer, but only one rate of
            # onnxruntime for all kinds, which can be wrong by a factor of 4. The engine is therefore preferred.
            ranks[name] = 0, seconds
    return sorted(ranks, key=lambda name: ranks[name])


def _network_seconds(layers: LayerGraph, device: Device, cost: CostModel) -> float:
    return sum(cost.seconds(layers, layer, LayerShare(), device) for layer in layers.layers)


def _has_only_one_rate(device: Device) -> bool:
    """Return True if the platform states no separate rates of the device's engine for different kinds of layers."""
    return {entry.kind for entry in device.engine_rates if entry.engine == device.engine} <= {OTHER_KINDS}


def _stated_share(layers: LayerGraph, device: Device) -> float:
    """Return the fraction of a network's FLOPs for which the platform states a rate of the device's engine."""
    kinds = {entry.kind for entry in device.engine_rates if entry.engine == device.engine}
    flops = {layer.name: count_flops(layers, layer) for layer in layers.layers}
    stated = sum(flops[layer.name] for layer in layers.layers if kinds.intersection(rate_kinds(layers, layer)))
    return stated / max(1, sum(flops.values()))


def with_possible_precision(name: str, precision: str | None) -> Engine:
    """Return the engine with this name, with a precision if it can compute with it, otherwise with fp32."""
    engine = make_engine(name)
    return replace(engine, precision=cast("Precision", precision)) if precision in engine.precisions else engine


def plan_with_engines(plan: Plan, platform: Platform) -> Plan:
    """Return the plan with the names of the platform's engines other than onnxruntime, by device name."""
    engines = platform.engines
    return replace(plan, engines={name: engines[name] for name in plan.devices if name in engines})


def make_engine(name: str) -> Engine:
    engine: Engine = registry().make("engines", name)
    return engine


def split_program(compilation: PipelineState) -> PipelineState:
    """Split the device programs at the operators that their device's engine does not support."""
    assert compilation.program is not None and compilation.platform is not None
    used = {device.device: device.engine for device in compilation.program.devices if device.engine != DEFAULT_ENGINE}
    engines = {name: make_engine(engine) for name, engine in used.items()}
    return replace(compilation, program=split_by_engine(compilation.program, engines))


def engine_tolerances(model: Model, engines: Mapping[str, str]) -> dict[str, Tolerance]:
    """Return the tolerances that engines need for outputs of type float32, by output name.

    Args:
        model: The unsplit model.
        engines: Engines other than onnxruntime, by device name.

    Returns:
        The tolerances; empty if the usual tolerance suffices for all engines.
    """
    import onnx

    limit = max((allowed_difference(make_engine(name)) for name in set(engines.values())), default=0.0)
    if limit <= RELATIVE_TOLERANCES["float32"]:
        return {}
    outputs = model.proto.graph.output
    floats = [value.name for value in outputs if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    return dict.fromkeys(floats, Tolerance(limit))


WORTHWHILE_OPERATORS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
"""Operators for which the call of an engine saves more time than it costs.

onnxruntime computes all groups of nodes without any of these operators.
"""


def split_by_engine(program: Program, engines: Mapping[str, Engine]) -> Program:
    """Split the segments (ONNX submodels) of a program at the nodes that onnxruntime must compute.

    These are operators that an engine does not support, and layers that its option `layers` omits.

    Args:
        program: The program, of which the transfers between devices stay the same.
        engines: Engines other than onnxruntime, by device name.
    """
    if not engines:
        return program
    roles = [_split_role(role, engines) for role in program.roles]
    return replace(roles[0], other_roles=tuple(roles[1:]))


def _split_role(program: Program, engines: Mapping[str, Engine]) -> Program:
    pieces: list[list[tuple[Segment, ...]]] = []
    for device in program.devices:
        engine = engines.get(device.device)
        pieces.append([(s,) if engine is None else split_segment(s, engine, program.weights) for s in device.segments])
    devices = tuple(_with_pieces(device, own) for device, own in zip(program.devices, pieces, strict=True))
    first = [_first_pieces(own) for own in pieces]
    order = tuple((i, first[i][j] + k) for i, j in program.segment_order for k in range(len(pieces[i][j])))
    return replace(program, devices=devices, segment_order=order)


def _first_pieces(pieces: Sequence[Sequence[Segment]]) -> list[int]:
    """Return the index of each segment's first piece, counted over all pieces of the device.

    Args:
        pieces: For each segment of the device, the pieces into which it was split.
    """
    return [sum(map(len, pieces[:i])) for i in range(len(pieces))]


def _with_pieces(device: DeviceProgram, pieces: Sequence[Sequence[Segment]]) -> DeviceProgram:
    first, steps = _first_pieces(pieces), list[Step]()
    for step in device.steps:
        if step.kind == "run":
            steps += [Step("run", first[step.index] + k) for k in range(len(pieces[step.index]))]
        else:
            steps.append(step)
    return replace(device, segments=tuple(piece for own in pieces for piece in own), steps=tuple(steps))


def split_segment(segment: Segment, engine: Engine, weights: Mapping[str, Weight]) -> tuple[Segment, ...]:
    """Split a segment (ONNX submodel) into pieces that are each computed by `engine` or by onnxruntime.

    The result is the unsplit segment if one of the two computes all of it, or if a type between two pieces is unknown.

    Returns:
        The pieces, at least one, in the order of execution.
    """
    graph = segment.model.graph
    unsupported = {*engine.unsupported_nodes(segment.model, weights), *excluded_nodes(engine, graph)}
    whole = (replace(segment, calls=1),)
    if not unsupported:
        return whole
    groups = _group_nodes(graph, [i not in unsupported for i in range(len(graph.node))])
    if len(groups) < 2:
        return whole
    infos = _find_types(segment.model)
    pieces = [_make_piece(segment, f"{segment.name}-{k}", nodes, infos) for k, nodes in enumerate(groups)]
    return tuple(piece for piece in pieces if piece is not None) if None not in pieces else whole


def _group_nodes(graph: onnx.GraphProto, is_supported: Sequence[bool]) -> list[list[int]]:
    """Return groups of node indices, alternately for the engine and for onnxruntime, in the order of execution.

    Args:
        graph: The graph of a segment.
        is_supported: For each node, whether the engine supports it.
    """
    supported = list(is_supported)
    while True:
        groups = _collect_ready_nodes(graph, supported)
        # These supported nodes are left to onnxruntime, because a call of the engine would cost more than it saves.
        light = [
            i
            for nodes in groups
            if supported[nodes[0]] and not any(graph.node[j].op_type in WORTHWHILE_OPERATORS for j in nodes)
            for i in nodes
        ]
        if not light:
            return groups
        for i in light:
            supported[i] = False


def _collect_ready_nodes(graph: onnx.GraphProto, supported: Sequence[bool]) -> list[list[int]]:
    """Return groups of node indices in an order of execution; in each group, all or none are `supported`.

    Args:
        graph: The graph of a segment.
        supported: For each node, whether the engine computes it.
    """
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in tensors_read(node) if name in maker} for node in graph.node]
    groups: list[list[int]] = []
    done, rest = set[int](), list(range(len(graph.node)))
    while rest:
        first = next(i for i in rest if needs[i] <= done)
        group = []
        # The nodes are in topological order, so one pass over them finds all nodes of the group.
        for i in rest:
            if supported[i] == supported[first] and needs[i] <= done:
                group.append(i)
                done.add(i)
        rest = [i for i in rest if i not in done]
        if groups and supported[groups[-1][0]] == supported[first]:
            groups[-1] += group
        else:
            groups.append(group)
    return groups


def _find_types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the type and static shape of each tensor, by its name. Tensors without a known type are missing."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    infos = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor_type = value.type.tensor_type
        if tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor_type.shape.dim):
            infos[value.name] = value
    return infos | {value.name: value for value in (*model.graph.input, *model.graph.output)}


def _make_piece(
    segment: Segment, name: str, nodes: Sequence[int], infos: Mapping[str, onnx.ValueInfoProto]
) -> Segment | None:
    """Return a submodel with some of a segment's nodes; None if the type of its input or output is unknown.

    Args:
        segment: The segment.
        name: Name of the submodel.
        nodes: Indices of the nodes.
        infos: Type and static shape of tensors, by name.
    """
    model, graph = segment.model, segment.model.graph
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    own = [graph.node[i] for i in nodes]
    made = dict.fromkeys(output for node in own for output in node.output if output)
    read = dict.fromkeys(input_name for node in own for input_name in tensors_read(node) if input_name)
    inside = set(nodes)
    read_later = {n for i, node in enumerate(graph.node) if i not in inside for n in tensors_read(node)}
    inputs = tuple(n for n in read if n not in made and n not in constants)
    outputs = tuple(n for n in made if n in read_later or n in segment.outputs)
    if any(n not in infos for n in (*inputs, *outputs)):
        return None
    piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    piece.graph.name = name
    piece.graph.node.extend(own)
    piece.graph.input.extend(infos[n] for n in inputs)
    piece.graph.output.extend(infos[n] for n in outputs)
    piece.graph.initializer.extend(t for t in graph.initializer if t.name in read)
    piece.graph.sparse_initializer.extend(t for t in graph.sparse_initializer if t.values.name in read)
    annotations = [read_annotation(node) for node in own]
    node_marks = tuple((entry.part, entry.origin) for entry in annotations if entry.part is not None)
    return Segment(name, segment.device, piece, inputs, outputs, node_marks)
