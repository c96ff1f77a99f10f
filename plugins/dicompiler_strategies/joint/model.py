"""The joint problem in numbers: a cost to make small over one choice for each layer, and loads that have limits.

Tables + objective → Model;   Model + selection → value, loads.   Relaxation and CP-SAT work on Models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.errors import UsageError
from dicompiler.base.objectives import OBJECTIVES
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler_strategies.joint.elimination import Graph, graph
from dicompiler_strategies.tables.cost_tables import Edge, Tables, edges, lines, sent_between, total
from dicompiler_strategies.tables.footprints import Need, holders

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Model:
    """Minimise Σ node + Σ edge, or, where `minimax`, the largest of the loads; every load stays within its cap.

    node: (choices,) by layer; edge: (choices, choices) by edge. load_node: (choices, loads) by layer; load_edge:
    (choices, choices, first loads) by edge, for the edges that load something (they load the first ones). caps:
    (loads,), endless where there is none.
    alive: the choices that are left, as numbers of the choices that there were at first.
    """

    node: tuple[Floats, ...]
    edge: Mapping[Edge, Floats]
    load_node: tuple[Floats, ...] = ()
    load_edge: Mapping[Edge, Floats] = field(default_factory=dict)
    caps: Floats = field(default_factory=lambda: np.zeros(0))
    minimax: bool = False
    alive: tuple[Ints, ...] = ()

    @cached_property
    def graph(self) -> Graph:
        return graph([len(own) for own in self.node], list(self.edge))

    def loads(self, selection: Sequence[int]) -> Floats:
        """The loads (loads,) of a selection."""
        found = np.zeros(len(self.caps))
        if not len(self.caps):
            return found
        for own, c in zip(self.load_node, selection, strict=True):
            found += own[c]
        for (i, j), table in self.load_edge.items():
            found[: table.shape[2]] += table[selection[i], selection[j]]
        return found

    def value(self, selection: Sequence[int]) -> float:
        """What is made small."""
        if self.minimax:
            return float(self.loads(selection).max())
        return float(total(self.node, self.edge, np.asarray([selection]))[0])

    def fits(self, selection: Sequence[int]) -> bool:
        """Whether every load is within its cap."""
        return bool((self.loads(selection) <= self.caps * (1 + 1e-12)).all()) if len(self.caps) else True

    def weighed(self, weights: Floats) -> tuple[tuple[Floats, ...], dict[Edge, Floats]]:
        """(node, edge) with the loads added, each times its weight."""
        if not len(weights):
            return self.node, dict(self.edge)
        node = tuple(own + load @ weights for own, load in zip(self.node, self.load_node, strict=True))
        edge = dict(self.edge)
        for e, load in self.load_edge.items():
            edge[e] = edge[e] + load @ weights[: load.shape[2]]
        return node, edge

    def kept(self, keep: Sequence[NDArray[np.bool_]]) -> Model:
        """The model with those choices alone."""
        at = [np.flatnonzero(mask) for mask in keep]
        return replace(
            self,
            node=tuple(own[i] for own, i in zip(self.node, at, strict=True)),
            edge={(i, j): table[np.ix_(at[i], at[j])] for (i, j), table in self.edge.items()},
            load_node=tuple(own[i] for own, i in zip(self.load_node, at, strict=True)) if self.load_node else (),
            load_edge={(i, j): table[np.ix_(at[i], at[j])] for (i, j), table in self.load_edge.items()},
            alive=tuple(own[i] for own, i in zip(self.alive, at, strict=True)),
        )

    def first(self, selection: Sequence[int]) -> tuple[int, ...]:
        """A selection in the numbers of the choices that there were at first."""
        return tuple(int(own[c]) for own, c in zip(self.alive, selection, strict=True))

    def now(self, selection: Sequence[int]) -> tuple[int, ...] | None:
        """The other way round; None where one of the choices is gone."""
        found = []
        for own, c in zip(self.alive, selection, strict=True):
            at = np.flatnonzero(own == c)
            if not len(at):
                return None
            found.append(int(at[0]))
        return tuple(found)


def model(
    tables: Tables,
    limits: Mapping[str, float] | None = None,
    on: Collection[str] | None = None,
    full: Collection[int] = (),
) -> Model:
    """The model for the objective of the tables' problem.

    latency: the barrier model's seconds. communication: bytes. energy: Joule: what each device draws while it computes,
    and idles for the rest of the latency (the network's power is not in it); `on` names the devices that idle, by
    default all: the choices must use no others. throughput: seconds of the busiest device
    or line (messages and their bytes, no latency). memory: bytes of weights, and of the largest layer's inputs and
    outputs, on the fullest host. limits: host → bytes that the weights of its devices may take, and with them the
    tensors of each layer in `full` (by place) while it is computed.
    """
    problem = tables.problem
    if problem.objective not in OBJECTIVES:
        raise UsageError(f"cpsat: objective {problem.objective!r} is none that it knows: {', '.join(OBJECTIVES)}")
    node, edge = tables.node, dict(tables.edge)
    load_node: list[list[Floats]] = [[] for _ in node]
    load_edge: dict[Edge, Floats] = {}
    caps: list[float] = []
    devices, hosts = problem.platform.devices, problem.platform.hosts
    place = np.array([[device.host == host.name for host in hosts] for device in devices], np.float64)
    minimax = problem.objective in ("throughput", "memory")
    if problem.objective == "communication":
        node, edge = tables.node_traffic, dict(tables.traffic)
    elif problem.objective == "energy":
        idle = sum(device.power_idle for device in devices if on is None or device.name in on)
        extra = np.array([device.power_active - device.power_idle for device in devices])
        node = tuple(idle * own + compute @ extra for own, compute in zip(tables.node, tables.compute, strict=True))
        edge = {e: idle * table for e, table in tables.edge.items()}
    elif minimax:
        node, edge = tuple(np.zeros_like(own) for own in node), {e: np.zeros_like(t) for e, t in edge.items()}
    if problem.objective == "throughput":
        on_lines, load_edge = line_loads(tables)
        for own, compute, busy in zip(load_node, tables.compute, on_lines, strict=True):
            own += [busy, compute]
        caps += [np.inf] * (len(devices) + on_lines[0].shape[1])
    elif problem.objective == "memory":
        for own, held in zip(load_node, tables.weights, strict=True):
            own.append(held @ place)
        caps += [np.inf] * len(hosts)
    if limits is not None:
        live = activations(tables) if full else ()
        for layer in full or (-1,):
            for i, (own, held) in enumerate(zip(load_node, tables.weights, strict=True)):
                own.append(held @ place + live[i] if i == layer else held @ place)
            caps += [limits[host.name] for host in hosts]
    return Model(
        node,
        edge,
        tuple(np.concatenate(own, axis=1) for own in load_node) if caps else (),
        load_edge,
        np.array(caps),
        minimax,
        tuple(np.arange(len(own)) for own in node),
    )


def activations(tables: Tables) -> tuple[Floats, ...]:
    """Bytes (choices, hosts) by layer that a host holds at least while it computes the layer: inputs and outputs."""
    problem = tables.problem
    hosts = problem.platform.hosts
    place = np.array([[d.host == host.name for host in hosts] for d in problem.platform.devices], np.float64)
    found = []
    for layer, print_ in zip(problem.layers.layers, tables.footprints, strict=True):
        held = np.zeros(print_.final.shape)
        for slot, needs in print_.needs.items():
            item = raw_nbytes(problem.layers.tensors[layer.inputs[slot]].dtype, (1,))
            held += item * sum(need.sign * _sizes(need.boxes) for need in needs)
        for slot, made in print_.made.items():
            held += raw_nbytes(problem.layers.tensors[layer.outputs[slot]].dtype, (1,)) * _sizes(made)
        found.append(held @ place)
    return tuple(found)


def _sizes(boxes: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = (boxes[..., 1] - boxes[..., 0]).prod(axis=-1)
    return found


def line_loads(tables: Tables) -> tuple[list[Floats], dict[Edge, Floats]]:
    """Seconds that each of the network's lines is busy for a layer (choices, lines) and for an edge (choices, choices,
    lines): the loads that the tables' edges take the largest of."""
    problem = tables.problem
    network, layers = lines(problem.platform), problem.layers
    node = []
    plan = problem.plan({layer.name: () for layer in layers.layers})
    for layer, own in zip(layers.layers, tables.footprints, strict=True):
        sent = own.merged.copy()
        for slot, tensor in enumerate(layer.inputs):
            if tensor in layers.inputs and slot in own.needs:
                there, first = holders(problem, tensor, plan.source), holders(problem, tensor, plan.source[:1])
                sent += sent_between(there, first, own.needs[slot], _item(tables, tensor))[0]
        for slot, tensor in enumerate(layer.outputs):
            if tensor in layers.outputs and slot in own.made:
                wanted = (Need(holders(problem, tensor, plan.sink)),)
                sent += sent_between(own.made[slot], own.shares[slot], wanted, _item(tables, tensor))[:, 0]
        node.append(network.loads(sent))
    memory: dict[tuple[object, ...], Floats] = {}
    edge = {}
    for (i, j), slots in edges(layers).items():
        producer, consumer = tables.footprints[i], tables.footprints[j]
        key = (producer, consumer, slots)
        if key not in memory:
            found = np.zeros((len(producer.final), len(consumer.final), network.seconds.shape[1]))
            for out, slot in slots:
                if out in producer.made and slot in consumer.needs:
                    item = _item(tables, layers.layers[j].inputs[slot])
                    for p in range(len(found)):  # one at a time: all pairs of devices of all choices are many
                        at = slice(p, p + 1)
                        held, shares = producer.made[out][at], producer.shares[out][at]
                        found[at] += network.loads(sent_between(held, shares, consumer.needs[slot], item))
            memory[key] = found
        edge[i, j] = memory[key]
    return node, edge


def _item(tables: Tables, tensor: str) -> int:
    return raw_nbytes(tables.problem.layers.tensors[tensor].dtype, (1,))
