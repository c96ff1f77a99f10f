"""Rules of Resize, Upsample and GridSample.

An axis can be split if it is enlarged by an integer, or reduced by a power of two. Tiles then start at the boundaries
of blocks; a block is one element of the smaller tensor with the corresponding elements of the larger one. The
coordinates in a tile are those in the whole tensor minus an integer, without rounding errors, so that tiles are
resampled exactly. With other factors, aligned corners or antialiasing, the whole axis is read.
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
"""Position of coordinate i within input element i, by coordinate mode: 0 is the start of the element, 1/2 its center.

Axes with other modes are not split, because a tile would not be resampled like the whole tensor.
"""
ElementFunction = Callable[[Fraction], int]
"""Function that returns the index of an input element for a coordinate."""
NEAREST_MODES: Mapping[str, ElementFunction] = {
    "round_prefer_floor": lambda at: math.ceil(at - ONE_HALF),
    "round_prefer_ceil": lambda at: math.floor(at + ONE_HALF),
    "floor": math.floor,
    "ceil": math.ceil,
}


@dataclass(frozen=True)
class ResizeAxis:
    """One axis of a Resize. A coordinate is a position on the input axis, in elements.

    Attributes:
        extent: Number of input elements.
        out_extent: Number of output elements.
        factor: Output elements per input element.
        shift: Position of coordinate i within element i: 0 if the coordinate is the start of the element, 1/2 if it is
            the center.
        low: Function that returns the first input element that is read at a coordinate.
        high: Function that returns the last input element that is read at a coordinate.
    """

    extent: int
    out_extent: int
    factor: Fraction
    shift: Fraction
    low: ElementFunction
    high: ElementFunction

    def input_interval(self, interval: Interval) -> Interval:
        """Return the interval of input elements that an interval of output elements reads."""
        first, last = ((index + self.shift) / self.factor - self.shift for index in (interval[0], interval[1] - 1))
        clip = self.extent - 1
        return min(max(self.low(first), 0), clip), min(max(self.high(last), 0), clip) + 1


def tile_resized_axis(axis: ResizeAxis, interval: Interval) -> tuple[Interval, Interval, Interval]:
    """Return the computed output interval, the input interval and the written output interval of a tile.

    The computed interval contains the requested one, `interval`. The tile writes the whole written interval. Its
    elements outside of the computed interval can be wrong, because they may read input elements that the tile does not
    have.
    """
    up, down = axis.factor.numerator, axis.factor.denominator
    low, high = axis.input_interval(interval)
    # Extend the input to whole blocks: one element of the smaller tensor with the corresponding ones of the larger.
    low = min(low // down, interval[0] // up) * down
    high = min(axis.extent, -(-max(high, -(-interval[1] * down // up)) // down) * down)
    written = (low * up // down, axis.out_extent if high == axis.extent else high * up // down)
    first, last = axis.input_interval(written)
    return written if low <= first and last <= high else interval, (low, high), written


def _has_old_coordinates(operation: Operation) -> bool:
    # Coordinate modes were added in opset 11.
    return operation.node.op == "Upsample" or operation.node.opset < 11


def resized_axes(operation: Operation) -> list[int]:
    """Return the axes to which the scales or sizes of a Resize apply, in the order of these scales or sizes."""
    rank = len(operation.input_shape(0))
    return [axis % rank for axis in operation.attribute("axes") or range(rank)]


def scale_factors(operation: Operation) -> list[float] | None:
    """Return the scale factor of each axis of a Resize or Upsample; None if the scales are a computed input."""
    shape, index = operation.input_shape(0), 1 if _has_old_coordinates(operation) else 2
    scales: Any = operation.attribute("scales")
    if scales is None and (not operation.has_input(index) or operation.input_shape(index) == (0,)):
        return [out / extent for out, extent in zip(operation.out_shape, shape, strict=True)]
    if scales is None and (scales := operation.constant_value(index)) is None:
        return None
    scale_of = dict(zip(resized_axes(operation), map(float, scales), strict=True))
    return [scale_of.get(axis, 1.0) for axis in range(len(shape))]


def exact_factor(factor: float, is_nearest: bool) -> Fraction | None:
    """Return the scale factor as a fraction if tiles can be resampled exactly with it, else None.

    It must be an integer (a power of two in modes that interpolate), or one of 1/2, 1/4, 1/8, ….
    """
    ratio = Fraction(factor)
    is_integer = ratio.denominator == 1 and ratio >= 1 and (is_nearest or ratio.numerator & (ratio.numerator - 1) == 0)
    is_reduction = ratio.numerator == 1 and ratio.denominator & (ratio.denominator - 1) == 0
    return ratio if is_integer or is_reduction else None


def _tap_functions(operation: Operation, factor: Fraction) -> tuple[ElementFunction, ElementFunction]:
    """Return two functions of a coordinate: the indices of the first and the last input element that are read there."""
    mode = operation.attribute("mode", "nearest")
    if factor == 1:
        return math.floor, math.floor
    if mode == "nearest":
        mode_function = NEAREST_MODES[operation.attribute("nearest_mode", "round_prefer_floor")]
        old_function = math.ceil if factor < 1 else math.floor
        nearest = old_function if _has_old_coordinates(operation) else mode_function
        return nearest, nearest
    if mode == "cubic":
        return lambda at: math.floor(at) - 1, lambda at: math.floor(at) + 2
    return math.floor, lambda at: math.floor(at) + 1


def _coordinate_mode(operation: Operation) -> str:
    mode: str = operation.attribute("coordinate_transformation_mode", "half_pixel")
    return "asymmetric" if _has_old_coordinates(operation) else mode


def _differs_in_tiles(operation: Operation) -> bool:
    """Return True if a tile of a Resize would be resampled differently from the whole tensor."""
    coordinates, policy = _coordinate_mode(operation), operation.attribute("keep_aspect_ratio_policy", "stretch")
    if coordinates not in COORDINATE_SHIFTS or policy != "stretch" or operation.attribute("antialias", 0):
        return True
    pairs = zip(operation.input_shape(0), operation.out_shape, strict=True)
    return coordinates == "pytorch_half_pixel" and any(out == 1 < extent for extent, out in pairs)


def resize_axes(operation: Operation) -> list[ResizeAxis | None]:
    """Return the axes of a Resize, with None in place of each axis that cannot be split."""
    coordinates, scales, differs = _coordinate_mode(operation), scale_factors(operation), _differs_in_tiles(operation)
    keeps_aspect = operation.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"
    # If the aspect ratio is kept and axes are negative numbers, ONNX and onnxruntime infer different shapes.
    is_disputed = keeps_aspect and min(operation.attribute("axes") or (0,)) < 0
    if scales is None or coordinates == "tf_crop_and_resize" or is_disputed:
        return [None] * len(operation.out_shape)
    is_nearest = operation.attribute("mode", "nearest") == "nearest"
    resized = resized_axes(operation)
    shift = COORDINATE_SHIFTS.get(coordinates, ONE_HALF)
    axes: list[ResizeAxis | None] = []
    is_leading = True
    extents = zip(operation.input_shape(0), operation.out_shape, scales, strict=True)
    for index, (extent, out_extent, scale) in enumerate(extents):
        # Axes before the first resampled one, such as batch and channels, can be split even if tiles of the other axes
        # would be resampled differently from the whole tensor.
        is_leading = is_leading and scale == 1 and not (keeps_aspect and index in resized)
        factor = exact_factor(scale, is_nearest) if is_leading or not differs else None
        exact = extent * (factor or 0)
        if factor is None or out_extent != (exact if coordinates == "half_pixel_symmetric" else math.floor(exact)):
            axes.append(None)
        else:
            axes.append(ResizeAxis(extent, out_extent, factor, shift, *_tap_functions(operation, factor)))
    return axes


def resize(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a Resize or Upsample: each part reads the input elements that affect its tile, extended to whole blocks.

    A block is one element of the smaller tensor with the corresponding elements of the larger one.
    """
    tiles = [
        ((0, operation.out_shape[i]), (0, operation.input_shape(0)[i]), (0, operation.out_shape[i]))
        if axis is None
        else tile_resized_axis(axis, region[i])
        for i, axis in enumerate(resize_axes(operation))
    ]
    out, need, written = zip(*tiles, strict=True)
    needs, constants = [need, *operation.full_needs()[1:]], dict[int, NDArray[Any]]()
    if operation.has_input(3):  # Target sizes are replaced by the sizes of the part, but scale factors are kept.
        resized = resized_axes(operation)
        sizes = [written[axis][1] - written[axis][0] for axis in resized]
        if sizes != [operation.out_shape[axis] for axis in resized]:
            constants[3], needs[3] = np.array(sizes, np.int64), None
    # pytorch_half_pixel differs from half_pixel only on axes of one element. The whole tensor has no such axis, but a
    # part can have one, so each part uses half_pixel.
    is_half_pixel = _coordinate_mode(operation) == "pytorch_half_pixel" and not _differs_in_tiles(operation)
    attributes = {"coordinate_transformation_mode": "half_pixel"} if is_half_pixel else {}
    return Piece(out, tuple(needs), attributes, constants, None if written == out else written)


def grid_sample(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a GridSample: each part reads its rows and columns of the grid, and whole images of its channels."""
    needs = (
        (*region[:2], *full_region(operation.input_shape(0)[2:])),
        (region[0], *region[2:], *full_region(operation.input_shape(1)[-1:])),
    )
    return Piece(region, needs)


def interpolation_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of interpolation: two FLOP for each input element that is blended into an output element."""
    grid = operation.node.op == "GridSample"
    axes = len(out) - 2 if grid else sum(map(operator.ne, operation.input_shape(0), operation.out_shape))
    mode = operation.attribute("mode", "linear" if grid else "nearest")
    # Along each resampled axis, two input elements are blended, or four in cubic mode; in nearest modes none.
    return OpCost(other_flops=math.prod(out) * (1 if mode == "nearest" else 2 * (4 if "cubic" in mode else 2) ** axes))


RULES = (
    *(OperatorRule(op, resize, cost=interpolation_cost, stand_in="resize") for op in ("Resize", "Upsample")),
    OperatorRule("GridSample", grid_sample, cost=interpolation_cost, stand_in="resize"),
)
