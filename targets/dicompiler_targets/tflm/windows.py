"""Convolutions and maximum pools: operators whose windows slide over images, with paddings as TFLite knows them.

SAME and VALID where they fit; else the pads go into a PAD before the operator, with the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dicompiler_targets.tflm.flatbuffer import Quantisation
from dicompiler_targets.tflm.graph import Graph, Node, refusal
from dicompiler_targets.tflm.writer import Writer

SAME, VALID = 0, 1
ACTIVATIONS = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}


@dataclass(frozen=True)
class Axis:
    """A window along one axis: extents of input and output, elements that it spans, step, and the pads that ONNX asks
    for; `end` is what the last window reads past the input and the pad at the begin."""

    extent: int
    out: int
    span: int
    stride: int
    begin: int
    declared_end: int

    @property
    def end(self) -> int:
        return max((self.out - 1) * self.stride + self.span - self.extent - self.begin, 0)

    @property
    def valid(self) -> bool:
        return self.begin == 0 and self.end == 0

    @property
    def same(self) -> bool:
        total = max((self.out - 1) * self.stride + self.span - self.extent, 0)
        return -(-self.extent // self.stride) == self.out and self.begin == total // 2


def axes(graph: Graph, node: Node, kernel: Sequence[int]) -> tuple[Axis, Axis]:
    """The windows of a node along H and W. `kernel`: elements of a window."""
    shape, out = graph.shape(node.inputs[0]), graph.shapes[node.output]
    if len(shape) != 4:
        raise refusal(node, f"it works on {len(shape) - 2} dimensions", "TFLite-micro has 2-D windows only")
    strides = node.attribute("strides", [1, 1])
    dilations = node.attribute("dilations", [1, 1])
    pads = node.attribute("pads", [0, 0, 0, 0])
    both = []
    for i in (0, 1):
        span = (kernel[i] - 1) * dilations[i] + 1
        begin, end = pads[i], pads[i + 2]
        auto = node.attribute("auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max((out[2 + i] - 1) * strides[i] + span - shape[2 + i], 0)
            begin = total // 2 if auto == "SAME_UPPER" else total - total // 2
            end = total - begin
        both.append(Axis(shape[2 + i], out[2 + i], span, strides[i], begin, end))
    if any(axis.begin < 0 or axis.declared_end < 0 for axis in both):
        raise refusal(node, "a pad is negative", "crop its input with a Slice")
    return both[0], both[1]


def pad(writer: Writer, index: int, windows: Sequence[Axis], value: float = 0.0) -> int:
    """The image with the windows' pads around it, filled with `value`."""
    shape = list(writer.shape(index))
    amounts = [[0, 0], *([axis.begin, axis.end] for axis in windows), [0, 0]]
    padded = writer.like(index, tuple(extent + sum(both) for extent, both in zip(shape, amounts, strict=True)))
    inputs = [index, writer.constant(np.asarray(amounts, np.int32), "pads")]
    if value == 0:  # of a quantised image: its zero point, which is what PAD fills in
        writer.add("PAD", inputs, [padded], "Pad")
        return padded
    tensor = writer.tensors[index]
    number = np.asarray([-128 if tensor.dtype == "int8" else value], tensor.dtype)
    writer.add("PADV2", [*inputs, writer.constant(number, "pad", tensor.quantisation)], [padded], "PadV2")
    return padded


def padding(writer: Writer, index: int, windows: Sequence[Axis], value: float = 0.0) -> tuple[int, int]:
    """(the image, SAME or VALID): with the pads made explicit where neither is what the windows ask for."""
    if all(axis.valid for axis in windows):
        return index, VALID
    if all(axis.same for axis in windows):
        return index, SAME
    return pad(writer, index, windows, value), VALID


def conv(writer: Writer, node: Node) -> None:
    """Conv with constant weights → CONV_2D, also grouped, or DEPTHWISE_CONV_2D."""
    weight = writer.graph.constants.get(node.inputs[1])
    if weight is None or (node.has(2) and node.inputs[2] not in writer.graph.constants):
        raise refusal(node, "its weights or bias are computed", "TFLite-micro wants constants; use target sockets")
    windows = axes(writer.graph, node, weight.shape[2:])
    x, scheme = padding(writer, writer.read(node.inputs[0], "image"), windows)
    groups, about = node.attribute("group", 1), writer.graph.quantisations.get(node.inputs[1])
    deep = weight.shape[1] == 1 and groups == writer.graph.shape(node.inputs[0])[1] and groups > 1
    dilations = node.attribute("dilations", [1, 1])
    values: dict[str, Any] = {"Padding": scheme, "StrideW": windows[1].stride, "StrideH": windows[0].stride}
    if deep:
        filters = weight.transpose(1, 2, 3, 0)
        values["DepthMultiplier"] = weight.shape[0] // groups
        about = None if about is None else Quantisation(about.scale, about.zero, 3)
    else:
        filters = weight.transpose(0, 2, 3, 1)
    values |= {"DilationHFactor": dilations[0], "DilationWFactor": dilations[1]}
    values["FusedActivationFunction"] = ACTIVATIONS[node.activation]
    inputs = [x, writer.constant(filters, node.inputs[1], about)]
    inputs.append(writer.read(node.inputs[2]) if node.has(2) else no_bias(writer, weight.shape[0], x, about))
    kind = ("DEPTHWISE_CONV_2D", "DepthwiseConv2D") if deep else ("CONV_2D", "Conv2D")
    writer.add(kind[0], inputs, [writer.make(node.output, "image")], kind[1], **values)


def conv_transpose(writer: Writer, node: Node) -> None:
    """ConvTranspose of one group → TRANSPOSE_CONV over all that the windows reach, cropped by the pads; its bias by
    ADD."""
    weight = writer.graph.constants.get(node.inputs[1])
    if weight is None or weight.ndim != 4 or node.attribute("group", 1) != 1 or writer.graph.quantisations:
        raise refusal(node, "only one group of constant weights in float32 can be expressed", "use target sockets")
    strides, pads = node.attribute("strides", [1, 1]), node.attribute("pads", [0, 0, 0, 0])
    x = writer.read(node.inputs[0], "image")
    batch, *extents, _ = writer.shape(x)
    reach = [(extent - 1) * step + size for extent, step, size in zip(extents, strides, weight.shape[2:], strict=True)]
    out = writer.graph.shapes[node.output][2:]
    outside = any(begin + size > most for begin, size, most in zip(pads[:2], out, reach, strict=True))
    if outside or max(node.attribute("dilations", [1])) > 1 or node.attribute("auto_pad", "NOTSET") != "NOTSET":
        raise refusal(node, "it is dilated, padded by itself or wider than its windows", "use target sockets")
    channels = weight.shape[1]
    whole = writer.like(x, (batch, *reach, channels))
    sizes = writer.constant(np.asarray([batch, *reach, channels], np.int32), "size")
    filters = writer.constant(weight.transpose(1, 2, 3, 0), node.inputs[1])
    values = {"Padding": VALID, "StrideW": strides[1], "StrideH": strides[0]}
    writer.add("TRANSPOSE_CONV", [sizes, filters, x], [whole], "TransposeConv", **values)
    cropped = writer.like(x, (batch, *out, channels))
    ends = (batch, pads[0] + out[0], pads[1] + out[1], channels)
    ranges = [np.asarray(row, np.int32) for row in ((0, *pads[:2], 0), ends, (1, 1, 1, 1))]
    columns = [writer.constant(row, "range") for row in ranges]
    writer.add("STRIDED_SLICE", [whole, *columns], [cropped], "StridedSlice")
    bias = writer.graph.constants[node.inputs[2]] if node.has(2) else np.zeros(channels, np.float32)
    activation = ACTIVATIONS[node.activation]
    output = writer.make(node.output, "image")
    writer.add("ADD", [cropped, writer.constant(bias, "bias")], [output], "Add", FusedActivationFunction=activation)


def no_bias(writer: Writer, count: int, x: int, about: Quantisation | None) -> int:
    """Zeros: LiteRT insists on a bias."""
    source = writer.tensors[x].quantisation
    if about is None or source is None:
        return writer.constant(np.zeros(count, np.float32), "bias")
    scale = tuple(source.scale[0] * one for one in about.scale)
    return writer.constant(np.zeros(count, np.int32), "bias", Quantisation(scale, (0,) * len(scale)))


def pool_axes(graph: Graph, node: Node) -> tuple[Axis, Axis]:
    """Its windows along height and width. DicompilerError for a pool with indices, and for a dilated one."""
    if len([name for name in node.outputs if name]) > 1:
        raise refusal(node, "its second output is read", "TFLite-micro gives no indices; use target sockets")
    if any(step != 1 for step in node.attribute("dilations", [1, 1])):
        raise refusal(node, "it is dilated", "TFLite-micro has no such pool; use target sockets")
    return axes(graph, node, node.attribute("kernel_shape"))


def pool(writer: Writer, node: Node, code: str, x: int, scheme: int, windows: Sequence[Axis]) -> None:
    """MAX_POOL_2D or AVERAGE_POOL_2D, which makes the node's output."""
    output = writer.make(node.output, "image")
    values = {"Padding": scheme, "StrideW": windows[1].stride, "StrideH": windows[0].stride}
    values |= {"FilterWidth": windows[1].span, "FilterHeight": windows[0].span}
    values["FusedActivationFunction"] = ACTIVATIONS[node.activation]
    writer.add(code, [x], [output], "Pool2D", **values)


def max_pool(writer: Writer, node: Node) -> None:
    """MaxPool → MAX_POOL_2D; pads that need a PAD are the lowest number there is."""
    windows = pool_axes(writer.graph, node)
    lowest = float(np.finfo(np.float32).min)
    x, scheme = padding(writer, writer.read(node.inputs[0], "image"), windows, lowest)
    pool(writer, node, "MAX_POOL_2D", x, scheme, windows)


def global_windows(graph: Graph, node: Node) -> list[Axis]:
    """One window over the whole image."""
    shape = graph.shape(node.inputs[0])
    if len(shape) != 4:
        raise refusal(node, f"its input has rank {len(shape)}", "TFLite-micro pools images of rank 4")
    return [Axis(extent, 1, extent, 1, 0, 0) for extent in shape[2:]]


def global_max_pool(writer: Writer, node: Node) -> None:
    """GlobalMaxPool → MAX_POOL_2D over the image."""
    windows = global_windows(writer.graph, node)
    pool(writer, node, "MAX_POOL_2D", writer.read(node.inputs[0], "image"), VALID, windows)
