"""The objective of a problem as tables: a cost for each choice of a layer, and for each pair of connected choices.

    CostTables + objective → one ObjectiveTables (latency), or one for each set of powered devices (energy)

A choice is one way to split a layer. Powered devices are those that draw idle power during the frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Platform, UsageError
from dicompiler.plugin_api.utilities import did_you_mean
from dicompiler_strategies.tables.choice_footprints import Floats, device_host_matrix, source_and_sink
from dicompiler_strategies.tables.choices import devices_by_rate
from dicompiler_strategies.tables.cost_tables import CostTables, LayerEdge, sum_tables

Selections = NDArray[np.intp]
TABLE_OBJECTIVES = ("latency", "energy")
"""Objectives that are a sum of costs of single layers and of pairs of connected layers."""


def check_objective(strategy: str, objective: str) -> None:
    """Raise UsageError if the objective is not one of TABLE_OBJECTIVES. `strategy` begins the message."""
    if objective not in TABLE_OBJECTIVES:
        known = " or ".join(TABLE_OBJECTIVES)
        close = did_you_mean(objective, TABLE_OBJECTIVES)
        close = close if "did you mean" in close else ""
        raise UsageError(f"{strategy}: objective {objective!r} is not supported: use {known}{close}")


@dataclass(frozen=True, eq=False)
class ObjectiveTables:
    """The problem "choose one way to split each layer such that Σ node + Σ edge is least, within the hosts' memory".

    A selection has the number of one choice (way to split it) for each layer. A limited host has too little
    memory for the weights of some selection.

    Attributes:
        node: For each layer, the cost of each of its choices in s or J, an array of shape (choices,).
        edge: For each pair (i, j) of connected layers, the cost of each pair of their choices in s or J, an array of
            shape (choices of i, choices of j).
        kept_choices: For each layer, the numbers that its choices have in the cost tables, which may have more choices.
        weights: For each layer, the bytes of weights of each choice on each limited host, shape (choices, limited
            hosts).
        limits: Memory of the limited hosts in bytes, shape (limited hosts,).
        families: For each layer, the family number of each choice, shape (choices,). A family has the choices with the
            same kind of split and number of devices, such as "grid 4".
    """

    node: tuple[Floats, ...]
    edge: Mapping[LayerEdge, Floats]
    kept_choices: tuple[Selections, ...]
    weights: tuple[Floats, ...]
    limits: Floats
    families: tuple[Selections, ...]

    def values(self, selections: Selections) -> Floats:
        """Return the cost Σ node + Σ edge of each selection, shape (plans,).

        `selections` has the shape (plans, layers): the number of each layer's choice (way to split it).
        """
        return sum_tables(self.node, self.edge, selections)

    def weight_loads(self, selections: Selections) -> Floats:
        """Return the bytes of weights on each limited host, shape (plans, limited hosts)."""
        loads = np.zeros((len(selections), len(self.limits)))
        for layer_weights, column in zip(self.weights, selections.T, strict=True):
            loads += layer_weights[column]
        return loads

    def relative_excess(self, loads: Floats) -> Floats:
        """Return Σ max(0, load − limit) / limit over the limited hosts, for each plan.

        `loads` are bytes of weights, shape (plans, limited hosts).
        """
        over: Floats = (np.maximum(loads - self.limits, 0.0) / np.maximum(self.limits, 1.0)).sum(axis=-1)
        return over

    @cached_property
    def excess_price(self) -> float:
        """Cost in s or J of a relative excess of 1 over a host's memory, so high that no gain outweighs one byte."""
        worst = sum(float(table.max()) for table in self.node) + sum(float(table.max()) for table in self.edge.values())
        return 1e3 * worst * max(1.0, float(self.limits.max(initial=1.0)))

    @cached_property
    def loss_scale(self) -> float:
        """Unit of the normalised loss: the cost of the cheapest way to split a layer, averaged over layers.

        With this unit, learning rates do not depend on the size of the network or the speed of the devices.
        """
        least = sum(float(table.min()) for table in self.node)
        most = sum(float(table.mean()) for table in (*self.node, *self.edge.values()))
        return (least or most or 1.0) / len(self.node)


def build_objective_tables(
    tables: CostTables, objective: str, reserve: Mapping[str, int] | None = None
) -> tuple[ObjectiveTables, ...]:
    """Return one or more tables. Their smallest minimum is the minimum of the objective.

    For latency, there is one. For energy, there is one for each set of powered devices, because a device that a plan
    uses draws idle power during the whole frame. The costs are exact for plans that use the whole set, and upper bounds
    for others.

    Args:
        tables: The costs of all choices (ways to split layers).
        objective: "latency" or "energy".
        reserve: Bytes of each host that weights must leave free, by host name.
    """
    check_objective("gradient", objective)
    whole = _latency_tables(tables, reserve or {})
    if objective == "latency":
        return (whole,)
    return tuple(_energy_tables(tables, whole, members) for members in _device_sets(tables))


def _latency_tables(tables: CostTables, reserve: Mapping[str, int]) -> ObjectiveTables:
    platform = tables.problem.platform
    place = device_host_matrix(platform)
    limits = np.array([float(host.memory - reserve.get(host.name, 0)) for host in platform.hosts])
    weights = [layer_weights.astype(np.float64) @ place for layer_weights in tables.weight_bytes]
    tight = sum((layer_weights.max(axis=0) for layer_weights in weights), np.zeros(len(limits))) > limits
    names: dict[str, int] = {}
    families = tuple(
        np.array([names.setdefault(_label_family(choice.label), len(names)) for choice in choices])
        for choices in tables.choices
    )
    kept = tuple(map(np.arange, tables.choice_counts))
    chosen = tuple(np.ascontiguousarray(layer_weights[:, tight]) for layer_weights in weights)
    return ObjectiveTables(tables.node_seconds, tables.edge_seconds, kept, chosen, limits[tight], families)


def _label_family(label: str) -> str:
    """Return the kind of split and the number of devices: "height 4 +1 rate" → "height 4"."""
    return " ".join(label.split()[:2])


def _device_sets(tables: CostTables) -> list[frozenset[str]]:
    """Return the sets of powered devices to try: the 1, 2, … fastest devices, all devices, and each single device."""
    devices = [device.name for device in devices_by_rate(tables.problem)]
    counts = tables.options.device_counts or range(2, len(devices) + 1)
    sizes = sorted({1, len(devices), *(count for count in counts if count <= len(devices))})
    teams = [frozenset(devices[:size]) for size in sizes]
    if tables.options.each_device:
        teams += [frozenset((name,)) for name in devices[1:]]
    return teams


def _energy_tables(tables: CostTables, whole: ObjectiveTables, members: frozenset[str]) -> ObjectiveTables:
    """Return the tables with the energy in J of plans that use only the devices `members`, sources and sinks.

    The energy is the sum of three terms:

    - (active power − idle power) · busy seconds of each device,
    - the idle power of `members`, sources and sinks during the whole frame,
    - the power of the network while bytes are sent.

    `whole` are the tables for latency, with the weights and memory limits.
    """
    problem = tables.problem
    source, sink = source_and_sink(problem)
    platform = problem.platform
    on = members | {*source, *sink}
    idle = sum(device.power_idle for device in platform.devices if device.name in on)
    above = np.array([d.power_active - d.power_idle if d.can_compute else 0.0 for d in platform.devices])
    byte = mean_joules_per_byte(platform)
    keep = tuple(
        np.flatnonzero([all(part.device in members for part in choice.parts) for choice in choices])
        for choices in tables.choices
    )
    node = tuple(
        (idle * seconds + np.where(np.isfinite(busy), busy, 0.0) @ above + byte * sent)[places]
        for seconds, busy, sent, places in zip(
            tables.node_seconds, tables.compute_seconds, tables.node_bytes, keep, strict=True
        )
    )
    edge = {
        (i, j): (idle * seconds + byte * tables.edge_bytes[i, j])[np.ix_(keep[i], keep[j])]
        for (i, j), seconds in tables.edge_seconds.items()
    }
    return replace(
        whole,
        node=node,
        edge=edge,
        kept_choices=keep,
        weights=tuple(layer_weights[places] for layer_weights, places in zip(whole.weights, keep, strict=True)),
        families=tuple(numbers[places] for numbers, places in zip(whole.families, keep, strict=True)),
    )


def mean_joules_per_byte(platform: Platform) -> float:
    """Return the energy in J of sender and receiver for one byte, averaged over pairs of devices on different hosts."""
    pairs = [(a, b) for a in platform.devices for b in platform.devices if a.host != b.host]
    joules = [
        link.transfer_s(a.power_network + b.power_network)
        for a, b in pairs
        if (link := platform.link(a.name, b.name)) is not None
    ]
    return sum(joules) / len(joules) if joules else 0.0
