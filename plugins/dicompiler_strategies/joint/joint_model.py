"""The joint problem in numbers: costs to minimise, and loads with limits.

CostTables + objective → JointModel
JointModel + selection → value and loads
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import UsageError
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.search import OBJECTIVES
from dicompiler_strategies.joint.variable_elimination import EliminationOrder, build_elimination_order
from dicompiler_strategies.tables.choice_footprints import Floats, box_elements, device_host_matrix, state_slots
from dicompiler_strategies.tables.cost_tables import (
    CostTables,
    LayerEdge,
    TensorSlots,
    bytes_between_devices,
    find_edges,
    find_state_edges,
    flows_at_ends,
    flows_on_edge,
    restrict_edges,
    sum_tables,
    to_kept_numbers,
    to_original_numbers,
)
from dicompiler_strategies.tables.link_loads import LinkLoads, build_link_loads

Numbers = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class JointModel:
    """Minimise Σ node + Σ edge, or if `is_minimax` the largest unlimited load.

    Every load stays within its limit.

    A load is an amount that adds up over layers and edges, such as the bytes on a host or the seconds of a link.

    Attributes:
        node: Cost (choices,) of each layer.
        edge: (i, j) → cost (choices of i, choices of j).
        node_loads: Loads (choices, loads) of each layer.
        edge_loads: (i, j) → loads (choices, choices, k), for edges that cause any of the first k loads.
        load_limits: Limit (loads,) of each load; infinite if there is none.
        is_minimax: The objective is the largest load without a limit.
        kept_choices: For each layer, the original numbers of the choices that are left.
    """

    node: tuple[Floats, ...]
    edge: Mapping[LayerEdge, Floats]
    node_loads: tuple[Floats, ...] = ()
    edge_loads: Mapping[LayerEdge, Floats] = field(default_factory=dict)
    load_limits: Floats = field(default_factory=lambda: np.zeros(0))
    is_minimax: bool = False
    kept_choices: tuple[Numbers, ...] = ()

    @cached_property
    def elimination_order(self) -> EliminationOrder:
        return build_elimination_order([len(costs) for costs in self.node], list(self.edge))

    def selection_loads(self, selection: Sequence[int]) -> Floats:
        """Return the loads (loads,) of a selection."""
        loads = np.zeros(len(self.load_limits))
        if not len(self.load_limits):
            return loads
        for layer_loads, c in zip(self.node_loads, selection, strict=True):
            loads += layer_loads[c]
        for (i, j), table in self.edge_loads.items():
            loads[: table.shape[2]] += table[selection[i], selection[j]]
        return loads

    def value(self, selection: Sequence[int]) -> float:
        """Return the value of the objective."""
        if self.is_minimax:
            return float(self.selection_loads(selection).max())
        return float(sum_tables(self.node, self.edge, np.asarray([selection]))[0])

    def fits_limits(self, selection: Sequence[int]) -> bool:
        """Return True if every load is within its limit."""
        return (
            bool((self.selection_loads(selection) <= self.load_limits * (1 + 1e-12)).all())
            if len(self.load_limits)
            else True
        )

    def priced_tables(self, prices: Floats) -> tuple[tuple[Floats, ...], dict[LayerEdge, Floats]]:
        """Return (node, edge) with each load added at its price: the Lagrangian without its constant."""
        if not len(prices):
            return self.node, dict(self.edge)
        node = tuple(costs + load @ prices for costs, load in zip(self.node, self.node_loads, strict=True))
        edge = dict(self.edge)
        for e, load in self.edge_loads.items():
            edge[e] = edge[e] + load @ prices[: load.shape[2]]
        return node, edge

    def keep_choices(self, keep: Sequence[NDArray[np.bool_]]) -> JointModel:
        """Return the model with only these choices, given as a mask (choices,) for each layer."""
        kept = [np.flatnonzero(mask) for mask in keep]
        return replace(
            self,
            node=tuple(costs[i] for costs, i in zip(self.node, kept, strict=True)),
            edge=restrict_edges(self.edge, kept),
            node_loads=tuple(loads[i] for loads, i in zip(self.node_loads, kept, strict=True))
            if self.node_loads
            else (),
            edge_loads=restrict_edges(self.edge_loads, kept),
            kept_choices=tuple(numbers[i] for numbers, i in zip(self.kept_choices, kept, strict=True)),
        )

    def to_original(self, selection: Sequence[int]) -> tuple[int, ...]:
        """Translate a selection to the original numbers of the choices."""
        return to_original_numbers(self.kept_choices, selection)

    def from_original(self, selection: Sequence[int]) -> tuple[int, ...] | None:
        """Translate a selection of original numbers; None if one of its choices is not left."""
        return to_kept_numbers(self.kept_choices, selection)


def build_joint_model(
    tables: CostTables,
    limits: Mapping[str, float] | None = None,
    powered: Collection[str] | None = None,
    limited_layers: Collection[int] = (),
) -> JointModel:
    """Return the model for the objective of the tables' problem.

    - latency: seconds of the barrier model.
    - communication: bytes that are sent.
    - energy: J. Each device draws active power while it computes, and idle power for the rest of the latency. The power
      of the network is left out.
    - throughput: seconds of the busiest device or link (bytes and messages, without latency).
    - memory: bytes of weights on the fullest host.

    Args:
        tables: The cost tables.
        limits: Host → bytes that the weights of its devices may take.
        powered: For energy, the devices that draw idle power; by default all. The choices must use no others.
        limited_layers: Positions of layers whose tensors must fit within the limits together with all weights.
    """
    problem, host_matrix = tables.problem, device_host_matrix(tables.problem.platform)
    if problem.objective not in OBJECTIVES:
        raise UsageError(f"cpsat: objective {problem.objective!r} is not supported: use one of {', '.join(OBJECTIVES)}")
    node, edge = _objective_tables(tables, powered)
    loads: list[list[Floats]] = [[] for _ in node]
    load_edge: dict[LayerEdge, Floats] = {}
    if problem.objective == "throughput":
        on_links, load_edge = link_seconds(tables)
        loads = [[busy, compute] for busy, compute in zip(on_links, tables.compute_seconds, strict=True)]
    elif problem.objective == "memory":
        loads = [[held @ host_matrix] for held in tables.weight_bytes]
    load_limits = [np.inf] * sum(load.shape[1] for columns in loads[:1] for load in columns)
    minimax = bool(load_limits)
    if limits is not None:
        tensor_bytes = activation_bytes(tables) if limited_layers else ()
        for layer in limited_layers or (-1,):
            for i, (columns, held) in enumerate(zip(loads, tables.weight_bytes, strict=True)):
                columns.append(held @ host_matrix + tensor_bytes[i] if i == layer else held @ host_matrix)
            load_limits += [limits[host.name] for host in problem.platform.hosts]
    return JointModel(
        node,
        edge,
        tuple(np.concatenate(columns, axis=1) for columns in loads) if load_limits else (),
        load_edge,
        np.array(load_limits),
        minimax,
        tuple(np.arange(len(costs)) for costs in node),
    )


def _objective_tables(
    tables: CostTables, powered: Collection[str] | None
) -> tuple[tuple[Floats, ...], Mapping[LayerEdge, Floats]]:
    """Return (node, edge) of an objective that is a sum, and zeros for one that is a maximum."""
    objective, devices = tables.problem.objective, tables.problem.platform.devices
    if objective == "latency":
        return tables.node_seconds, tables.edge_seconds
    if objective == "communication":
        return tables.node_bytes, tables.edge_bytes
    if objective != "energy":
        return tuple(map(np.zeros_like, tables.node_seconds)), {
            e: np.zeros_like(table) for e, table in tables.edge_seconds.items()
        }
    idle = sum(device.power_idle for device in devices if powered is None or device.name in powered)
    extra = np.array([device.power_active - device.power_idle for device in devices])
    node = tuple(
        idle * time + compute @ extra for time, compute in zip(tables.node_seconds, tables.compute_seconds, strict=True)
    )
    return node, {e: idle * table for e, table in tables.edge_seconds.items()}


def activation_bytes(tables: CostTables) -> tuple[Floats, ...]:
    """Return for each layer the bytes (choices, hosts) of its inputs and outputs."""
    layers, place = tables.problem.layers, device_host_matrix(tables.problem.platform)
    on_each_host = []
    for layer, footprint in zip(layers.layers, tables.footprints, strict=True):
        held = np.zeros(footprint.final_seconds.shape)
        names = dict(enumerate(layer.inputs)) | {slot: name for name, slot in state_slots(layers, layer).items()}
        for slot, needs in footprint.needs.items():
            item = raw_nbytes(layers.tensors[names[slot]].dtype, (1,))
            held += item * sum(need.sign * box_elements(need.boxes) for need in needs)
        for slot, boxes in footprint.produced.items():
            held += raw_nbytes(layers.tensors[layer.outputs[slot]].dtype, (1,)) * box_elements(boxes)
        on_each_host.append(held @ place)
    return tuple(on_each_host)


def link_seconds(tables: CostTables) -> tuple[list[Floats], dict[LayerEdge, Floats]]:
    """Return the seconds of each link: (choices, links) by layer, (choices, choices, links) by edge."""
    problem = tables.problem
    network, layers = build_link_loads(problem), problem.layers
    node = []
    for layer, footprint in zip(layers.layers, tables.footprints, strict=True):
        sent = footprint.merged_bytes.copy()
        inputs, outputs = flows_at_ends(problem, layer, footprint)
        for flow in inputs:
            sent += bytes_between_devices(*flow)[0]
        for flow in outputs:
            sent += bytes_between_devices(*flow)[:, 0]
        node.append(network.busy_seconds(sent))
    known: dict[tuple[object, ...], Floats] = {}
    edge: dict[LayerEdge, Floats] = {}
    for ends, slots in find_edges(layers).items():
        edge[ends] = _edge_link_seconds(tables, network, ends, slots, known)
    # States are never sent: such choices cost more than any plan on one device.
    prohibitive_s = 2 * sum(float(compute.max()) for compute in tables.compute_seconds)
    for (i, j), slots in find_state_edges(layers).items():
        busy = np.where(_edge_link_seconds(tables, network, (i, j), slots, known) > 0, prohibitive_s, 0.0)
        if i == j:
            node[i] = node[i] + busy[np.arange(len(busy)), np.arange(len(busy))]
        else:
            ends, busy = ((i, j), busy) if i < j else ((j, i), busy.transpose(1, 0, 2))
            edge[ends] = busy + edge[ends] if ends in edge else busy
    return node, edge


def _edge_link_seconds(
    tables: CostTables, network: LinkLoads, ends: LayerEdge, slots: TensorSlots, known: dict[tuple[object, ...], Floats]
) -> Floats:
    """Return the seconds (choices, choices, links) of an edge; `known` caches those of equal edges."""
    producer, consumer = (tables.footprints[i] for i in ends)
    key = (producer, consumer, slots)
    if key not in known:
        busy = np.zeros((len(producer.final_seconds), len(consumer.final_seconds), network.byte_seconds.shape[1]))
        for held, shares, needs, item in flows_on_edge(tables.problem.layers, ends, slots, tables.footprints):
            for p in range(len(busy)):  # One at a time, because the array of all device pairs would be large.
                at = slice(p, p + 1)
                busy[at] += network.busy_seconds(bytes_between_devices(held[at], shares[at], needs, item))
        known[key] = busy
    return known[key]
