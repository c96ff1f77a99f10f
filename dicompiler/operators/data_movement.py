"""Rules of operators that only move, repeat or select elements.

They are Reshape, Transpose, Concat, Expand, Tile, Gather, Scatter and their relatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece, counted_rules, whole_tensor, zero_cost
from dicompiler.ir.regions import Interval, Region, block_interval, full_region, region_shape, with_interval
from dicompiler.operators.elementwise import broadcast_need

SUMMABLE_DTYPES = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64}
)
"""Types of tables with rows that can be distributed over devices: a device without a row adds 0."""


def match_axes(a: Sequence[int], b: Sequence[int]) -> list[tuple[range, range]]:
    """Pair the axes of two shapes of equal volume, as finely as possible.

    (1, 8, 4, 4) and (1, 128) ⇒ [axis 0 | axis 0], [axes 1-3 | axis 1].
    """
    pairs = []
    i = j = 0
    while i < len(a) or j < len(b):
        i0, j0, left, right = i, j, 1, 1
        while left != right or (i == i0 and j == j0):
            if (left <= right and i < len(a)) or j == len(b):
                left, i = left * a[i], i + 1
            else:
                right, j = right * b[j], j + 1
        pairs.append((range(i0, i), range(j0, j)))
    return pairs


def linear_span(box: Region, dims: Sequence[int]) -> Interval:
    """Return the linear indices from a box's first to its last element.

    ((1, 2), (0, 3)) of (4, 5) ⇒ (5, 8).
    """
    first = last = 0
    for (start, stop), extent in zip(box, dims, strict=True):
        first, last = first * extent + start, last * extent + stop - 1
    return first, last + 1


def linear_box(interval: Interval, dims: Sequence[int]) -> Region:
    """Return the smallest contiguous box that contains a linear interval.

    (5, 8) of (4, 5) ⇒ ((1, 2), (0, 3)).
    """
    first, last = interval[0], interval[1] - 1
    box: list[Interval] = []
    inner = math.prod(dims)
    for extent in dims:
        inner //= extent
        low, high = first // inner, last // inner
        box.append((low, high + 1))
        first, last = first - low * inner, last - high * inner
        if low != high:
            rest = dims[len(box) :]
            return (*box, *full_region(rest))
    return tuple(box)


def reshape_region(region: Region, out: Sequence[int], into: Sequence[int]) -> tuple[Region, Region]:
    """Return a region extended so that it can be reshaped, and the same region after the reshape.

    Within each group of matching axes, the region is extended until it is contiguous in both shapes.

    Args:
        region: Region of the tensor.
        out: Shape of the tensor.
        into: Shape after the reshape.
    """
    grown: list[Interval] = []
    need: list[Interval] = []
    for in_axes, out_axes in match_axes(into, out):
        out_dims, in_dims = [out[i] for i in out_axes], [into[i] for i in in_axes]
        interval, wider = None, linear_span(tuple(region[i] for i in out_axes), out_dims)
        while interval != wider:
            interval = wider
            box, other = linear_box(interval, out_dims), linear_box(interval, in_dims)
            ends = linear_span(box, out_dims), linear_span(other, in_dims)
            wider = min(first for first, _ in ends), max(last for _, last in ends)
        grown.extend(box)
        need.extend(other)
    return tuple(grown), tuple(need)


def reshape(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Reshape, Flatten, Squeeze, Unsqueeze: a region that is one interval of elements in both shapes."""
    if operation.inputs[0] is None or 0 in operation.input_shape(0):
        return whole_tensor(operation, region, reduce)
    out, need = reshape_region(region, operation.out_shape, operation.input_shape(0))
    removed = dict.fromkeys(operation.node.attributes)
    if operation.node.opset < 5:  # before opset 5 the shape is an attribute
        return Piece(out, (need,), {**removed, "shape": list(region_shape(out))}, op="Reshape")
    shape = np.array(region_shape(out), np.int64)
    return Piece(out, (need, *(None for _ in operation.inputs[1:])), removed, {1: shape}, op="Reshape")


def transpose(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Transpose: the region with permuted axes."""
    perm = operation.attribute("perm") or list(range(len(region)))[::-1]
    need: list[Interval] = [(0, 0)] * len(region)
    for axis, source in enumerate(perm):
        need[source] = region[axis]
    return Piece(region, (tuple(need),))


def concat(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Concat: an interval of the joined axis needs only the inputs that it overlaps."""
    axis = operation.attribute("axis") % len(region)
    needs: list[Region | None] = []
    offset = 0
    for index in range(len(operation.inputs)):
        extent = operation.input_shape(index)[axis]
        low, high = max(region[axis][0], offset) - offset, min(region[axis][1], offset + extent) - offset
        needs.append(with_interval(region, axis, (low, high)) if low < high else None)
        offset += extent
    return Piece(region, tuple(needs))


MAX_CONSTANT_INDICES = 64
"""Up to this number of constant indices, a piece reads only the interval that they select."""


def expand(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Expand: like any broadcast; the piece has its own target shape."""
    shape = np.array(region_shape(region), np.int64)
    return Piece(region, (broadcast_need(operation.input_shape(0), region), None), {}, {1: shape})


def tile(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Tile: an interval within one repetition is that interval of x.

    Other intervals are extended to whole repetitions.
    """
    if operation.node.opset < 6:  # before opset 6 an input names a single axis to repeat
        return whole_tensor(operation, region, reduce)
    tiles: list[tuple[Interval, Interval, int]] = []
    for extent, (start, stop) in zip(operation.input_shape(0), region, strict=True):
        first, last = block_interval((start, stop), extent)
        low, high = (start, stop) if last - first == 1 else (first * extent, last * extent)
        tiles.append(((low, high), (low - first * extent, min(extent, high - first * extent)), last - first))
    out, need, repeats = zip(*tiles, strict=True) if tiles else ((), (), ())
    return Piece(out, (need, None), {}, {1: np.array(repeats, np.int64)})


def gather(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Gather: y[before, i, after] ← x[before, axis in full, after], indices[i].

    If the indices are a few constants, only the interval that they select is read. A partial result has a range of the
    rows of a table.
    """
    shape, rank = operation.input_shape(0), len(operation.input_shape(1))
    axis = operation.attribute("axis", 0) % len(shape)
    picked = region[axis : axis + rank]
    if reduce is not None:
        return Piece(region, ((reduce, *region[rank:]), picked), {"axis": 0}, table_rows=reduce)
    values = operation.constant_value(1)
    if values is None or not 0 < values.size <= MAX_CONSTANT_INDICES:
        return Piece(region, ((*region[:axis], (0, shape[axis]), *region[axis + rank :]), picked))
    cut = np.asarray(values[tuple(slice(*interval) for interval in picked)])
    cut = np.where(cut < 0, cut + shape[axis], cut).astype(values.dtype)
    low, high = int(cut.min()), int(cut.max())
    need = (*region[:axis], (low, high + 1), *region[axis + rank :])
    return Piece(region, (need, None), {}, {1: np.asarray(cut - low, values.dtype)})


def table_rows(operation: Operation) -> int | None:
    """Return the number of rows of a Gather's constant table with computed indices.

    None if it does not gather rows of a table, or if onnxruntime cannot add the partial results.
    """
    table, axis = operation.inputs[0], operation.attribute("axis", 0)
    if table is None or not table.is_constant or table.shape is None or table.dtype not in SUMMABLE_DTYPES:
        return None
    computed = operation.inputs[1] is not None and not operation.inputs[1].is_constant
    return table.shape[0] if computed and axis % len(table.shape) == 0 and operation.node.opset >= 9 else None


def gather_elements(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """GatherElements: y[i] ← x[i, but the axis in full], indices[i]."""
    axis = operation.attribute("axis", 0) % len(region)
    return Piece(region, (with_interval(region, axis, (0, operation.input_shape(0)[axis])), region))


def scatter_nd(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """ScatterND: the axes that the indices address are in full; the others can be split."""
    indices = operation.input_shape(1)
    out = (*full_region(operation.out_shape[: indices[-1]]), *region[indices[-1] :])
    return Piece(out, (out, full_region(indices), (*full_region(indices[:-1]), *region[indices[-1] :])))


def scatter_elements(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """ScatterElements: its axis is in full; the other axes can be split if the indices cover them."""
    axis = operation.attribute("axis", 0) % len(region)
    if any(
        own != of
        for i, (own, of) in enumerate(zip(operation.input_shape(1), operation.input_shape(0), strict=True))
        if i != axis
    ):
        return whole_tensor(operation, region, reduce)
    out, read = (with_interval(region, axis, (0, operation.input_shape(index)[axis])) for index in (0, 1))
    return Piece(out, (out, read, read))


def depth_to_space(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """DepthToSpace: rows and columns in whole blocks.

    Channels can be split if those of a block are adjacent (mode CRD).
    """
    size, (batch, channels, *tile) = operation.attribute("blocksize"), region
    cells = [block_interval(interval, size) for interval in tile]
    if operation.attribute("mode", "DCR") != "CRD":
        channels = (0, operation.out_shape[1])
    out = (batch, channels, *((start * size, stop * size) for start, stop in cells))
    return Piece(out, ((batch, (channels[0] * size * size, channels[1] * size * size), *cells),))


def space_to_depth(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """SpaceToDepth: each output row is a block of input rows.

    All input channels are read, because they are mixed.
    """
    size = operation.attribute("blocksize")
    need = (region[0], (0, operation.input_shape(0)[1]), *((start * size, stop * size) for start, stop in region[2:]))
    return Piece(with_interval(region, 1, (0, operation.out_shape[1])), (need,))


RULES = (
    *(OperatorRule(op, reshape, cost=zero_cost) for op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze")),
    OperatorRule("Transpose", transpose, cost=zero_cost),
    OperatorRule("Concat", concat, cost=zero_cost, constant_stand_ins="shift"),
    *counted_rules(zero_cost, "Constant ConstantOfShape Shape Size Split", ""),
    OperatorRule("Expand", expand, cost=zero_cost),
    OperatorRule("Tile", tile, cost=zero_cost),
    OperatorRule(
        "Gather", gather, reduction_length=table_rows, cost=zero_cost, stand_in="indexed", constant_stand_ins="shift -"
    ),  # LIP cuts the rows of an embedding table
    OperatorRule("GatherElements", gather_elements, cost=zero_cost, stand_in="indexed"),
    OperatorRule("ScatterND", scatter_nd, cost=zero_cost, constant_stand_ins="shift - shift"),
    OperatorRule("ScatterElements", scatter_elements, cost=zero_cost, constant_stand_ins="shift - shift"),
    *counted_rules(zero_cost, "CenterCropPad Compress GatherND ReverseSequence Scatter", ""),
    *counted_rules(zero_cost, "ExpandDims GatherND Pad"),
    OperatorRule("DepthToSpace", depth_to_space, cost=zero_cost),
    OperatorRule("SpaceToDepth", space_to_depth, cost=zero_cost),
)
