"""Lowering of Resize on images.

    nearest → RESIZE_NEAREST_NEIGHBOR, or GATHER along each axis;   linear → RESIZE_BILINEAR

Along each axis, an output pixel is a weighted mean of two input pixels. The lowering uses those options of TFLite
(align_corners, half_pixel_centers) that give the weights of the ONNX node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler_targets.tflm.graph import SegmentGraph, SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, TfliteWriter, permute

_COORDINATE_MODES = ((False, False), (False, True), (True, False))
"""TFLite's modes (align_corners, half_pixel_centers)."""


def _source_positions(node: SegmentNode, extent: int, out: int, scale: float) -> NDArray[Any]:
    """Return the position of each output pixel among the input pixels along an axis, as ONNX defines it.

    Args:
        node: The Resize or Upsample.
        extent: Number of input pixels.
        out: Number of output pixels.
        scale: The node's scale along the axis.
    """
    x = np.arange(out, dtype=np.float64)
    mode = node.get_attribute("coordinate_transformation_mode", "half_pixel" if node.op == "Resize" else "asymmetric")
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        return x * (extent - 1) / (out - 1) if out > 1 else 0 * x
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and out > 1):
        return (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return 0 * x
    raise make_refusal(node, f"it has the coordinate mode {mode!r}", "use half_pixel, asymmetric or align_corners")


def _nearest_pixels(node: SegmentNode, x: NDArray[Any], extent: int) -> NDArray[Any]:
    mode = node.get_attribute("nearest_mode", "round_prefer_floor" if node.op == "Resize" else "floor")
    rounding: dict[str, Callable[[NDArray[Any]], Any]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    }
    return np.asarray(np.clip(rounding[mode](x), 0, extent - 1), np.int32)


def _tflite_positions(extent: int, out: int, aligns_corners: bool, has_half_pixels: bool) -> NDArray[Any]:
    """Return the position of each output pixel in the input along an axis, as TFLite computes it.

    If `has_half_pixels` is True, RESIZE_BILINEAR uses the positions minus 0.5, which the caller must subtract.

    Args:
        extent: Number of input pixels.
        out: Number of output pixels.
        aligns_corners: TFLite's option align_corners.
        has_half_pixels: TFLite's option half_pixel_centers.
    """
    factor = (extent - 1) / (out - 1) if aligns_corners and out > 1 else extent / out
    x = np.arange(out, dtype=np.float32) + np.float32(0.5 if has_half_pixels else 0.0)
    return np.asarray(x * np.float32(factor))


def _interpolation_weights(x: NDArray[Any], extent: int) -> Iterator[NDArray[Any]]:
    """Yield, for each output pixel along an axis, the weights of linear interpolation over all input pixels.

    `x` has the position of each output pixel among the `extent` input pixels.
    """
    low = np.floor(x)
    for value, base in zip(x, low, strict=True):
        row = np.zeros(extent)
        row[int(np.clip(base, 0, extent - 1))] += 1 - (value - base)
        row[int(np.clip(base + 1, 0, extent - 1))] += value - base
        yield row


def lower_resize(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Resize or Upsample along H and W to RESIZE_NEAREST_NEIGHBOR, two GATHERs, or RESIZE_BILINEAR."""
    shape, out = writer.graph.get_shape(node.inputs[0]), writer.graph.shapes[node.output]
    if len(shape) != 4 or shape[:2] != out[:2]:
        raise make_refusal(
            node, "it resizes other axes than those of an image's height and width", "use target sockets"
        )
    mode = node.get_attribute("mode", "nearest")
    if mode not in ("nearest", "linear", "bilinear") or node.get_attribute("antialias", 0):
        raise make_refusal(node, f"it has mode {mode!r}", "use nearest, or linear without antialias")
    scales = _read_scales(writer, node)
    positions = [_source_positions(node, shape[i], out[i], scales[i] if scales else out[i] / shape[i]) for i in (2, 3)]
    x = writer.require_tensor(node.inputs[0], "image")
    size = writer.add_constant(np.asarray(out[2:], np.int32), "size")
    if mode == "nearest":
        _lower_nearest(
            writer, node, x, size, [_nearest_pixels(node, p, shape[i]) for p, i in zip(positions, (2, 3), strict=True)]
        )
        return
    wanted = [
        np.stack(list(_interpolation_weights(np.clip(p, 0, shape[i] - 1), shape[i])))
        for p, i in zip(positions, (2, 3), strict=True)
    ]
    for aligns_corners, has_half_pixels in _COORDINATE_MODES:
        shift = 0.5 if has_half_pixels else 0.0
        sampled = [
            np.clip(_tflite_positions(shape[i], out[i], aligns_corners, has_half_pixels) - shift, 0, shape[i] - 1)
            for i in (2, 3)
        ]
        rows = [np.stack(list(_interpolation_weights(f, shape[i]))) for f, i in zip(sampled, (2, 3), strict=True)]
        if all(np.allclose(a, b, atol=1e-6) for a, b in zip(wanted, rows, strict=True)):
            flags = {"AlignCorners": aligns_corners, "HalfPixelCenters": has_half_pixels}
            writer.add_operation(
                "RESIZE_BILINEAR", [x, size], [writer.add_output(node.output, "image")], "ResizeBilinear", **flags
            )
            return
    raise make_refusal(node, "TFLite-micro cannot interpolate at these positions", "use scales that divide evenly")


def can_resize_integers(graph: SegmentGraph, node: SegmentNode) -> bool:
    """Return True if TFLite-micro resizes 8-bit integers as precisely as floats.

    In mode linear, TFLite-micro rounds positions to multiples of 1/1024 pixel, so all positions must be such multiples.
    """
    extents, outs = graph.get_shape(node.inputs[0]), graph.shapes[node.output]
    aligns_corners = node.get_attribute("coordinate_transformation_mode") == "align_corners"
    exact = not aligns_corners and all(extent * 1024 % out == 0 for extent, out in zip(extents, outs, strict=True))
    return node.get_attribute("mode", "nearest") == "nearest" or exact


def _read_scales(writer: TfliteWriter, node: SegmentNode) -> list[float] | None:
    index = 1 if node.op == "Upsample" or node.opset < 11 else 2
    value = writer.graph.constants.get(node.inputs[index]) if node.has_input(index) else None
    if value is None and node.has_input(index):
        raise make_refusal(
            node, "its scales are computed during the run", "TFLite-micro requires constants; use target sockets"
        )
    if value is None or value.size == 0:
        return None
    along = node.get_attribute("axes", range(4))
    scales = {axis % 4: float(v) for axis, v in zip(along, value, strict=True)}
    return [scales.get(axis, 1.0) for axis in range(4)]


def _lower_nearest(writer: TfliteWriter, node: SegmentNode, x: int, size: int, wanted: list[NDArray[Any]]) -> None:
    shape, out = writer.graph.get_shape(node.inputs[0]), writer.graph.shapes[node.output]
    for aligns_corners, has_half_pixels in _COORDINATE_MODES:
        sampled = []
        for i in (2, 3):
            position = _tflite_positions(shape[i], out[i], aligns_corners, has_half_pixels)
            sampled.append(np.minimum(np.floor(position + 0.5) if aligns_corners else np.floor(position), shape[i] - 1))
        if all(np.array_equal(a, b) for a, b in zip(wanted, sampled, strict=True)):
            flags = {"AlignCorners": aligns_corners, "HalfPixelCenters": has_half_pixels}
            output = writer.add_output(node.output, "image")
            writer.add_operation("RESIZE_NEAREST_NEIGHBOR", [x, size], [output], "ResizeNearestNeighbor", **flags)
            return
    image_shape = permute(shape, NCHW_TO_NHWC)
    rows = writer.add_like(x, (image_shape[0], out[2], *image_shape[2:]))
    writer.add_operation("GATHER", [x, writer.add_constant(wanted[0], "rows")], [rows], "Gather", Axis=1)
    output = writer.add_output(node.output, "image")
    writer.add_operation("GATHER", [rows, writer.add_constant(wanted[1], "columns")], [output], "Gather", Axis=2)
