"""Rules of Slice, Pad and Trilu, which select a region of a tensor or extend the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece, whole_tensor, zero_cost
from dicompiler.ir.regions import Interval, Region, region_shape
from dicompiler.partition.operators.conv_pool import AxisTile, tile_axis
from dicompiler.partition.operators.window_geometry import SpatialAxis


def _integer_list(operation: Operation, name: str, index: int) -> list[int] | None:
    """Return the integers of a node's input `index` or, in old opsets, of its attribute `name`.

    The result is None if the input is not constant, or if the node has neither.
    """
    if operation.has_input(index):
        value = operation.constant_value(index)
        return None if value is None else [int(number) for number in value.reshape(-1)]
    numbers = operation.attribute(name)
    return None if numbers is None else list(numbers)


def _starts_and_steps(operation: Operation) -> list[tuple[int, int]] | None:
    """Return the first index and the step of a Slice for each axis; None if they are not constants of the model."""
    shape = operation.input_shape(0)
    starts_and_steps = [(0, 1)] * len(shape)
    starts, axes, steps = (_integer_list(operation, *which) for which in (("starts", 1), ("axes", 3), ("steps", 4)))
    if starts is None or (axes is None and operation.has_input(3)) or (steps is None and operation.has_input(4)):
        return None
    for i, axis in enumerate(axes if axes is not None else range(len(starts))):
        extent, step = shape[axis], 1 if steps is None else steps[i]
        start = starts[i] + extent if starts[i] < 0 else starts[i]
        low, high = (0, extent) if step > 0 else (0, extent - 1)
        starts_and_steps[axis % len(shape)] = (min(max(start, low), high), step)
    return starts_and_steps


def slice_(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Slice: each part reads the input elements that are copied to its output region."""
    starts_and_steps = _starts_and_steps(operation)
    if starts_and_steps is None:
        return whole_tensor(operation, region, reduce)
    need: list[Interval] = []
    for (start, step), (low, high) in zip(starts_and_steps, region, strict=True):
        first, last = start + low * step, start + (high - 1) * step
        need.append((min(first, last), max(first, last) + 1))
    needs = (tuple(need), *(None for _ in operation.inputs[1:]))
    removed = dict.fromkeys(operation.node.attributes)
    steps = [step for _, step in starts_and_steps]
    if set(steps) <= {1}:  # The part's output is exactly the region that it reads.
        return Piece(region, needs, removed, op="Identity")
    lengths = region_shape(tuple(need))
    starts = [0 if step > 0 else length - 1 for length, step in zip(lengths, steps, strict=True)]
    ends = [length if step > 0 else -1 - length for length, step in zip(lengths, steps, strict=True)]
    numbers = enumerate((starts, ends, range(len(need)), steps), 1)
    return Piece(region, needs, removed, {i: np.array(values, np.int64) for i, values in numbers})


def pad_axis(extent: int, pad: Interval, interval: Interval, mode: str) -> tuple[AxisTile, Interval]:
    """Return the tile of one padded axis, and the interval of the output that the tile's own Pad node writes.

    In the modes reflect and wrap, pads are copies of input elements. The tile reads the copied elements, and its Pad
    node also writes them at their own positions, which can be outside of `interval`.

    Args:
        extent: Number of input elements of the axis.
        pad: Numbers of elements that are added before the first and after the last input element.
        interval: The requested interval of the output.
        mode: The attribute `mode` of the Pad.
    """
    begin, end = pad
    out = (0, extent + begin + end)
    if min(*pad, 0) <= -extent or (mode in ("reflect", "wrap") and (min(pad) < 0 or max(pad) >= extent)):
        return AxisTile(out, (0, extent), begin, end), out
    # In the modes constant and edge, a Pad is like a pool with windows of one element. Negative pads at the end shorten
    # the input.
    if mode in ("constant", "edge"):
        tile = tile_axis(SpatialAxis(extent + min(0, end), out[1], pad_begin=begin, pad_end=max(0, end)), interval)
        return tile, tile.out
    low, high = interval[0] - begin, interval[1] - begin
    need = (max(0, min(low, 2 * extent - 1 - high)), min(extent, max(high, 1 - low)))
    if mode == "wrap":
        need = (low, high) if low >= 0 and high <= extent else (0, extent)
    written = (min(low, need[0]), max(high, need[1]))
    tile = AxisTile(interval, need, need[0] - written[0], written[1] - need[1])
    return tile, (written[0] + begin, written[1] + begin)


def pad(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Pad: each part reads the input elements in its output region, and pads the rest of this region."""
    shape, pads = operation.input_shape(0), _integer_list(operation, "pads", 1)
    # Since opset 18, pads can be given for some axes only.
    axes = _integer_list(operation, "axes", 3) if operation.has_input(3) else list(range(len(shape)))
    if pads is None or axes is None or operation.node.opset < 2:
        return whole_tensor(operation, region, reduce)
    pad_of = {axis % len(shape): (pads[i], pads[len(axes) + i]) for i, axis in enumerate(axes)}
    mode = operation.attribute("mode", "constant")
    borders = [pad_axis(extent, pad_of.get(axis, (0, 0)), region[axis], mode) for axis, extent in enumerate(shape)]
    tiles, raw = zip(*borders, strict=True)
    out, need, begins, ends = zip(*tiles, strict=True)
    numbers, written = [*begins, *ends], None if raw == out else raw
    if operation.node.opset < 11:
        return Piece(out, (need,), {"pads": numbers}, written_region=written)
    rest = (None, *operation.full_needs()[2:3], *(None for _ in operation.inputs[3:]))
    return Piece(out, (need, *rest[: len(operation.inputs) - 1]), {}, {1: np.array(numbers, np.int64)}, written)


def trilu(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Trilu: each part, a tile of the matrix, is a Trilu with the diagonal moved by the tile's position."""
    diagonal = _integer_list(operation, "", 1)
    if diagonal is None and operation.has_input(1):
        return whole_tensor(operation, region, reduce)
    moved = (diagonal or [0])[0] + region[-2][0] - region[-1][0]
    constants: dict[int, Any] = {1: np.array(moved, np.int64)}
    return Piece(region, (region, *(None for _ in operation.inputs[1:])), {}, constants)


RULES = (
    OperatorRule("Slice", slice_, cost=zero_cost),
    OperatorRule("Pad", pad, cost=zero_cost, constant_stand_ins="- - rounded"),
    OperatorRule("Trilu", trilu),
)
