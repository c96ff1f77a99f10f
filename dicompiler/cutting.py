"""Cut, the driver's last step: the placed model becomes a Program, per device segments and between devices transfers.

placed Model (every node on a device, in step order) → Program
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from dicompiler.model import Model
from dicompiler.program import DEVICE, LANE, SINKS, SOURCE, DeviceProgram, Program, Segment, Step, Transfer, Value
from dicompiler.structure import node_reads

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

    devices, lanes, uses: of each node its device, lane, and the tensors that it reads (captured ones included).
    made: tensor → index of the node that makes it. users: tensor → indices of the nodes that read it, in order.
    sinks: the graph's outputs → the outputs of the original that they are.
    """

    model: Model
    hosts: Mapping[str, str]
    nodes: Sequence[onnx.NodeProto]
    devices: Sequence[str]
    lanes: Sequence[str]
    uses: Sequence[tuple[str, ...]]
    made: Mapping[str, int]
    users: Mapping[str, Sequence[int]]
    infos: Mapping[str, onnx.ValueInfoProto]
    inputs: tuple[str, ...]
    source: tuple[str, ...]
    sinks: Mapping[str, str]

    def value(self, tensor: str) -> Value:
        """Its type and shape (no shape where it is not static, or where it is no tensor)."""
        kind = self.infos[tensor].type.tensor_type
        dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
        return Value(tensor, kind.elem_type, dims if kind.HasField("shape") and -1 not in dims else None)

    def readers(self, tensor: str) -> tuple[str, ...]:
        """The devices that read it, in order of their first reading node."""
        return tuple(dict.fromkeys(self.devices[i] for i in self.users.get(tensor, ())))

    def sender(self, tensor: str, receiver: str) -> str:
        """Who sends `tensor` to `receiver`: its maker; of an input's sources one of the same host, else the first."""
        if tensor in self.made:
            return self.devices[self.made[tensor]]
        host = self.hosts.get(receiver, receiver)
        return next((s for s in self.source if self.hosts.get(s, s) == host), self.source[0])

    def is_remote(self, tensor: str, device: str) -> bool:
        """Whether `device` must receive the tensor to read it."""
        if tensor in self.made:
            return self.devices[self.made[tensor]] != device
        return device not in self.source


def cut(model: Model, devices: Sequence[str], hosts: Mapping[str, str] | None = None) -> Program:
    """The program of a placed model. `devices`: all in order, also those without work; `hosts`: device → host."""
    placed = _read(model, hosts or {})
    groups = _gather(placed)
    transfers = _transfers(placed)
    index = {device: i for i, device in enumerate(devices)}
    counts = dict.fromkeys(devices, 0)
    order: list[tuple[int, int]] = []
    for group in groups:
        order.append((index[group.device], counts[group.device]))
        counts[group.device] += 1
    constants = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    programs = []
    for device in devices:
        own = [group for group in groups if group.device == device]
        segments = tuple(_segment(f"{device}_{k:03}", group, placed, constants) for k, group in enumerate(own))
        programs.append(_device(device, segments, placed, transfers))
    outputs = tuple(placed.value(name) for name, output in placed.sinks.items() if name == output)
    inputs = tuple(placed.value(name) for name in placed.inputs)
    return Program(tuple(programs), transfers, inputs, outputs, model.weights, tuple(order))


def _read(model: Model, hosts: Mapping[str, str]) -> _Placed:
    graph = model.proto.graph
    marks = {entry.key: entry.value for entry in model.proto.metadata_props}
    extra = json.loads(marks[SINKS])
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    node_marks = [{entry.key: entry.value for entry in node.metadata_props} for node in graph.node]
    made = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    inputs = tuple(v.name for v in graph.input if v.name not in constants)
    uses = [tuple(n for n in node_reads(node) if n in made or n in inputs) for node in graph.node]
    users: dict[str, list[int]] = {}
    for i, names in enumerate(uses):
        for name in names:
            users.setdefault(name, []).append(i)
    return _Placed(
        model,
        hosts,
        list(graph.node),
        [mark[DEVICE] for mark in node_marks],
        [mark.get(LANE, "0") for mark in node_marks],
        uses,
        made,
        users,
        {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)},
        inputs,
        tuple(json.loads(marks[SOURCE])),
        {v.name: extra.get(v.name, v.name) for v in graph.output},
    )


def _gather(placed: _Placed) -> list[_Group]:
    """Greedy and eager: a device's segment closes after a tensor that another device needs (unless its next node
    makes one too), before a node that needs something newer than the segment's start, and where the lane changes.
    In order of their first nodes; each depends only on earlier ones."""
    sends = [
        any(placed.devices[user] != device for name in node.output for user in placed.users.get(name, ()))
        for node, device in zip(placed.nodes, placed.devices, strict=True)
    ]
    groups: list[_Group] = []
    current: dict[str, _Group] = {}
    for unit in _units(placed):
        device = placed.devices[unit[0]]
        group = current.get(device)
        sent = any(sends[i] for i in unit)
        if group is not None:
            read = {name for i in unit for name in placed.uses[i] if placed.is_remote(name, device)}
            newest = max((placed.made.get(name, GIVEN) for name in read), default=GIVEN)
            turned = placed.lanes[group.nodes[-1]] != placed.lanes[unit[0]]
            if newest > group.nodes[0] or (group.sends and not sent) or turned:
                group = None
        if group is None:
            group = current[device] = _Group(device)
            groups.append(group)
        group.nodes.extend(unit)
        group.sends = sent
    return groups


def _units(placed: _Placed) -> list[list[int]]:
    """The nodes in order, those together that must share a segment: a tensor whose type nobody knows cannot be the
    input of one. Only layers that stay whole have such tensors, and the nodes of a layer stand side by side."""
    units: list[list[int]] = []
    for i, names in enumerate(placed.uses):
        first = min((placed.made[n] for n in names if n in placed.made and n not in placed.infos), default=i)
        unit = [i]
        while unit[0] > first:
            unit = units.pop() + unit
        units.append(unit)
    return units


def _transfers(placed: _Placed) -> tuple[Transfer, ...]:
    """One per tensor and device that must receive it, in order of making."""
    wanted = sorted(
        (placed.made.get(name, GIVEN), name, place, reader)
        for name in placed.users
        for place, reader in enumerate(placed.readers(name))
        if placed.is_remote(name, reader)
    )
    return tuple(
        Transfer(i, placed.sender(name, reader), reader, placed.value(name))
        for i, (_, name, _, reader) in enumerate(wanted)
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
    sinks = {name: output for name, output in placed.sinks.items() if placed.devices[placed.made[name]] == device}
    return DeviceProgram(device, placed.hosts.get(device, device), segments, tuple(steps), sources, sinks)


def _segment(name: str, group: _Group, placed: _Placed, constants: Mapping[str, onnx.TensorProto]) -> Segment:
    inside, source = set(group.nodes), placed.model.proto
    made = dict.fromkeys(n for i in group.nodes for n in placed.nodes[i].output if n)
    needed = dict.fromkeys(n for i in group.nodes for n in placed.uses[i] if n not in made)
    outputs = tuple(n for n in made if n in placed.sinks or not inside.issuperset(placed.users.get(n, ())))
    read = dict.fromkeys(n for i in group.nodes for n in node_reads(placed.nodes[i]))
    proto = onnx.ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions)
    proto.graph.name = name
    proto.graph.node.extend(placed.nodes[i] for i in group.nodes)
    proto.graph.input.extend(placed.infos[n] for n in needed)
    proto.graph.output.extend(placed.infos.get(n) or onnx.ValueInfoProto(name=n) for n in outputs)
    proto.graph.initializer.extend(constants[n] for n in read if n in constants)
    proto.graph.sparse_initializer.extend(t for t in source.graph.sparse_initializer if t.values.name in read)
    return Segment(name, group.device, proto, tuple(needed), outputs)


def sent_bytes(transfers: Iterable[Transfer]) -> int:
    """All bytes on the network for one frame."""
    return sum(transfer.value.nbytes for transfer in transfers)
