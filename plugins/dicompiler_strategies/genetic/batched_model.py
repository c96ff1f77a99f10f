"""A model that evaluates thousands of whole-layer plans at once: the first level of the search.

Problem → BatchedModel
BatchedModel + assignments (plans, layers) → PlanEstimates: times, bytes, memory and energy
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
    INPUT_PLACE,
    SINK_PLACE,
    NetworkFlows,
    ReaderGroup,
    TensorFlow,
    find_flows,
)
from dicompiler_strategies.tables.link_loads import RuntimeArrays, build_runtime_arrays, pair_times

Array = NDArray[np.float64]
Places = NDArray[np.intp]

CHUNK_PLANS = 2048
"""Number of plans that are evaluated at once, so that the arrays fit into the processor's cache."""


@dataclass(frozen=True)
class PlanEstimates:
    """Estimates of P plans for one frame; D devices and H hosts in platform order.

    Attributes:
        compute_s: Seconds (P, D) that each device computes.
        weights: Bytes (P, D), as in `DeviceMetrics`.
        activations: Bytes (P, D), as in `DeviceMetrics`.
        sent: Bytes (P, D), as in `DeviceMetrics`.
        received: Bytes (P, D), as in `DeviceMetrics`.
        used: True (P, D) if the plan names the device.
        latency_s: Seconds (P,), as in `Metrics`.
        period_s: Seconds (P,), as in `Metrics`.
        energy_j: J (P,), as in `Metrics`.
        device_energy_j: J (P, D) for each frame of a stream.
        host_memory: Bytes (P, H).
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
        """Return the values (P,) of an objective of FRONT_OBJECTIVES, which are to be minimised."""
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
    """Everything about a problem that does not depend on the assignment of layers to devices.

    Every layer is whole on one device. The results are then those of `Problem.estimate`, with five exceptions:

    - Received pieces of a tensor whose readers on a device overlap without being equal are all held until the last of
      these readers, which is never less than the true memory.
    - The runtime costs of messages to several devices are added up.
    - Types below a byte are not rounded up for each piece.
    - A message is counted for the elements that readers share, not for each piece.
    - Inputs from several sources on a switch are sent one after another.

    Attributes:
        problem: The problem.
        flows: Tensors and their readers.
        seconds: Seconds (L, D) of each layer on each device.
        byte_seconds: Seconds per byte for each pair of devices (sender · D + receiver).
        message_seconds: Seconds per message for each pair.
        latency: Latency in seconds for each pair, see `pair_times`.
        link_latency: The network's part of the latency for each pair.
        runtimes: Costs of the runtimes.
        nearest_sources: For each device, the source that sends it the inputs.
    """

    problem: Problem
    flows: NetworkFlows = field(repr=False)
    seconds: Array = field(repr=False)
    byte_seconds: Array = field(repr=False)
    message_seconds: Array = field(repr=False)
    latency: Array = field(repr=False)
    link_latency: Array = field(repr=False)
    runtimes: RuntimeArrays = field(repr=False)
    nearest_sources: tuple[int, ...] = field(repr=False)

    def evaluate(self, assignments: NDArray[Any]) -> PlanEstimates:
        """Return the estimates of plans, given the platform position (P, L) of each layer's device."""
        parts = [_Batch(self, chunk).run() for chunk in _split_chunks(np.asarray(assignments, np.intp))]
        return PlanEstimates(
            *(np.concatenate([part[name] for part in parts]) for name in PlanEstimates.__annotations__)
        )

    def plan(self, assignment: NDArray[Any]) -> Plan:
        """Return the plan of one row (L,) of assignments."""
        devices = self.problem.platform.devices
        names = [layer.name for layer in self.problem.layers.layers]
        return self.problem.build_plan(
            {name: (Part(devices[d].name),) for name, d in zip(names, assignment, strict=True)}
        )

    @cached_property
    def host_matrix(self) -> Array:
        """Matrix (H, D) that is 1 if the device is on the host."""
        platform = self.problem.platform
        return np.array([[d.host == host.name for d in platform.devices] for host in platform.hosts], float)

    @cached_property
    def weight_bytes(self) -> Array:
        """Bytes (L,) of each layer's constants; shared constants are counted for the first layer."""
        total = np.zeros(len(self.seconds))
        for nbytes, layers in self.flows.weights:
            total[layers[0]] += nbytes
        return total

    @cached_property
    def source_and_sink_places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Platform positions of the sources and of the sinks."""
        return _device_places(self.problem, self.problem.source), _device_places(self.problem, self.problem.sink)

    def device_powers(self, kind: str) -> Array:
        """Return the power (D, 1) in W: "active", "idle" or "network"."""
        return np.array([[getattr(device, f"power_{kind}")] for device in self.problem.platform.devices])


def build_batched_model(problem: Problem) -> BatchedModel:
    """Return the model of a problem, within tens of milliseconds for a large network."""
    layers, platform = problem.layers, problem.platform
    return BatchedModel(
        problem,
        find_flows(layers),
        np.concatenate(
            [
                problem.cost_model.seconds_table(layers, layer, [LayerShare()], platform.devices)
                for layer in layers.layers
            ]
        ),
        *pair_times(problem),
        platform.transfer_times[2].ravel(),
        build_runtime_arrays(problem),
        _nearest_sources(problem),
    )


def _device_places(problem: Problem, names: tuple[str, ...]) -> tuple[int, ...]:
    place = {device.name: i for i, device in enumerate(problem.platform.devices)}
    return tuple(place[name] for name in names) or (0,)


def _nearest_sources(problem: Problem) -> tuple[int, ...]:
    """Return for each device the source that sends it the inputs: itself, one on its host, or the first."""
    devices, sources = problem.platform.devices, _device_places(problem, problem.source)
    senders = []
    for i, device in enumerate(devices):
        near = [s for s in sources if devices[s].host == device.host]
        senders.append(i if i in sources else (near or sources)[0])
    return tuple(senders)


def _split_chunks(assignments: Places) -> list[Places]:
    return [assignments[start : start + CHUNK_PLANS] for start in range(0, len(assignments), CHUNK_PLANS)] or [
        assignments
    ]


class _Batch:
    """Evaluation of one chunk of plans. Plans are the last axis of every array."""

    def __init__(self, model: BatchedModel, assignments: Places) -> None:
        self.model = model
        self.plan_numbers = np.arange(len(assignments))
        self.layer_devices = np.ascontiguousarray(assignments.T)  # (L, P)
        self.devices = len(model.problem.platform.devices)
        size = self.devices * len(self.plan_numbers)  # Device-major: device d of plan p has the index d · P + p.
        self.compute, self.weights, self.sent, self.received = (np.zeros(size) for _ in range(4))
        self.sending_seconds, self.receiving_seconds = np.zeros(size), np.zeros(size)  # On the links.
        self.held = np.zeros(size)  # Inputs on their sources, from the start of the frame.
        self.forwarded_inputs = np.zeros(size)  # Inputs that a source only sends; held in the first step only.
        self.peak = np.zeros(size)
        layers = len(self.layer_devices)
        self.released = np.zeros((layers, len(self.plan_numbers)))  # Bytes that the device frees after it.
        # Latency of each layer's transfers; the last row is for the network's inputs.
        self.layer_latency = np.zeros((layers + 1, len(self.plan_numbers)))
        self.largest_latency = np.zeros(len(self.plan_numbers))  # Of all links that are used.
        self.frame_seconds = np.zeros(len(self.plan_numbers))

    def run(self) -> dict[str, NDArray[Any]]:
        """Return the fields of PlanEstimates."""
        for flow in self.model.flows.flows:
            if flow.producer == INPUT_PLACE:
                self._hold_input(flow)
            else:
                self.released[flow.producer] += flow.nbytes * self._release(flow, self.layer_devices[flow.producer])
            for held in flow.groups:
                self._send_tensor(flow, held)
        self._add_computing()
        self._find_peaks()
        return self._build_estimates()

    def _flat_index(self, devices: Places) -> Places:
        return devices * len(self.plan_numbers) + self.plan_numbers

    def _reader_rows(self, flow: TensorFlow, chosen: Iterable[int]) -> list[tuple[int, Places]]:
        """Return (layer or SINK_PLACE, its device in each plan) for each reader; one row for each sink."""
        rows: list[tuple[int, Places]] = []
        for i in chosen:
            place = flow.readers[i]
            if place == SINK_PLACE:
                rows += [
                    (SINK_PLACE, np.full(len(self.plan_numbers), sink)) for sink in self.model.source_and_sink_places[1]
                ]
            else:
                rows.append((place, self.layer_devices[place]))
        return rows

    def _release(self, flow: TensorFlow, owners: Places) -> NDArray[np.bool_]:
        """Release a tensor after the last reader on its owner; return the plans without such a reader.

        A sink never releases a tensor.
        """
        unread = np.ones(len(self.plan_numbers), bool)
        for place, devices in reversed(self._reader_rows(flow, range(len(flow.readers)))):
            here = devices == owners
            if place != SINK_PLACE:
                self.released[place] += flow.nbytes * (here & unread)
            unread &= ~here
        return unread

    def _hold_input(self, flow: TensorFlow) -> None:
        """Count a network input until its last reader on the source; for one step if only forwarded."""
        for source in self.model.source_and_sink_places[0]:
            owners = np.full(len(self.plan_numbers), source)
            unread = self._release(flow, owners)
            served = [d for d, sender in enumerate(self.model.nearest_sources) if sender == source != d]
            sends = np.zeros(len(self.plan_numbers), bool)
            for _, devices in self._reader_rows(flow, range(len(flow.readers))):
                sends |= np.isin(devices, served)
            self.held[self._flat_index(owners)] += flow.nbytes * ~unread
            self.forwarded_inputs[self._flat_index(owners)] += flow.nbytes * (unread & sends)

    def _send_tensor(self, flow: TensorFlow, held: ReaderGroup) -> None:
        """Send each shared piece once to every device with a reader; it is held there until the last reader."""
        rows = {i: self._reader_rows(flow, (i,)) for i in held.readers}
        for atom in held.shared_bytes:
            for _, devices, first in self._first_on_each(flow, (row for i in atom.readers for row in rows[i])):
                self._count_transfer(flow, devices, atom.nbytes, np.flatnonzero(first))
        for place, devices, last in self._first_on_each(flow, reversed([row for i in held.readers for row in rows[i]])):
            if place != SINK_PLACE and last.any():
                self.released[place] += last * self._received_bytes(held, rows, devices)

    def _first_on_each(
        self, flow: TensorFlow, rows: Iterable[tuple[int, Places]]
    ) -> Iterator[tuple[int, Places, NDArray[np.bool_]]]:
        """Yield each row with a mask of the plans in which it is the first on its device and needs a transfer."""
        before: list[Places] = []
        for place, devices in rows:
            first = devices != self._sender(flow, devices)
            for earlier in before:
                first &= devices != earlier
            before.append(devices)
            yield place, devices, first

    def _sender(self, flow: TensorFlow, devices: Places) -> Places:
        return (
            np.asarray(self.model.nearest_sources)[devices]
            if flow.producer == INPUT_PLACE
            else self.layer_devices[flow.producer]
        )

    def _received_bytes(
        self, held: ReaderGroup, rows: Mapping[int, list[tuple[int, Places]]], devices: Places
    ) -> Array:
        """Return the bytes (P,) that `devices` have received."""
        total = np.zeros(len(self.plan_numbers))
        for atom in held.shared_bytes:
            here = np.zeros(len(self.plan_numbers), bool)
            for _, reader in (row for i in atom.readers for row in rows[i]):
                here |= reader == devices
            total += atom.nbytes * here
        return total

    def _count_transfer(self, flow: TensorFlow, devices: Places, nbytes: int, chosen: Places) -> None:
        """Count a transfer of `nbytes` to `devices` in the chosen plans."""
        if not len(chosen):
            return
        receiver = devices[chosen]
        sender = self._sender(flow, devices)[chosen]
        pair = sender * self.devices + receiver
        sender, receiver = (device * len(self.plan_numbers) + chosen for device in (sender, receiver))
        seconds = nbytes * self.model.byte_seconds[pair] + self.model.message_seconds[pair]
        self.sent[sender] += nbytes
        self.received[receiver] += nbytes
        self.sending_seconds[sender] += seconds
        self.receiving_seconds[receiver] += seconds
        runtimes = self.model.runtimes
        s, r = np.divmod(pair, self.devices)
        handling_s = (
            runtimes.send[s]
            + runtimes.receive[r]
            + runtimes.calling[r]
            + nbytes * (runtimes.byte[s] + runtimes.byte[r])
        )
        self.frame_seconds[chosen] += seconds + handling_s
        latencies = self.layer_latency[flow.producer]
        latencies[chosen] = np.maximum(latencies[chosen], self.model.latency[pair])
        self.largest_latency[chosen] = np.maximum(self.largest_latency[chosen], self.model.link_latency[pair])

    def _add_computing(self) -> None:
        for layer in self.model.flows.live_layers:
            seconds = self.model.seconds[layer][self.layer_devices[layer]]
            self.compute[self._flat_index(self.layer_devices[layer])] += seconds
            self.frame_seconds += seconds
        for nbytes, layers in self.model.flows.weights:
            for i, layer in enumerate(layers):  # Shared constants count once on a device.
                first = np.ones(len(self.plan_numbers), bool)
                for earlier in layers[:i]:
                    first &= self.layer_devices[layer] != self.layer_devices[earlier]
                self.weights[self._flat_index(self.layer_devices[layer])] += nbytes * first
        self.frame_seconds += self.layer_latency.sum(axis=0)

    def _find_peaks(self) -> None:
        """Find the largest memory use of each device, which only changes in the device's own steps.

        The buffer of a received tensor exists from the start of the frame.
        """
        held = self.held + self.received + self.forwarded_inputs
        produced = dict.fromkeys(self.model.flows.live_layers, 0)
        for flow in self.model.flows.flows:
            if flow.producer != INPUT_PLACE:
                produced[flow.producer] += flow.nbytes
        self.peak[:] = held
        for i, layer in enumerate(self.model.flows.live_layers):
            place = self._flat_index(self.layer_devices[layer])
            now = held[place] + produced[layer]
            self.peak[place] = np.maximum(self.peak[place], now)
            held[place] = now - self.released[layer]
            if i == 0:
                held -= self.forwarded_inputs

    def _build_estimates(self) -> dict[str, NDArray[Any]]:
        model, shape = self.model, (self.devices, len(self.plan_numbers))
        compute, out, into = (
            array.reshape(shape) for array in (self.compute, self.sending_seconds, self.receiving_seconds)
        )
        memory = (self.weights + self.peak).reshape(shape)
        used = np.zeros(shape[0] * shape[1], bool)
        for devices in (
            *self.layer_devices,
            *(
                np.full(len(self.plan_numbers), d)
                for d in (*model.source_and_sink_places[0], *model.source_and_sink_places[1])
            ),
        ):
            used[self._flat_index(devices)] = True
        used = used.reshape(shape)
        switch = model.problem.platform.network.kind == "switch"
        lines = (
            np.concatenate([model.host_matrix @ out, model.host_matrix @ into])
            if switch
            else out.sum(axis=0, keepdims=True)
        )
        period = np.maximum(compute.max(axis=0), lines.max(axis=0) + self.largest_latency)
        active, idle, network = (model.device_powers(kind) for kind in ("active", "idle", "network"))
        frame = active * compute + idle * np.maximum(0.0, self.frame_seconds - compute)
        stream = active * compute + idle * np.maximum(0.0, period - compute) + network * (out + into)
        return {
            "compute_s": compute.T,
            "weights": self.weights.reshape(shape).T,
            "activations": self.peak.reshape(shape).T,
            "sent": self.sent.reshape(shape).T,
            "received": self.received.reshape(shape).T,
            "used": used.T,
            "latency_s": self.frame_seconds,
            "period_s": period,
            "energy_j": (frame * used).sum(axis=0),
            "device_energy_j": (stream * used).T,
            "host_memory": (model.host_matrix @ memory).T,
        }
