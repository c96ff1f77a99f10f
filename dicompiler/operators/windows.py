"""Convolutions and pools: a window slides over the spatial axes, so a tile of the output needs a halo of the input.

Pads exist only at the tensor's true borders; a tile that ends at the border reads to the input's end, so that the
whole is just the tile that ends at every border, and its node stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.remembering import remembered
from dicompiler.ir.regions import Interval, Region, Shape, full
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted, taken, whole


@dataclass(frozen=True)
class Window:
    """One spatial axis: input and output extents, kernel, stride, dilation, and the pads at both ends."""

    extent: int
    out: int
    kernel: int
    stride: int
    dilation: int
    begin: int
    end: int

    @property
    def span(self) -> int:
        """Input elements from a window's first to its last tap."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def reach(self) -> int:
        """Elements that all windows span, side by side."""
        return (self.out - 1) * self.stride + self.span


@dataclass(frozen=True)
class Tile:
    """What one axis of a tile comes to: outputs [out), inputs [need), and the pads to put at both ends."""

    out: Interval
    need: Interval
    begin: int
    end: int


def tile(window: Window, interval: Interval) -> Tile:
    """Output interval → input interval with its halo. Windows that lie in the pads alone have no input to give them
    a size: the interval then grows towards the middle until it has one."""
    start, stop = interval
    while True:
        low = start * window.stride - window.begin
        high = (stop - 1) * window.stride - window.begin + window.span
        last = stop == window.out
        need = (max(0, low), window.extent if last else min(high, window.extent))
        if need[0] < need[1]:
            return Tile((start, stop), need, max(0, -low), window.end if last else max(0, high - window.extent))
        start, stop = (start - 1, stop) if low >= window.extent else (start, stop + 1)


@remembered
def windows(operation: Operation, kernel: tuple[int, ...]) -> tuple[Window, ...]:
    """The spatial axes of a convolution or pool with this kernel, which is the operation's own; `auto_pad` as pads."""
    rank, mode = len(kernel), operation.attribute("auto_pad", "NOTSET")
    strides, dilations = (operation.attribute(name) or [1] * rank for name in ("strides", "dilations"))
    pads = (mode != "VALID" and operation.attribute("pads")) or [0] * (2 * rank)
    axes = []
    for i, (extent, out) in enumerate(zip(operation.shape(0)[2:], operation.out_shape[2:], strict=True)):
        axis = Window(extent, out, kernel[i], strides[i], dilations[i], pads[i], pads[rank + i])
        if mode.startswith("SAME"):
            total = max(0, axis.reach - extent)
            begin = total // 2 if mode == "SAME_UPPER" else total - total // 2
            axis = replace(axis, begin=begin, end=total - begin)
        axes.append(axis)
    return tuple(axes)


def spatial(operation: Operation, kernel: tuple[int, ...], region: Region) -> tuple[Region, Region, Mapping[str, Any]]:
    """Spatial part of a tile: (outputs, inputs, attributes to replace; none where the tile is all of it)."""
    tiles = [tile(window, interval) for window, interval in zip(windows(operation, kernel), region, strict=True)]
    out, need = tuple(t.out for t in tiles), tuple(t.need for t in tiles)
    # ceil_mode stays: windows fit a tile exactly, but where it ends at the true border and rounds up as the whole does.
    attributes = {"auto_pad": None, "pads": [t.begin for t in tiles] + [t.end for t in tiles]}
    return out, need, {} if out == full(operation.out_shape[2:]) else attributes


def group_range(groups: int, channels: int, interval: Interval) -> tuple[Interval, Interval]:
    """(groups, output channels): a range inside one group stays as it is, another one grows to whole groups."""
    per_group, (start, stop) = channels // groups, interval
    first, last = start // per_group, -(-stop // per_group)
    return (first, last), interval if last - first == 1 else (first * per_group, last * per_group)


def conv_core(operation: Operation, weight: int, region: Region, reduce: Interval | None) -> Piece:
    """y[n, m-range, tile] ← x[n, channels of those groups, tile + halo], w[m-range]: what it needs of those two alone.
    The weight is input `weight`.

    A range inside one group becomes an ungrouped convolution; otherwise it grows to whole groups. A partial sum over
    input channels [r0, r1) reads x[:, r0:r1], w[:, r0:r1].
    """
    shape = operation.shape(weight)
    groups = operation.attribute("group", 1)
    if groups < 1 or shape[0] % groups or operation.shape(0)[1] != groups * shape[1]:
        raise DicompilerError(
            f"{operation.node.op} {operation.node.name!r}: {groups} groups do not fit an input of "
            f"{operation.shape(0)[1]} channels and weights {shape}: correct the model"
        )
    out, need, attributes = spatial(operation, shape[2:], region[2:])
    (first, last), filters = group_range(groups, shape[0], region[1])
    if last - first != groups:
        attributes = {**attributes, "group": last - first}
    inputs = reduce or (first * shape[1], last * shape[1])
    x, w = (region[0], inputs, *need), (filters, reduce or (0, shape[1]), *full(shape[2:]))
    return Piece((region[0], filters, *out), (x, w), attributes)


def conv(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Conv: see `conv_core`; b[m-range] rides in the range of input channels that starts at 0."""
    core = conv_core(operation, 1, region, reduce)
    bias = (core.out[1],) if operation.has(2) and (reduce is None or reduce[0] == 0) else None
    return Piece(core.out, (*core.needs, *(bias for _ in operation.inputs[2:])), core.attributes)


def ungrouped(operation: Operation) -> int | None:
    """The input channels; a grouped convolution has none to cut."""
    return operation.shape(0)[1] if operation.attribute("group", 1) == 1 else None


def pool(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """MaxPool, AveragePool, LpPool: y[n, c, tile] ← x[n, c, tile + halo]. With indices asked for: whole; and where
    auto_pad "SAME" leaves some of the input to no window: onnxruntime's LpPool then begins further in (its other pools
    refuse that)."""
    kernel, same = tuple(operation.attribute("kernel_shape")), operation.attribute("auto_pad", "").startswith("SAME")
    falls_short = same and any(window.reach < window.extent for window in windows(operation, kernel))
    if falls_short or (len(operation.outputs) > 1 and operation.outputs[1] is not None):
        return whole(operation, region, reduce)
    out, need, attributes = spatial(operation, kernel, region[2:])
    return Piece((*region[:2], *out), ((*region[:2], *need),), attributes)


def global_pool(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """GlobalAveragePool and its kin: y[n, c] ← x[n, c, everything]; the maximum over some rows, too."""
    rest = full(operation.shape(0)[2:])
    return Piece(region, ((*region[:2], *(rest if reduce is None else (reduce, *rest[1:]))),))


def height(operation: Operation) -> int:
    """The extent of the first spatial axis."""
    return operation.shape(0)[2]


def convolved(operation: Operation, out: Shape, needs: Sequence[Shape], weight: int = 1) -> Effort:  # noqa: ARG001
    """Each output element reads one filter of the weight (M, C/g, kernel…)."""
    return Effort(math.prod(out) * math.prod(needs[weight][1:]))


def fused(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """A convolution with its activation, and with what it adds before that."""
    other = bool(operation.attribute("activation")) + operation.has(3)
    return convolved(operation, out, needs)._replace(other=other * math.prod(out))


def deformed(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """A convolution of elements that are interpolated first: for each channel and tap of each output position one."""
    samples = out[0] * math.prod(out[2:]) * needs[0][1] * math.prod(needs[1][2:])
    return convolved(operation, out, needs)._replace(other=samples)


def pooled(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:  # noqa: ARG001
    """One FLOP for each element of each window."""
    return Effort(pool=math.prod(out) * math.prod(operation.attribute("kernel_shape", ())))


def strided(operation: Operation, weight: int | None = None) -> float:
    """The least share of x that windows read: Π of min(1, kernel / stride) over the axes."""
    kernel = operation.attribute("kernel_shape") or (operation.shape(weight)[2:] if weight else ())
    strides = operation.attribute("strides", ())
    return math.prod((min(1.0, size / stride) for size, stride in zip(kernel, strides, strict=False)), start=1.0)


RULES = (
    OperatorRule("Conv", conv, reduction=ungrouped, cost=convolved, reads=partial(strided, weight=1)),
    *counted(convolved, "NhwcConv CausalConvWithState"),
    *counted(fused, "FusedConv NhwcFusedConv"),
    *counted(deformed, "DeformConv", ""),
    *(
        OperatorRule(op, pool, cost=pooled, reads=strided, stand_in=stand_in)
        for op, stand_in in {"MaxPool": "", "AveragePool": "window", "LpPool": "window"}.items()
    ),
    *counted(pooled, "NhwcMaxPool MaxpoolWithMask QLinearAveragePool"),
    *(OperatorRule(op, global_pool, cost=taken, stand_in="map") for op in ("GlobalAveragePool", "GlobalLpPool")),
    OperatorRule("GlobalMaxPool", global_pool, reduction=height, merge="Max", cost=taken),
    *counted(taken, "QLinearGlobalAveragePool"),
)
