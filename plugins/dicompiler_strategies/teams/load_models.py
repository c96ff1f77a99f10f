"""Models of loads: the memory of each host, or the seconds of each device and link, for many selections at once.

    CostTables → SentTensors → PeriodModel or HostMemoryModel
    model + selections (one choice for each layer) → loads

The strategy `teams` searches for a selection whose largest load is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler_strategies.joint.joint_model import activation_bytes
from dicompiler_strategies.tables.choice_footprints import Floats, device_host_matrix, output_bytes, source_and_sink
from dicompiler_strategies.tables.cost_tables import (
    BoxFlow,
    CostTables,
    LayerEdge,
    bytes_between_devices,
    find_edges,
    find_state_edges,
    flows_at_ends,
    flows_on_edge,
)
from dicompiler_strategies.tables.link_loads import RuntimeArrays, build_link_loads

Selections = NDArray[np.intp]
"""Selections as an array of shape (selections, layers): the number of the choice of each layer."""


class LoadModel(Protocol):
    """A model that predicts the loads of selections: bytes of each host, or seconds of each device and link.

    A selection has one choice (way to split the layer) for each layer.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def entries(self) -> int:
        """Number of table entries that the evaluation of a selection reads."""

    def loads(self, selections: Selections) -> Floats:
        """Return the loads of each selection, an array of shape (selections, loads)."""


@dataclass(frozen=True, eq=False)
class SentTensors:
    """The bytes that devices send to each other for each tensor, by the choices (ways to split a layer) of its layers.

    Attributes:
        edges: For each layer whose outputs other layers read, two values: the position of the last reader, and the
            bytes by edge. An edge (i, j) joins the layer i and a reader j. Its bytes have the shape (choices of i,
            choices of j, senders, receivers).
        inputs: For each layer, the bytes of network inputs that it reads, of shape (choices, senders, receivers).
        outputs: For each layer, the bytes of network outputs that it sends to sinks, of the same shape.
    """

    edges: Sequence[tuple[int, Mapping[LayerEdge, Floats]]]
    inputs: Sequence[Floats]
    outputs: Sequence[Floats]

    def sent_on_edges(self, columns: Selections) -> Iterable[tuple[int, Floats]]:
        """Yield, for each layer whose outputs are read, the position of its last reader and the bytes that are sent.

        `columns` has the shape (layers, selections), and the bytes the shape (selections, senders, receivers). A
        receiver gets a tensor once, even if it computes several layers that read it. The regions that these layers read
        mostly overlap, so that only the largest number of bytes counts.
        """
        for last_reader, tables in self.edges:
            yield last_reader, np.max([table[columns[i], columns[j]] for (i, j), table in tables.items()], axis=0)

    @property
    def entries(self) -> int:
        """Number of table entries that are read to evaluate a selection (plan).

        The network inputs of a layer count like the tensors between two layers.
        """
        edges = sum(len(tables) for _, tables in self.edges)
        return (edges + len(self.inputs)) * math.prod(self.inputs[0].shape[1:])

    def received_by(self, hosts: Floats) -> SentTensors:
        """Return the bytes that each host receives; in all shapes, one axis of hosts replaces senders and receivers.

        `hosts` is a matrix of shape (devices, hosts) that is 1 for each device on its host.
        """
        known: dict[int, Floats] = {}

        def received(sent: Floats) -> Floats:
            if id(sent) not in known:
                known[id(sent)] = sent.sum(axis=-2) @ hosts
            return known[id(sent)]

        edges = [(last, {edge: received(sent) for edge, sent in tables.items()}) for last, tables in self.edges]
        return SentTensors(edges, [*map(received, self.inputs)], [*map(received, self.outputs)])


def find_sent_tensors(tables: CostTables) -> SentTensors:
    """Return the tensors that are sent under each choice (way to split a layer).

    Equal edges (pairs of connected layers) share their arrays.
    """
    problem, layers, footprints = tables.problem, tables.problem.layers, tables.footprints
    known: dict[object, Floats] = {}
    by_producer: dict[int, dict[LayerEdge, Floats]] = {}
    for (i, j), slots in find_edges(layers).items():
        key = footprints[i], footprints[j], slots
        if key not in known:
            shape = len(tables.choices[i]), len(tables.choices[j])
            known[key] = _sum_flows(tables, flows_on_edge(layers, (i, j), slots, footprints), shape)
        by_producer.setdefault(i, {})[i, j] = known[key]
    inputs, outputs = [], []
    for layer, footprint, choices in zip(layers.layers, footprints, tables.choices, strict=True):
        flows_in, flows_out = flows_at_ends(problem, layer, footprint)
        inputs.append(_sum_flows(tables, flows_in, (1, len(choices)))[0])
        outputs.append(_sum_flows(tables, flows_out, (len(choices), 1))[:, 0])
    return SentTensors([(max(j for _, j in edges), edges) for edges in by_producer.values()], inputs, outputs)


def _sum_flows(tables: CostTables, flows: Sequence[BoxFlow], shape: tuple[int, int]) -> Floats:
    devices = len(tables.problem.platform.devices)
    nbytes = np.zeros((*shape, devices, devices))
    for flow in flows:
        nbytes += bytes_between_devices(*flow)
    return nbytes


def find_sent_states(tables: CostTables) -> dict[LayerEdge, NDArray[np.bool_]]:
    """Return, for each edge from the layer that computes a state to a reader, the choices that would send the state.

    A state (an output that is an input of the next frame) must stay on its device. The arrays are True for pairs of
    choices that would send it to another device. Their shape is (choices of the computing layer, choices of the
    reader).
    """
    layers, sent = tables.problem.layers, {}
    for (i, j), slots in find_state_edges(layers).items():
        shape = len(tables.choices[i]), len(tables.choices[j])
        nbytes = _sum_flows(tables, flows_on_edge(layers, (i, j), slots, tables.footprints), shape)
        sent[i, j] = np.asarray(nbytes.any(axis=(2, 3)))
    return sent


@dataclass(frozen=True, eq=False)
class PeriodModel:
    """Seconds for which each device and each link is busy for one frame. Each device and each link is a load.

    A choice is one way to split a layer.

    Attributes:
        layer_seconds: For each layer, the seconds of computing, and of sending the network's inputs to it and its
            outputs to sinks, of shape (choices, loads).
        sent: The tensors that are sent.
        byte_seconds: Seconds that a byte from one device to another adds to each load, of shape (pairs of devices,
            loads).
        message_seconds: Seconds that a message from one device to another adds to each load, of the same shape.
    """

    layer_seconds: Sequence[Floats]
    sent: SentTensors
    byte_seconds: Floats
    message_seconds: Floats

    @property
    def layers(self) -> int:
        return len(self.layer_seconds)

    @property
    def entries(self) -> int:
        return self.layers * len(self.byte_seconds[0]) + self.sent.entries

    def loads(self, selections: Selections) -> Floats:
        columns = selections.T
        loads: Floats = np.sum(_look_up(self.layer_seconds, columns), axis=0)
        for _, sent in self.sent.sent_on_edges(columns):
            loads += _sending_seconds(sent, self.byte_seconds, self.message_seconds)
        return loads


def _sending_seconds(sent: Floats, byte_seconds: Floats, message_seconds: Floats) -> Floats:
    """Return the seconds that sent bytes add to each load, that is, to the time of each device and link.

    The bytes `sent` have the shape (selections, senders, receivers).
    """
    pairs = sent.reshape(len(sent), -1)
    seconds: Floats = pairs @ byte_seconds + (pairs > 0) @ message_seconds
    return seconds


def build_period_model(tables: CostTables, sent: SentTensors) -> PeriodModel:
    """Return the model of the seconds of each device and link."""
    links = build_link_loads(tables.problem)
    devices = len(tables.problem.platform.devices)
    byte_seconds, message_seconds = np.zeros((2, devices, devices, devices + links.byte_seconds.shape[1]))
    byte_seconds[..., devices:] = links.byte_seconds.reshape(devices, devices, -1)
    message_seconds[..., devices:] = links.message_seconds.reshape(devices, devices, -1)
    if links.runtime is not None:
        _add_runtime_seconds(links.runtime, byte_seconds, message_seconds)
    byte_seconds, message_seconds = (array.reshape(devices**2, -1) for array in (byte_seconds, message_seconds))
    layer_seconds = [
        np.pad(seconds, ((0, 0), (0, links.byte_seconds.shape[1])))
        + _sending_seconds(inputs, byte_seconds, message_seconds)
        + _sending_seconds(outputs, byte_seconds, message_seconds)
        for seconds, inputs, outputs in zip(tables.compute_seconds, sent.inputs, sent.outputs, strict=True)
    ]
    return PeriodModel(layer_seconds, sent, byte_seconds, message_seconds)


def _add_runtime_seconds(runtime: RuntimeArrays, byte_seconds: Floats, message_seconds: Floats) -> None:
    """Add the seconds for which the runtimes of sender and receiver handle each byte and each message to the arrays."""
    for device in range(len(byte_seconds)):
        byte_seconds[device, :, device] += runtime.byte[device]
        byte_seconds[:, device, device] += runtime.byte[device]
        message_seconds[device, :, device] += runtime.send[device]
        message_seconds[:, device, device] += runtime.receive[device]


@dataclass(frozen=True, eq=False)
class HostMemoryModel:
    """Bytes that each host needs for one frame.

    A choice is one way to split a layer. A host needs the weights of all its layers, and space for tensors. A received
    tensor takes space from the start of the frame to the last layer that reads it. A computed tensor takes space from
    its layer to the last layer that reads it. While a host computes layer t, its tensors therefore take

        Σ_{i > t} received_i + activations_t + Σ (tensors that are computed before t and read after t).

    The host needs the largest of these sums.

    Attributes:
        constants: For each layer, the bytes that are stored during the whole frame: weights, and network outputs that
            sinks receive, of shape (choices, hosts).
        activations: For each layer, the bytes of its inputs and outputs, of shape (choices, hosts).
        produced: For each layer, the bytes of its outputs, of shape (choices, hosts).
        inputs: For each layer, the bytes of network inputs that hosts receive for it, of shape (choices, hosts). Inputs
            that sources store until the layer is computed are included.
        received: The tensors that layers send to each other, with the bytes that each host receives.
        kept: For each layer i whose output is read after other layers: the layers between layer i and its last reader
            that do not read the output. The output is stored while they are computed.
    """

    constants: Sequence[Floats]
    activations: Sequence[Floats]
    produced: Sequence[Floats]
    inputs: Sequence[Floats]
    received: SentTensors
    kept: Mapping[int, Sequence[int]]

    @property
    def layers(self) -> int:
        return len(self.constants)

    @property
    def entries(self) -> int:
        hosts, kept = len(self.constants[0][0]), sum(map(len, self.kept.values()))
        return hosts * (4 * self.layers + kept) + self.received.entries

    def loads(self, selections: Selections) -> Floats:
        columns = selections.T
        stored = _look_up(self.activations, columns)
        for layer, others in self.kept.items():
            stored[others] += self.produced[layer][columns[layer]]
        received = _look_up(self.inputs, columns)
        for last_reader, nbytes in self.received.sent_on_edges(columns):
            received[last_reader] += nbytes
        later = received[::-1].cumsum(axis=0)[::-1]
        stored[:-1] += later[1:]
        tensors = np.maximum(stored.max(axis=0), later[0])
        loads: Floats = np.sum(_look_up(self.constants, columns), axis=0) + tensors
        return loads


def _look_up(tables: Sequence[Floats], columns: Selections) -> Floats:
    """Return, for each layer and each selection, the row of the layer's table for its choice (way to split it).

    The result has the shape (layers, selections, …).
    """
    return np.array([table[c] for table, c in zip(tables, columns, strict=True)])


def build_memory_model(tables: CostTables, sent: SentTensors) -> HostMemoryModel:
    """Return the model of the memory of each host."""
    layers, hosts = tables.problem.layers, device_host_matrix(tables.problem.platform)
    received = sent.received_by(hosts)
    kept = {}
    for last_reader, edges in sent.edges:
        (producer,), readers = {i for i, _ in edges}, {j for _, j in edges}
        if others := [layer for layer in range(producer + 1, last_reader) if layer not in readers]:
            kept[producer] = others
    weights = zip(tables.weight_bytes, received.outputs, strict=True)
    inputs = zip(received.inputs, _source_buffers(tables), strict=True)
    outputs = zip(layers.layers, tables.footprints, strict=True)
    return HostMemoryModel(
        [nbytes @ hosts + of_outputs for nbytes, of_outputs in weights],
        activation_bytes(tables),
        [output_bytes(layers, layer, footprint) @ hosts for layer, footprint in outputs],
        [nbytes + buffers for nbytes, buffers in inputs],
        received,
        kept,
    )


def _source_buffers(tables: CostTables) -> Floats:
    """Return the bytes of network inputs that sources store until each layer is computed, of shape (layers, hosts).

    A source stores a network input until the last layer that reads it, so that the bytes are in the row of that layer.
    """
    problem, layers = tables.problem, tables.problem.layers
    sources = {problem.platform.host_of[name] for name in source_and_sink(problem)[0]}
    is_source = np.array([host.name in sources for host in problem.platform.hosts], np.float64)
    buffers = np.zeros((len(layers.layers), len(is_source)))
    for name in layers.inputs:
        readers = [layers.position[layer.name] for layer in layers.consumers.get(name, ())]
        tensor = layers.tensors[name]
        if readers and tensor.shape is not None:
            buffers[max(readers)] += raw_nbytes(tensor.dtype, tensor.shape) * is_source
    return buffers
