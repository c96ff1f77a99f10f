"""Counting: the operations and bytes that a part of a layer comes to, which the cost models rest on.

LayerGraph + Layer + region → multiplications, FLOPs, bytes.   No model, no weights, no clock.
What an operator costs is said by its rule (see `OperatorRule.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dicompiler.base.remembering import remembered
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.plan import Share
from dicompiler.ir.regions import Interval, Region, full, shape_of, volume
from dicompiler.ir.rule import Effort
from dicompiler.ir.tasks import ShareTask, Work
from dicompiler.partition.bounds_inference import share_task


def macs(layers: LayerGraph, layer: Layer, region: Region | None = None, reduce: Interval | None = None) -> int:
    """Multiplications (each with its addition) of a part of `layer`: convolutions, matrix products and the like.

    What the operator rules compute beyond `region` (a whole group of channels, say) is counted. Nodes whose shapes are
    not static count 0.
    """
    return task_macs(layers, share_task(layers, layer, Share(region, reduce)))


def flops(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
    *,
    pools: bool = True,
    elementwise: bool = True,
) -> int:
    """Floating-point operations of a part of `layer`, counted as `Analytic` says; the arguments are those of
    `CostModel.seconds`."""
    return count(layers, layer, region, reduce, merge).of(pools, elementwise)


NOTHING = Effort()


@dataclass(frozen=True)
class Count:
    """What a part of a layer comes to. In FLOP: `multiply` of multiplications, `pool` of pools and reductions, `other`
    of all else, `add` of adding up partial sums. weights: bytes of weights that it reads, each piece once; what only
    picks some of them (an embedding) reads no more than it makes. moved: bytes that it reads (weights too) and writes,
    where what its nodes hand to each other stays in caches. read: those of them that it reads, weights apart."""

    multiply: int
    pool: int
    other: int
    add: int
    moved: int
    weights: int = 0
    read: int = 0

    @property
    def flops(self) -> int:
        """All of them."""
        return self.of(pools=True, elementwise=True)

    def of(self, pools: bool, elementwise: bool) -> int:
        """FLOP, with those of pools or without, and of elements likewise."""
        return self.multiply + self.add + pools * self.pool + elementwise * self.other


@remembered
def count(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
) -> Count:
    """The operations and bytes of a part of `layer`; the arguments are those of `CostModel.seconds`."""
    task = share_task(layers, layer, Share(region, reduce, merge))
    efforts = [_effort(layers, work) for work in task.works]
    multiply, pool, other = (sum(kind) for kind in zip(Effort(), *efforts, strict=True))
    ((key, region_made), *_) = task.outputs.items()
    size = 0 if region_made is None else volume(region_made)
    weights = _weights_read(layers, task.works, efforts)
    partial = merge * _nbytes(layers, key.tensor, region_made)
    read = partial + sum(_nbytes(layers, need.tensor, region) for need, region in task.needs.items())
    moved = weights + live_nbytes(layers, task) + partial
    return Count(2 * multiply, pool, other, (merge - 1) * size if merge else 0, moved, weights, read)


def _weights_read(layers: LayerGraph, works: tuple[Work, ...], efforts: Sequence[Effort]) -> int:
    """`Count.weights`: see there. efforts: what each of the works costs."""
    held = _weight_regions(layers, works)
    if not held or NOTHING not in efforts:
        return sum(held.values())
    read: dict[tuple[str, Region], int] = {}
    for work, effort in zip(works, efforts, strict=True):
        made, _ = _regions(layers, work)
        picks = made is not None and effort == NOTHING
        most = _nbytes(layers, layers.cut_output(work.node), made) if picks else math.inf
        for piece, nbytes in _weights_of(layers, work):
            read[piece] = max(read.get(piece, 0), int(min(nbytes, most)))
    return sum(read.values())


def _nbytes(layers: LayerGraph, tensor: str, region: Region | None) -> int:
    return 0 if region is None else raw_nbytes(layers.tensors[tensor].dtype, shape_of(region))


def live_nbytes(layers: LayerGraph, task: ShareTask) -> int:
    """Bytes of what a task reads, weights apart, and of what it makes; nothing of tensors without static shape."""
    moved = (*task.needs.items(), *task.kept.items(), *task.outputs.items())
    return sum(_nbytes(layers, key.tensor, region) for key, region in moved)


def task_macs(layers: LayerGraph, task: ShareTask) -> int:
    """Multiplications of a task, see `macs`."""
    return sum(_effort(layers, work).multiply for work in task.works)


def weight_regions(layers: LayerGraph, task: ShareTask) -> Mapping[tuple[str, Region], int]:
    """The pieces of constants that a task holds: (tensor, region) → bytes."""
    return _weight_regions(layers, task.works)


@remembered
def _weight_regions(layers: LayerGraph, works: tuple[Work, ...]) -> Mapping[tuple[str, Region], int]:
    return dict(piece for work in works for piece in _weights_of(layers, work))


def _weights_of(layers: LayerGraph, work: Work) -> Iterator[tuple[tuple[str, Region], int]]:
    """The pieces of constants that a node reads, with their bytes."""
    tensors, inputs = layers.tensors, work.node.inputs
    if any(name and tensors[name].constant for name in inputs):
        _, needs = _regions(layers, work)
        for name, need in zip(inputs, needs, strict=True):
            if name and need is not None and tensors[name].constant:
                yield (name, need), raw_nbytes(tensors[name].dtype, shape_of(need))


def _regions(layers: LayerGraph, work: Work) -> tuple[Region | None, tuple[Region | None, ...]]:
    """(the region of its output that a node computes, the regions of its inputs that it reads); None: unknown."""
    if work.piece is not None:
        return work.piece.out, work.piece.needs
    operation = layers.operation(work.node)
    tensor = next((tensor for tensor in operation.outputs[operation.output :] if tensor is not None), None)
    return None if tensor is None or tensor.shape is None else full(tensor.shape), operation.full_needs()


def _effort(layers: LayerGraph, work: Work) -> Effort:
    """What one node costs, as its rule says; nothing where shapes are not static."""
    operation = layers.operation(work.node)
    out, needs = _regions(layers, work)
    if out is None or any(tensor is not None and tensor.shape is None for tensor in operation.inputs):
        return Effort()
    shapes = [() if need is None else shape_of(need) for need in needs]
    return layers.rule(work.node).cost(operation, shape_of(out), shapes)
