"""Lowering of AveragePool and GlobalAveragePool.

ONNX and TFLite may count padding elements differently in an average. In float32, a MUL after the AVERAGE_POOL_2D
corrects the averages of these windows.

In int8, a MUL would round a second time, and results would depend on the split into tiles. Instead, neighbouring
windows that average the same number of elements form a block. Each block is cropped from the image and averaged without
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dicompiler_targets.tflm.conv_pool import (
    ACTIVATION_CODES,
    SAME_PADDING,
    VALID_PADDING,
    WindowAxis,
    add_pad,
    add_pool,
    make_global_windows,
    make_pool_axes,
    make_zero_bias,
)
from dicompiler_targets.tflm.flatbuffer import QuantizationParams
from dicompiler_targets.tflm.graph import SegmentGraph, SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, TfliteWriter, permute

UNIT_WEIGHT = 64
"""The int8 number that represents the weight 1 in a convolution that averages.

TFLite-micro rounds a sum twice: after multiplying it by a scale, and after shifting it. With a large number, the second
rounding is precise.
"""


@dataclass(frozen=True)
class WindowBlock:
    """Neighbouring windows of an average pool along an axis that average the same number of elements.

    Attributes:
        start: Position, along the axis, of the first element that the windows read.
        stop: Position after the last element that the windows read.
        span: Number of elements that each window averages.
        out: Number of windows in the block.
    """

    start: int
    stop: int
    span: int
    out: int = 1


def lower_average_pool(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower AveragePool to AVERAGE_POOL_2D, and further operators if ONNX counts padding differently from TFLite."""
    windows = make_pool_axes(writer.graph, node)
    includes_padding = bool(node.get_attribute("count_include_pad", 0))
    blocks = [_find_blocks(axis, includes_padding) for axis in windows]
    if any(block.span <= 0 for along in blocks for block in along):
        raise make_refusal(node, "a window contains only pads", "remove ceil_mode")
    if writer.graph.dtypes[node.output] == "float32":
        _pool_floats(writer, node, windows, includes_padding)
    else:
        _pool_integers(writer, node, windows, includes_padding)


def lower_global_average_pool(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower GlobalAveragePool to an AVERAGE_POOL_2D with one window that covers the whole image.

    If input and output have different quantizations, it is lowered to MEAN, which rounds once, as onnxruntime does.
    """
    windows, x = make_global_windows(writer.graph, node), writer.require_tensor(node.inputs[0], "image")
    if _is_rescaled(writer.graph, node):
        axes = writer.add_constant(np.asarray([1, 2], np.int32), "axes")
        writer.add_operation("MEAN", [x, axes], [writer.add_output(node.output, "image")], "Reducer", KeepDims=True)
    else:
        add_pool(writer, node, "AVERAGE_POOL_2D", x, VALID_PADDING, windows)


def _is_rescaled(graph: SegmentGraph, node: SegmentNode) -> bool:
    """Return True if the node's output is quantized, but not with the scale and zero point of its input."""
    quantizations = graph.quantizations
    return node.output in quantizations and quantizations[node.output] != quantizations.get(node.inputs[0])


def _pool_floats(
    writer: TfliteWriter, node: SegmentNode, windows: Sequence[WindowAxis], includes_padding: bool
) -> None:
    """Lower an average pool in float32. `includes_padding` is ONNX's attribute count_include_pad."""
    x = writer.require_tensor(node.inputs[0], "image")
    valid = all(axis.is_valid for axis in windows)
    if valid or (all(axis.is_same for axis in windows) and not includes_padding):
        add_pool(writer, node, "AVERAGE_POOL_2D", x, VALID_PADDING if valid else SAME_PADDING, windows)
        return
    x = add_pad(writer, x, windows)
    counts = [
        np.concatenate([np.full(b.out, b.span) for b in _find_blocks(axis, includes_padding)]) for axis in windows
    ]
    if all((count == axis.span).all() for count, axis in zip(counts, windows, strict=True)):
        add_pool(writer, node, "AVERAGE_POOL_2D", x, VALID_PADDING, windows)
        return
    average = writer.add_like(x, permute(writer.graph.shapes[node.output], NCHW_TO_NHWC))
    values = {"StrideH": windows[0].stride, "StrideW": windows[1].stride, "FilterHeight": windows[0].span}
    values |= {
        "FilterWidth": windows[1].span,
        "Padding": VALID_PADDING,
        "FusedActivationFunction": ACTIVATION_CODES["NONE"],
    }
    writer.add_operation("AVERAGE_POOL_2D", [x], [average], "Pool2D", **values)
    factor = (windows[0].span / counts[0])[:, None] * (windows[1].span / counts[1])[None, :]
    scale = writer.add_constant(factor[None, :, :, None].astype(np.float32), "counts")
    output = writer.add_output(node.output, "image")
    writer.add_operation(
        "MUL", [average, scale], [output], "Mul", FusedActivationFunction=ACTIVATION_CODES[node.activation]
    )


def _find_blocks(axis: WindowAxis, includes_padding: bool) -> list[WindowBlock]:
    """Group the windows of an average pool along an axis into blocks that average the same number of elements.

    Consecutive windows without missing elements form one block. Every other window is a block of its own.
    """
    end = axis.extent + (axis.end_pad if includes_padding else 0)
    blocks: list[WindowBlock] = []
    for number in range(axis.out):
        start = number * axis.stride - axis.begin_pad
        low, high = start if includes_padding else max(start, 0), min(start + axis.span, end)
        if blocks and blocks[-1].span == high - low == axis.span:
            blocks[-1] = replace(blocks[-1], stop=high, out=blocks[-1].out + 1)
        else:
            blocks.append(WindowBlock(low, high, high - low))
    return blocks


def _pool_integers(
    writer: TfliteWriter, node: SegmentNode, windows: Sequence[WindowAxis], includes_padding: bool
) -> None:
    """Lower an average pool in int8: average each block by its own operation, and concatenate the results.

    A block has neighbouring windows that average the same number of elements. `includes_padding` is ONNX's attribute
    count_include_pad.
    """
    x = writer.require_tensor(node.inputs[0], "image")
    blocks = [_find_blocks(axis, includes_padding) for axis in windows]
    if includes_padding and not all(axis.is_valid for axis in windows):
        x = add_pad(writer, x, windows)
        blocks = [
            [replace(block, start=block.start + axis.begin_pad, stop=block.stop + axis.begin_pad) for block in along]
            for axis, along in zip(windows, blocks, strict=True)
        ]
    bands = []
    for top in blocks[0]:
        cells = [_average_block(writer, node, x, (top, left), windows) for left in blocks[1]]
        bands.append(_concatenate(writer, cells, 2))
    writer.set_alias(node.output, "image", _concatenate(writer, bands, 1))


def _average_block(
    writer: TfliteWriter,
    node: SegmentNode,
    x: int,
    blocks: tuple[WindowBlock, WindowBlock],
    windows: Sequence[WindowAxis],
) -> int:
    """Add the operation that averages a block, and return the index of its result.

    If input and output have different quantizations, it is a DEPTHWISE_CONV_2D, with weights 1 / (elements of a
    window).

    Args:
        writer: The writer of the TFLite graph.
        node: The average pool.
        x: Index of the image's tensor.
        blocks: The windows of the block along height and along width.
        windows: All windows of the pool along height and along width; only their strides are used.
    """
    batch, _, _, channels = writer.get_shape(x)
    out, spans = [block.out for block in blocks], [block.span for block in blocks]
    x = _crop(writer, x, blocks)
    output = writer.add_tensor(node.output, "int8", (batch, *out, channels), writer.graph.quantizations[node.output])
    values = {"Padding": VALID_PADDING, "StrideH": windows[0].stride, "StrideW": windows[1].stride}
    values["FusedActivationFunction"] = ACTIVATION_CODES[node.activation]
    if not _is_rescaled(writer.graph, node):
        writer.add_operation(
            "AVERAGE_POOL_2D", [x], [output], "Pool2D", FilterHeight=spans[0], FilterWidth=spans[1], **values
        )
        return output
    quantization = QuantizationParams((1 / (UNIT_WEIGHT * spans[0] * spans[1]),), (0,))
    ones = writer.add_constant(np.full((1, *spans, channels), UNIT_WEIGHT, np.int8), "ones", quantization)
    values |= {"DepthMultiplier": 1, "DilationHFactor": 1, "DilationWFactor": 1}
    inputs = [x, ones, make_zero_bias(writer, channels, x, quantization)]
    writer.add_operation("DEPTHWISE_CONV_2D", inputs, [output], "DepthwiseConv2D", **values)
    return output


def _crop(writer: TfliteWriter, x: int, blocks: tuple[WindowBlock, WindowBlock]) -> int:
    """Return the tensor index of image `x`, cropped to the region that `blocks` (along height and width) read."""
    batch, height, width, channels = writer.get_shape(x)
    if all((block.start, block.stop) == (0, extent) for block, extent in zip(blocks, (height, width), strict=True)):
        return x
    top, left = blocks
    output = writer.add_like(x, (batch, top.stop - top.start, left.stop - left.start, channels))
    ranges = ((0, top.start, left.start, 0), (batch, top.stop, left.stop, channels), (1, 1, 1, 1))
    columns = [writer.add_constant(np.asarray(column, np.int32), "range") for column in ranges]
    writer.add_operation("STRIDED_SLICE", [x, *columns], [output], "StridedSlice")
    return output


def _concatenate(writer: TfliteWriter, parts: Sequence[int], axis: int) -> int:
    if len(parts) == 1:
        return parts[0]
    shape = list(writer.get_shape(parts[0]))
    shape[axis] = sum(writer.get_shape(part)[axis] for part in parts)
    output = writer.add_like(parts[0], tuple(shape))
    writer.add_operation("CONCATENATION", parts, [output], "Concatenation", Axis=axis, FusedActivationFunction=0)
    return output
