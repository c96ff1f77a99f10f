"""Cut, the driver's last step: the placed model becomes a Program, per device segments and between devices transfers.

placed Model (every node on a device, in step order) → Program
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from dicompiler.model import Model
from dicompiler.program import (
    DEVICE,
    LANE,
    SINKS,
    SOURCE,
    DeviceProgram,
    Program,
    Segment,
    Step,
    Transfer,
    Value,
)
from dicompiler.structure import node_reads

GIVEN = -1  # the step of graph inputs: there from the start


@dataclass
class _Group:
    """A segment while it is being gathered: indices of its nodes in the placed graph."""

    device: str
    nodes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Placed:
    """The placed graph as the cut reads it. `home`: tensor → the device that makes it; `made`: tensor → index of the
    node that makes it; `readers`: tensor → devices that read it, in node order; `uses`: what each node reads,
    captures included."""

    nodes: Sequence[onnx.NodeProto]
    devices: Sequence[str]
    lanes: Sequence[str]
    uses: Sequence[tuple[str, ...]]
    made: Mapping[str, int]
    readers: Mapping[str, tuple[str, ...]]
    inputs: tuple[str, ...]
    source: tuple[str, ...]

    def sender(self, tensor: str, receiver: str, hosts: Mapping[str, str]) -> str:
        """Who sends `tensor` to `receiver`: its maker; of an input's sources one of the same host, else the first."""
        if tensor in self.made:
            return self.devices[self.made[tensor]]
        host = hosts.get(receiver, receiver)
        return next((s for s in self.source if hosts.get(s, s) == host), self.source[0])

    def is_remote(self, tensor: str, device: str) -> bool:
        """Whether `device` must receive the tensor to read it."""
        if tensor in self.made:
            return self.devices[self.made[tensor]] != device
        return tensor in self.inputs and device not in self.source


def cut(model: Model, devices: Sequence[str], hosts: Mapping[str, str] | None = None) -> Program:
    """The program of a placed model. `devices`: all devices in order, also those without work; `hosts`: device → host."""
    hosts = hosts or {}
    graph = model.proto.graph
    marks = {entry.key: entry.value for entry in model.proto.metadata_props}
    placed = _read(graph, tuple(marks[SOURCE].split(",")))
    groups = _gather(placed)
    transfers = _transfers(placed, _values(graph), hosts)
    extra = json.loads(marks[SINKS])
    sinks = {v.name: extra.get(v.name, v.name) for v in graph.output}
    values = _values(graph)
    programs = tuple(
        _device(device, hosts.get(device, device), placed, groups, transfers, sinks, model, values)
        for device in devices
    )
    index = {device: i for i, device in enumerate(devices)}
    counts = dict.fromkeys(devices, 0)
    order: list[tuple[int, int]] = []
    for group in groups:
        order.append((index[group.device], counts[group.device]))
        counts[group.device] += 1
    outputs = tuple(values[v.name] for v in graph.output if v.name not in extra)
    return Program(programs, transfers, tuple(values[n] for n in placed.inputs), outputs, model.weights, tuple(order))


def _read(graph: onnx.GraphProto, source: tuple[str, ...]) -> _Placed:
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    marks = [{entry.key: entry.value for entry in node.metadata_props} for node in graph.node]
    made = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    inputs = tuple(v.name for v in graph.input if v.name not in constants)
    uses = [tuple(node_reads(node)) for node in graph.node]
    readers: dict[str, dict[str, None]] = {}
    for mark, names in zip(marks, uses, strict=True):
        for name in names:
            readers.setdefault(name, {})[mark[DEVICE]] = None
    return _Placed(
        graph.node,
        [mark[DEVICE] for mark in marks],
        [mark.get(LANE, "0") for mark in marks],
        [tuple(n for n in names if n in made or n in inputs) for names in uses],
        made,
        {name: tuple(devices) for name, devices in readers.items()},
        inputs,
        source,
    )


def _gather(placed: _Placed) -> list[_Group]:
    """Greedy and eager: a device's segment closes after a tensor that another device needs (unless its next node
    makes one too), before a node that needs something newer than the segment's start, and where the lane changes.
    In order of their first nodes; each depends only on earlier ones."""
    sends = [
        any(reader != placed.devices[i] for name in node.output for reader in placed.readers.get(name, ()))
        for i, node in enumerate(placed.nodes)
    ]
    groups: list[_Group] = []
    current: dict[str, _Group] = {}
    for i, device in enumerate(placed.devices):
        group = current.get(device)
        if group is not None:
            newest = max(
                (placed.made.get(n, GIVEN) for n in placed.uses[i] if placed.is_remote(n, device)), default=GIVEN
            )
            last = group.nodes[-1]
            if newest > group.nodes[0] or (sends[last] and not sends[i]) or placed.lanes[last] != placed.lanes[i]:
                group = None
        if group is None:
            group = current[device] = _Group(device)
            groups.append(group)
        group.nodes.append(i)
    return groups


def _values(graph: onnx.GraphProto) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
        static = tensor.HasField("shape") and -1 not in dims
        found[value.name] = Value(value.name, tensor.elem_type, dims if static else None)
    return found


def _transfers(placed: _Placed, values: Mapping[str, Value], hosts: Mapping[str, str]) -> tuple[Transfer, ...]:
    """One per tensor and device that must receive it, in order of making."""
    wanted = sorted(
        (placed.made.get(name, GIVEN), name, place, reader)
        for name, readers in placed.readers.items()
        for place, reader in enumerate(readers)
        if placed.is_remote(name, reader)
    )
    return tuple(
        Transfer(i, placed.sender(name, reader, hosts), reader, values[name])
        for i, (_, name, _, reader) in enumerate(wanted)
    )


def _device(
    device: str,
    host: str,
    placed: _Placed,
    groups: Sequence[_Group],
    transfers: Sequence[Transfer],
    sinks: Mapping[str, str],
    model: Model,
    values: Mapping[str, Value],
) -> DeviceProgram:
    own = [group for group in groups if group.device == device]
    segments = tuple(_segment(f"{device}_{k:03}", group, placed, sinks, model, values) for k, group in enumerate(own))
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
    delivered = {name: output for name, output in sinks.items() if placed.devices[placed.made[name]] == device}
    return DeviceProgram(device, host, segments, tuple(steps), sources, delivered)


def _segment(
    name: str,
    group: _Group,
    placed: _Placed,
    sinks: Mapping[str, str],
    model: Model,
    values: Mapping[str, Value],
) -> Segment:
    inside = set(group.nodes)
    made = dict.fromkeys(n for i in group.nodes for n in placed.nodes[i].output if n)
    needed = dict.fromkeys(n for i in group.nodes for n in placed.uses[i] if n not in made)
    later = {n for i, names in enumerate(placed.uses) if i not in inside for n in names}
    outputs = tuple(n for n in made if n in later or n in sinks)
    proto = onnx.ModelProto()
    proto.ir_version = model.proto.ir_version
    proto.opset_import.extend(model.proto.opset_import)
    proto.functions.extend(model.proto.functions)
    proto.graph.name = name
    proto.graph.node.extend(placed.nodes[i] for i in group.nodes)
    proto.graph.input.extend(_info(values[n]) for n in needed)
    proto.graph.output.extend(_info(values[n]) if n in values else onnx.ValueInfoProto(name=n) for n in outputs)
    used = {n for i in group.nodes for n in node_reads(placed.nodes[i])}
    proto.graph.initializer.extend(t for t in model.proto.graph.initializer if t.name in used)
    proto.graph.sparse_initializer.extend(t for t in model.proto.graph.sparse_initializer if t.values.name in used)
    return Segment(name, group.device, proto, tuple(needed), outputs)


def _info(value: Value) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(value.name, value.dtype, value.shape)


def sent_bytes(transfers: Iterable[Transfer]) -> int:
    """All bytes on the network for one frame."""
    return sum(transfer.value.nbytes for transfer in transfers)
