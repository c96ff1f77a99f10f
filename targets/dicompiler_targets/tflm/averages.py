"""Averages over windows of images, and over whole images.

In float32 by AVERAGE_POOL_2D, and a MUL where ONNX counts the pads otherwise than TFLite. On 8-bit numbers window by
window, so that an average is the same number however the image is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dicompiler_targets.tflm.flatbuffer import Quantisation
from dicompiler_targets.tflm.graph import Graph, Node, refusal
from dicompiler_targets.tflm.windows import (
    ACTIVATIONS,
    SAME,
    VALID,
    Axis,
    global_windows,
    no_bias,
    pad,
    pool,
    pool_axes,
)
from dicompiler_targets.tflm.writer import IMAGE, Writer, permuted

ONE = 64
"""The number that stands for 1 in weights that are all the same. TFLite-micro rounds the product with a scale, and once
more when it shifts it: what is shifted far is rounded well."""


@dataclass(frozen=True)
class Block:
    """`out` neighbouring windows of `span` elements each along an axis, in the elements start…stop of the image."""

    start: int
    stop: int
    span: int
    out: int = 1


def average_pool(writer: Writer, node: Node) -> None:
    """AveragePool → AVERAGE_POOL_2D, with what else it takes to count the pads as ONNX does."""
    windows = pool_axes(writer.graph, node)
    include = bool(node.attribute("count_include_pad", 0))
    blocks = [_blocks(axis, include) for axis in windows]
    if any(block.span <= 0 for along in blocks for block in along):
        raise refusal(node, "a window lies in the pads alone", "leave out ceil_mode")
    if writer.graph.dtypes[node.output] == "float32":
        _of_floats(writer, node, windows, include)
    else:
        _of_numbers(writer, node, windows, include)


def global_average_pool(writer: Writer, node: Node) -> None:
    """GlobalAveragePool → AVERAGE_POOL_2D over the image; MEAN where another scale comes out, with one rounding as
    onnxruntime has it."""
    windows, x = global_windows(writer.graph, node), writer.read(node.inputs[0], "image")
    if _rescaled(writer.graph, node):
        axes = writer.constant(np.asarray([1, 2], np.int32), "axes")
        writer.add("MEAN", [x, axes], [writer.make(node.output, "image")], "Reducer", KeepDims=True)
    else:
        pool(writer, node, "AVERAGE_POOL_2D", x, VALID, windows)


def _rescaled(graph: Graph, node: Node) -> bool:
    """Whether quantised numbers go in and others of another scale come out."""
    about = graph.quantisations
    return node.output in about and about[node.output] != about.get(node.inputs[0])


def _of_floats(writer: Writer, node: Node, windows: Sequence[Axis], include: bool) -> None:
    """SAME leaves the pads out of the count; where ONNX counts otherwise at the border, the average over a padded
    window is multiplied by what it is off by."""
    x = writer.read(node.inputs[0], "image")
    valid = all(axis.valid for axis in windows)
    if valid or (all(axis.same for axis in windows) and not include):
        pool(writer, node, "AVERAGE_POOL_2D", x, VALID if valid else SAME, windows)
        return
    x = pad(writer, x, windows)
    counts = [np.concatenate([np.full(b.out, b.span) for b in _blocks(axis, include)]) for axis in windows]
    if all((count == axis.span).all() for count, axis in zip(counts, windows, strict=True)):
        pool(writer, node, "AVERAGE_POOL_2D", x, VALID, windows)
        return
    average = writer.like(x, permuted(writer.graph.shapes[node.output], IMAGE))
    values = {"StrideH": windows[0].stride, "StrideW": windows[1].stride, "FilterHeight": windows[0].span}
    values |= {"FilterWidth": windows[1].span, "Padding": VALID, "FusedActivationFunction": ACTIVATIONS["NONE"]}
    writer.add("AVERAGE_POOL_2D", [x], [average], "Pool2D", **values)
    factor = (windows[0].span / counts[0])[:, None] * (windows[1].span / counts[1])[None, :]
    scale = writer.constant(factor[None, :, :, None].astype(np.float32), "counts")
    output = writer.make(node.output, "image")
    writer.add("MUL", [average, scale], [output], "Mul", FusedActivationFunction=ACTIVATIONS[node.activation])


def _blocks(axis: Axis, include: bool) -> list[Block]:
    """The windows that count all their elements, in runs, and each of the others by itself, over just what it counts.

    Elements below 0 and from the extent on are pads.
    """
    end = axis.extent + (axis.declared_end if include else 0)
    blocks: list[Block] = []
    for number in range(axis.out):
        start = number * axis.stride - axis.begin
        low, high = start if include else max(start, 0), min(start + axis.span, end)
        if blocks and blocks[-1].span == high - low == axis.span:
            blocks[-1] = replace(blocks[-1], stop=high, out=blocks[-1].out + 1)
        else:
            blocks.append(Block(low, high, high - low))
    return blocks


def _of_numbers(writer: Writer, node: Node, windows: Sequence[Axis], include: bool) -> None:
    """Blocks of windows that count as many elements are averaged by themselves and joined."""
    x = writer.read(node.inputs[0], "image")
    blocks = [_blocks(axis, include) for axis in windows]
    if include and not all(axis.valid for axis in windows):
        x = pad(writer, x, windows)
        blocks = [
            [replace(block, start=block.start + axis.begin, stop=block.stop + axis.begin) for block in along]
            for axis, along in zip(windows, blocks, strict=True)
        ]
    bands = []
    for top in blocks[0]:
        cells = [_averaged(writer, node, x, (top, left), windows) for left in blocks[1]]
        bands.append(_joined(writer, cells, 2))
    writer.alias(node.output, "image", _joined(writer, bands, 1))


def _averaged(writer: Writer, node: Node, x: int, blocks: tuple[Block, Block], windows: Sequence[Axis]) -> int:
    """The averages of a block of windows: AVERAGE_POOL_2D, or DEPTHWISE_CONV_2D of weights that are all 1 / (elements
    of a window) where another scale comes out."""
    batch, _, _, channels = writer.shape(x)
    out, spans = [block.out for block in blocks], [block.span for block in blocks]
    x = _cropped(writer, x, blocks)
    output = writer.tensor(node.output, "int8", (batch, *out, channels), writer.graph.quantisations[node.output])
    values = {"Padding": VALID, "StrideH": windows[0].stride, "StrideW": windows[1].stride}
    values["FusedActivationFunction"] = ACTIVATIONS[node.activation]
    if not _rescaled(writer.graph, node):
        writer.add("AVERAGE_POOL_2D", [x], [output], "Pool2D", FilterHeight=spans[0], FilterWidth=spans[1], **values)
        return output
    about = Quantisation((1 / (ONE * spans[0] * spans[1]),), (0,))
    ones = writer.constant(np.full((1, *spans, channels), ONE, np.int8), "ones", about)
    values |= {"DepthMultiplier": 1, "DilationHFactor": 1, "DilationWFactor": 1}
    inputs = [x, ones, no_bias(writer, channels, x, about)]
    writer.add("DEPTHWISE_CONV_2D", inputs, [output], "DepthwiseConv2D", **values)
    return output


def _cropped(writer: Writer, x: int, blocks: tuple[Block, Block]) -> int:
    """The part of an image that the blocks cover."""
    batch, height, width, channels = writer.shape(x)
    if all((block.start, block.stop) == (0, extent) for block, extent in zip(blocks, (height, width), strict=True)):
        return x
    top, left = blocks
    output = writer.like(x, (batch, top.stop - top.start, left.stop - left.start, channels))
    ranges = ((0, top.start, left.start, 0), (batch, top.stop, left.stop, channels), (1, 1, 1, 1))
    columns = [writer.constant(np.asarray(column, np.int32), "range") for column in ranges]
    writer.add("STRIDED_SLICE", [x, *columns], [output], "StridedSlice")
    return output


def _joined(writer: Writer, parts: Sequence[int], axis: int) -> int:
    """One tensor of the parts, one after another along the axis."""
    if len(parts) == 1:
        return parts[0]
    shape = list(writer.shape(parts[0]))
    shape[axis] = sum(writer.shape(part)[axis] for part in parts)
    output = writer.like(parts[0], tuple(shape))
    writer.add("CONCATENATION", parts, [output], "Concatenation", Axis=axis, FusedActivationFunction=0)
    return output
