"""The loads of every stage on every unit. A unit is one device, or several devices that take frames in turn.

    Problem → StageModel

A stage has consecutive layers. Loads are seconds of work, or bytes of memory. Devices of one kind are interchangeable,
so a unit is described by its number of devices of each kind.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dicompiler.plugin_api import Device, LayerShare, Problem
from dicompiler.plugin_api.costs import FREE_RUNTIME, LocalBytes, RuntimeCosts
from dicompiler.plugin_api.search import free_memory
from dicompiler_strategies.genetic.tensor_flows import NetworkFlows, find_flows
from dicompiler_strategies.stages.interval_loads import (
    Floats,
    IntervalTraffic,
    Traffic,
    crossing_bytes,
    interval_activations,
    interval_sums,
    interval_traffic,
    interval_weights,
)
from dicompiler_strategies.stages.turns import MAX_ROUND_FRAMES, deal_frames
from dicompiler_strategies.tables.choice_footprints import source_and_sink

MAX_POSITIONS = 260
"""Largest number of positions between layers at which a stage of a pipeline may begin.

The search needs memory in proportion to the square of this number.
"""
MAX_STATES = 1024
"""Largest number of sets of devices in the search. Sets that differ only in interchangeable devices count as one."""
MAX_TRANSITIONS = 4096
"""Largest number of pairs (set of used devices, devices of the next stage) in the search."""

ROUND_LENGTHS = (1, 2, 3, 4, 6, 12)
"""Allowed numbers of frames after which devices of unequal speed repeat the order in which they take frames.

All numbers divide 12, so that a plan has at most 12 replicas. If all devices share one stage, any number up to
MAX_ROUND_FRAMES is allowed.
"""


@dataclass(frozen=True)
class DeviceKind:
    """A set of interchangeable devices, which have the same costs, memory and links.

    Attributes:
        names: Names of the devices, in platform order.
        is_source: True if the devices have the network's inputs.
        is_sink: True if the devices receive the network's outputs.
    """

    names: tuple[str, ...]
    is_source: bool
    is_sink: bool


@dataclass(frozen=True, eq=False)
class StageUnit:
    """One device that computes a stage, or several that take its frames in turn, with the loads of every stage.

    Entry [i, j] of an array is for the stage that begins at entry i of `StageModel.positions` and ends at entry j.

    Attributes:
        counts: Number of devices of each kind.
        turns: For each frame of a repeating round, the index of its device; devices are numbered in the order of kinds.
        load: The largest load of a device or link of the unit: mean seconds of work for each frame, or bytes of memory.
            It is infinite if the stage does not fit into memory.
        traffic: Seconds for which messages to the unit, and from the unit to the sinks, occupy links.
    """

    counts: tuple[int, ...]
    turns: tuple[int, ...]
    load: Floats
    traffic: Floats


@dataclass(frozen=True, eq=False)
class StageModel:
    """All units of a problem. A unit is one device, or several devices that take frames in turn.

    Attributes:
        kinds: Kinds of devices.
        units: Units that may compute a stage.
        positions: Positions between layers at which stages may begin and end: 0, …, number of layers.
        unused_load: For each kind, the load of a device that computes nothing. It is not 0 for sources and sinks.
        has_shared_medium: True if all messages share one medium. The total traffic is then a load too.
    """

    kinds: tuple[DeviceKind, ...]
    units: tuple[StageUnit, ...]
    positions: tuple[int, ...]
    unused_load: tuple[float, ...]
    has_shared_medium: bool


@dataclass(frozen=True)
class StageRules:
    """Rules for the stages of a pipeline, and the devices that compute them.

    Attributes:
        takes_turns: True if several devices may take the frames of a stage in turn.
        order: Only these devices are used, in this order; () for all devices in any order.
        limits_memory: True if stages must fit into the memory of the hosts.
        counts_readers: True if a tensor counts as sent to each layer that reads it (upper bound), False if once (lower
            bound).
    """

    takes_turns: bool = False
    order: tuple[Device, ...] = ()
    limits_memory: bool = True
    counts_readers: bool = False


def build_stage_model(problem: Problem, rules: StageRules = StageRules()) -> StageModel:
    """Return the loads of every stage (consecutive layers) on every unit (one device, or several in turn).

    Loads are bytes of memory if the objective is memory, else seconds of work for each frame.
    """
    return _ModelBuilder(problem, rules).build()


@dataclass(frozen=True)
class _ModelBuilder:
    problem: Problem
    rules: StageRules

    def build(self) -> StageModel:
        kinds = self._limit_kinds(self._group_devices())
        units = [self._build_unit(kinds, counts) for counts in self._list_units(kinds)]
        shared = self.problem.platform.network.kind != "switch" and not self.is_memory
        unused = tuple(self._unused_load(kind) for kind in kinds)
        return StageModel(tuple(kinds), tuple(units), self.positions, unused, shared)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.rules.order or self.problem.platform.computing_devices

    @cached_property
    def is_memory(self) -> bool:
        return self.problem.objective == "memory"

    @cached_property
    def layer_count(self) -> int:
        return len(self.problem.layers.layers)

    @cached_property
    def flows(self) -> NetworkFlows:
        return find_flows(self.problem.layers)

    @cached_property
    def traffic(self) -> IntervalTraffic:
        return interval_traffic(self.flows, self.positions)

    @property
    def sent(self) -> Traffic:
        return self.traffic.sent_to_readers if self.rules.counts_readers else self.traffic.sent

    @cached_property
    def weights(self) -> Floats:
        return interval_weights(self.flows, self.positions)

    @cached_property
    def sources_and_sinks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return source_and_sink(self.problem)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Positions between layers at which stages (consecutive layers) may begin or end, at most about MAX_POSITIONS.

        Positions that few bytes cross are preferred. No stage begins between the layer that reads a state (a cache) and
        the layer that computes it, because a state stays on its device.
        """
        layers, count = self.problem.layers, self.layer_count
        allowed = np.ones(count + 1, bool)
        for past, present in layers.states:
            ends = [
                i
                for i, layer in enumerate(layers.layers)
                if any(past in node.inputs or present in node.outputs for node in layer.nodes)
            ]
            if ends:
                allowed[min(ends) + 1 : max(ends) + 1] = False
        allowed[[0, count]] = True
        inner = np.flatnonzero(allowed[1:-1]) + 1
        if len(inner) > MAX_POSITIONS:
            received = crossing_bytes(self.flows, count)[inner]
            windows = np.array_split(np.arange(len(inner)), MAX_POSITIONS)
            inner = np.array([inner[window[received[window].argmin()]] for window in windows])
        return (0, *map(int, inner), count)

    def _seconds(self, kind: DeviceKind) -> tuple[float, ...]:
        """Return the seconds of each layer on a device of this kind that also computes the layers before it.

        An engine computes consecutive layers in one call, which changes their times.
        """
        return self._device_seconds[kind.names[0]]

    @cached_property
    def _device_seconds(self) -> Mapping[str, tuple[float, ...]]:
        layers, cost_model = self.problem.layers, self.problem.cost_model
        costs: dict[str, list[float]] = {device.name: [] for device in self.devices}
        # Other layers do not contribute to the network's outputs, so no device computes them.
        live = set(self.flows.live_layers)
        for position, layer in enumerate(layers.layers):
            local = LocalBytes.of_whole_layer(layers, layer)
            for device in self.devices:
                seconds = cost_model.seconds_in_frame(layers, layer, LayerShare(), device, local)
                costs[device.name].append(seconds if position in live else 0.0)
        return {name: tuple(seconds) for name, seconds in costs.items()}

    def _runtime(self, device: str) -> RuntimeCosts:
        return self.problem.runtime_costs.get(device, FREE_RUNTIME)

    def _link_times(self, device: str) -> tuple[float, float]:
        """Return the least seconds per message and per byte of the links between a device and other hosts."""
        platform, costs = self.problem.platform, self._runtime(device)
        links = [platform.link(device, other.name) for other in platform.devices]
        message_s = platform.network.message_overhead_s + costs.gap
        byte_s = [link.transfer_s(1.0) * (1 + costs.header_share) for link in links if link is not None]
        return (message_s, min(byte_s)) if byte_s else (0.0, 0.0)

    def _group_devices(self) -> list[DeviceKind]:
        sources, sinks = self.sources_and_sinks
        hosts = self.problem.platform.host_of
        groups: dict[object, list[str]] = {}
        for device in self.devices:
            costs = () if self.is_memory else (self._device_seconds[device.name], self._runtime(device.name))
            roles = device.name in sources, device.name in sinks
            order = device.name if self.rules.order else ""
            key = (costs, self.memory_limits[hosts[device.name]], self._link_times(device.name), roles, order)
            groups.setdefault(key, []).append(device.name)
        kinds = (DeviceKind(tuple(names), names[0] in sources, names[0] in sinks) for names in groups.values())
        return list(kinds)

    def _limit_kinds(self, kinds: list[DeviceKind]) -> list[DeviceKind]:
        """Remove devices of the slowest kinds until there are at most MAX_STATES sets of devices."""
        rate = {device.name: device.rate for device in self.devices}
        while np.prod([len(kind.names) + 1 for kind in kinds]) > MAX_STATES:
            slowest = min(range(len(kinds)), key=lambda i: (rate[kinds[i].names[0]], len(kinds[i].names) > 1, -i))
            names = kinds[slowest].names[:-1]
            kinds = [
                *kinds[:slowest],
                *([replace(kinds[slowest], names=names)] if names else []),
                *kinds[slowest + 1 :],
            ]
        return kinds

    def _list_units(self, kinds: Sequence[DeviceKind]) -> Iterator[tuple[int, ...]]:
        """Yield the devices of each unit (one device, or several that take frames in turn) as a number of each kind."""
        singles = [tuple(int(i == k) for k in range(len(kinds))) for i in range(len(kinds))]
        yield from singles
        if not self.rules.takes_turns or self.rules.order or self.is_memory or self.problem.layers.states:
            return
        sets = list(itertools.product(*(range(len(kind.names) + 1) for kind in kinds)))
        larger = sorted((counts for counts in sets if sum(counts) > 1), key=lambda counts: (sum(counts), counts))
        yield from larger[: max(0, MAX_TRANSITIONS // len(sets))]

    def _build_unit(self, kinds: Sequence[DeviceKind], counts: tuple[int, ...]) -> StageUnit:
        members = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        totals = [sum(self._seconds(kind)) for kind in members]
        # Devices of equal speed get one frame of a round (repeating order of devices) each. Otherwise faster devices
        # get more.
        has_equal_speeds = max(totals) <= min(totals) * (1 + 1e-9)
        uses_all = all(count == len(kind.names) for kind, count in zip(kinds, counts, strict=True))
        lengths = range(1, MAX_ROUND_FRAMES + 1) if uses_all else ROUND_LENGTHS
        turns = tuple(range(len(members))) if has_equal_speeds else deal_frames(totals, lengths)
        shares = [turns.count(i) / len(turns) for i in range(len(members))]
        pairs = dict.fromkeys(zip(members, shares, strict=True))
        load = np.max([self._kind_load(kind, share) for kind, share in pairs], axis=0)
        # `feeding` is the fraction of frames for which inputs are sent to a device of the unit, and `draining` the
        # fraction for which a device of the unit sends outputs to a sink.
        feeding = sum(share for kind, share in zip(members, shares, strict=True) if not kind.is_source)
        draining = sum(share for kind, share in zip(members, shares, strict=True) if not kind.is_sink)
        times = self._link_times(members[0].names[0])
        traffic = self.traffic.received.weighted(*times) + feeding * self.traffic.inputs.weighted(*times)
        traffic = traffic - (1 - draining) * self.traffic.received_outputs.weighted(*times)
        return StageUnit(counts, turns, load, traffic + draining * self.traffic.outputs.weighted(*times))

    def _kind_load(self, kind: DeviceKind, share: float) -> Floats:
        """Return the load of a device for each possible stage, if it computes the fraction `share` of its frames.

        A load is seconds of work per frame, or bytes of memory; infinite if the stage does not fit into memory.
        """
        memory = self.weights + self._activations(kind)
        load = memory
        if not self.is_memory:
            load = np.maximum(self._busy_seconds(kind, share), self._link_seconds(kind, share))
        return np.where(memory > self.memory_limits[self.problem.platform.host_of[kind.names[0]]], np.inf, load)

    @cached_property
    def memory_limits(self) -> Mapping[str, int]:
        if self.rules.limits_memory:
            return free_memory(self.problem)
        return {host.name: sys.maxsize for host in self.problem.platform.hosts}

    def _activations(self, kind: DeviceKind) -> Floats:
        """Return the bytes of tensors that a device of this kind stores at once, for each possible stage.

        The result is 0 if the whole network fits into the memory of every host.
        """
        total = sum(flow.nbytes for flow in self.flows.flows)
        if not self.is_memory and 2 * total + self.weights[0, -1] <= min(self.memory_limits.values()):
            return np.zeros_like(self.weights)
        return interval_activations(self.flows, self.positions, kind.is_source, kind.is_sink)

    def _received(self, kind: DeviceKind) -> Traffic:
        """Return the tensors that each possible stage receives from earlier stages.

        On a sink, network outputs are omitted, because `IntervalTraffic.other_outputs` counts them already.
        """
        received, outputs = self.traffic.received, self.traffic.received_outputs
        if not kind.is_sink:
            return received
        return Traffic(received.messages - outputs.messages, received.nbytes - outputs.nbytes)

    def _busy_seconds(self, kind: DeviceKind, share: float) -> Floats:
        """Return the seconds per frame for which a device computes, sends and receives, for each possible stage.

        `share` is the fraction of the stage's frames that the device computes.
        """
        costs, traffic = self._runtime(kind.names[0]), self.traffic
        seconds = interval_sums(self._seconds(kind), self.positions)
        seconds = seconds + self._received(kind).weighted(costs.receive, costs.per_byte)
        seconds = seconds + self.sent.weighted(costs.send, costs.per_byte) + costs.call_seconds(1)
        if not kind.is_source:
            seconds = seconds + traffic.inputs.weighted(costs.receive, costs.per_byte)
        if not kind.is_sink:
            seconds = seconds + traffic.outputs.weighted(costs.send, costs.per_byte)
        seconds = share * seconds
        if kind.is_source:
            seconds = seconds + traffic.other_inputs.weighted(costs.send, costs.per_byte)
        if kind.is_sink:
            seconds = seconds + traffic.other_outputs.weighted(costs.receive, costs.per_byte)
        return seconds

    def _link_seconds(self, kind: DeviceKind, share: float) -> Floats:
        """Return the seconds per frame for which a device's link to a switch is busy, for each possible stage.

        The busier direction counts. The result is 0 without a switch. `share` is the fraction of the stage's frames
        that the device computes.
        """
        if self.problem.platform.network.kind != "switch":
            return np.zeros_like(self.weights)
        times, traffic = self._link_times(kind.names[0]), self.traffic
        incoming, outgoing = share * self._received(kind).weighted(*times), share * self.sent.weighted(*times)
        inputs, outputs = traffic.inputs.weighted(*times), traffic.outputs.weighted(*times)
        if kind.is_source:
            # This device also sends the network's inputs to the other devices of its stage, for the frames that these
            # compute.
            outgoing = outgoing + traffic.other_inputs.weighted(*times) + (1 - share) * inputs
        else:
            incoming = incoming + share * inputs
        if kind.is_sink:
            incoming = incoming + traffic.other_outputs.weighted(*times) + (1 - share) * outputs
        else:
            outgoing = outgoing + share * outputs
        return np.maximum(incoming, outgoing)

    def _unused_load(self, kind: DeviceKind) -> float:
        """Return the load of a device that computes nothing: seconds of work per frame, or bytes of memory.

        It is not 0 for a source, which supplies the network's inputs, and for a sink, which receives its outputs.
        """
        inputs, outputs, end = self.traffic.inputs, self.traffic.outputs, -1
        if self.is_memory:
            return float(kind.is_source * inputs.nbytes[0, end] + kind.is_sink * outputs.nbytes[0, end])
        if self.problem.platform.network.kind != "switch":
            return 0.0
        times = self._link_times(kind.names[0])
        sent, received = inputs.weighted(*times)[0, end], outputs.weighted(*times)[0, end]
        return float(max(kind.is_source * sent, kind.is_sink * received))
