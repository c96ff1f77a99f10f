"""Landscapes: what is made small, as a sum of tables over the layers' choices, with the hosts' memory limits.

Tables + objective → one Landscape (latency), or one for each set of devices that may be switched on (energy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Platform, UsageError, nearest
from dicompiler_strategies.tables.choices import ranked
from dicompiler_strategies.tables.cost_tables import Edge, Tables, total
from dicompiler_strategies.tables.footprints import Floats, on_hosts, source_and_sink

Selections = NDArray[np.intp]
LANDSCAPE_OBJECTIVES = ("latency", "energy")
"""Of dicompiler.base.objectives those that have landscapes."""


def check_objective(objective: str) -> None:
    """UsageError where the objective is none of those that are known here."""
    if objective not in LANDSCAPE_OBJECTIVES:
        known = " and ".join(LANDSCAPE_OBJECTIVES)
        close = nearest(objective, LANDSCAPE_OBJECTIVES)
        close = close if "did you mean" in close else ""
        raise UsageError(f"gradient: objective {objective!r} is not one of {known}, which it knows{close}")


@dataclass(frozen=True, eq=False)
class Landscape:
    """Σ node + Σ edge over the choices of L layers, to be made small under memory limits.

    node: (choices,) of each layer; edge: (choices of i, choices of j) for layers (i, j); in s or J.
    kept: for each layer the places of these choices among those of the tables.
    weights: bytes (choices, hosts) of each layer, limits: bytes (hosts,), of the hosts whose memory could be passed.
    families: (choices,) of each layer, numbers of the kinds of split ("grid 4x2", whatever the
    extra rows and the shares).
    """

    node: tuple[Floats, ...]
    edge: Mapping[Edge, Floats]
    kept: tuple[Selections, ...]
    weights: tuple[Floats, ...]
    limits: Floats
    families: tuple[Selections, ...]

    def values(self, selections: Selections) -> Floats:
        """Σ node + Σ edge (plans,) of selections (plans, layers)."""
        return total(self.node, self.edge, selections)

    def loads(self, selections: Selections) -> Floats:
        """Bytes (plans, hosts) of weights."""
        loads = np.zeros((len(selections), len(self.limits)))
        for layer_weights, column in zip(self.weights, selections.T, strict=True):
            loads += layer_weights[column]
        return loads

    def excess(self, loads: Floats) -> Floats:
        """By how much loads (…, hosts) pass the limits, as shares of these, summed: (…); 0 where all fit."""
        over: Floats = (np.maximum(loads - self.limits, 0.0) / np.maximum(self.limits, 1.0)).sum(axis=-1)
        return over

    @cached_property
    def price(self) -> float:
        """What an excess of 1 costs: so much that no gain pays for a host's last byte."""
        worst = sum(float(table.max()) for table in self.node) + sum(float(table.max()) for table in self.edge.values())
        return 1e3 * worst * max(1.0, float(self.limits.max(initial=1.0)))

    @cached_property
    def scale(self) -> float:
        """The mean over the layers of the cheapest choice's own cost: the unit of a loss that does not depend on how
        large or how fast things are. Where that costs nothing, the mean of all costs."""
        least = sum(float(table.min()) for table in self.node)
        most = sum(float(table.mean()) for table in (*self.node, *self.edge.values()))
        return (least or most or 1.0) / len(self.node)


def landscapes(tables: Tables, objective: str, reserve: Mapping[str, int] | None = None) -> tuple[Landscape, ...]:
    """The landscapes whose minima's minimum is that of the objective over the choices of `tables`.

    latency: the tables as they are. energy: the devices that a plan names idle as long as a frame takes, so there is
    a landscape for the 1, 2, … fastest devices and for each one alone: exact for plans that use all of the set, and
    an upper bound for others. reserve: bytes by host that are kept free of weights. UsageError for other objectives.
    """
    check_objective(objective)
    whole = _latency(tables, reserve or {})
    if objective == "latency":
        return (whole,)
    return tuple(_energy(tables, whole, members) for members in _teams(tables))


def _latency(tables: Tables, reserve: Mapping[str, int]) -> Landscape:
    platform = tables.problem.platform
    place = on_hosts(platform)
    limits = np.array([float(host.memory - reserve.get(host.name, 0)) for host in platform.hosts])
    weights = [held.astype(np.float64) @ place for held in tables.weights]
    tight = sum((held.max(axis=0) for held in weights), np.zeros(len(limits))) > limits
    names: dict[str, int] = {}
    families = tuple(
        np.array([names.setdefault(_family(choice.label), len(names)) for choice in choices])
        for choices in tables.choices
    )
    kept = tuple(map(np.arange, tables.counts))
    chosen = tuple(np.ascontiguousarray(held[:, tight]) for held in weights)
    return Landscape(tables.node, tables.edge, kept, chosen, limits[tight], families)


def _family(label: str) -> str:
    """A choice's kind and on how many devices (or which): "height 4 +1 rate" ⇒ "height 4"."""
    return " ".join(label.split()[:2])


def _teams(tables: Tables) -> list[frozenset[str]]:
    """The sets of devices of which energy knows a landscape: prefixes of the ranking that choices split over (the
    whole of it as well), and each device alone."""
    devices = [device.name for device in ranked(tables.problem)]
    counts = tables.options.counts or range(2, len(devices) + 1)
    sizes = sorted({1, len(devices), *(count for count in counts if count <= len(devices))})
    teams = [frozenset(devices[:size]) for size in sizes]
    if tables.options.each:
        teams += [frozenset((name,)) for name in devices[1:]]
    return teams


def _energy(tables: Tables, whole: Landscape, members: frozenset[str]) -> Landscape:
    """Joule of the plans that name no device but `members`, sources and sinks: in a layer Σ over the devices of
    (active − idle power) · its seconds; in all seconds the idle power of every member; and that of the network."""
    problem = tables.problem
    source, sink = source_and_sink(problem)
    platform = problem.platform
    on = members | {*source, *sink}
    idle = sum(device.power_idle for device in platform.devices if device.name in on)
    above = np.array([d.power_active - d.power_idle if d.computes else 0.0 for d in platform.devices])
    byte = joules_per_byte(platform)
    keep = tuple(
        np.flatnonzero([all(part.device in members for part in choice.parts) for choice in choices])
        for choices in tables.choices
    )
    node = tuple(
        (idle * seconds + np.where(np.isfinite(busy), busy, 0.0) @ above + byte * sent)[places]
        for seconds, busy, sent, places in zip(tables.node, tables.compute, tables.node_traffic, keep, strict=True)
    )
    edge = {
        (i, j): (idle * seconds + byte * tables.traffic[i, j])[np.ix_(keep[i], keep[j])]
        for (i, j), seconds in tables.edge.items()
    }
    return replace(
        whole,
        node=node,
        edge=edge,
        kept=keep,
        weights=tuple(held[places] for held, places in zip(whole.weights, keep, strict=True)),
        families=tuple(numbers[places] for numbers, places in zip(whole.families, keep, strict=True)),
    )


def joules_per_byte(platform: Platform) -> float:
    """What sender and receiver draw for a byte between two hosts, the mean over all pairs of devices."""
    pairs = [(a, b) for a in platform.devices for b in platform.devices if a.host != b.host]
    joules = [
        link.seconds(a.power_network + b.power_network)
        for a, b in pairs
        if (link := platform.link(a.name, b.name)) is not None
    ]
    return sum(joules) / len(joules) if joules else 0.0
