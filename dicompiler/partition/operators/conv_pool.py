"""Rules of convolutions and pools.

A tile (a region of the output) reads a halo: rows and columns of the input beyond those at its own position. Only a
tile at the border of the whole tensor has pads.

The windows of a ConvTranspose slide over its output: each input element has a window. A tile reads the input elements
with windows that overlap the tile. Pads cut off the parts of these windows outside of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.operator_rule import (
    OpCost,
    Operation,
    OperatorRule,
    Piece,
    cost_only_rules,
    cost_per_input,
    whole_tensor,
)
from dicompiler.ir.regions import Interval, Region, Shape, block_interval, full_region
from dicompiler.partition.operators.window_geometry import SpatialAxis, window_axes


class AxisTile(NamedTuple):
    """One axis of a tile (a region of the output with the input that it reads).

    Attributes:
        out: Interval of the output.
        need: Interval of the input.
        pad_begin: Number of pads before the input interval.
        pad_end: Number of pads after the input interval.
    """

    out: Interval
    need: Interval
    pad_begin: int
    pad_end: int


def tile_axis(window: SpatialAxis, interval: Interval) -> AxisTile:
    """Return the tile of an output interval of a convolution or pool.

    If all windows of the interval lie in the pads, the interval is extended until it reads an input element, because a
    tile must have an input.
    """
    start, stop = interval
    while True:
        low = start * window.stride - window.pad_begin
        high = (stop - 1) * window.stride - window.pad_begin + window.span
        is_last = stop == window.count
        need = (max(0, low), window.extent if is_last else min(high, window.extent))
        if need[0] < need[1]:
            pad_end = window.pad_end if is_last else max(0, high - window.extent)
            return AxisTile((start, stop), need, max(0, -low), pad_end)
        if low >= window.extent:
            start = min(start - 1, (window.extent - 1 + window.pad_begin) // window.stride)
        else:
            stop = min(window.count, max(stop, -((window.span - window.pad_begin - 1) // window.stride)) + 1)


def tile_transposed_axis(window: SpatialAxis, interval: Interval) -> AxisTile:
    """Return the tile of an output interval of a transposed convolution.

    A pad of n > 0 cuts n elements off the tile's output, and a pad of -n appends n zeros.
    """
    start, stop = interval[0] + window.pad_begin, interval[1] + window.pad_begin
    # Input element i contributes to the output elements of its window: i·stride to i·stride + span - 1. The tile reads
    # the elements with windows that overlap the tile. If it begins or ends in a gap between windows (stride > span), it
    # also reads the element on the other side of the gap.
    first = min(-(-(start - window.span + 1) // window.stride), start // window.stride)
    last = max((stop - 1) // window.stride, -(-(stop - window.span) // window.stride))
    # At the tensor's border, the tile reads its input up to the border, even if it does not need all of it. A tile that
    # covers the whole tensor then has the input and the pads of the original node.
    low = 0 if interval[0] == 0 else min(max(0, first), window.count - 1)
    high = window.count if interval[1] == window.extent else max(low + 1, min(window.count, last + 1))
    return AxisTile(interval, (low, high), start - low * window.stride, (high - 1) * window.stride + window.span - stop)


def tile_spatial_axes(
    operation: Operation, kernel: tuple[int, ...], region: Region
) -> tuple[Region, Region, Mapping[str, Any]]:
    """Return the output region, the input region and the changed attributes of a tile.

    All regions have only the spatial axes; `region` is the requested output region.
    """
    out, need, begins, ends = zip(*map(tile_axis, window_axes(operation, kernel), region), strict=True)
    # The attribute ceil_mode is kept: it has an effect only at the end of the whole tensor, where the tile must round
    # up like the whole tensor. In all other tiles, windows fit exactly.
    is_whole = out == full_region(operation.out_shape[2:])
    return out, need, {} if is_whole else {"auto_pad": None, "pads": [*begins, *ends]}


def group_range(groups: int, channels: int, interval: Interval) -> tuple[Interval, Interval]:
    """Return the range of groups that contain the output channels `interval`, and the channels of these groups.

    If `interval` lies within one group, it is returned instead of the channels of the group.
    """
    per_group = channels // groups
    first, last = block_interval(interval, per_group)
    return (first, last), interval if last - first == 1 else (first * per_group, last * per_group)


def conv(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Conv: each part reads its rows and columns with a halo, and the weights of its output channels.

    A range of output channels within one group becomes a convolution without groups, and other ranges are extended to
    whole groups. A partial sum reads a range of input channels; the one that starts at channel 0 adds the bias.
    """
    shape = operation.input_shape(1)
    groups = operation.attribute("group", 1)
    if groups < 1 or shape[0] % groups or operation.input_shape(0)[1] != groups * shape[1]:
        raise DicompilerError(
            f"{operation.node.op} {operation.node.name!r}: {groups} groups do not fit an input of "
            f"{operation.input_shape(0)[1]} channels and weights of shape {shape}: correct the model"
        )
    out, need, attributes = tile_spatial_axes(operation, shape[2:], region[2:])
    (first, last), filters = group_range(groups, shape[0], region[1])
    x = (region[0], reduce or (first * shape[1], last * shape[1]), *need)
    w = (filters, reduce or (0, shape[1]), *full_region(shape[2:]))
    return _with_groups_and_bias(operation, last - first, Piece((region[0], filters, *out), (x, w), attributes), reduce)


def conv_transpose(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a ConvTranspose: each part reads the input elements with windows that overlap its output region.

    The window of an input element is the region of the output to which the element contributes. A range of output
    channels within one group becomes a node without groups, and other ranges are extended to whole groups. A partial
    sum reads a range of input channels; the one that starts at channel 0 adds the bias.
    """
    weight, groups = operation.input_shape(1), operation.attribute("group", 1)
    axes, tiled = window_axes(operation, weight[2:]), region[2:]
    _, need, begins, ends = zip(*map(tile_transposed_axis, axes, tiled), strict=True)
    attributes: dict[str, Any] = {}
    if tiled != full_region(operation.out_shape[2:]):
        pads, added = [max(0, cut) for cut in (*begins, *ends)], [max(0, -cut) for cut in ends]
        attributes = {"auto_pad": None, "output_shape": None, "pads": pads, "output_padding": added}
    (first, last), channels = group_range(groups, operation.out_shape[1], region[1])
    inputs = reduce or (first * weight[0] // groups, last * weight[0] // groups)
    # The weights' output axis has only the channels of one group, so its indices count from the group's first channel.
    start = channels[0] % weight[1]
    filters = (start, start + channels[1] - channels[0]) if last - first == 1 else (0, weight[1])
    x, w = (region[0], inputs, *need), (inputs, filters, *full_region(weight[2:]))
    piece = Piece((region[0], channels, *tiled), (x, w), attributes)
    return _with_groups_and_bias(operation, last - first, piece, reduce)


def _with_groups_and_bias(operation: Operation, groups: int, piece: Piece, reduce: Interval | None) -> Piece:
    """Return a part of a convolution with `groups` as number of groups, and with the bias of its output channels.

    A partial sum over the range `reduce` has the bias only if the range starts at 0.
    """
    changed = {} if groups == operation.attribute("group", 1) else {"group": groups}
    bias = (piece.out[1],) if operation.has_input(2) and (reduce is None or reduce[0] == 0) else None
    return Piece(piece.out, (*piece.needs, *(bias for _ in operation.inputs[2:])), {**piece.attributes, **changed})


def conv_reduction_length(operation: Operation) -> int | None:
    """Return the number of input channels; None for grouped convolutions, which have no partial sums."""
    return operation.input_shape(0)[1] if operation.attribute("group", 1) == 1 else None


def pool(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a MaxPool, AveragePool or LpPool: each part reads its rows and columns with a halo.

    The pool stays whole if its second output (the indices of the maxima) is read, or if automatic pads leave input
    elements outside of all windows.
    """
    kernel = tuple(operation.attribute("kernel_shape"))
    # If elements are outside of all windows, onnxruntime's LpPool starts at another offset. Its other pools refuse the
    # input.
    leaves_elements = any(min(window.pad_begin, window.pad_end) < 0 for window in window_axes(operation, kernel))
    if leaves_elements or (len(operation.outputs) > 1 and operation.outputs[1] is not None):
        return whole_tensor(operation, region, reduce)
    out, need, attributes = tile_spatial_axes(operation, kernel, region[2:])
    return Piece((*region[:2], *out), ((*region[:2], *need),), attributes)


def global_pool(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a global pool: each part reads the whole images of its channels.

    A partial maximum reads only the rows `reduce` of the images.
    """
    image = full_region(operation.input_shape(0)[2:])
    return Piece(region, ((*region[:2], *(image if reduce is None else (reduce, *image[1:]))),))


def global_pool_row_count(operation: Operation) -> int:
    return operation.input_shape(0)[2]


def conv_cost(operation: Operation, out: Shape, needs: Sequence[Shape], weight_index: int = 1) -> OpCost:  # noqa: ARG001
    """Return the cost of a convolution: one multiply-add per output element and weight of its filter.

    The weights have the shape (M, C / groups, kernel…), and are the input with index `weight_index`.
    """
    return OpCost(math.prod(out) * math.prod(needs[weight_index][1:]))


def conv_transpose_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a transposed convolution: one multiply-add per input element and weight of its channel.

    The weights have the shape (C, M / groups, kernel…).
    """
    return OpCost(math.prod(needs[0]) * math.prod(needs[1][1:]))


def fused_conv_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of a convolution with fused operators: one more FLOP per output element for each of them.

    The fused operators are an optional addition and an optional activation.
    """
    extra = bool(operation.attribute("activation")) + operation.has_input(3)
    return conv_cost(operation, out, needs)._replace(other_flops=extra * math.prod(out))


def deform_conv_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of a deformable convolution: a convolution, and one FLOP per interpolated input element."""
    # One input element is interpolated per channel, weight position and output position.
    samples = out[0] * math.prod(out[2:]) * needs[0][1] * math.prod(needs[1][2:])
    return conv_cost(operation, out, needs)._replace(other_flops=samples)


def pool_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a pool: one FLOP per element of each window."""
    return OpCost(pool_flops=math.prod(out) * math.prod(operation.attribute("kernel_shape", ())))


def window_read_share(operation: Operation, weight_index: int = 1) -> float:
    """Return a lower bound of the fraction of its input that a convolution or pool reads.

    It is below 1 if the stride exceeds the kernel, so that windows skip elements. The weights, which determine the
    kernel's size unless an attribute does, are the input with index `weight_index`.
    """
    weight_shape = operation.input_shape(weight_index) if operation.has_input(weight_index) else ()
    kernel, strides = operation.attribute("kernel_shape") or weight_shape[2:], operation.attribute("strides", ())
    return math.prod((min(1.0, size / stride) for size, stride in zip(kernel, strides, strict=False)), start=1.0)


_convolution = partial(
    OperatorRule, reduction_length=conv_reduction_length, stand_in="same_operator", constant_stand_ins="- - shift"
)
RULES = (
    _convolution("Conv", conv, cost=conv_cost, read_share=window_read_share),
    *cost_only_rules(conv_cost, "NhwcConv CausalConvWithState"),
    *cost_only_rules(fused_conv_cost, "FusedConv NhwcFusedConv"),
    *cost_only_rules(deform_conv_cost, "DeformConv", ""),
    _convolution("ConvTranspose", conv_transpose, cost=conv_transpose_cost),
    *cost_only_rules(conv_transpose_cost, "ConvTransposeWithDynamicPads"),
    *(
        OperatorRule(op, pool, cost=pool_cost, read_share=window_read_share, stand_in=stand_in)
        for op, stand_in in {"MaxPool": "", "AveragePool": "pool", "LpPool": "pool"}.items()
    ),
    *cost_only_rules(pool_cost, "NhwcMaxPool MaxpoolWithMask QLinearAveragePool"),
    *(
        OperatorRule(op, global_pool, cost=cost_per_input, stand_in="global_pool")
        for op in ("GlobalAveragePool", "GlobalLpPool")
    ),
    OperatorRule(
        "GlobalMaxPool",
        global_pool,
        reduction_length=global_pool_row_count,
        merge_operator="Max",
        cost=cost_per_input,
    ),
    *cost_only_rules(cost_per_input, "QLinearGlobalAveragePool"),
)
