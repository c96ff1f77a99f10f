"""Cut, the driver's last step: the placed model becomes a Program, per device segments and between devices transfers.

placed Model (every node on a device, in step order), or PlacedGraph, the same unwritten → Program
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import NO_MODEL, DeviceProgram, DeviceState, Program, Segment, Step, TensorSpec, Transfer
from dicompiler.ir.recurrent_states import read_state_pieces
from dicompiler.partition.annotations import read_annotation, read_source_and_sinks
from dicompiler.partition.placed_graph import FROM_INPUT, NodePlacement, PlacedGraph, PlacedNode


def build_program(
    placed: Model | PlacedGraph, devices: Sequence[str], hosts: Mapping[str, str] | None = None
) -> Program:
    """The program of a placed model; of a placed graph, which is not written as ONNX, the same but for the segments'
    models and the weights. `devices`: all in order, also those without work; `hosts`: device → host."""
    graph, hosts = _read_placed_model(placed) if isinstance(placed, Model) else placed, hosts or {}
    constants = {tensor.name: tensor for tensor in placed.proto.graph.initializer} if isinstance(placed, Model) else {}
    transfers = tuple(
        Transfer(i, _sender(graph, name, reader, hosts), reader, graph.tensor_spec(name))
        for i, (_, name, _, reader) in enumerate(graph.sends)
    )
    by_end: dict[str, list[Transfer]] = {device: [] for device in devices}
    for transfer in transfers:
        by_end[transfer.sender].append(transfer)
        by_end[transfer.receiver].append(transfer)
    segments: dict[str, list[Segment]] = {device: [] for device in devices}
    index = {device: i for i, device in enumerate(devices)}
    for device, own in by_end.items():  # first to the next device: where all send to all, lines carry one message each
        own.sort(key=lambda one: (index[one.receiver] - index[device]) % len(index))
    order: list[tuple[int, int]] = []
    for nodes in _group_into_segments(graph):
        device = graph.nodes[nodes[0]].placement.device
        there = segments[device]
        order.append((index[device], len(there)))
        segment = _build_segment(f"{device}_{len(there):03}", nodes, graph)
        if isinstance(placed, Model):
            segment = replace(segment, model=_segment_model(segment, nodes, graph, placed, constants))
        there.append(segment)
    return Program(
        tuple(
            _build_device_program(device, hosts, tuple(parts), graph, by_end[device])
            for device, parts in segments.items()
        ),
        transfers,
        tuple(graph.tensor_spec(name) for name in graph.inputs),
        tuple(graph.tensor_spec(name) for name, output in graph.sinks.items() if name == output),
        placed.weights if isinstance(placed, Model) else {},
        tuple(order),
        states=graph.states,
    )


def _read_placed_model(model: Model) -> PlacedGraph:
    """The placed graph that a placed model is."""
    graph = model.proto.graph
    source, copies = read_source_and_sinks(model.proto)
    pieces, states = read_state_pieces(model.proto)
    kept = {name for piece in pieces for name in (piece.read_name, piece.written_name)}
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    nodes = []
    for node in graph.node:
        said = read_annotation(node)
        place = NodePlacement(said.device, said.lane, part=said.part)
        nodes.append(PlacedNode(place, said.origin, tuple(tensors_read(node)), tuple(node.output), op=node.op_type))
    return PlacedGraph(
        nodes,
        {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)},
        tuple(v.name for v in graph.input if v.name not in constants and v.name not in kept),
        source,
        {v.name: copies.get(v.name, v.name) for v in graph.output if v.name not in kept},
        state_pieces=pieces,
        states=tuple(TensorSpec(*state) for state in states),
    )


def _group_into_segments(graph: PlacedGraph) -> list[list[int]]:
    """The segments, as indices of nodes. Greedy and eager: a device's segment closes after a tensor that another device
    needs (unless its next node makes one too, or is a product of the same tensor that leads to one: keys and values
    leave together), before a node that needs something newer than the segment's start, and where the lane changes. In
    order of their first nodes; each depends only on earlier ones."""
    places, maker = [node.placement for node in graph.nodes], graph.producer
    sends = {at for at, *_ in graph.sends}
    groups: list[list[int]] = []
    current: dict[str, list[int]] = {}  # device → its last segment
    sending: dict[str, bool] = {}  # whether that ends with what another device needs
    products = _find_products(graph, sends)
    last: dict[str, str] = {}  # device → what the products that it sent last are of
    for unit in _inseparable_nodes(graph):
        device, lane, *_ = places[unit[0]]
        product, group = products.get(unit[0]), current.get(device, [])
        sent = not sends.isdisjoint(unit) or (product is not None and product == last.get(device))
        read = [
            at for i in unit for name in graph.node_reads[i] if group and (at := maker.get(name, FROM_INPUT)) > group[0]
        ]
        newer = any(places[at].device != device for at in read)
        if not group or newer or (sending[device] and not sent) or places[group[-1]].lane != lane:
            group = current[device] = []
            groups.append(group)
        group.extend(unit)
        sending[device] = sent
        if product is not None:
            last[device] = product
    return groups


def _find_products(graph: PlacedGraph, sends: Collection[int]) -> dict[int, str]:
    """Node → the tensor of which it is a product with a matrix, or on the way from one to what another device needs."""
    found: dict[int, str] = {}
    for at in sends:
        chain = [at] if at != FROM_INPUT else []
        while chain and len(names := graph.node_reads[chain[-1]]) == 1:
            if graph.nodes[chain[-1]].operator in ("MatMul", "Gemm"):
                found.update(dict.fromkeys(chain, names[0]))
                break
            before = graph.producer.get(names[0], FROM_INPUT)
            chain = [*chain, before] if before != FROM_INPUT else []
    return found


def _inseparable_nodes(graph: PlacedGraph) -> Iterable[list[int]]:
    """The nodes in order, those together that must share a segment: a tensor whose type nobody knows cannot be the
    input of one. Only layers that stay whole have such tensors, and the nodes of a layer stand side by side."""
    unknown = graph.producer.keys() - graph.infos.keys()
    if not unknown:
        return ([i] for i in range(len(graph.nodes)))
    units: list[list[int]] = []
    for i, names in enumerate(graph.node_reads):
        first, unit = min((graph.producer[n] for n in names if n in unknown), default=i), [i]
        while unit[0] > first:
            unit = units.pop() + unit
        units.append(unit)
    return units


def _sender(graph: PlacedGraph, tensor: str, receiver: str, hosts: Mapping[str, str]) -> str:
    """Who sends `tensor` to `receiver`: its maker; of an input's sources one of the same host, else the first."""
    if tensor in graph.producer:
        return graph.nodes[graph.producer[tensor]].placement.device
    host = hosts.get(receiver, receiver)
    return next((s for s in graph.source if hosts.get(s, s) == host), graph.source[0])


def _build_device_program(
    device: str,
    hosts: Mapping[str, str],
    segments: tuple[Segment, ...],
    graph: PlacedGraph,
    transfers: Sequence[Transfer],
) -> DeviceProgram:
    outgoing: dict[str, list[Step]] = {}
    for transfer in transfers:
        if transfer.sender == device:
            outgoing.setdefault(transfer.value.name, []).append(Step("send", transfer.index))
    steps = [Step("receive", t.index) for t in transfers if t.receiver == device]
    turn = {transfer.index: i for i, transfer in enumerate(transfers)}  # receiver by receiver

    def sends(names: Iterable[str]) -> list[Step]:
        return sorted((step for name in names for step in outgoing.get(name, ())), key=lambda step: turn[step.index])

    steps += sends(graph.inputs)
    for k, segment in enumerate(segments):
        steps += [Step("run", k), *sends(segment.outputs)]
    made = {name for segment in segments for name in segment.outputs}
    sinks = {name: output for name, output in graph.sinks.items() if name in made}
    read = {
        name
        for name in graph.unsized_inputs
        if any(graph.nodes[i].placement.device == device for i in graph.readers.get(name, ()))
    }
    sources = tuple(
        name for name in graph.inputs if (name in read if name in graph.unsized_inputs else device in graph.source)
    )
    states = tuple(
        DeviceState(graph.tensor_spec(piece.read_name), piece.written_name, piece.past, piece.present, piece.region)
        for piece in graph.state_pieces
        if piece.device == device
    )
    return DeviceProgram(device, hosts.get(device, device), segments, tuple(steps), sources, sinks, states)


def _build_segment(name: str, nodes: Sequence[int], graph: PlacedGraph) -> Segment:
    """The segment of these nodes without its model."""
    makes = dict.fromkeys(n for i in nodes for n in graph.nodes[i].outputs if n)
    needed = dict.fromkeys(n for i in nodes for n in graph.node_reads[i] if n not in makes)
    inside = set(nodes)
    leave = graph.sinks.keys() | graph.state_writes
    outputs = tuple(n for n in makes if n in leave or not inside.issuperset(graph.readers.get(n, ())))
    marks = tuple(
        (place.part, graph.nodes[i].origin) for i in nodes if (place := graph.nodes[i].placement).part is not None
    )
    return Segment(name, graph.nodes[nodes[0]].placement.device, NO_MODEL, tuple(needed), outputs, marks)


def _segment_model(
    segment: Segment, nodes: Sequence[int], graph: PlacedGraph, source: Model, constants: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """The segment's model. constants: the initializers of the placed model by name."""
    read = dict.fromkeys(n for i in nodes for n in graph.nodes[i].reads)
    proto = onnx.ModelProto(
        ir_version=source.proto.ir_version, opset_import=source.proto.opset_import, functions=source.proto.functions
    )
    proto.graph.name = segment.name
    proto.graph.node.extend(source.proto.graph.node[i] for i in nodes)
    proto.graph.input.extend(graph.infos[n] for n in segment.inputs)
    proto.graph.output.extend(graph.infos.get(n) or onnx.ValueInfoProto(name=n) for n in segment.outputs)
    proto.graph.initializer.extend(constants[n] for n in read if n in constants)
    proto.graph.sparse_initializer.extend(t for t in source.proto.graph.sparse_initializer if t.values.name in read)
    return proto
