"""Facts that all whole-layer plans share: the readers of each tensor and the bytes that they need.

LayerGraph → NetworkFlows: the layers that are read, their weights, and the tensors with their readers
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import LayerGraph, LayerShare, Region
from dicompiler.plugin_api.costs import sent_dtype, weight_regions
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.regions import ShareTask, contains, full_region, intersect, make_share_task, volume

SINK_PLACE = -1
INPUT_PLACE = -1


@dataclass(frozen=True)
class SharedBytes:
    """Bytes of a tensor that exactly these readers need.

    Attributes:
        nbytes: Number of bytes.
        readers: Positions in the flow's readers.
    """

    nbytes: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ReaderGroup:
    """Readers of a flow with overlapping needs; a device holds the received pieces until the last of them."""

    readers: tuple[int, ...]
    shared_bytes: tuple[SharedBytes, ...]


@dataclass(frozen=True)
class TensorFlow:
    """One tensor with its readers.

    Attributes:
        producer: Position of the layer that computes it; INPUT_PLACE for a network input.
        nbytes: Bytes of the whole tensor.
        readers: Positions of the layers that read it; SINK_PLACE comes last for a network output.
        groups: Readers with overlapping needs.
    """

    producer: int
    nbytes: int
    readers: tuple[int, ...]
    groups: tuple[ReaderGroup, ...]


@dataclass(frozen=True)
class NetworkFlows:
    """All tensors of a network.

    Attributes:
        live_layers: Positions of the layers that are read.
        flows: Tensors of these layers and of the network's inputs.
        weights: (bytes of constants, positions of the layers that hold them); several layers if they share them.
    """

    live_layers: tuple[int, ...]
    flows: tuple[TensorFlow, ...]
    weights: tuple[tuple[int, tuple[int, ...]], ...]


def find_flows(layers: LayerGraph) -> NetworkFlows:
    """Return the flows of a network with whole layers."""
    tasks = [make_share_task(layers, layer, LayerShare()) for layer in layers.layers]
    live = _find_live_layers(layers, tasks)
    readers: dict[str, list[tuple[int, Region]]] = {}
    for i in live:
        for key, need in tasks[i].needs.items():
            readers.setdefault(key.tensor, []).append((i, need))
    for name in layers.delivered_outputs:
        shape = layers.tensors[name].shape
        if shape is not None:
            readers.setdefault(name, []).append((SINK_PLACE, full_region(shape)))
    producers = [(name, INPUT_PLACE) for name in layers.inputs]
    producers += [(key.tensor, i) for i in live for key, region in tasks[i].outputs.items() if region is not None]
    tensor_flows = [_build_flow(layers, name, producer, readers.get(name, [])) for name, producer in producers]
    return NetworkFlows(
        live, tuple(flow for flow in tensor_flows if flow is not None), _shared_weights(layers, tasks, live)
    )


def _find_live_layers(layers: LayerGraph, tasks: Sequence[ShareTask]) -> tuple[int, ...]:
    wanted = set(layers.outputs)
    live = []
    for i in reversed(range(len(tasks))):
        if wanted.intersection(layers.layers[i].outputs):
            live.append(i)
            wanted.update(key.tensor for key in tasks[i].needs)
    return tuple(reversed(live))


def _shared_weights(
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


def _build_flow(
    layers: LayerGraph, name: str, producer: int, readers: Sequence[tuple[int, Region]]
) -> TensorFlow | None:
    tensor = layers.tensors[name]
    if tensor.shape is None:
        return None
    needs = [need for _, need in readers]
    held = tuple(
        ReaderGroup(group, _split_by_readers(sent_dtype(layers, name), needs, group))
        for group in _overlapping_groups(needs)
    )
    return TensorFlow(producer, raw_nbytes(tensor.dtype, tensor.shape), tuple(place for place, _ in readers), held)


def _overlapping_groups(needs: Sequence[Region]) -> tuple[tuple[int, ...], ...]:
    """Return the connected components of overlapping needs."""
    groups: list[list[int]] = []
    for i, need in enumerate(needs):
        touching = [group for group in groups if any(intersect(need, needs[j]) or need == needs[j] for j in group)]
        groups = [group for group in groups if group not in touching]
        groups.append(sorted({i, *itertools.chain.from_iterable(touching)}))
    return tuple(tuple(group) for group in sorted(groups))


def _split_by_readers(dtype: int, needs: Sequence[Region], group: Sequence[int]) -> tuple[SharedBytes, ...]:
    """Cut the needs of a group along each other's borders, and return the bytes for each set of readers."""
    borders = [sorted({edge for i in group for edge in needs[i][axis]}) for axis in range(len(needs[group[0]]))]
    elements: dict[tuple[int, ...], int] = {}
    for cell in itertools.product(*(tuple(itertools.pairwise(edges)) for edges in borders)):
        readers = tuple(i for i in group if contains(needs[i], cell))
        if readers:
            elements[readers] = elements.get(readers, 0) + volume(cell)
    return tuple(SharedBytes(raw_nbytes(dtype, (count,)), readers) for readers, count in elements.items())
