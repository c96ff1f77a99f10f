"""What whole-layer plans share, found once for a network: who reads which tensor, and what that comes to in bytes.

LayerGraph → Flows: the layers that are read, their weights, the tensors with their readers.   No device, no plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import (
    LayerGraph,
    Region,
    Share,
    ShareTask,
    contains,
    full,
    intersect,
    raw_nbytes,
    sent_dtype,
    share_task,
    volume,
    weight_regions,
)

SINK = -1
INPUT = -1


@dataclass(frozen=True)
class Atom:
    """Bytes of a tensor that all of `readers` (places in the flow's readers) need, and no other reader."""

    nbytes: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """Readers of a flow whose needs overlap: what a device receives for them it holds until the last of them."""

    readers: tuple[int, ...]
    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class Flow:
    """One tensor on its way. producer: the layer's place in layer order (INPUT: a graph input). nbytes: all of it.
    readers: places of layers in layer order; for a graph output SINK comes last."""

    producer: int
    nbytes: int
    readers: tuple[int, ...]
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Flows:
    """live: the layers whose output is read, by their places in layer order. flows: the tensors that they and the
    inputs make. weights: bytes of constants → the live layers that hold them (one, or those that share them)."""

    live: tuple[int, ...]
    flows: tuple[Flow, ...]
    weights: tuple[tuple[int, tuple[int, ...]], ...]


def flows(layers: LayerGraph) -> Flows:
    """What follows from the layers alone where each is computed whole, on whatever device."""
    tasks = [share_task(layers, layer, Share()) for layer in layers.layers]
    live = _live(layers, tasks)
    readers: dict[str, list[tuple[int, Region]]] = {}
    for i in live:
        for key, need in tasks[i].needs.items():
            readers.setdefault(key.tensor, []).append((i, need))
    for name in layers.delivered:
        shape = layers.tensors[name].shape
        if shape is not None:
            readers.setdefault(name, []).append((SINK, full(shape)))
    producers = [(name, INPUT) for name in layers.inputs]
    producers += [(key.tensor, i) for i in live for key, region in tasks[i].outputs.items() if region is not None]
    tensor_flows = [_flow(layers, name, producer, readers.get(name, [])) for name, producer in producers]
    return Flows(live, tuple(flow for flow in tensor_flows if flow is not None), _weights(layers, tasks, live))


def _live(layers: LayerGraph, tasks: Sequence[ShareTask]) -> tuple[int, ...]:
    wanted = set(layers.outputs)
    live = []
    for i in reversed(range(len(tasks))):
        if wanted.intersection(layers.layers[i].outputs):
            live.append(i)
            wanted.update(key.tensor for key in tasks[i].needs)
    return tuple(reversed(live))


def _weights(
    layers: LayerGraph, tasks: Sequence[ShareTask], live: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    owners: dict[tuple[str, Region], list[int]] = {}
    sizes: dict[tuple[str, Region], int] = {}
    for i in live:
        for key, nbytes in weight_regions(layers, tasks[i]).items():
            owners.setdefault(key, []).append(i)
            sizes[key] = nbytes
    total: dict[tuple[int, ...], int] = {}
    for key, places in owners.items():
        total[tuple(places)] = total.get(tuple(places), 0) + sizes[key]
    return tuple((nbytes, places) for places, nbytes in total.items())


def _flow(layers: LayerGraph, name: str, producer: int, readers: Sequence[tuple[int, Region]]) -> Flow | None:
    tensor = layers.tensors[name]
    if tensor.shape is None:
        return None
    needs = [need for _, need in readers]
    held = tuple(Held(group, _atoms(sent_dtype(layers, name), needs, group)) for group in _overlapping(needs))
    return Flow(producer, raw_nbytes(tensor.dtype, tensor.shape), tuple(place for place, _ in readers), held)


def _overlapping(needs: Sequence[Region]) -> tuple[tuple[int, ...], ...]:
    """The connected components of needs that overlap."""
    groups: list[list[int]] = []
    for i, need in enumerate(needs):
        touching = [group for group in groups if any(intersect(need, needs[j]) or need == needs[j] for j in group)]
        groups = [group for group in groups if group not in touching]
        groups.append(sorted({i, *itertools.chain.from_iterable(touching)}))
    return tuple(tuple(group) for group in sorted(groups))


def _atoms(dtype: int, needs: Sequence[Region], group: Sequence[int]) -> tuple[Atom, ...]:
    """The needs of a group cut along each other's borders, cells of the same readers together."""
    borders = [sorted({edge for i in group for edge in needs[i][axis]}) for axis in range(len(needs[group[0]]))]
    elements: dict[tuple[int, ...], int] = {}
    for cell in itertools.product(*(tuple(itertools.pairwise(edges)) for edges in borders)):
        readers = tuple(i for i in group if contains(needs[i], cell))
        if readers:
            elements[readers] = elements.get(readers, 0) + volume(cell)
    return tuple(Atom(raw_nbytes(dtype, (count,)), readers) for readers, count in elements.items())
