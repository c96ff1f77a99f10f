"""Operators that repeat or pick elements: Expand, Tile, Gather, GatherElements; and those that move elements between
channels and space: DepthToSpace, SpaceToDepth.
"""

from __future__ import annotations

import numpy as np

from dicompiler.ir.regions import Interval, Region, blocks_of, shape_of, with_interval
from dicompiler.ir.rule import Operation, OperatorRule, Piece, counted, free, whole
from dicompiler.operators.elementwise import broadcast_need

FEW = 64
"""So many constant indices are looked at one by one: their piece reads just the interval that they name."""


def expand(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Expand: as any broadcast; a piece is given its own shape."""
    shape = np.array(shape_of(region), np.int64)
    return Piece(region, (broadcast_need(operation.shape(0), region), None), {}, {1: shape})


def tile(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Tile: an interval inside one repetition is that interval of x; another one grows to whole repetitions."""
    if operation.node.opset < 6:  # where it repeats one axis, which an input names
        return whole(operation, region, reduce)
    tiles: list[tuple[Interval, Interval, int]] = []
    for extent, (start, stop) in zip(operation.shape(0), region, strict=True):
        first, last = blocks_of((start, stop), extent)
        if last - first == 1:
            tiles.append(((start, stop), (start - first * extent, stop - first * extent), 1))
        else:
            tiles.append(((first * extent, last * extent), (0, extent), last - first))
    out, need, repeats = zip(*tiles, strict=True) if tiles else ((), (), ())
    return Piece(out, (need, None), {}, {1: np.array(repeats, np.int64)})


def gather(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Gather: y[before, i, after] ← x[before, indices[i], after]: x's axis in full, or what a few constant indices
    name of it, which then count from the first of those."""
    shape, rank = operation.shape(0), len(operation.shape(1))
    axis = operation.attribute("axis", 0) % len(shape)
    picked = region[axis : axis + rank]
    values = operation.value(1)
    if values is None or not 0 < values.size <= FEW:
        return Piece(region, ((*region[:axis], (0, shape[axis]), *region[axis + rank :]), picked))
    cut = np.asarray(values[tuple(slice(*interval) for interval in picked)])
    cut = np.where(cut < 0, cut + shape[axis], cut).astype(values.dtype)
    low, high = int(cut.min()), int(cut.max())
    need = (*region[:axis], (low, high + 1), *region[axis + rank :])
    return Piece(region, (need, None), {}, {1: np.asarray(cut - low, values.dtype)})


def gather_elements(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """GatherElements: y[i] ← x[i, but along the axis what the index at i says]: x's axis in full."""
    axis = operation.attribute("axis", 0) % len(region)
    return Piece(region, (with_interval(region, axis, (0, operation.shape(0)[axis])), region))


def depth_to_space(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """DepthToSpace: rows and columns in whole blocks; channels pass where those of a block lie together (mode CRD)."""
    size, (batch, channels, *tile) = operation.attribute("blocksize"), region
    cells = [blocks_of(interval, size) for interval in tile]
    if operation.attribute("mode", "DCR") != "CRD":
        channels = (0, operation.out_shape[1])
    out = (batch, channels, *((start * size, stop * size) for start, stop in cells))
    return Piece(out, ((batch, (channels[0] * size * size, channels[1] * size * size), *cells),))


def space_to_depth(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """SpaceToDepth: each row is a block of rows; the channels, which mix, in full."""
    size = operation.attribute("blocksize")
    need = (region[0], (0, operation.shape(0)[1]), *((start * size, stop * size) for start, stop in region[2:]))
    return Piece(with_interval(region, 1, (0, operation.out_shape[1])), (need,))


RULES = (
    OperatorRule("Expand", expand, cost=free),
    OperatorRule("Tile", tile, cost=free),
    OperatorRule("Gather", gather, cost=free, constants="shift -"),  # the rows of an embedding
    OperatorRule("GatherElements", gather_elements, cost=free),
    *counted(free, "CenterCropPad Compress GatherND ReverseSequence Scatter ScatterElements ScatterND", ""),
    *counted(free, "ExpandDims GatherND Pad"),
    OperatorRule("DepthToSpace", depth_to_space, cost=free),
    OperatorRule("SpaceToDepth", space_to_depth, cost=free),
)
