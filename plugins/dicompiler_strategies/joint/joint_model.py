"""The joint problem in numbers: the costs and loads of every choice (way to split a layer), with limits on the loads.

A load is an amount that adds up over layers, such as the bytes on a host or the seconds of a link.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import UsageError
from dicompiler.plugin_api.search import OBJECTIVES
from dicompiler_strategies.joint.variable_elimination import EliminationOrder, build_elimination_order
from dicompiler_strategies.tables.choice_footprints import (
    Floats,
    device_host_matrix,
    needed_bytes,
    output_bytes,
    state_bytes,
)
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
    """Costs to minimise by choosing one way to split each layer, under limits on loads.

    A load is an amount that adds up over layers and edges, such as the bytes on a host or the seconds of a link. An
    edge is a pair of connected layers.

    Attributes:
        node: For each layer, the cost of each choice (way to split it).
        edge: For each edge (i, j), the costs of shape (choices of i, choices of j).
        node_loads: For each layer, the loads of shape (choices, loads).
        edge_loads: For each edge (i, j) that causes loads, the first k loads, of shape (choices of i, choices of j, k).
            The others are 0.
        load_limits: Limit of each load; infinite if there is none.
        is_minimax: True if the objective is the largest load without a limit, instead of the sum of all costs.
        kept_choices: For each layer, the indices that the model's choices have in the cost tables.
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
        """Return each load (such as the bytes on a host) if layer i is split by its choice selection[i]."""
        loads = np.zeros(len(self.load_limits))
        if not len(self.load_limits):
            return loads
        for layer_loads, c in zip(self.node_loads, selection, strict=True):
            loads += layer_loads[c]
        for (i, j), table in self.edge_loads.items():
            loads[: table.shape[2]] += table[selection[i], selection[j]]
        return loads

    def value(self, selection: Sequence[int]) -> float:
        """Return the objective value if layer i is split by its choice selection[i]."""
        if self.is_minimax:
            return float(self.selection_loads(selection).max())
        return float(sum_tables(self.node, self.edge, np.asarray([selection]))[0])

    def fits_limits(self, selection: Sequence[int]) -> bool:
        """Return True if no load (such as the bytes on a host) exceeds its limit, up to rounding errors.

        Layer i is split by its choice (way to split it) number selection[i].
        """
        return bool((self.selection_loads(selection) <= self.load_limits * (1 + 1e-12)).all())

    def priced_tables(self, prices: Floats) -> tuple[tuple[Floats, ...], dict[LayerEdge, Floats]]:
        """Return `node` and `edge` with price · load added for each load, an amount such as the bytes on a host.

        The prices are Lagrange multipliers. The result is the Lagrangian without its constant term.
        """
        if not len(prices):
            return self.node, dict(self.edge)
        node = tuple(costs + load @ prices for costs, load in zip(self.node, self.node_loads, strict=True))
        priced = {edge: self.edge[edge] + load @ prices[: load.shape[2]] for edge, load in self.edge_loads.items()}
        return node, {**self.edge, **priced}

    def keep_choices(self, keep: Sequence[NDArray[np.bool_]]) -> JointModel:
        """Return the model with the choices (ways to split a layer) for which a mask is True.

        `keep` has a mask for each layer.
        """
        kept = [np.flatnonzero(mask) for mask in keep]
        node_loads = zip(self.node_loads, kept, strict=True) if self.node_loads else ()
        return replace(
            self,
            node=tuple(costs[i] for costs, i in zip(self.node, kept, strict=True)),
            edge=restrict_edges(self.edge, kept),
            node_loads=tuple(loads[i] for loads, i in node_loads),
            edge_loads=restrict_edges(self.edge_loads, kept),
            kept_choices=tuple(numbers[i] for numbers, i in zip(self.kept_choices, kept, strict=True)),
        )

    def to_original(self, selection: Sequence[int]) -> tuple[int, ...]:
        return to_original_numbers(self.kept_choices, selection)

    def from_original(self, selection: Sequence[int]) -> tuple[int, ...] | None:
        return to_kept_numbers(self.kept_choices, selection)


def build_joint_model(
    tables: CostTables,
    limits: Mapping[str, float] | None = None,
    powered: Collection[str] | None = None,
    limited_layers: Collection[int] = (),
) -> JointModel:
    """Return the model for the objective of the tables' problem.

    - latency: seconds if each layer begins when all devices have finished the layer before (the barrier model).
    - communication: bytes that are sent.
    - energy: J. Each device draws active power while it computes, and otherwise idle power. The power of the network is
      omitted.
    - throughput: seconds of the busiest device or link (bytes and messages, without latency).
    - memory: bytes of weights on the fullest host.

    Args:
        tables: The cost tables.
        limits: Bytes that weights may occupy, by name of the host; None without limits.
        powered: For energy, the devices that draw idle power; None for all. The result does not exclude plans on other
            devices.
        limited_layers: Positions of layers. The inputs and outputs of each one must fit together with all weights.
    """
    problem, host_matrix = tables.problem, device_host_matrix(tables.problem.platform)
    if problem.objective not in OBJECTIVES:
        raise UsageError(f"cpsat: objective {problem.objective!r} is not supported: use one of {', '.join(OBJECTIVES)}")
    node, edge = _objective_tables(tables, powered)
    host_weights = [nbytes @ host_matrix for nbytes in tables.weight_bytes]
    loads: list[list[Floats]] = [[] for _ in node]
    edge_loads: dict[LayerEdge, Floats] = {}
    if problem.objective == "throughput":
        link_s, edge_loads = link_seconds(tables)
        loads = [[of_links, of_devices] for of_links, of_devices in zip(link_s, tables.compute_seconds, strict=True)]
    elif problem.objective == "memory":
        loads = [[weights] for weights in host_weights]
    load_limits = [np.inf] * sum(load.shape[1] for columns in loads[:1] for load in columns)
    is_minimax = bool(load_limits)
    if limits is not None:
        tensor_bytes = activation_bytes(tables) if limited_layers else ()
        for limited_layer in limited_layers or (-1,):
            for i, (columns, weights) in enumerate(zip(loads, host_weights, strict=True)):
                columns.append(weights + tensor_bytes[i] if i == limited_layer else weights)
            load_limits += [limits[host.name] for host in problem.platform.hosts]
    node_loads = tuple(np.concatenate(columns, axis=1) for columns in loads) if load_limits else ()
    numbers = tuple(np.arange(len(costs)) for costs in node)
    return JointModel(node, edge, node_loads, edge_loads, np.array(load_limits), is_minimax, numbers)


def _objective_tables(
    tables: CostTables, powered: Collection[str] | None
) -> tuple[tuple[Floats, ...], Mapping[LayerEdge, Floats]]:
    """Return the costs of choices and of pairs of choices (`node` and `edge`). Their sum is the objective.

    If the objective is the largest load (throughput, memory), all costs are 0. `powered` are the devices that draw idle
    power; None for all.
    """
    objective, devices = tables.problem.objective, tables.problem.platform.devices
    if objective == "latency":
        return tables.node_seconds, tables.edge_seconds
    if objective == "communication":
        return tables.node_bytes, tables.edge_bytes
    if objective != "energy":
        edge = {e: np.zeros_like(table) for e, table in tables.edge_seconds.items()}
        return tuple(map(np.zeros_like, tables.node_seconds)), edge
    idle = sum(device.power_idle for device in devices if powered is None or device.name in powered)
    extra = np.array([device.power_active - device.power_idle for device in devices])
    times = zip(tables.node_seconds, tables.compute_seconds, strict=True)
    node = tuple(idle * seconds + compute @ extra for seconds, compute in times)
    return node, {e: idle * table for e, table in tables.edge_seconds.items()}


def activation_bytes(tables: CostTables) -> tuple[Floats, ...]:
    """Return the bytes of each layer's inputs and outputs, arrays of shape (choices, hosts).

    A choice is one way to split the layer.
    """
    layers, host_matrix = tables.problem.layers, device_host_matrix(tables.problem.platform)
    host_bytes = []
    for layer, footprint in zip(layers.layers, tables.footprints, strict=True):
        device_bytes = state_bytes(layers, layer, footprint)
        for nbytes in output_bytes(layers, layer, footprint).values():
            device_bytes += nbytes
        for slot in (slot for slot in footprint.needs if slot >= 0):  # Negative numbers are those of states.
            device_bytes += needed_bytes(layers, layer.inputs[slot], footprint, slot)
        host_bytes.append(device_bytes @ host_matrix)
    return tuple(host_bytes)


def link_seconds(tables: CostTables) -> tuple[list[Floats], dict[LayerEdge, Floats]]:
    """Return the seconds for which each layer and each edge (pair of connected layers) occupies each network link.

    Returns:
        For each layer, an array of shape (choices, links). For each edge (i, j), an array of shape (choices of i,
        choices of j, links). A choice is one way to split a layer.
    """
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
    cache: dict[tuple[object, ...], Floats] = {}
    edges = {
        edge: _edge_link_seconds(tables, network, edge, slots, cache) for edge, slots in find_edges(layers).items()
    }
    # A state (tensor for the next frame) must not be sent. A pair of choices that sends it costs more than any plan on
    # one device.
    prohibitive_s = 2 * sum(float(compute.max()) for compute in tables.compute_seconds)
    for (i, j), slots in find_state_edges(layers).items():
        busy = np.where(_edge_link_seconds(tables, network, (i, j), slots, cache) > 0, prohibitive_s, 0.0)
        if i == j:
            node[i] = node[i] + busy[np.arange(len(busy)), np.arange(len(busy))]
        else:
            edge, busy = ((i, j), busy) if i < j else ((j, i), busy.transpose(1, 0, 2))
            edges[edge] = busy + edges[edge] if edge in edges else busy
    return node, edges


def _edge_link_seconds(
    tables: CostTables, network: LinkLoads, edge: LayerEdge, slots: TensorSlots, cache: dict[tuple[object, ...], Floats]
) -> Floats:
    """Return the seconds for which an edge occupies each link, of shape (producer choices, consumer choices, links).

    Args:
        tables: The cost tables.
        network: The loads of the links.
        edge: Positions of the layer that produces tensors, and of the layer that reads them.
        slots: For each of these tensors, the index among the producer's outputs and the consumer's inputs.
        cache: Earlier results, because many edges have equal structure.
    """
    producer, consumer = (tables.footprints[i] for i in edge)
    key = (producer, consumer, slots)
    if key not in cache:
        busy = np.zeros((len(producer.final_seconds), len(consumer.final_seconds), network.byte_seconds.shape[1]))
        for held, sent, needs, item_bytes in flows_on_edge(tables.problem.layers, edge, slots, tables.footprints):
            # One choice of the producing layer at a time, because an array for all of them would be too large.
            for p in range(len(busy)):
                row = slice(p, p + 1)
                busy[row] += network.busy_seconds(bytes_between_devices(held[row], sent[row], needs, item_bytes))
        cache[key] = busy
    return cache[key]
