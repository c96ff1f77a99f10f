"""Rules of convolutions and pools.

A window slides over the spatial axes, so a tile of the output needs a halo of the input.

Pads exist only at the borders of the whole tensor. A tile that ends at the border reads to the end of the input, so a
tile of everything equals the original node. For ConvTranspose, windows slide over the output: a tile needs the input
elements with windows that overlap it, and pads cut away elements outside of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dicompiler.base.errors import DicompilerError
from dicompiler.base.memoize import memoized
from dicompiler.ir.operator_rule import (
    OpCost,
    Operation,
    OperatorRule,
    Piece,
    cost_per_input,
    counted_rules,
    whole_tensor,
)
from dicompiler.ir.regions import Interval, Region, Shape, block_interval, full_region


@dataclass(frozen=True)
class SpatialAxis:
    """One spatial axis of a convolution or pool.

    Attributes:
        extent: Number of elements over which windows slide.
        count: Number of windows.
        span: Elements from a window's first to its last tap.
        stride: Distance between windows.
        pad_begin: Pads before the first element.
        pad_end: Pads after the last element.
    """

    extent: int
    count: int
    span: int = 1
    stride: int = 1
    pad_begin: int = 0
    pad_end: int = 0

    @property
    def covered_extent(self) -> int:
        """Number of elements that all windows cover."""
        return (self.count - 1) * self.stride + self.span


class AxisTile(NamedTuple):
    """One axis of a tile.

    Attributes:
        out: Interval of the output.
        need: Interval of the input.
        pad_begin: Pads before the input interval.
        pad_end: Pads after the input interval.
    """

    out: Interval
    need: Interval
    pad_begin: int
    pad_end: int


def tile_axis(window: SpatialAxis, interval: Interval) -> AxisTile:
    """Return the tile of an output interval, with its halo.

    Windows that lie completely in the pads need no input; the interval is then extended towards the middle until it
    does.
    """
    start, stop = interval
    while True:
        low = start * window.stride - window.pad_begin
        high = (stop - 1) * window.stride - window.pad_begin + window.span
        last = stop == window.count
        need = (max(0, low), window.extent if last else min(high, window.extent))
        if need[0] < need[1]:
            return AxisTile((start, stop), need, max(0, -low), window.pad_end if last else max(0, high - window.extent))
        if low >= window.extent:
            start = min(start - 1, (window.extent - 1 + window.pad_begin) // window.stride)
        else:
            stop = min(window.count, max(stop, -((window.span - window.pad_begin - 1) // window.stride)) + 1)


def tile_transposed_axis(window: SpatialAxis, interval: Interval) -> AxisTile:
    """Return the tile of a transposed convolution; its windows slide over the output.

    Its pads are elements to cut away (negative: zeros to append). A tile at the tensor's border reads to the border, so
    a tile of everything equals the original node.
    """
    start, stop = interval[0] + window.pad_begin, interval[1] + window.pad_begin
    # The first input with a window that overlaps the tile; if a gap between windows comes first, the one before it.
    first = min(-(-(start - window.span + 1) // window.stride), start // window.stride)
    last = max((stop - 1) // window.stride, -(-(stop - window.span) // window.stride))
    low = 0 if interval[0] == 0 else min(max(0, first), window.count - 1)
    high = window.count if interval[1] == window.extent else max(low + 1, min(window.count, last + 1))
    return AxisTile(interval, (low, high), start - low * window.stride, (high - 1) * window.stride + window.span - stop)


@memoized
def window_axes(operation: Operation, kernel: tuple[int, ...], transposed: bool = False) -> tuple[SpatialAxis, ...]:
    """Return the spatial axes of a convolution or pool.

    `auto_pad` is converted to pads, and so is `output_shape`, which gives the total pads of a transposed convolution.
    """
    rank, mode = len(kernel), operation.attribute("auto_pad", "NOTSET")
    strides, dilations = (operation.attribute(name) or [1] * rank for name in ("strides", "dilations"))
    pads = (mode != "VALID" and operation.attribute("pads")) or [0] * (2 * rank)
    added = operation.attribute("output_padding") or [0] * rank
    under, over = operation.input_shape(0)[2:], operation.out_shape[2:]
    axes = []
    for i, (extent, count) in enumerate(zip(over, under, strict=True) if transposed else zip(under, over, strict=True)):
        span, begin, end = (kernel[i] - 1) * dilations[i] + 1, pads[i], pads[rank + i]
        if mode.startswith("SAME") or operation.attribute("output_shape"):
            total = max(0, (count - 1) * strides[i] + span + added[i] - extent)
            begin = total // 2 if mode == "SAME_UPPER" else total - total // 2
            end = total - begin
        axes.append(SpatialAxis(extent, count, span, strides[i], begin, end))
    return tuple(axes)


def tile_spatial_axes(
    operation: Operation, kernel: tuple[int, ...], region: Region
) -> tuple[Region, Region, Mapping[str, Any]]:
    """Return output region, input region and changed attributes of a tile's spatial axes.

    No attributes change for a tile of everything.
    """
    out, need, begins, ends = zip(*map(tile_axis, window_axes(operation, kernel), region), strict=True)
    # ceil_mode stays: windows fit a tile exactly, except at the tensor's border, where tile and whole both round up.
    return (
        out,
        need,
        {} if out == full_region(operation.out_shape[2:]) else {"auto_pad": None, "pads": [*begins, *ends]},
    )


def group_range(groups: int, channels: int, interval: Interval) -> tuple[Interval, Interval]:
    """Return the groups and the output channels of a range of channels.

    A range is unchanged within one group, else extended to whole groups.
    """
    per_group = channels // groups
    first, last = block_interval(interval, per_group)
    return (first, last), interval if last - first == 1 else (first * per_group, last * per_group)


def conv(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Conv: y[n, m-range, tile] ← x[n, channels of those groups, tile + halo], w[m-range], b[m-range].

    A range within one group becomes an ungrouped convolution; other ranges are extended to whole groups. A partial sum
    over input channels [r0, r1) reads x[:, r0:r1] and w[:, r0:r1]. The bias is added by the range that starts at 0.
    """
    shape = operation.input_shape(1)
    groups = operation.attribute("group", 1)
    if groups < 1 or shape[0] % groups or operation.input_shape(0)[1] != groups * shape[1]:
        raise DicompilerError(
            f"{operation.node.op} {operation.node.name!r}: {groups} groups do not fit an input of "
            f"{operation.input_shape(0)[1]} channels and weights {shape}: correct the model"
        )
    out, need, attributes = tile_spatial_axes(operation, shape[2:], region[2:])
    (first, last), filters = group_range(groups, shape[0], region[1])
    x = (region[0], reduce or (first * shape[1], last * shape[1]), *need)
    w = (filters, reduce or (0, shape[1]), *full_region(shape[2:]))
    return _with_groups_and_bias(operation, last - first, Piece((region[0], filters, *out), (x, w), attributes), reduce)


def conv_transpose(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """ConvTranspose: y[n, m-range, tile] ← x[n, channels of those groups, inputs of the tile], w, b.

    The inputs of the tile are those with windows that overlap it.

    w is read in those channels, and in the m-range of a group. Groups, partial sums and bias are handled as for Conv.
    """
    weight, groups = operation.input_shape(1), operation.attribute("group", 1)
    axes, tiled = window_axes(operation, weight[2:], True), region[2:]
    _, need, begins, ends = zip(*map(tile_transposed_axis, axes, tiled), strict=True)
    attributes: dict[str, Any] = {}
    if tiled != full_region(operation.out_shape[2:]):
        pads, added = [max(0, cut) for cut in (*begins, *ends)], [max(0, -cut) for cut in ends]
        attributes = {"auto_pad": None, "output_shape": None, "pads": pads, "output_padding": added}
    (first, last), channels = group_range(groups, operation.out_shape[1], region[1])
    inputs = reduce or (first * weight[0] // groups, last * weight[0] // groups)
    # Within one group, filters are counted from the group's first one.
    start = channels[0] % weight[1]
    filters = (start, start + channels[1] - channels[0]) if last - first == 1 else (0, weight[1])
    x, w = (region[0], inputs, *need), (inputs, filters, *full_region(weight[2:]))
    return _with_groups_and_bias(
        operation, last - first, Piece((region[0], channels, *tiled), (x, w), attributes), reduce
    )


def _with_groups_and_bias(operation: Operation, groups: int, piece: Piece, reduce: Interval | None) -> Piece:
    """Return the piece with a number of groups, and with the bias of its output channels."""
    changed = {} if groups == operation.attribute("group", 1) else {"group": groups}
    bias = (piece.out[1],) if operation.has_input(2) and (reduce is None or reduce[0] == 0) else None
    return Piece(piece.out, (*piece.needs, *(bias for _ in operation.inputs[2:])), {**piece.attributes, **changed})


def conv_reduction_length(operation: Operation) -> int | None:
    """Return the number of input channels; None for grouped convolutions."""
    return operation.input_shape(0)[1] if operation.attribute("group", 1) == 1 else None


def pool(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """MaxPool, AveragePool, LpPool: y[n, c, tile] ← x[n, c, tile + halo].

    If the indices are read, it stays whole.

    It also stays whole if auto_pad SAME leaves input elements outside of all windows: onnxruntime's LpPool then starts
    at another offset, and its other pools refuse it.
    """
    kernel, same = tuple(operation.attribute("kernel_shape")), operation.attribute("auto_pad", "").startswith("SAME")
    falls_short = same and any(window.covered_extent < window.extent for window in window_axes(operation, kernel))
    if falls_short or (len(operation.outputs) > 1 and operation.outputs[1] is not None):
        return whole_tensor(operation, region, reduce)
    out, need, attributes = tile_spatial_axes(operation, kernel, region[2:])
    return Piece((*region[:2], *out), ((*region[:2], *need),), attributes)


def global_pool(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """GlobalAveragePool and similar: y[n, c] ← x[n, c, all spatial axes].

    A partial maximum reads a range of rows.
    """
    rest = full_region(operation.input_shape(0)[2:])
    return Piece(region, ((*region[:2], *(rest if reduce is None else (reduce, *rest[1:]))),))


def global_pool_reduction_length(operation: Operation) -> int:
    """Return the extent of the first spatial axis."""
    return operation.input_shape(0)[2]


def conv_cost(operation: Operation, out: Shape, needs: Sequence[Shape], weight: int = 1) -> OpCost:  # noqa: ARG001
    """Return the cost of a convolution.

    Each output element reads one filter of the weight (M, C/g, kernel…).
    """
    return OpCost(math.prod(out) * math.prod(needs[weight][1:]))


def conv_transpose_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a transposed convolution.

    Each input element is multiplied by filters of (C, M/g, kernel…).
    """
    return OpCost(math.prod(needs[0]) * math.prod(needs[1][1:]))


def fused_conv_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of a convolution with an addition and an activation."""
    other = bool(operation.attribute("activation")) + operation.has_input(3)
    return conv_cost(operation, out, needs)._replace(other_flops=other * math.prod(out))


def deform_conv_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of a deformable convolution.

    It interpolates one element per channel, tap and output position.
    """
    samples = out[0] * math.prod(out[2:]) * needs[0][1] * math.prod(needs[1][2:])
    return conv_cost(operation, out, needs)._replace(other_flops=samples)


def pool_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a pool: one FLOP per element of each window."""
    return OpCost(pool_flops=math.prod(out) * math.prod(operation.attribute("kernel_shape", ())))


def window_read_share(operation: Operation, weight: int = 1) -> float:
    """Return the smallest share of x that is read: the product of min(1, kernel / stride) over axes."""
    kernel = operation.attribute("kernel_shape") or (
        operation.input_shape(weight)[2:] if operation.has_input(weight) else ()
    )
    strides = operation.attribute("strides", ())
    return math.prod((min(1.0, size / stride) for size, stride in zip(kernel, strides, strict=False)), start=1.0)


BIAS_STAND_IN = "- - shift"
"""Stand-in of a bias in the exact check; for weights see `dicompiler.verify.exact`."""
RULES = (
    OperatorRule(
        "Conv",
        conv,
        reduction_length=conv_reduction_length,
        cost=conv_cost,
        read_share=window_read_share,
        stand_in="same_operator",
        constant_stand_ins=BIAS_STAND_IN,
    ),
    *counted_rules(conv_cost, "NhwcConv CausalConvWithState"),
    *counted_rules(fused_conv_cost, "FusedConv NhwcFusedConv"),
    *counted_rules(deform_conv_cost, "DeformConv", ""),
    OperatorRule(
        "ConvTranspose",
        conv_transpose,
        reduction_length=conv_reduction_length,
        cost=conv_transpose_cost,
        stand_in="same_operator",
        constant_stand_ins=BIAS_STAND_IN,
    ),
    *counted_rules(conv_transpose_cost, "ConvTransposeWithDynamicPads"),
    *(
        OperatorRule(op, pool, cost=pool_cost, read_share=window_read_share, stand_in=stand_in)
        for op, stand_in in {"MaxPool": "", "AveragePool": "pool", "LpPool": "pool"}.items()
    ),
    *counted_rules(pool_cost, "NhwcMaxPool MaxpoolWithMask QLinearAveragePool"),
    *(
        OperatorRule(op, global_pool, cost=cost_per_input, stand_in="global_pool")
        for op in ("GlobalAveragePool", "GlobalLpPool")
    ),
    OperatorRule(
        "GlobalMaxPool",
        global_pool,
        reduction_length=global_pool_reduction_length,
        merge_operator="Max",
        cost=cost_per_input,
    ),
    *counted_rules(cost_per_input, "QLinearGlobalAveragePool"),
)
