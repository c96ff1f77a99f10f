"""Segmentation: a placed model becomes a Program, with segments on devices and transfers between devices.

A segment is an ONNX submodel that a device runs as soon as its inputs are complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from dicompiler.ir.onnx.graph_structure import graph_and_bodies
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import NO_MODEL, DeviceProgram, DeviceState, Program, Segment, Step, TensorSpec, Transfer
from dicompiler.partition.placed_graph import FROM_INPUT, PlacedGraph
from dicompiler.partition.placed_model import read_placed_model
from dicompiler.partition.wire_casts import is_encoder_tensor


def build_program(
    placed: Model | PlacedGraph, devices: Sequence[str], hosts: Mapping[str, str] | None = None
) -> Program:
    """Return the program of a placed (partitioned) model, or of its graph if the program is only simulated.

    Args:
        placed: The model or its graph. Segments (submodels) of a graph have no ONNX model and no weights.
        devices: Names of all devices in order, including those without work.
        hosts: Host of each device, by device name; without an entry, a device has its own host.
    """
    graph, hosts = read_placed_model(placed) if isinstance(placed, Model) else placed, hosts or {}
    constants = {tensor.name: tensor for tensor in placed.proto.graph.initializer} if isinstance(placed, Model) else {}
    transfers = tuple(
        Transfer(
            i, _find_sender(graph, send.tensor, send.receiver, hosts), send.receiver, graph.tensor_spec(send.tensor)
        )
        for i, send in enumerate(graph.sends)
    )
    by_end: dict[str, list[Transfer]] = {device: [] for device in devices}
    for transfer in transfers:
        by_end[transfer.sender].append(transfer)
        by_end[transfer.receiver].append(transfer)
    segments: dict[str, list[Segment]] = {device: [] for device in devices}
    index = {device: i for i, device in enumerate(devices)}
    # Each device first sends to the next device in order. If all devices send to all others, their messages then use
    # different links at the same time.
    for device, own_transfers in by_end.items():
        own_transfers.sort(key=lambda transfer: (index[transfer.receiver] - index[device]) % len(index))
    order: list[tuple[int, int]] = []
    for nodes in _group_into_segments(graph):
        device = graph.nodes[nodes[0]].placement.device
        number = len(segments[device])
        order.append((index[device], number))
        segment = _build_segment(f"{device}_{number:03}", nodes, graph)
        if isinstance(placed, Model):
            segment = replace(segment, model=_segment_model(segment, nodes, graph, placed, constants))
        segments[device].append(segment)
    return Program(
        tuple(_build_device_program(d, hosts, tuple(segments[d]), graph, by_end[d]) for d in segments),
        transfers,
        tuple(graph.tensor_spec(name) for name in graph.inputs),
        _model_outputs(graph),
        placed.weights if isinstance(placed, Model) else {},
        tuple(order),
        states=graph.states,
    )


def _model_outputs(graph: PlacedGraph) -> tuple[TensorSpec, ...]:
    first_tensors: dict[str, str] = {}
    for tensor, output in graph.model_outputs.items():
        first_tensors.setdefault(output, tensor)
    return tuple(replace(graph.tensor_spec(tensor), name=output) for output, tensor in first_tensors.items())


def _group_into_segments(graph: PlacedGraph) -> list[list[int]]:
    """Group the nodes of a placed graph into segments (submodels): lists of node indices.

    A device's segment ends:
    - after a node with a result that another device needs;
    - before a node that needs a tensor that another device computes after the segment's start;
    - at a change of the lane (group of the device's parts).

    Exception: results that directly follow each other, or are matrix products of the same operand, are sent together.
    Examples are the keys and values of an attention.
    """
    places, producer_of = [node.placement for node in graph.nodes], graph.producer
    sends = {send.producer for send in graph.sends}
    encoder_starts = _find_encoder_starts(graph)
    groups: list[list[int]] = []
    current: dict[str, list[int]] = {}  # The segment (submodel) of each device to which nodes are being added.
    # For each device, True if the last node of its segment leads to a tensor that is sent. Further nodes in this
    # segment would delay the tensor, because it is sent when the segment has ended.
    sending: dict[str, bool] = {}
    products = _find_products(graph, sends, encoder_starts)
    last: dict[str, str] = {}  # The operand of the last matrix product with a result that is sent, by device.
    for unit in _inseparable_nodes(graph, encoder_starts):
        device, lane, *_ = places[unit[0]]
        product, group = products.get(unit[0]), current.get(device, [])
        sent = not sends.isdisjoint(unit) or (product is not None and product == last.get(device))
        read = [
            producer
            for i in unit
            for name in graph.node_reads[i]
            if group and (producer := producer_of.get(name, FROM_INPUT)) > group[0]
        ]
        newer = any(places[producer].device != device for producer in read)
        if not group or newer or (sending[device] and not sent) or places[group[-1]].lane != lane:
            group = current[device] = []
            groups.append(group)
        group.extend(unit)
        sending[device] = sent
        if product is not None:
            last[device] = product
    return groups


def _find_encoder_starts(graph: PlacedGraph) -> dict[int, int]:
    """Return the index of the first node of each encoder, by the index of its last node.

    An encoder is a group of nodes that convert a tensor to the wire type int8-block before it is sent.
    """
    starts: dict[int, int] = {}
    for send in graph.sends:
        start = send.producer
        while start > 0 and is_encoder_tensor(graph.nodes[start - 1].outputs[0], send.tensor):
            start -= 1
        if start < send.producer:
            starts[send.producer] = start
    return starts


def _find_products(graph: PlacedGraph, sends: Collection[int], encoder_starts: Mapping[int, int]) -> dict[int, str]:
    """Find matrix products with results that are sent; return the name of the computed operand by node index.

    The other operand is a weight. Nodes between the product and the sent tensor have entries too.

    Args:
        graph: The placed graph.
        sends: Indices of the nodes that compute tensors that are sent.
        encoder_starts: Index of the first node of each encoder (the nodes that convert a tensor to the wire type
            int8-block), by the index of its last node. Only the first node of an encoder gets an entry.
    """
    found: dict[int, str] = {}
    for producer in sends:
        chain = [encoder_starts.get(producer, producer)] if producer != FROM_INPUT else []
        while chain and len(names := graph.node_reads[chain[-1]]) == 1:
            if graph.nodes[chain[-1]].operator in ("MatMul", "Gemm"):
                found.update(dict.fromkeys(chain, names[0]))
                break
            before = graph.producer.get(names[0], FROM_INPUT)
            chain = [*chain, before] if before != FROM_INPUT else []
    return found


def _inseparable_nodes(graph: PlacedGraph, encoder_starts: Mapping[int, int]) -> Iterable[list[int]]:
    """Return the indices of all nodes in order, in groups that must each be within one segment (submodel)."""
    # A tensor of unknown type cannot be an input of a segment. Only layers that stay whole have such tensors, and the
    # nodes of a layer are adjacent.
    unknown = graph.producer.keys() - graph.infos.keys()
    if not unknown and not encoder_starts:
        return ([i] for i in range(len(graph.nodes)))
    units: list[list[int]] = []
    for i, names in enumerate(graph.node_reads):
        first, unit = min((graph.producer[n] for n in names if n in unknown), default=encoder_starts.get(i, i)), [i]
        while unit[0] > first:
            unit = units.pop() + unit
        units.append(unit)
    return units


def _find_sender(graph: PlacedGraph, tensor: str, receiver: str, hosts: Mapping[str, str]) -> str:
    """Return the device that sends `tensor` to `receiver`.

    A model input is sent by a source (a device that has the inputs), if possible by one on the receiver's host.
    """
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
    # `build_program` has sorted `transfers` in the order in which this device sends them.
    turn = {transfer.index: i for i, transfer in enumerate(transfers)}

    def sends(names: Iterable[str]) -> list[Step]:
        return sorted((step for name in names for step in outgoing.get(name, ())), key=lambda step: turn[step.index])

    steps += sends(graph.inputs)
    for k, segment in enumerate(segments):
        steps += [Step("run", k), *sends(segment.outputs)]
    computed = {name for segment in segments for name in segment.outputs}
    model_outputs = {name: output for name, output in graph.model_outputs.items() if name in computed}
    read = {
        name
        for name in graph.unsized_inputs
        if any(graph.nodes[i].placement.device == device for i in graph.readers.get(name, ()))
    }
    model_inputs = tuple(
        name for name in graph.inputs if (name in read if name in graph.unsized_inputs else device in graph.source)
    )
    states = tuple(
        DeviceState(graph.tensor_spec(piece.read_name), piece.written_name, piece.past, piece.present, piece.region)
        for piece in graph.state_pieces
        if piece.device == device
    )
    return DeviceProgram(device, hosts.get(device, device), segments, tuple(steps), model_inputs, model_outputs, states)


def _build_segment(name: str, nodes: Sequence[int], graph: PlacedGraph) -> Segment:
    makes = dict.fromkeys(n for i in nodes for n in graph.nodes[i].outputs if n)
    needed = dict.fromkeys(n for i in nodes for n in graph.node_reads[i] if n not in makes)
    inside = set(nodes)
    leave = graph.model_outputs.keys() | graph.state_writes
    outputs = tuple(n for n in makes if n in leave or not inside.issuperset(graph.readers.get(n, ())))
    node_marks = tuple(
        (place.part, graph.nodes[i].origin) for i in nodes if (place := graph.nodes[i].placement).part is not None
    )
    return Segment(name, graph.nodes[nodes[0]].placement.device, NO_MODEL, tuple(needed), outputs, node_marks)


def _segment_model(
    segment: Segment, nodes: Sequence[int], graph: PlacedGraph, source: Model, constants: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """Return the ONNX model of a segment. `constants` are the initializers of the partitioned model, by name."""
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
    # Boards may have an older onnxruntime than this host. It refuses newer IR versions even if nothing new is used.
    proto.ir_version = lowest_ir_version(proto)
    return proto


_BASE_VERSION = 4
"""First ONNX IR version in which initializers need not be graph inputs, as in segments (ONNX submodels)."""
_SPARSE_VERSION, _OPTIONAL_VERSION = 6, 8
_FUNCTION_VERSION, _FUNCTION_DEFAULTS_VERSION, _OVERLOAD_VERSION = 8, 9, 10
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "precision")
"""Names of attributes whose value is an element type (an onnx.TensorProto.DataType)."""
_FIRST_TYPES = ((17, 9), (21, 10), (23, 11), (24, 12), (25, 13), (27, 14))
"""Pairs (number of an element type in onnx.TensorProto.DataType, IR version that added it and the types after it)."""


def lowest_ir_version(model: onnx.ModelProto) -> int:
    """Return the lowest IR version that has all element types and constructs of a model.

    It is at least 4, so that initializers need not be graph inputs, but never above the model's own.
    """
    needed = {_BASE_VERSION, *map(_function_version, model.functions)}
    for root in (model.graph, *model.functions):
        for graph in graph_and_bodies(root):
            needed |= {_attribute_version(attribute) for node in graph.node for attribute in node.attribute}
            needed |= {_value_version(value.type) for value in graph.value_info}
            if isinstance(graph, onnx.GraphProto):
                needed |= {_value_version(value.type) for value in (*graph.input, *graph.output)}
                needed |= {_type_version(tensor.data_type) for tensor in graph.initializer}
                needed |= {max(_SPARSE_VERSION, _type_version(t.values.data_type)) for t in graph.sparse_initializer}
    return min(max(needed), model.ir_version)


def _function_version(function: onnx.FunctionProto) -> int:
    if function.overload:
        return _OVERLOAD_VERSION
    return _FUNCTION_DEFAULTS_VERSION if function.attribute_proto else _FUNCTION_VERSION


def _attribute_version(attribute: onnx.AttributeProto) -> int:
    """Return the lowest IR version that has all element types in an attribute, such as the value of `to` of Cast."""
    types = [tensor.data_type for tensor in (attribute.t, *attribute.tensors)]
    types += [attribute.i] if attribute.name in _TYPE_ATTRIBUTES else []
    return max(map(_type_version, types))


def _value_version(value: onnx.TypeProto) -> int:
    kind = value.WhichOneof("value")
    if kind == "sequence_type":
        return _value_version(value.sequence_type.elem_type)
    if kind == "optional_type":
        return max(_OPTIONAL_VERSION, _value_version(value.optional_type.elem_type))
    if kind == "sparse_tensor_type":
        return max(_OPTIONAL_VERSION, _type_version(value.sparse_tensor_type.elem_type))
    return _type_version(value.tensor_type.elem_type)


def _type_version(element_type: int) -> int:
    return max((version for first, version in _FIRST_TYPES if element_type >= first), default=_BASE_VERSION)
