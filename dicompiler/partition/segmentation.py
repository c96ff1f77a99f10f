"""Cut, the driver's last step: the placed model becomes a Program, per device segments and between devices transfers.

placed Model (every node on a device, in step order), or PlacedGraph, the same unwritten → Program
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import node_reads
from dicompiler.ir.program import UNWRITTEN, DeviceProgram, Mark, Program, Segment, Step, Transfer, Value
from dicompiler.ir.regions import shape_of
from dicompiler.partition.annotations import annotation_of, ends_of
from dicompiler.partition.placed_graph import Held, Known, PlacedGraph

GIVEN = -1  # the step of graph inputs: there from the start


@dataclass
class _Group:
    """A segment while it is gathered: its nodes, as indices in the placed graph, and whether the last one makes what
    another device needs."""

    device: str
    nodes: list[int] = field(default_factory=list)
    sends: bool = False


@dataclass(frozen=True)
class _Placed:
    """The placed graph as the cut reads it.

    devices, lanes, reads, makes, marks: of each node in step order its device, its lane, the tensors that it reads
    (captured ones included) and makes, and what it says of its part. infos: what is known of tensors. sinks: the
    graph's outputs → the outputs of the original that they are.
    """

    hosts: Mapping[str, str]
    devices: Sequence[str]
    lanes: Sequence[int]
    reads: Sequence[Sequence[str]]
    makes: Sequence[Sequence[str]]
    marks: Sequence[Mark | None]
    infos: Mapping[str, Known]
    inputs: tuple[str, ...]
    source: tuple[str, ...]
    sinks: Mapping[str, str]

    @cached_property
    def maker(self) -> Mapping[str, int]:
        """Tensor → index of the node that makes it."""
        return {name: i for i, names in enumerate(self.makes) for name in names if name}

    @cached_property
    def uses(self) -> Sequence[Sequence[str]]:
        """Of each node the tensors that it reads, constants left out."""
        there = self.maker.keys() | set(self.inputs)
        return [[name for name in names if name in there] for names in self.reads]

    @cached_property
    def users(self) -> Mapping[str, Sequence[int]]:
        """Tensor → indices of the nodes that read it, in order."""
        users: dict[str, list[int]] = {}
        for i, names in enumerate(self.uses):
            for name in names:
                users.setdefault(name, []).append(i)
        return users

    def value(self, tensor: str) -> Value:
        """Its type and shape (no shape where it is not static, or where it is no tensor)."""
        info = self.infos[tensor]
        if isinstance(info, Held):
            return Value(tensor, info.dtype, shape_of(info.region))
        kind = info.type.tensor_type
        dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
        return Value(tensor, kind.elem_type, dims if kind.HasField("shape") and -1 not in dims else None)

    @cached_property
    def wanted(self) -> Sequence[tuple[int, str, int, str]]:
        """What must travel: (step that makes it, tensor, how many devices read it before this one does, the device), in
        order."""
        travels: list[tuple[int, str, int, str]] = []
        for name, indices in self.users.items():
            at = self.maker.get(name, GIVEN)
            there = self.source if at == GIVEN else (self.devices[at],)
            if len(indices) == 1 and self.devices[indices[0]] in there:  # as it is most often
                continue
            readers = dict.fromkeys([self.devices[i] for i in indices])
            travels += [(at, name, place, reader) for place, reader in enumerate(readers) if reader not in there]
        return sorted(travels)

    def sender(self, tensor: str, receiver: str) -> str:
        """Who sends `tensor` to `receiver`: its maker; of an input's sources one of the same host, else the first."""
        if tensor in self.maker:
            return self.devices[self.maker[tensor]]
        host = self.hosts.get(receiver, receiver)
        return next((s for s in self.source if self.hosts.get(s, s) == host), self.source[0])


def cut(placed: Model | PlacedGraph, devices: Sequence[str], hosts: Mapping[str, str] | None = None) -> Program:
    """The program of a placed model; of a placed graph, which is not written as ONNX, the same but for the segments'
    models and the weights. `devices`: all in order, also those without work; `hosts`: device → host."""
    graph = _of_model(placed, hosts or {}) if isinstance(placed, Model) else _of_graph(placed, hosts or {})
    constants = {tensor.name: tensor for tensor in placed.proto.graph.initializer} if isinstance(placed, Model) else {}
    transfers = _transfers(graph)
    segments: dict[str, list[Segment]] = {device: [] for device in devices}
    index = {device: i for i, device in enumerate(devices)}
    order: list[tuple[int, int]] = []
    for group in _gather(graph):
        there = segments[group.device]
        order.append((index[group.device], len(there)))
        segment = _segment(f"{group.device}_{len(there):03}", group, graph)
        if isinstance(placed, Model):
            segment = replace(segment, model=_written(segment, group, graph, placed, constants))
        there.append(segment)
    return Program(
        tuple(_device(device, tuple(parts), graph, transfers) for device, parts in segments.items()),
        transfers,
        tuple(graph.value(name) for name in graph.inputs),
        tuple(graph.value(name) for name, output in graph.sinks.items() if name == output),
        placed.weights if isinstance(placed, Model) else {},
        tuple(order),
    )


def _of_graph(graph: PlacedGraph, hosts: Mapping[str, str]) -> _Placed:
    given, nodes = graph.given, graph.nodes
    outputs = {name: given.outputs[output] for name, output in graph.sinks.items()}
    constants = (given.initializers & graph.used) | given.sparse
    return _Placed(
        hosts,
        [node.place.device for node in nodes],
        [node.place.lane for node in nodes],
        [node.reads for node in nodes],
        [node.outputs for node in nodes],
        [None if node.place.part is None else (node.place.part, node.origin) for node in nodes],
        {**graph.values, **given.inputs, **outputs},
        tuple(name for name in given.inputs if name not in constants),
        graph.source,
        graph.sinks,
    )


def _of_model(model: Model, hosts: Mapping[str, str]) -> _Placed:
    graph = model.proto.graph
    source, copies = ends_of(model.proto)
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    annotations = [annotation_of(node) for node in graph.node]
    return _Placed(
        hosts,
        [node.device for node in annotations],
        [node.lane for node in annotations],
        [tuple(node_reads(node)) for node in graph.node],
        [tuple(node.output) for node in graph.node],
        [None if node.part is None else (node.part, node.origin) for node in annotations],
        {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)},
        tuple(v.name for v in graph.input if v.name not in constants),
        source,
        {v.name: copies.get(v.name, v.name) for v in graph.output},
    )


def _gather(placed: _Placed) -> list[_Group]:
    """Greedy and eager: a device's segment closes after a tensor that another device needs (unless its next node
    makes one too), before a node that needs something newer than the segment's start, and where the lane changes.
    In order of their first nodes; each depends only on earlier ones."""
    devices, maker = placed.devices, placed.maker
    sends = {at for at, *_ in placed.wanted}
    groups: list[_Group] = []
    current: dict[str, _Group] = {}
    for unit in _units(placed):
        device = devices[unit[0]]
        group = current.get(device)
        sent = not sends.isdisjoint(unit)
        if group is not None:
            start = group.nodes[0]
            read = [at for i in unit for name in placed.uses[i] if (at := maker.get(name, GIVEN)) > start]
            newer = any(devices[at] != device for at in read)
            turned = placed.lanes[group.nodes[-1]] != placed.lanes[unit[0]]
            if newer or (group.sends and not sent) or turned:
                group = None
        if group is None:
            group = current[device] = _Group(device)
            groups.append(group)
        group.nodes.extend(unit)
        group.sends = sent
    return groups


def _units(placed: _Placed) -> Iterable[list[int]]:
    """The nodes in order, those together that must share a segment: a tensor whose type nobody knows cannot be the
    input of one. Only layers that stay whole have such tensors, and the nodes of a layer stand side by side."""
    unknown = placed.maker.keys() - placed.infos.keys()
    if not unknown:
        return ([i] for i in range(len(placed.uses)))
    units: list[list[int]] = []
    for i, names in enumerate(placed.uses):
        first, unit = min((placed.maker[n] for n in names if n in unknown), default=i), [i]
        while unit[0] > first:
            unit = units.pop() + unit
        units.append(unit)
    return units


def _transfers(placed: _Placed) -> tuple[Transfer, ...]:
    """One per tensor and device that must receive it, in order of making."""
    return tuple(
        Transfer(i, placed.sender(name, reader), reader, placed.value(name))
        for i, (_, name, _, reader) in enumerate(placed.wanted)
    )


def _device(
    device: str, segments: tuple[Segment, ...], placed: _Placed, transfers: Sequence[Transfer]
) -> DeviceProgram:
    outgoing: dict[str, list[int]] = {}
    for transfer in transfers:
        if transfer.sender == device:
            outgoing.setdefault(transfer.value.name, []).append(transfer.index)
    steps = [Step("receive", t.index) for t in transfers if t.receiver == device]
    steps += [Step("send", i) for name in placed.inputs for i in outgoing.get(name, ())]
    for k, segment in enumerate(segments):
        steps.append(Step("run", k))
        steps += [Step("send", i) for name in segment.outputs for i in outgoing.get(name, ())]
    sources = placed.inputs if device in placed.source else ()
    sinks = {name: output for name, output in placed.sinks.items() if placed.devices[placed.maker[name]] == device}
    return DeviceProgram(device, placed.hosts.get(device, device), segments, tuple(steps), sources, sinks)


def _segment(name: str, group: _Group, placed: _Placed) -> Segment:
    """The segment without its model."""
    inside = set(group.nodes)
    makes = dict.fromkeys(n for i in group.nodes for n in placed.makes[i] if n)
    needed = dict.fromkeys(n for i in group.nodes for n in placed.uses[i] if n not in makes)
    outputs = tuple(n for n in makes if n in placed.sinks or not inside.issuperset(placed.users.get(n, ())))
    marks = tuple(mark for i in group.nodes if (mark := placed.marks[i]) is not None)
    return Segment(name, group.device, UNWRITTEN, tuple(needed), outputs, marks)


def _written(
    segment: Segment, group: _Group, placed: _Placed, source: Model, constants: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """The segment's model. constants: the initializers of the placed model by name."""
    nodes = [source.proto.graph.node[i] for i in group.nodes]
    read = dict.fromkeys(n for i in group.nodes for n in placed.reads[i])
    proto = onnx.ModelProto(
        ir_version=source.proto.ir_version, opset_import=source.proto.opset_import, functions=source.proto.functions
    )
    proto.graph.name = segment.name
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(placed.infos[n] for n in segment.inputs)
    proto.graph.output.extend(placed.infos.get(n) or onnx.ValueInfoProto(name=n) for n in segment.outputs)
    proto.graph.initializer.extend(constants[n] for n in read if n in constants)
    proto.graph.sparse_initializer.extend(t for t in source.proto.graph.sparse_initializer if t.values.name in read)
    return proto


def sent_bytes(transfers: Iterable[Transfer]) -> int:
    """All bytes on the network for one frame."""
    return sum(transfer.value.nbytes for transfer in transfers)
