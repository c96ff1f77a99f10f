"""Resize and Upsample: an axis that grows by a whole factor, or shrinks by one that is a power of two, can be cut.

Then a shift of the output by so many elements is a shift of the input by a whole number of them, in floating point too,
so that a tile is resampled as the whole is. Everything else (other factors, aligned corners, antialiasing) reads all.
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
"""Where in an element its coordinate lies, for the coordinate modes under which tiles are resampled as the whole is."""
NEAREST_MODES: Mapping[str, Callable[[Fraction], int]] = {
    "round_prefer_floor": lambda at: math.ceil(at - ONE_HALF),
    "round_prefer_ceil": lambda at: math.floor(at + ONE_HALF),
    "floor": math.floor,
    "ceil": math.ceil,
}


@dataclass(frozen=True)
class ResizeAxis:
    """One axis: extents of input and output, the factor, the coordinate's shift, and what an output element reads of
    the input: from `low` to `high` of its coordinate there, both included."""

    extent: int
    out_extent: int
    factor: Fraction
    shift: Fraction
    low: Callable[[Fraction], int]
    high: Callable[[Fraction], int]

    def input_interval(self, interval: Interval) -> Interval:
        """The input elements that an interval of the output reads."""
        first, last = ((index + self.shift) / self.factor - self.shift for index in (interval[0], interval[1] - 1))
        clip = self.extent - 1
        return min(max(self.low(first), 0), clip), min(max(self.high(last), 0), clip) + 1


def tile_resized_axis(axis: ResizeAxis, interval: Interval) -> tuple[Interval, Interval, Interval]:
    """(what of the output is right, what is read, what is written) for an interval of the output: the input is widened
    to whole blocks of `factor`, and where all that it then writes is right, all of that is the piece's."""
    up, down = axis.factor.numerator, axis.factor.denominator
    low, high = axis.input_interval(interval)
    low = min(low // down, interval[0] // up) * down
    high = min(axis.extent, -(-max(high, -(-interval[1] * down // up)) // down) * down)
    raw = (low * up // down, axis.out_extent if high == axis.extent else high * up // down)
    first, last = axis.input_interval(raw)
    return raw if low <= first and last <= high else interval, (low, high), raw


def _has_old_coordinates(operation: Operation) -> bool:
    """Whether it is of before Resize had modes of coordinates."""
    return operation.node.op == "Upsample" or operation.node.opset < 11


def scale_factors(operation: Operation) -> list[float] | None:
    """The factor of every axis, as `scales` gives them or as sizes do; None where they are not known."""
    shape, index = operation.input_shape(0), 1 if _has_old_coordinates(operation) else 2
    scales: Any = operation.attribute("scales")
    if scales is None and (not operation.has_input(index) or operation.input_shape(index) == (0,)):
        return [out / extent for out, extent in zip(operation.out_shape, shape, strict=True)]
    if scales is None and (scales := operation.constant_value(index)) is None:
        return None
    named = dict(zip(operation.attribute("axes") or range(len(shape)), map(float, scales), strict=True))
    return [named.get(axis, 1.0) for axis in range(len(shape))]


def exact_factor(factor: float, nearest: bool) -> Fraction | None:
    """The factor where it is whole or one over a power of two; a linear blend wants powers of two both ways."""
    ratio = Fraction(factor)
    whole = ratio.denominator == 1 and ratio >= 1 and (nearest or ratio.numerator & (ratio.numerator - 1) == 0)
    return ratio if whole or (ratio.numerator == 1 and ratio.denominator & (ratio.denominator - 1) == 0) else None


def _tap_functions(
    operation: Operation, factor: Fraction
) -> tuple[Callable[[Fraction], int], Callable[[Fraction], int]]:
    """The first and the last input element that a coordinate reads; one of an axis that stays as it is reads itself."""
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
    """Whether a tile of a resampled axis would be resampled otherwise than the whole is."""
    coordinates, policy = _coordinate_mode(operation), operation.attribute("keep_aspect_ratio_policy", "stretch")
    if coordinates not in COORDINATE_SHIFTS or policy != "stretch" or operation.attribute("antialias", 0):
        return True
    pairs = zip(operation.input_shape(0), operation.out_shape, strict=True)
    return coordinates == "pytorch_half_pixel" and any(out == 1 < extent for extent, out in pairs)


def resize_axes(operation: Operation) -> list[ResizeAxis | None]:
    """The axes that can be cut (None: one that cannot). Those before the first that is resampled (batch and channels)
    pass whatever the mode."""
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
    """Resize, Upsample: y[tile] ← x[the blocks that it is made of, and what it blends with]. `scales` stay, sizes are
    those of the piece."""
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
    # pytorch_half_pixel differs on axes of extent 1 alone, which a piece may have where the whole has more.
    plain = _coordinate_mode(operation) == "pytorch_half_pixel" and not _differs_in_tiles(operation)
    attributes = {"coordinate_transformation_mode": "half_pixel"} if plain else {}
    return Piece(out, tuple(needs), attributes, constants, None if raw == out else raw)


def grid_sample(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """GridSample: y[batch, channels, tile] ← x[batch, channels], the grid's tile."""
    needs = (
        (*region[:2], *full_region(operation.input_shape(0)[2:])),
        (region[0], *region[2:], *full_region(operation.input_shape(1)[-1:])),
    )
    return Piece(region, needs)


def interpolation_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Two FLOP for each element that is blended, of 2 or 4 along each axis that is resampled; one where none is."""
    grid = operation.node.op == "GridSample"
    axes = len(out) - 2 if grid else sum(map(operator.ne, operation.input_shape(0), operation.out_shape))
    mode = operation.attribute("mode", "linear" if grid else "nearest")
    return OpCost(other_flops=math.prod(out) * (1 if mode == "nearest" else 2 * (4 if "cubic" in mode else 2) ** axes))


RULES = (
    *(OperatorRule(op, resize, cost=interpolation_cost, stand_in="resampled") for op in ("Resize", "Upsample")),
    OperatorRule("GridSample", grid_sample, cost=interpolation_cost, stand_in="resampled"),
)
