"""Rules of operators that move, repeat or select elements: Reshape, Transpose, Concat, Gather and similar ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece, cost_only_rules, whole_tensor, zero_cost
from dicompiler.ir.regions import Interval, Region, block_interval, full_region, region_shape, with_interval
from dicompiler.partition.operators.elementwise import broadcast_need

SUMMABLE_DTYPES = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64}
)
"""Element types of lookup tables (of Gather) with rows that can be stored on different devices.

Each device looks up all indices, with the result 0 for rows that it does not store. The results are then added, which
onnxruntime can do only for these types.
"""


def match_axes(first: Sequence[int], second: Sequence[int]) -> list[tuple[range, range]]:
    """Split the axes of two shapes into the smallest groups that have equally many elements in both shapes.

    For (1, 8, 4, 4) and (1, 128), the groups are (axis 0, axis 0) and (axes 1 to 3, axis 1).
    """
    pairs = []
    i = j = 0
    while i < len(first) or j < len(second):
        i0, j0, left, right = i, j, 1, 1
        while left != right or (i == i0 and j == j0):
            if (left <= right and i < len(first)) or j == len(second):
                left, i = left * first[i], i + 1
            else:
                right, j = right * second[j], j + 1
        pairs.append((range(i0, i), range(j0, j)))
    return pairs


def linear_span(box: Region, shape: Sequence[int]) -> Interval:
    """Return the half-open interval from the first to the last element of a region, counted in row-major order.

    For the region `box` = ((1, 2), (0, 3)) of a tensor of shape (4, 5), the interval is (5, 8).
    """
    first = last = 0
    for (start, stop), extent in zip(box, shape, strict=True):
        first, last = first * extent + start, last * extent + stop - 1
    return first, last + 1


def linear_box(interval: Interval, shape: Sequence[int]) -> Region:
    """Return the smallest contiguous region of a tensor that contains an interval of its elements in row-major order.

    For the interval (5, 8) and the shape (4, 5), the region is ((1, 2), (0, 3)).
    """
    first, last = interval[0], interval[1] - 1
    box: list[Interval] = []
    inner = math.prod(shape)
    for extent in shape:
        inner //= extent
        low, high = first // inner, last // inner
        box.append((low, high + 1))
        first, last = first - low * inner, last - high * inner
        if low != high:
            return (*box, *full_region(shape[len(box) :]))
    return tuple(box)


def reshape_region(region: Region, shape: Sequence[int], reshaped: Sequence[int]) -> tuple[Region, Region]:
    """Extend a region of a tensor until its elements are also a region of the reshaped tensor; return both regions.

    `shape` is the shape of the tensor, and `reshaped` that of the reshaped tensor.
    """
    grown: list[Interval] = []
    need: list[Interval] = []
    for in_axes, out_axes in match_axes(reshaped, shape):
        out_dims, in_dims = [shape[i] for i in out_axes], [reshaped[i] for i in in_axes]
        # Within each group of axes, the region is extended until its elements are consecutive in both shapes.
        interval, wider = None, linear_span(tuple(region[i] for i in out_axes), out_dims)
        while interval != wider:
            interval = wider
            out_box, in_box = linear_box(interval, out_dims), linear_box(interval, in_dims)
            spans = linear_span(out_box, out_dims), linear_span(in_box, in_dims)
            wider = min(first for first, _ in spans), max(last for _, last in spans)
        grown.extend(out_box)
        need.extend(in_box)
    return tuple(grown), tuple(need)


def reshape(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Reshape, Flatten, Squeeze or Unsqueeze: each part is a Reshape of a region of the input.

    The requested output region is extended until its elements are also a region of the input.
    """
    if operation.inputs[0] is None or 0 in operation.input_shape(0):
        return whole_tensor(operation, region, reduce)
    out, need = reshape_region(region, operation.out_shape, operation.input_shape(0))
    removed = dict.fromkeys(operation.node.attributes)
    if operation.node.opset < 5:  # Before opset 5, the target shape of a Reshape is an attribute and not an input.
        return Piece(out, (need,), {**removed, "shape": list(region_shape(out))}, op="Reshape")
    shape = np.array(region_shape(out), np.int64)
    return Piece(out, (need, *(None for _ in operation.inputs[1:])), removed, {1: shape}, op="Reshape")


def transpose(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a Transpose: each part reads the input region that becomes its output region when axes are permuted."""
    perm = operation.attribute("perm") or list(range(len(region)))[::-1]
    need: list[Interval] = [(0, 0)] * len(region)
    for axis, source in enumerate(perm):
        need[source] = region[axis]
    return Piece(region, (tuple(need),))


def concat(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a Concat: each part reads only the inputs from which elements are copied to its output region."""
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
"""Maximum number of constant indices for which a Gather reads only the interval that they select."""


def expand(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split an Expand: each part reads the input elements that are repeated in its output region."""
    shape = np.array(region_shape(region), np.int64)
    return Piece(region, (broadcast_need(operation.input_shape(0), region), None), {}, {1: shape})


def tile(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Tile: a part within one repetition of the input reads the input region that is repeated there.

    An output region that overlaps several repetitions is extended to whole repetitions, along each axis.
    """
    # Before opset 6, a Tile repeats a single axis and has other inputs, so it is not split.
    if operation.node.opset < 6:
        return whole_tensor(operation, region, reduce)
    tiles: list[tuple[Interval, Interval, int]] = []
    for extent, (start, stop) in zip(operation.input_shape(0), region, strict=True):
        first, last = block_interval((start, stop), extent)
        low, high = (start, stop) if last - first == 1 else (first * extent, last * extent)
        tiles.append(((low, high), (low - first * extent, min(extent, high - first * extent)), last - first))
    out, need, repeats = zip(*tiles, strict=True) if tiles else ((), (), ())
    return Piece(out, (need, None), {}, {1: np.array(repeats, np.int64)})


def gather(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Gather: each part reads its indices and all rows of the table, as indices are unknown before a run.

    Rows are the elements of the first input (the table) along the attribute `axis`. For a few constant indices, only
    the smallest interval of rows that contains them is read. A partial sum reads the rows `reduce`, and is 0 for
    indices of other rows.
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
    """Return the number of rows of a Gather's table (its first input) if devices can each store some of them.

    It is None if they cannot, for example because onnxruntime cannot add values of the table's type.
    """
    table, axis = operation.inputs[0], operation.attribute("axis", 0)
    if table is None or not table.is_constant or table.shape is None or table.dtype not in SUMMABLE_DTYPES:
        return None
    computed = operation.inputs[1] is not None and not operation.inputs[1].is_constant
    return table.shape[0] if computed and axis % len(table.shape) == 0 and operation.node.opset >= 9 else None


def gather_elements(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a GatherElements: each part reads its indices, and all elements along the axis of the attribute `axis`."""
    axis = operation.attribute("axis", 0) % len(region)
    return Piece(region, (with_interval(region, axis, (0, operation.input_shape(0)[axis])), region))


def scatter_nd(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a ScatterND: the axes that the indices address stay whole, and all other axes can be split."""
    indices = operation.input_shape(1)
    out = (*full_region(operation.out_shape[: indices[-1]]), *region[indices[-1] :])
    return Piece(out, (out, full_region(indices), (*full_region(indices[:-1]), *region[indices[-1] :])))


def scatter_elements(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a ScatterElements: the axis in the attribute `axis` stays whole, and all other axes can be split.

    The node stays whole if the indices and the data differ in length along one of the other axes.
    """
    axis = operation.attribute("axis", 0) % len(region)
    index_shape, data_shape = list(operation.input_shape(1)), list(operation.input_shape(0))
    if index_shape[:axis] + index_shape[axis + 1 :] != data_shape[:axis] + data_shape[axis + 1 :]:
        return whole_tensor(operation, region, reduce)
    out, read = (with_interval(region, axis, (0, operation.input_shape(index)[axis])) for index in (0, 1))
    return Piece(out, (out, read, read))


def depth_to_space(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a DepthToSpace: rows and columns are extended to whole blocks; channels can be split only in mode CRD."""
    size, (batch, channels, *tile) = operation.attribute("blocksize"), region
    cells = [block_interval(interval, size) for interval in tile]
    # Only in mode CRD, the input channels that form one block are adjacent.
    if operation.attribute("mode", "DCR") != "CRD":
        channels = (0, operation.out_shape[1])
    out = (batch, channels, *((start * size, stop * size) for start, stop in cells))
    return Piece(out, ((batch, (channels[0] * size * size, channels[1] * size * size), *cells),))


def space_to_depth(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a SpaceToDepth: each part reads its blocks of input rows and columns. Channels stay whole."""
    size = operation.attribute("blocksize")
    need = (region[0], (0, operation.input_shape(0)[1]), *((start * size, stop * size) for start, stop in region[2:]))
    return Piece(with_interval(region, 1, (0, operation.out_shape[1])), (need,))


RULES = (
    *(OperatorRule(op, reshape, cost=zero_cost) for op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze")),
    OperatorRule("Transpose", transpose, cost=zero_cost),
    OperatorRule("Concat", concat, cost=zero_cost, constant_stand_ins="shift"),
    *cost_only_rules(zero_cost, "Constant ConstantOfShape Shape Size Split", ""),
    OperatorRule("Expand", expand, cost=zero_cost),
    OperatorRule("Tile", tile, cost=zero_cost),
    # Partial sums of a Gather: each part stores some rows of the table, and returns zeros for indices of other rows.
    OperatorRule(
        "Gather", gather, reduction_length=table_rows, cost=zero_cost, stand_in="indexed", constant_stand_ins="shift -"
    ),
    OperatorRule("GatherElements", gather_elements, cost=zero_cost, stand_in="indexed"),
    OperatorRule("ScatterND", scatter_nd, cost=zero_cost, constant_stand_ins="shift - shift"),
    OperatorRule("ScatterElements", scatter_elements, cost=zero_cost, constant_stand_ins="shift - shift"),
    *cost_only_rules(zero_cost, "CenterCropPad Compress GatherND ReverseSequence Scatter", ""),
    *cost_only_rules(zero_cost, "ExpandDims GatherND Pad"),
    OperatorRule("DepthToSpace", depth_to_space, cost=zero_cost),
    OperatorRule("SpaceToDepth", space_to_depth, cost=zero_cost),
)
