"""The analytic model of whole-layer plans, for thousands of plans at once in numpy: the first level of the search.

Problem → AnalyticModel (tables);   … + assignments (plans, layers) → Estimates: times, bytes, memory and energy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Part, Plan, Problem, Share
from dicompiler_strategies.genetic.flows import INPUT, SINK, Flow, Flows, Held, flows
from dicompiler_strategies.tables.lines import Runtimes, line_times, runtimes

Array = NDArray[np.float64]
Places = NDArray[np.intp]

CHUNK = 2048
"""Plans that are evaluated at once: as many as keep the arrays in the processor's cache."""


@dataclass(frozen=True)
class Estimates:
    """What plans come to for one frame. P plans, D devices and H hosts in platform order.

    compute_s (P, D): seconds that a device computes.
    weights, activations, sent, received (P, D): bytes, as in `DeviceMetrics`. used (P, D): the plan names the device.
    latency_s, period_s, energy_j (P,): as in `Metrics`. device_energy_j (P, D): Joule between a frame of a stream
    and the next. host_memory (P, H): bytes.
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
        """(P,): the numbers that are to be small, see `dicompiler.search.fronts.FRONT_OBJECTIVES`."""
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
class AnalyticModel:
    """The tables of a problem: everything that does not depend on who computes which layer.

    seconds (L, D); per pair of devices (sender · D + receiver): `per_byte`, `per_message` and `latency` in seconds,
    see `line_times`; `lines`: what of the latency is the network's.
    sources: for each device the source that it has the inputs from.

    Assumed: every layer whole on one device. The numbers are then those of `Problem.estimate`, but for five things:
    received pieces of a tensor whose readers on a device overlap without being equal are all held until the last of
    these readers (never less than in truth); what runtimes take for messages to several devices is added up; types
    below a byte are not rounded up for each piece; a message is counted for what readers share, not for each piece; the
    inputs from several sources on a switch are sent one after another.
    """

    problem: Problem
    flows: Flows = field(repr=False)
    seconds: Array = field(repr=False)
    per_byte: Array = field(repr=False)
    per_message: Array = field(repr=False)
    latency: Array = field(repr=False)
    lines: Array = field(repr=False)
    runtimes: Runtimes = field(repr=False)
    sources: tuple[int, ...] = field(repr=False)

    def evaluate(self, assignments: NDArray[Any]) -> Estimates:
        """assignments (P, L): the place in the platform of the device of each layer."""
        parts = [_Batch(self, chunk).run() for chunk in _chunks(np.asarray(assignments, np.intp))]
        return Estimates(*(np.concatenate([part[name] for part in parts]) for name in Estimates.__annotations__))

    def plan(self, assignment: NDArray[Any]) -> Plan:
        """The plan of one row (L,) of assignments."""
        devices = self.problem.platform.devices
        names = [layer.name for layer in self.problem.layers.layers]
        return self.problem.plan({name: (Part(devices[d].name),) for name, d in zip(names, assignment, strict=True)})

    @cached_property
    def hosts(self) -> Array:
        """(H, D): 1 where the device is the host's."""
        platform = self.problem.platform
        return np.array([[d.host == host.name for d in platform.devices] for host in platform.hosts], float)

    @cached_property
    def weights(self) -> Array:
        """(L,): bytes of each layer's constants; shared ones are the first layer's."""
        total = np.zeros(len(self.seconds))
        for nbytes, layers in self.flows.weights:
            total[layers[0]] += nbytes
        return total

    @cached_property
    def named(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The places of the sources and of the sinks."""
        return _named(self.problem, self.problem.source), _named(self.problem, self.problem.sink)

    def power(self, kind: str) -> Array:
        """(D, 1) in W: "active", "idle" or "network"."""
        return np.array([[getattr(device, f"power_{kind}")] for device in self.problem.platform.devices])


def analytic_model(problem: Problem) -> AnalyticModel:
    """The tables of `problem`, in tens of milliseconds for a big network."""
    layers, platform = problem.layers, problem.platform
    return AnalyticModel(
        problem,
        flows(layers),
        np.concatenate([problem.cost.fill(layers, layer, [Share()], platform.devices) for layer in layers.layers]),
        *line_times(problem),
        platform.times[2].ravel(),
        runtimes(problem),
        _sources(problem),
    )


def _named(problem: Problem, names: tuple[str, ...]) -> tuple[int, ...]:
    place = {device.name: i for i, device in enumerate(problem.platform.devices)}
    return tuple(place[name] for name in names) or (0,)


def _sources(problem: Problem) -> tuple[int, ...]:
    """For each device where it has the inputs from: itself, a source on its host, or the first."""
    devices, sources = problem.platform.devices, _named(problem, problem.source)
    senders = []
    for i, device in enumerate(devices):
        near = [s for s in sources if devices[s].host == device.host]
        senders.append(i if i in sources else (near or sources)[0])
    return tuple(senders)


def _chunks(assignments: Places) -> list[Places]:
    return [assignments[start : start + CHUNK] for start in range(0, len(assignments), CHUNK)] or [assignments]


class _Batch:
    """One chunk of plans on its way through the model. Plans are the last axis of every array: (…, P)."""

    def __init__(self, model: AnalyticModel, assignments: Places) -> None:
        self.model = model
        self.row = np.arange(len(assignments))
        self.at = np.ascontiguousarray(assignments.T)  # (L, P): the device of each layer
        self.devices = len(model.problem.platform.devices)
        size = self.devices * len(self.row)  # device-major: the place of device d of plan p is d · P + p
        self.compute, self.weights, self.sent, self.received = (np.zeros(size) for _ in range(4))
        self.out, self.into = np.zeros(size), np.zeros(size)  # seconds on the lines
        self.held = np.zeros(size)  # inputs on their sources from the start on
        self.passing = np.zeros(size)  # inputs that a source only sends: there in the first step, then gone
        self.peak = np.zeros(size)
        layers = len(self.at)
        self.released = np.zeros((layers, len(self.row)))  # bytes that the layer's device lets go after it
        self.waited = np.zeros(
            (layers + 1, len(self.row))
        )  # latency of what a layer sends; the last row: of the inputs
        self.farthest = np.zeros(len(self.row))  # latency of the longest line that is taken
        self.time = np.zeros(len(self.row))

    def run(self) -> dict[str, NDArray[Any]]:
        """The fields of Estimates."""
        for flow in self.model.flows.flows:
            if flow.producer == INPUT:
                self._hold_input(flow)
            else:
                self.released[flow.producer] += flow.nbytes * self._let_go(flow, self.at[flow.producer])
            for held in flow.held:
                self._travel(flow, held)
        self._compute()
        self._remember()
        return self._estimates()

    def _place(self, devices: Places) -> Places:
        return devices * len(self.row) + self.row

    def _readers(self, flow: Flow, chosen: Iterable[int]) -> list[tuple[int, Places]]:
        """(layer or SINK, its device in each plan) for each of the chosen readers; a row for each of the sinks."""
        rows: list[tuple[int, Places]] = []
        for i in chosen:
            place = flow.readers[i]
            if place == SINK:
                rows += [(SINK, np.full(len(self.row), sink)) for sink in self.model.named[1]]
            else:
                rows.append((place, self.at[place]))
        return rows

    def _let_go(self, flow: Flow, owners: Places) -> NDArray[np.bool_]:
        """Lets a tensor go on the devices `owners` that have it whole, after its last reader there (never where that is
        a sink). Returns where nobody reads it."""
        unread = np.ones(len(self.row), bool)
        for place, devices in reversed(self._readers(flow, range(len(flow.readers)))):
            here = devices == owners
            if place != SINK:
                self.released[place] += flow.nbytes * (here & unread)
            unread &= ~here
        return unread

    def _hold_input(self, flow: Flow) -> None:
        """A source holds an input from the start to its last reader there; one that only sends it, for a step."""
        for source in self.model.named[0]:
            owners = np.full(len(self.row), source)
            unread = self._let_go(flow, owners)
            served = [d for d, sender in enumerate(self.model.sources) if sender == source != d]
            sends = np.zeros(len(self.row), bool)
            for _, devices in self._readers(flow, range(len(flow.readers))):
                sends |= np.isin(devices, served)
            self.held[self._place(owners)] += flow.nbytes * ~unread
            self.passing[self._place(owners)] += flow.nbytes * (unread & sends)

    def _travel(self, flow: Flow, held: Held) -> None:
        """Sends each atom to every device with a reader of it, once; it stays there up to the last reader."""
        rows = {i: self._readers(flow, (i,)) for i in held.readers}
        for atom in held.atoms:
            for _, devices, first in self._first_on_each(flow, (row for i in atom.readers for row in rows[i])):
                self._deliver(flow, devices, atom.nbytes, np.flatnonzero(first))
        for place, devices, last in self._first_on_each(flow, reversed([row for i in held.readers for row in rows[i]])):
            if place != SINK and last.any():
                self.released[place] += last * self._present(held, rows, devices)

    def _first_on_each(
        self, flow: Flow, rows: Iterable[tuple[int, Places]]
    ) -> Iterator[tuple[int, Places, NDArray[np.bool_]]]:
        """Each row (reader, its devices) with the plans in which it is the first on its device, of those that a
        transfer must reach."""
        before: list[Places] = []
        for place, devices in rows:
            first = devices != self._sender(flow, devices)
            for earlier in before:
                first &= devices != earlier
            before.append(devices)
            yield place, devices, first

    def _sender(self, flow: Flow, devices: Places) -> Places:
        return np.asarray(self.model.sources)[devices] if flow.producer == INPUT else self.at[flow.producer]

    def _present(self, held: Held, rows: Mapping[int, list[tuple[int, Places]]], devices: Places) -> Array:
        """(P,): bytes that `devices` have received."""
        total = np.zeros(len(self.row))
        for atom in held.atoms:
            here = np.zeros(len(self.row), bool)
            for _, reader in (row for i in atom.readers for row in rows[i]):
                here |= reader == devices
            total += atom.nbytes * here
        return total

    def _deliver(self, flow: Flow, devices: Places, nbytes: int, chosen: Places) -> None:
        """Counts a transfer of `nbytes` to `devices` in the `chosen` plans."""
        if not len(chosen):
            return
        receiver = devices[chosen]
        sender = self._sender(flow, devices)[chosen]
        pair = sender * self.devices + receiver
        sender, receiver = (device * len(self.row) + chosen for device in (sender, receiver))
        seconds = nbytes * self.model.per_byte[pair] + self.model.per_message[pair]
        self.sent[sender] += nbytes
        self.received[receiver] += nbytes
        self.out[sender] += seconds
        self.into[receiver] += seconds
        costs = self.model.runtimes
        s, r = np.divmod(pair, self.devices)
        handled = costs.send[s] + costs.receive[r] + costs.calling[r] + nbytes * (costs.byte[s] + costs.byte[r])
        self.time[chosen] += seconds + handled
        waited = self.waited[flow.producer]
        waited[chosen] = np.maximum(waited[chosen], self.model.latency[pair])
        self.farthest[chosen] = np.maximum(self.farthest[chosen], self.model.lines[pair])

    def _compute(self) -> None:
        for layer in self.model.flows.live:
            seconds = self.model.seconds[layer][self.at[layer]]
            self.compute[self._place(self.at[layer])] += seconds
            self.time += seconds
        for nbytes, layers in self.model.flows.weights:
            for i, layer in enumerate(layers):  # shared ones count once on a device
                first = np.ones(len(self.row), bool)
                for earlier in layers[:i]:
                    first &= self.at[layer] != self.at[earlier]
                self.weights[self._place(self.at[layer])] += nbytes * first
        self.time += self.waited.sum(axis=0)

    def _remember(self) -> None:
        """The most that each device holds. In a step only its own device's memory changes, so that no other is looked
        at; a received tensor's buffer is there from the start of the frame."""
        held = self.held + self.received + self.passing
        produced = dict.fromkeys(self.model.flows.live, 0)
        for flow in self.model.flows.flows:
            if flow.producer != INPUT:
                produced[flow.producer] += flow.nbytes
        self.peak[:] = held
        for i, layer in enumerate(self.model.flows.live):
            place = self._place(self.at[layer])
            now = held[place] + produced[layer]
            self.peak[place] = np.maximum(self.peak[place], now)
            held[place] = now - self.released[layer]
            if i == 0:
                held -= self.passing

    def _estimates(self) -> dict[str, NDArray[Any]]:
        model, shape = self.model, (self.devices, len(self.row))
        compute, out, into = (array.reshape(shape) for array in (self.compute, self.out, self.into))
        memory = (self.weights + self.peak).reshape(shape)
        used = np.zeros(shape[0] * shape[1], bool)
        for devices in (*self.at, *(np.full(len(self.row), d) for d in (*model.named[0], *model.named[1]))):
            used[self._place(devices)] = True
        used = used.reshape(shape)
        switch = model.problem.platform.network.kind == "switch"
        lines = np.concatenate([model.hosts @ out, model.hosts @ into]) if switch else out.sum(axis=0, keepdims=True)
        period = np.maximum(compute.max(axis=0), lines.max(axis=0) + self.farthest)
        active, idle, network = (model.power(kind) for kind in ("active", "idle", "network"))
        frame = active * compute + idle * np.maximum(0.0, self.time - compute)
        stream = active * compute + idle * np.maximum(0.0, period - compute) + network * (out + into)
        return {
            "compute_s": compute.T,
            "weights": self.weights.reshape(shape).T,
            "activations": self.peak.reshape(shape).T,
            "sent": self.sent.reshape(shape).T,
            "received": self.received.reshape(shape).T,
            "used": used.T,
            "latency_s": self.time,
            "period_s": period,
            "energy_j": (frame * used).sum(axis=0),
            "device_energy_j": (stream * used).T,
            "host_memory": (model.hosts @ memory).T,
        }
