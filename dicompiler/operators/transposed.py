"""ConvTranspose: every input element writes a window of the output, so that a tile of the output needs the inputs whose
windows touch it. Its pads cut away what those windows write beside the tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicompiler.ir.regions import Interval, Region, Shape, full
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted
from dicompiler.operators.windows import Tile, group_range, ungrouped


@dataclass(frozen=True)
class Spread:
    """One spatial axis: input and output extents, stride, elements that a window spans, and how many of the first
    window's elements lie before the output."""

    extent: int
    out: int
    stride: int
    span: int
    begin: int


def tile(spread: Spread, interval: Interval) -> Tile:
    """Output interval → input interval, and what to cut away at both ends (less than nothing: zeros that follow).

    At the tensor's border the tile reads to the border, so that the whole is just the tile that ends at both.
    """
    start, stop = interval[0] + spread.begin, interval[1] + spread.begin
    # The first input whose window reaches into the tile; where a gap between windows comes first, the one before it.
    first = min(-(-(start - spread.span + 1) // spread.stride), start // spread.stride)
    last = max((stop - 1) // spread.stride, -(-(stop - spread.span) // spread.stride))
    low = 0 if interval[0] == 0 else min(max(0, first), spread.extent - 1)
    high = spread.extent if interval[1] == spread.out else max(low + 1, min(spread.extent, last + 1))
    return Tile(interval, (low, high), start - low * spread.stride, (high - 1) * spread.stride + spread.span - stop)


def spreads(operation: Operation) -> tuple[Spread, ...]:
    """The spatial axes. `auto_pad` and `output_shape` say what is cut away in all, which the output's extent tells."""
    kernel, rank = operation.shape(1)[2:], len(operation.out_shape) - 2
    strides, dilations = (operation.attribute(name) or [1] * rank for name in ("strides", "dilations"))
    added, pads = (operation.attribute(name) or [0] * rank for name in ("output_padding", "pads"))
    mode = operation.attribute("auto_pad", "NOTSET")
    axes = []
    for i, (extent, out) in enumerate(zip(operation.shape(0)[2:], operation.out_shape[2:], strict=True)):
        span, begin = (kernel[i] - 1) * dilations[i] + 1, pads[i]
        if operation.attribute("output_shape") or mode.startswith("SAME"):
            total = max(0, (extent - 1) * strides[i] + added[i] + span - out)
            begin = total // 2 if mode == "SAME_UPPER" else total - total // 2
        elif mode == "VALID":
            begin = 0
        axes.append(Spread(extent, out, strides[i], span, begin))
    return tuple(axes)


def spatial(operation: Operation, region: Region) -> tuple[Region, Mapping[str, Any]]:
    """Spatial part of a tile: (inputs, attributes to replace; none where the tile is all of it)."""
    tiles = [tile(spread, interval) for spread, interval in zip(spreads(operation), region, strict=True)]
    if region == full(operation.out_shape[2:]):
        return full(operation.shape(0)[2:]), {}
    return tuple(t.need for t in tiles), {
        "auto_pad": None,
        "output_shape": None,
        "pads": [max(0, t.begin) for t in tiles] + [max(0, t.end) for t in tiles],
        "output_padding": [max(0, -t.end) for t in tiles],
    }


def conv_transpose(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """ConvTranspose: y[n, m-range, tile] ← x[n, channels of those groups, what reaches the tile], w[those channels,
    m-range of a group], b[m-range]; groups, partial sums and the bias as in Conv."""
    weight, groups = operation.shape(1), operation.attribute("group", 1)
    need, attributes = spatial(operation, region[2:])
    (first, last), channels = group_range(groups, operation.out_shape[1], region[1])
    inputs = reduce or (first * weight[0] // groups, last * weight[0] // groups)
    if last - first != groups:
        attributes = {**attributes, "group": last - first}
    # Within one group the filters count from its first one on.
    start = channels[0] % weight[1]
    filters = (start, start + channels[1] - channels[0]) if last - first == 1 else (0, weight[1])
    needs: list[Region | None] = [(region[0], inputs, *need), (inputs, filters, *full(weight[2:]))]
    if operation.has(2):
        needs.append((channels,) if reduce is None or reduce[0] == 0 else None)
    return Piece((region[0], channels, *region[2:]), tuple(needs), attributes)


def sown(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:  # noqa: ARG001
    """Each input element goes to the filters of the weight (C, M/g, kernel…)."""
    return Effort(math.prod(needs[0]) * math.prod(needs[1][1:]))


RULES = (
    OperatorRule("ConvTranspose", conv_transpose, reduction=ungrouped, cost=sown),
    *counted(sown, "ConvTransposeWithDynamicPads"),
)
