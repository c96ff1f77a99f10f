"""Splitting of segments at operators that an engine does not support, so that the engine computes the others.

In the resulting program, each segment is computed either by the engine of its device or by onnxruntime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import shape_inference

from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.weights import Weight
from dicompiler.ir.program import DeviceProgram, Program, Segment, Step
from dicompiler.partition.annotations import read_annotation
from dicompiler.target.engine import Engine

WORTHWHILE_OPERATORS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
"""A piece of a segment is left to onnxruntime if it has none of these operators, because a call of the engine would
cost more than it saves."""


def split_by_engine(program: Program, engines: Mapping[str, Engine]) -> Program:
    """Return the program with its segments split at the operators that the engines do not support.

    A segment becomes several pieces, each computed by the engine or by onnxruntime. A device sends the outputs of a
    segment after the segment's last piece.

    Args:
        program: The program.
        engines: Engines other than onnxruntime by device name.

    Returns:
        The program. The transfers are the same.
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
    """Return the index of each segment's first piece in the list of all pieces of the device."""
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
    """Split a segment into pieces, in order. In each piece, either the engine computes all nodes, or onnxruntime does.

    The result is the segment itself if the engine supports all nodes, if it supports none of WORTHWHILE_OPERATORS in
    the segment, or if the type of a tensor between two pieces is unknown.

    Args:
        segment: The segment.
        engine: The engine.
        weights: The data of large weights, by name.

    Returns:
        At least one segment.
    """
    unsupported = engine.unsupported_nodes(segment.model, weights)
    if not unsupported:
        return (segment,)
    graph = segment.model.graph
    groups = _group_nodes(graph, [i not in unsupported for i in range(len(graph.node))])
    if len(groups) < 2:
        return (segment,)
    infos = _find_types(segment.model)
    pieces = [_make_piece(segment, f"{segment.name}-{k}", nodes, infos) for k, nodes in enumerate(groups)]
    return tuple(piece for piece in pieces if piece is not None) if None not in pieces else (segment,)


def _group_nodes(graph: onnx.GraphProto, is_supported: Sequence[bool]) -> list[list[int]]:
    """Return groups of node indices, in topological order. Groups of supported and unsupported nodes alternate.

    Supported groups without any of WORTHWHILE_OPERATORS are merged with the unsupported groups next to them, because a
    call of the engine would cost more than it saves.
    """
    supported = list(is_supported)
    while True:
        groups = _collect_ready_nodes(graph, supported)
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
    """Return groups of nodes that are all supported or all unsupported.

    Each group has as many nodes as can run before the next group.
    """
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in tensors_read(node) if name in maker} for node in graph.node]
    groups: list[list[int]] = []
    done, rest = set[int](), list(range(len(graph.node)))
    while rest:
        first = next(i for i in rest if needs[i] <= done)
        group = []
        for i in rest:  # The nodes are in topological order, so one pass finds all nodes that can run.
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
    """Return types and static shapes of the tensors of a segment by name, as far as ONNX infers them."""
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
    """Return a new segment with the given nodes of `segment`; None if the type of an input or output is unknown."""
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
    marks = tuple((entry.part, entry.origin) for entry in annotations if entry.part is not None)
    return Segment(name, segment.device, piece, inputs, outputs, marks)
