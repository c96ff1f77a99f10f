"""A fast model that evaluates thousands of plans at once, in which each layer is whole on one device.

The strategy `genetic` uses the model in its search, and the strategy `auto` uses it to move layers between devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import LayerShare, Part, Plan, Problem
from dicompiler_strategies.genetic.tensor_flows import (
    INPUT_PRODUCER,
    SINK_READER,
    NetworkFlows,
    ReaderGroup,
    TensorFlow,
    find_flows,
)
from dicompiler_strategies.tables.choice_footprints import device_host_matrix, source_and_sink
from dicompiler_strategies.tables.link_loads import RuntimeArrays, build_runtime_arrays, pair_times

Array = NDArray[np.float64]
Positions = NDArray[np.intp]
_ReaderRow = tuple[int, Positions]
"""A reader of a tensor: the layer's position (SINK_READER for a sink), and its device in each plan."""

CHUNK_PLANS = 2048
"""Number of plans that are evaluated at once: their arrays fit into the processor's cache."""


@dataclass(frozen=True)
class PlanEstimates:
    """Estimates of several plans for one frame.

    Arrays have the shape (plans, devices), (plans, hosts) or (plans,), with devices and hosts in platform order.

    Attributes:
        compute_s: Seconds that each device computes.
        weights: Bytes of weights on each device.
        activations: Largest number of bytes of tensors on each device at any time.
        sent: Bytes that each device sends.
        received: Bytes that each device receives.
        used: True for each device that a plan uses.
        latency_s: Seconds of a single frame.
        period_s: Seconds from frame to frame in a stream of frames.
        energy_j: Energy in J of all devices for a single frame.
        device_energy_j: Energy in J of each device for each frame of a stream.
        host_memory: Bytes of weights and activations on each host.
    """

    compute_s: Array
    weights: Array
    activations: Array
    sent: Array
    received: Array
    used: NDArray[np.bool_]
    latency_s: Array
    period_s: Array
    energy_j: Array
    device_energy_j: Array
    host_memory: Array

    def objective(self, name: str) -> Array:
        """Return the value of an objective for each plan. Lower is better: throughput is seconds per frame."""
        values: dict[str, Array] = {
            "latency": self.latency_s,
            "throughput": self.period_s,
            "energy": self.energy_j,
            "memory": self.host_memory.max(axis=1),
            "communication": self.received.sum(axis=1),
            "device-memory": (self.weights + self.activations).max(axis=1),
            "device-energy": self.device_energy_j.max(axis=1),
        }
        return values[name]


@dataclass(frozen=True)
class BatchedModel:
    """A fast model of a problem, which evaluates many plans of whole layers at once.

    The results are those of `Problem.estimate`, with five exceptions:

    - Layers on one device may read different, overlapping regions of a tensor. All received elements then stay in
      memory until the last of these layers is computed. The true memory is never larger.
    - The runtime costs of messages to several devices are added up.
    - If elements are smaller than a byte, the bytes of a message are not rounded up.
    - All elements with the same readers count as one message, instead of one message for each box of elements.
    - Inputs from several sources (devices with the network's inputs) on a switch are sent one after another.

    Attributes:
        problem: The problem.
        flows: Tensors and the layers that read them.
        seconds: Seconds of each layer on each device, of shape (layers, devices).
        byte_seconds: Seconds to send a byte. This and the next three arrays have the index sender · number of devices +
            receiver.
        message_seconds: Seconds to send a message in addition to its bytes.
        latency: Latency in seconds of the network and the receiver's runtime.
        link_latency: Latency in seconds of the network alone.
        runtimes: Seconds that the runtime of each device takes for messages and calls.
    """

    problem: Problem
    flows: NetworkFlows = field(repr=False)
    seconds: Array = field(repr=False)
    byte_seconds: Array = field(repr=False)
    message_seconds: Array = field(repr=False)
    latency: Array = field(repr=False)
    link_latency: Array = field(repr=False)
    runtimes: RuntimeArrays = field(repr=False)

    def evaluate(self, assignments: NDArray[Any]) -> PlanEstimates:
        """Return the estimates of many plans.

        Args:
            assignments: Position of each layer's device in the platform, of shape (plans, layers).
        """
        rows = np.asarray(assignments, np.intp)
        starts = range(0, max(1, len(rows)), CHUNK_PLANS)
        chunks = [_Batch(self, rows[start : start + CHUNK_PLANS]).run() for start in starts]
        return PlanEstimates(*(np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]))

    def plan(self, assignment: NDArray[Any]) -> Plan:
        """Return the plan in which all of layer i is on device number `assignment[i]` of the platform."""
        devices = self.problem.platform.devices
        pairs = zip(self.problem.layers.layers, assignment, strict=True)
        return self.problem.build_plan({layer.name: (Part(devices[d].name),) for layer, d in pairs})

    @cached_property
    def host_matrix(self) -> Array:
        """A matrix of shape (hosts, devices): 1 if the device is on the host, else 0."""
        return np.ascontiguousarray(device_host_matrix(self.problem.platform).T)

    @cached_property
    def weight_bytes(self) -> Array:
        """Bytes of each layer's constants. A constant of several layers is counted for the first of them."""
        total = np.zeros(len(self.seconds))
        for nbytes, layers in self.flows.weights:
            total[layers[0]] += nbytes
        return total

    @cached_property
    def source_and_sink_positions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Platform positions of the sources (devices with the inputs) and of the sinks (with the outputs)."""
        position = {device.name: i for i, device in enumerate(self.problem.platform.devices)}
        sources, sinks = source_and_sink(self.problem)
        return tuple(position[name] for name in sources), tuple(position[name] for name in sinks)

    @cached_property
    def nearest_sources(self) -> Positions:
        """For each device, the platform position of the source that sends it the network's inputs.

        This is the device itself, otherwise the first source on its host, otherwise the first source.
        """
        devices, (sources, _) = self.problem.platform.devices, self.source_and_sink_positions
        senders = []
        for i, device in enumerate(devices):
            same_host = [source for source in sources if devices[source].host == device.host]
            senders.append(i if i in sources else (same_host or sources)[0])
        return np.array(senders)

    def device_powers(self, kind: str) -> Array:
        """Return the power of each device in W, of shape (devices, 1). `kind` is "active", "idle" or "network"."""
        return np.array([[getattr(device, f"power_{kind}")] for device in self.problem.platform.devices])


def build_batched_model(problem: Problem) -> BatchedModel:
    """Return the fast model of a problem. This takes tens of milliseconds for a large network."""
    layers, devices = problem.layers, problem.platform.devices
    seconds = [problem.cost_model.seconds_table(layers, layer, [LayerShare()], devices) for layer in layers.layers]
    link_latency = problem.platform.transfer_times[2].ravel()
    pairs, runtimes = pair_times(problem), build_runtime_arrays(problem)
    return BatchedModel(problem, find_flows(layers), np.concatenate(seconds), *pairs, link_latency, runtimes)


class _Batch:
    """Evaluation of at most CHUNK_PLANS plans at once.

    Plans are the last axis of every array. Arrays over devices and plans are flat: device d in plan p has the index
    d · number of plans + p.
    """

    def __init__(self, model: BatchedModel, assignments: Positions) -> None:
        self.model = model
        self.plan_numbers = np.arange(len(assignments))
        # Platform position of each layer's device in each plan, of shape (layers, plans).
        self.layer_devices = np.ascontiguousarray(assignments.T)
        self.devices = len(model.problem.platform.devices)
        layers, plans = len(self.layer_devices), len(self.plan_numbers)
        size = self.devices * plans
        self.compute, self.weights, self.sent, self.received = (np.zeros(size) for _ in range(4))
        self.sending_seconds, self.receiving_seconds = (
            np.zeros(size),
            np.zeros(size),
        )  # Seconds of each device's messages on links.
        self.input_bytes = np.zeros(size)  # Bytes of network inputs that a source keeps for its own layers.
        self.forwarded_inputs = np.zeros(size)  # Bytes of network inputs that a source sends and then frees.
        self.peak = np.zeros(size)
        # Bytes of tensors that the layer's device frees after it has computed the layer.
        self.released = np.zeros((layers, plans))
        # Latency in seconds of the transfers of each layer's output; the last row is for the network's inputs.
        self.layer_latency = np.zeros((layers + 1, plans))
        # Largest latency in seconds of the links that the plan uses.
        self.largest_latency = np.zeros(plans)
        self.frame_seconds = np.zeros(plans)

    def run(self) -> dict[str, NDArray[Any]]:
        """Return the fields of `PlanEstimates` by name, in their order."""
        for flow in self.model.flows.flows:
            if flow.producer == INPUT_PRODUCER:
                self._keep_input(flow)
            else:
                self.released[flow.producer] += flow.nbytes * self._release(flow, self.layer_devices[flow.producer])
            for group in flow.groups:
                self._send_tensor(flow, group)
        self._add_computing()
        self._find_peaks()
        return self._build_estimates()

    def _flat_index(self, devices: Positions) -> Positions:
        return devices * len(self.plan_numbers) + self.plan_numbers

    def _reader_rows(self, flow: TensorFlow, readers: Iterable[int]) -> list[_ReaderRow]:
        rows: list[_ReaderRow] = []
        for i in readers:
            layer = flow.readers[i]
            if layer == SINK_READER:
                sinks = self.model.source_and_sink_positions[1]
                rows += [(SINK_READER, np.full(len(self.plan_numbers), sink)) for sink in sinks]
            else:
                rows.append((layer, self.layer_devices[layer]))
        return rows

    def _release(self, flow: TensorFlow, owners: Positions) -> NDArray[np.bool_]:
        """Add a tensor's bytes to `released`, the bytes that a device frees after a layer, at the tensor's last reader.

        Only readers on the tensor's own device count. A network output on a sink is never freed.

        Args:
            flow: The tensor.
            owners: In each plan, the device that computes the tensor, or the source of a network input.

        Returns:
            True for each plan in which nothing on this device reads the tensor.
        """
        unread = np.ones(len(self.plan_numbers), bool)
        for layer, devices in reversed(self._reader_rows(flow, range(len(flow.readers)))):
            is_owner = devices == owners
            if layer != SINK_READER:
                self.released[layer] += flow.nbytes * (is_owner & unread)
            unread &= ~is_owner
        return unread

    def _keep_input(self, flow: TensorFlow) -> None:
        """Count the memory of a network input on its sources.

        A source keeps the input for its own layers. An input that it only sends is freed after the network's first
        layer.
        """
        for source in self.model.source_and_sink_positions[0]:
            owners = np.full(len(self.plan_numbers), source)
            unread = self._release(flow, owners)
            receivers = [d for d, sender in enumerate(self.model.nearest_sources) if sender == source != d]
            sends = np.zeros(len(self.plan_numbers), bool)
            for _, devices in self._reader_rows(flow, range(len(flow.readers))):
                sends |= np.isin(devices, receivers)
            self.input_bytes[self._flat_index(owners)] += flow.nbytes * ~unread
            self.forwarded_inputs[self._flat_index(owners)] += flow.nbytes * (unread & sends)

    def _send_tensor(self, flow: TensorFlow, group: ReaderGroup) -> None:
        """Count the transfers and the memory of a tensor that is sent to the readers in `group`.

        Each element is sent once to every device with readers, which frees all received elements after its last reader.
        """
        rows = {i: self._reader_rows(flow, (i,)) for i in group.readers}
        for piece in group.shared_bytes:
            for _, devices, is_first in self._first_on_each(flow, (row for i in piece.readers for row in rows[i])):
                self._count_transfer(flow, devices, piece.nbytes, np.flatnonzero(is_first))
        backwards = reversed([row for i in group.readers for row in rows[i]])
        for layer, devices, is_last in self._first_on_each(flow, backwards):
            if layer != SINK_READER and is_last.any():
                self.released[layer] += is_last * self._received_bytes(group, rows, devices)

    def _first_on_each(
        self, flow: TensorFlow, rows: Iterable[_ReaderRow]
    ) -> Iterator[tuple[int, Positions, NDArray[np.bool_]]]:
        """Yield each reader of a tensor, its device in each plan, and a mask of plans in which it receives the tensor.

        It receives nothing if its device computes the tensor, is its source, or has an earlier reader in `rows`.
        """
        before: list[Positions] = []
        for layer, devices in rows:
            is_first = devices != self._sender(flow, devices)
            for earlier in before:
                is_first &= devices != earlier
            before.append(devices)
            yield layer, devices, is_first

    def _sender(self, flow: TensorFlow, receivers: Positions) -> Positions:
        is_input = flow.producer == INPUT_PRODUCER
        return self.model.nearest_sources[receivers] if is_input else self.layer_devices[flow.producer]

    def _received_bytes(self, group: ReaderGroup, rows: Mapping[int, list[_ReaderRow]], devices: Positions) -> Array:
        """Return, for each plan, the bytes of a tensor that a device receives for the readers in `group`.

        Args:
            group: Readers (layers or sinks) of overlapping regions.
            rows: The readers with their devices in each plan, by index of the reader.
            devices: The receiving device in each plan.
        """
        total = np.zeros(len(self.plan_numbers))
        for piece in group.shared_bytes:
            is_reader = np.zeros(len(self.plan_numbers), bool)
            for _, readers in (row for i in piece.readers for row in rows[i]):
                is_reader |= readers == devices
            total += piece.nbytes * is_reader
        return total

    def _count_transfer(self, flow: TensorFlow, devices: Positions, nbytes: int, chosen: Positions) -> None:
        """Count a transfer of `nbytes` bytes of a tensor, in the plans with the numbers `chosen`.

        `devices` has the receiver in each plan.
        """
        if not len(chosen):
            return
        r, s = devices[chosen], self._sender(flow, devices)[chosen]
        pair = s * self.devices + r
        sender, receiver = (device * len(self.plan_numbers) + chosen for device in (s, r))
        seconds = nbytes * self.model.byte_seconds[pair] + self.model.message_seconds[pair]
        self.sent[sender] += nbytes
        self.received[receiver] += nbytes
        self.sending_seconds[sender] += seconds
        self.receiving_seconds[receiver] += seconds
        costs = self.model.runtimes
        message_s = costs.send[s] + costs.receive[r] + costs.calling[r]
        self.frame_seconds[chosen] += seconds + (message_s + nbytes * (costs.byte[s] + costs.byte[r]))
        latencies = self.layer_latency[flow.producer]
        latencies[chosen] = np.maximum(latencies[chosen], self.model.latency[pair])
        self.largest_latency[chosen] = np.maximum(self.largest_latency[chosen], self.model.link_latency[pair])

    def _add_computing(self) -> None:
        for layer in self.model.flows.live_layers:
            seconds = self.model.seconds[layer][self.layer_devices[layer]]
            self.compute[self._flat_index(self.layer_devices[layer])] += seconds
            self.frame_seconds += seconds
        for nbytes, layers in self.model.flows.weights:
            # A device stores a constant of several layers once. Count it for the first of them.
            for i, layer in enumerate(layers):
                is_first = np.ones(len(self.plan_numbers), bool)
                for earlier in layers[:i]:
                    is_first &= self.layer_devices[layer] != self.layer_devices[earlier]
                self.weights[self._flat_index(self.layer_devices[layer])] += nbytes * is_first
        self.frame_seconds += self.layer_latency.sum(axis=0)

    def _find_peaks(self) -> None:
        """Compute the largest number of bytes of tensors on each device at any time."""
        # The buffers of received tensors exist from the start of the frame. After that, a device's memory use changes
        # only when it computes a layer, or when it has forwarded the inputs (after the first layer).
        used_bytes = self.input_bytes + self.received + self.forwarded_inputs
        produced = dict.fromkeys(self.model.flows.live_layers, 0)
        for flow in self.model.flows.flows:
            if flow.producer != INPUT_PRODUCER:
                produced[flow.producer] += flow.nbytes
        self.peak[:] = used_bytes
        for i, layer in enumerate(self.model.flows.live_layers):
            index = self._flat_index(self.layer_devices[layer])
            with_output = used_bytes[index] + produced[layer]
            self.peak[index] = np.maximum(self.peak[index], with_output)
            used_bytes[index] = with_output - self.released[layer]
            if i == 0:
                used_bytes -= self.forwarded_inputs

    def _build_estimates(self) -> dict[str, NDArray[Any]]:
        model, shape = self.model, (self.devices, len(self.plan_numbers))
        compute, sending, receiving, peak, weights, sent, received = (
            array.reshape(shape)
            for array in (
                self.compute, self.sending_seconds, self.receiving_seconds, self.peak, self.weights, self.sent,
                self.received,
            )
        )  # fmt: skip
        used = np.zeros(shape, bool)
        for devices in self.layer_devices:
            used[devices, self.plan_numbers] = True
        for positions in model.source_and_sink_positions:
            used[list(positions)] = True
        hosts = model.host_matrix
        if model.problem.platform.network.kind == "switch":
            link_s = np.concatenate([hosts @ sending, hosts @ receiving])
        else:
            link_s = sending.sum(axis=0, keepdims=True)
        period = np.maximum(compute.max(axis=0), link_s.max(axis=0) + self.largest_latency)
        active, idle, network = (model.device_powers(kind) for kind in ("active", "idle", "network"))
        frame = active * compute + idle * np.maximum(0.0, self.frame_seconds - compute)
        stream = active * compute + idle * np.maximum(0.0, period - compute) + network * (sending + receiving)
        return {
            "compute_s": compute.T,
            "weights": weights.T,
            "activations": peak.T,
            "sent": sent.T,
            "received": received.T,
            "used": used.T,
            "latency_s": self.frame_seconds,
            "period_s": period,
            "energy_j": (frame * used).sum(axis=0),
            "device_energy_j": (stream * used).T,
            "host_memory": (hosts @ (weights + peak)).T,
        }
