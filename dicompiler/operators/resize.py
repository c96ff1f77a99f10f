"""Rules of Resize, Upsample and GridSample.

An axis can be split if it is enlarged by an integer, or reduced by a power of two. A shift of the output by whole
blocks is then a shift of the input by whole elements, also in floating point, so a tile is resampled exactly like the
whole. All other cases (other factors, aligned corners, antialiasing) read the whole axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.ir.operator_rule import OpCost, Operation, OperatorRule, Piece
from dicompiler.ir.regions import Interval, Region, Shape, full_region

ONE_HALF = Fraction(1, 2)
COORDINATE_SHIFTS = {
    "half_pixel": ONE_HALF,
    "half_pixel_symmetric": ONE_HALF,
    "pytorch_half_pixel": ONE_HALF,
    "asymmetric": Fraction(0),
}
"""Position of the coordinate within an element, for coordinate modes in which tiles are resampled like the whole."""
NEAREST_MODES: Mapping[str, Callable[[Fraction], int]] = {
    "round_prefer_floor": lambda at: math.ceil(at - ONE_HALF),
    "round_prefer_ceil": lambda at: math.floor(at + ONE_HALF),
    "floor": math.floor,
    "ceil": math.ceil,
}


@dataclass(frozen=True)
class ResizeAxis:
    """One axis of a Resize.

    Attributes:
        extent: Number of input elements.
        out_extent: Number of output elements.
        factor: Output elements per input element.
        shift: Position of the coordinate within an element.
        low: Function that returns the first input element read at a coordinate.
        high: Function that returns the last input element read at a coordinate.
    """

    extent: int
    out_extent: int
    factor: Fraction
    shift: Fraction
    low: Callable[[Fraction], int]
    high: Callable[[Fraction], int]

    def input_interval(self, interval: Interval) -> Interval:
        """Return the input elements that an interval of the output reads."""
        first, last = ((index + self.shift) / self.factor - self.shift for index in (interval[0], interval[1] - 1))
        clip = self.extent - 1
        return min(max(self.low(first), 0), clip), min(max(self.high(last), 0), clip) + 1


def tile_resized_axis(axis: ResizeAxis, interval: Interval) -> tuple[Interval, Interval, Interval]:
    """Return (output interval, input interval, written interval) for a requested interval of the output.

    The input interval is extended to whole blocks of `factor`. If all outputs written from it are correct, the output
    interval is all of them.
    """
    up, down = axis.factor.numerator, axis.factor.denominator
    low, high = axis.input_interval(interval)
    low = min(low // down, interval[0] // up) * down
    high = min(axis.extent, -(-max(high, -(-interval[1] * down // up)) // down) * down)
    raw = (low * up // down, axis.out_extent if high == axis.extent else high * up // down)
    first, last = axis.input_interval(raw)
    return raw if low <= first and last <= high else interval, (low, high), raw


def _has_old_coordinates(operation: Operation) -> bool:
    """Return True for operators from before the coordinate modes of Resize."""
    return operation.node.op == "Upsample" or operation.node.opset < 11


def scale_factors(operation: Operation) -> list[float] | None:
    """Return the factor of each axis from `scales` or sizes; None if unknown."""
    shape, index = operation.input_shape(0), 1 if _has_old_coordinates(operation) else 2
    scales: Any = operation.attribute("scales")
    if scales is None and (not operation.has_input(index) or operation.input_shape(index) == (0,)):
        return [out / extent for out, extent in zip(operation.out_shape, shape, strict=True)]
    if scales is None and (scales := operation.constant_value(index)) is None:
        return None
    named = dict(zip(operation.attribute("axes") or range(len(shape)), map(float, scales), strict=True))
    return [named.get(axis, 1.0) for axis in range(len(shape))]


def exact_factor(factor: float, nearest: bool) -> Fraction | None:
    """Return the factor if tiles can be resampled exactly.

    It must be an integer or one over a power of two; linear interpolation needs powers of two in both directions.
    """
    ratio = Fraction(factor)
    whole = ratio.denominator == 1 and ratio >= 1 and (nearest or ratio.numerator & (ratio.numerator - 1) == 0)
    return ratio if whole or (ratio.numerator == 1 and ratio.denominator & (ratio.denominator - 1) == 0) else None


def _tap_functions(
    operation: Operation, factor: Fraction
) -> tuple[Callable[[Fraction], int], Callable[[Fraction], int]]:
    """Return functions for the first and the last input element that is read at a coordinate."""
    mode = operation.attribute("mode", "nearest")
    if factor == 1:
        return math.floor, math.floor
    if mode == "nearest":
        named = NEAREST_MODES[operation.attribute("nearest_mode", "round_prefer_floor")]
        nearest = named if not _has_old_coordinates(operation) else math.ceil if factor < 1 else math.floor
        return nearest, nearest
    if mode == "cubic":
        return lambda at: math.floor(at) - 1, lambda at: math.floor(at) + 2
    return math.floor, lambda at: math.floor(at) + 1


def _coordinate_mode(operation: Operation) -> str:
    return (
        "asymmetric"
        if _has_old_coordinates(operation)
        else operation.attribute("coordinate_transformation_mode", "half_pixel")
    )


def _differs_in_tiles(operation: Operation) -> bool:
    """Return True if a tile of a resampled axis would be resampled differently from the whole."""
    coordinates, policy = _coordinate_mode(operation), operation.attribute("keep_aspect_ratio_policy", "stretch")
    if coordinates not in COORDINATE_SHIFTS or policy != "stretch" or operation.attribute("antialias", 0):
        return True
    pairs = zip(operation.input_shape(0), operation.out_shape, strict=True)
    return coordinates == "pytorch_half_pixel" and any(out == 1 < extent for extent, out in pairs)


def resize_axes(operation: Operation) -> list[ResizeAxis | None]:
    """Return the axes that can be split (None: an axis that cannot).

    Axes before the first resampled one (batch and channels) can be split in any mode.
    """
    coordinates, scales, special = _coordinate_mode(operation), scale_factors(operation), _differs_in_tiles(operation)
    if scales is None or coordinates == "tf_crop_and_resize":
        return [None] * len(operation.out_shape)
    aspect = operation.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"
    named = operation.attribute("axes") or range(len(scales))
    axes: list[ResizeAxis | None] = []
    leading = True
    for index, (extent, out, scale) in enumerate(
        zip(operation.input_shape(0), operation.out_shape, scales, strict=True)
    ):
        leading = leading and scale == 1 and not (aspect and index in named)
        factor = (
            exact_factor(scale, operation.attribute("mode", "nearest") == "nearest") if leading or not special else None
        )
        grown = extent * (factor or 0)
        if factor is None or out != (grown if coordinates == "half_pixel_symmetric" else math.floor(grown)):
            axes.append(None)
        else:
            axes.append(
                ResizeAxis(
                    extent,
                    out,
                    factor,
                    COORDINATE_SHIFTS.get(coordinates, ONE_HALF),
                    *_tap_functions(operation, factor),
                )
            )
    return axes


def resize(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Resize, Upsample: y[tile] ← x[blocks of the tile and the elements with which they are blended].

    `scales` are kept; sizes become those of the piece.
    """
    axes = zip(
        resize_axes(operation),
        region,
        full_region(operation.input_shape(0)),
        full_region(operation.out_shape),
        strict=True,
    )
    tiles = [
        (out, need, out) if axis is None else tile_resized_axis(axis, interval) for axis, interval, need, out in axes
    ]
    out, need, raw = zip(*tiles, strict=True)
    needs, constants = [need, *operation.full_needs()[1:]], dict[int, NDArray[Any]]()
    if operation.has_input(3):
        over = operation.attribute("axes") or range(len(raw))
        sizes = [raw[axis][1] - raw[axis][0] for axis in over]
        if sizes != [operation.out_shape[axis] for axis in over]:
            constants[3], needs[3] = np.array(sizes, np.int64), None
    # pytorch_half_pixel is special only for axes of extent 1, which a piece can have although the whole does not.
    plain = _coordinate_mode(operation) == "pytorch_half_pixel" and not _differs_in_tiles(operation)
    attributes = {"coordinate_transformation_mode": "half_pixel"} if plain else {}
    return Piece(out, tuple(needs), attributes, constants, None if raw == out else raw)


def grid_sample(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """GridSample: y[batch, channels, tile] ← x[batch, channels], grid[batch, tile]."""
    needs = (
        (*region[:2], *full_region(operation.input_shape(0)[2:])),
        (region[0], *region[2:], *full_region(operation.input_shape(1)[-1:])),
    )
    return Piece(region, needs)


def interpolation_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of interpolation.

    It is two FLOP per blended element (2 or 4 per resampled axis), or one without blending.
    """
    grid = operation.node.op == "GridSample"
    axes = len(out) - 2 if grid else sum(map(operator.ne, operation.input_shape(0), operation.out_shape))
    mode = operation.attribute("mode", "linear" if grid else "nearest")
    return OpCost(other_flops=math.prod(out) * (1 if mode == "nearest" else 2 * (4 if "cubic" in mode else 2) ** axes))


RULES = (
    *(OperatorRule(op, resize, cost=interpolation_cost, stand_in="resize") for op in ("Resize", "Upsample")),
    OperatorRule("GridSample", grid_sample, cost=interpolation_cost, stand_in="resize"),
)
