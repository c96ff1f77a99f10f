"""The tensors of a network with the layers that read them, and the bytes that each of these layers needs.

These facts are the same for all plans in which each layer is whole on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import LayerGraph, LayerShare, Region
from dicompiler.plugin_api.costs import sent_nbytes, weight_regions
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.regions import ShareTask, contains, full_region, intersect, make_share_task, volume

SINK_READER = -1
"""Reader of a network output: a sink (device that receives the outputs) instead of a layer position."""
INPUT_PRODUCER = -1
"""Producer of a network input, instead of a layer position."""


@dataclass(frozen=True)
class SharedBytes:
    """Some bytes of a tensor that the same readers (layers or sinks) need.

    Attributes:
        nbytes: Number of bytes.
        readers: The readers, as indices in `TensorFlow.readers`.
    """

    nbytes: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ReaderGroup:
    """Readers of overlapping regions of a tensor.

    A device keeps all elements that it received for these readers until it has computed the last of them.

    Attributes:
        readers: The readers, as indices in `TensorFlow.readers`.
        shared_bytes: For each set of readers that need the same elements, the bytes of these elements.
    """

    readers: tuple[int, ...]
    shared_bytes: tuple[SharedBytes, ...]


@dataclass(frozen=True)
class TensorFlow:
    """One tensor with the layers that read it.

    Attributes:
        producer: Position of the layer that computes the tensor; INPUT_PRODUCER for a network input.
        nbytes: Bytes of the whole tensor.
        readers: Positions of the layers that read the tensor. For a network output, SINK_READER is the last one.
        groups: The readers in groups: readers that need overlapping regions are in one group.
    """

    producer: int
    nbytes: int
    readers: tuple[int, ...]
    groups: tuple[ReaderGroup, ...]


@dataclass(frozen=True)
class NetworkFlows:
    """All tensors of a network.

    Attributes:
        live_layers: Positions of the layers that contribute to the network's outputs.
        flows: The outputs of these layers, and the network's inputs.
        weights: For each set of layers that read the same constants: the bytes of the constants, and the positions of
            the layers.
    """

    live_layers: tuple[int, ...]
    flows: tuple[TensorFlow, ...]
    weights: tuple[tuple[int, tuple[int, ...]], ...]


def find_flows(layers: LayerGraph) -> NetworkFlows:
    tasks = [make_share_task(layers, layer, LayerShare()) for layer in layers.layers]
    live = _find_live_layers(layers, tasks)
    readers: dict[str, list[tuple[int, Region]]] = {}
    for i in live:
        for key, need in tasks[i].needs.items():
            readers.setdefault(key.tensor, []).append((i, need))
    for name in layers.delivered_outputs:
        shape = layers.tensors[name].shape
        if shape is not None:
            readers.setdefault(name, []).append((SINK_READER, full_region(shape)))
    producers = [(name, INPUT_PRODUCER) for name in layers.inputs]
    producers += [(key.tensor, i) for i in live for key, region in tasks[i].outputs.items() if region is not None]
    flows = [_build_flow(layers, name, producer, readers.get(name, [])) for name, producer in producers]
    return NetworkFlows(live, tuple(filter(None, flows)), _shared_weights(layers, tasks, live))


def _find_live_layers(layers: LayerGraph, tasks: Sequence[ShareTask]) -> tuple[int, ...]:
    read = set(layers.outputs)
    live = []
    for i in reversed(range(len(tasks))):
        if read.intersection(layers.layers[i].outputs):
            live.append(i)
            read.update(key.tensor for key in tasks[i].needs)
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
    for key, positions in owners.items():
        total[tuple(positions)] = total.get(tuple(positions), 0) + sizes[key]
    return tuple((nbytes, positions) for positions, nbytes in total.items())


def _build_flow(
    layers: LayerGraph, name: str, producer: int, readers: Sequence[tuple[int, Region]]
) -> TensorFlow | None:
    tensor = layers.tensors[name]
    if tensor.shape is None:
        return None
    needs = [need for _, need in readers]
    groups = [ReaderGroup(group, _split_by_readers(layers, name, needs, group)) for group in _overlapping_groups(needs)]
    positions = tuple(position for position, _ in readers)
    return TensorFlow(producer, raw_nbytes(tensor.dtype, tensor.shape), positions, tuple(groups))


def _overlapping_groups(needs: Sequence[Region]) -> tuple[tuple[int, ...], ...]:
    """Return groups of regions that overlap, directly or through other regions, as positions in `needs`."""
    groups: list[list[int]] = []
    for i, need in enumerate(needs):
        touching = [group for group in groups if any(intersect(need, needs[j]) or need == needs[j] for j in group)]
        groups = [group for group in groups if group not in touching]
        groups.append(sorted({i, *itertools.chain.from_iterable(touching)}))
    return tuple(tuple(group) for group in sorted(groups))


def _split_by_readers(
    layers: LayerGraph, name: str, needs: Sequence[Region], group: Sequence[int]
) -> tuple[SharedBytes, ...]:
    """Return, for each set of readers of a tensor, the bytes that exactly these readers need.

    Args:
        layers: The layer graph.
        name: Name of the tensor.
        needs: The region that each reader needs.
        group: Indices of the readers that are considered.
    """
    # The edges of all regions divide the tensor into cells. A reader needs all of a cell or nothing of it.
    borders = [sorted({edge for i in group for edge in needs[i][axis]}) for axis in range(len(needs[group[0]]))]
    elements: dict[tuple[int, ...], int] = {}
    for cell in itertools.product(*(tuple(itertools.pairwise(edges)) for edges in borders)):
        readers = tuple(i for i in group if contains(needs[i], cell))
        if readers:
            elements[readers] = elements.get(readers, 0) + volume(cell)
    return tuple(SharedBytes(sent_nbytes(layers, name, (count,)), readers) for readers, count in elements.items())
