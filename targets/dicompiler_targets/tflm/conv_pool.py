"""Lowering of convolutions and maximum pools: operators with windows that slide over images.

TFLite's paddings SAME and VALID are used if one of them equals the padding of the ONNX node. Otherwise, a PAD before
the operator adds elements that do not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dicompiler_targets.tflm.flatbuffer import QuantizationParams
from dicompiler_targets.tflm.graph import SegmentGraph, SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import TfliteWriter

SAME_PADDING, VALID_PADDING = 0, 1
ACTIVATION_CODES = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}


@dataclass(frozen=True)
class WindowAxis:
    """The windows of a convolution or pool along one axis.

    Attributes:
        extent: Number of elements of the input along the axis.
        out: Number of windows.
        span: Number of elements from the first to the last element of a window, including the gaps of dilations.
        stride: Number of elements from the start of a window to the start of the next window.
        begin_pad: Number of padding elements at the beginning.
        end_pad: Number of padding elements at the end, as the node declares it.
    """

    extent: int
    out: int
    span: int
    stride: int
    begin_pad: int
    end_pad: int

    @property
    def needed_end_pad(self) -> int:
        """Number of padding elements at the end that the last window reads."""
        return max((self.out - 1) * self.stride + self.span - self.extent - self.begin_pad, 0)

    @property
    def is_valid(self) -> bool:
        """True if TFLite's padding VALID has the same effect as the padding of the node."""
        return self.begin_pad == 0 and self.needed_end_pad == 0

    @property
    def is_same(self) -> bool:
        """True if TFLite's padding SAME has the same effect as the padding of the node."""
        total = max((self.out - 1) * self.stride + self.span - self.extent, 0)
        return -(-self.extent // self.stride) == self.out and self.begin_pad == total // 2


def make_window_axes(graph: SegmentGraph, node: SegmentNode, kernel: Sequence[int]) -> tuple[WindowAxis, WindowAxis]:
    """Return the windows of a node along height and width. `kernel` is the size of a window along each axis."""
    shape, out = graph.get_shape(node.inputs[0]), graph.shapes[node.output]
    if len(shape) != 4:
        dimensions = f"it works on {len(shape) - 2} dimensions, but TFLite-micro has 2-D windows only"
        raise make_refusal(node, dimensions, "use target sockets")
    strides = node.get_attribute("strides", [1, 1])
    dilations = node.get_attribute("dilations", [1, 1])
    pads = node.get_attribute("pads", [0, 0, 0, 0])
    both = []
    for i in (0, 1):
        span = (kernel[i] - 1) * dilations[i] + 1
        begin, end = pads[i], pads[i + 2]
        auto = node.get_attribute("auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max((out[2 + i] - 1) * strides[i] + span - shape[2 + i], 0)
            begin = total // 2 if auto == "SAME_UPPER" else total - total // 2
            end = total - begin
        both.append(WindowAxis(shape[2 + i], out[2 + i], span, strides[i], begin, end))
    if any(axis.begin_pad < 0 or axis.end_pad < 0 for axis in both):
        raise make_refusal(node, "a pad is negative", "crop its input with a Slice")
    return both[0], both[1]


def add_pad(writer: TfliteWriter, index: int, windows: Sequence[WindowAxis], value: float = 0.0) -> int:
    """Add an operation that puts padding of `value` around an image; return the tensor index of the result.

    `index` is the tensor index of the image. `windows` are its windows along height and width.
    """
    shape = list(writer.get_shape(index))
    amounts = [[0, 0], *([axis.begin_pad, axis.needed_end_pad] for axis in windows), [0, 0]]
    padded = writer.add_like(index, tuple(extent + sum(both) for extent, both in zip(shape, amounts, strict=True)))
    inputs = [index, writer.add_constant(np.asarray(amounts, np.int32), "pads")]
    if value == 0:  # PAD writes 0; in a quantized image, it writes the zero point, which means 0 too.
        writer.add_operation("PAD", inputs, [padded], "Pad")
        return padded
    tensor = writer.tensors[index]
    number = np.asarray([-128 if tensor.dtype == "int8" else value], tensor.dtype)
    writer.add_operation("PADV2", [*inputs, writer.add_constant(number, "pad", tensor.quantization)], [padded], "PadV2")
    return padded


def choose_padding(
    writer: TfliteWriter, index: int, windows: Sequence[WindowAxis], value: float = 0.0
) -> tuple[int, int]:
    """Return the image for an operator with these `windows`, and TFLite's number of the padding (SAME or VALID).

    The image is the tensor `index` if SAME or VALID gives these windows. Otherwise, it is the result of a PAD with
    `value`.
    """
    if all(axis.is_valid for axis in windows):
        return index, VALID_PADDING
    if all(axis.is_same for axis in windows):
        return index, SAME_PADDING
    return add_pad(writer, index, windows, value), VALID_PADDING


def lower_conv(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Conv with constant weights to CONV_2D, which can be grouped, or to DEPTHWISE_CONV_2D."""
    weight = writer.graph.constants.get(node.inputs[1])
    if weight is None or (node.has_input(2) and node.inputs[2] not in writer.graph.constants):
        raise make_refusal(
            node, "its weights or bias are not constant", "TFLite-micro requires constants; use target sockets"
        )
    windows = make_window_axes(writer.graph, node, weight.shape[2:])
    x, padding = choose_padding(writer, writer.require_tensor(node.inputs[0], "image"), windows)
    groups, quantization = node.get_attribute("group", 1), writer.graph.quantizations.get(node.inputs[1])
    deep = weight.shape[1] == 1 and groups == writer.graph.get_shape(node.inputs[0])[1] and groups > 1
    dilations = node.get_attribute("dilations", [1, 1])
    values: dict[str, Any] = {"Padding": padding, "StrideW": windows[1].stride, "StrideH": windows[0].stride}
    if deep:
        filters = weight.transpose(1, 2, 3, 0)
        values["DepthMultiplier"] = weight.shape[0] // groups
        quantization = (
            None if quantization is None else QuantizationParams(quantization.scale, quantization.zero_point, 3)
        )
    else:
        filters = weight.transpose(0, 2, 3, 1)
    values |= {"DilationHFactor": dilations[0], "DilationWFactor": dilations[1]}
    values["FusedActivationFunction"] = ACTIVATION_CODES[node.activation]
    inputs = [x, writer.add_constant(filters, node.inputs[1], quantization)]
    inputs.append(
        writer.require_tensor(node.inputs[2])
        if node.has_input(2)
        else make_zero_bias(writer, weight.shape[0], x, quantization)
    )
    kind = ("DEPTHWISE_CONV_2D", "DepthwiseConv2D") if deep else ("CONV_2D", "Conv2D")
    writer.add_operation(kind[0], inputs, [writer.add_output(node.output, "image")], kind[1], **values)


def lower_conv_transpose(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower ConvTranspose with one group to a TRANSPOSE_CONV, a crop of its result, and an ADD of the bias."""
    weight = writer.graph.constants.get(node.inputs[1])
    if weight is None or weight.ndim != 4 or node.get_attribute("group", 1) != 1 or writer.graph.quantizations:
        raise make_refusal(
            node,
            "it has several groups, its weights are not constant 2-D kernels, or the network is quantised",
            "use target sockets",
        )
    strides, pads = node.get_attribute("strides", [1, 1]), node.get_attribute("pads", [0, 0, 0, 0])
    x = writer.require_tensor(node.inputs[0], "image")
    batch, *extents, _ = writer.get_shape(x)
    reach = [(extent - 1) * step + size for extent, step, size in zip(extents, strides, weight.shape[2:], strict=True)]
    out = writer.graph.shapes[node.output][2:]
    outside = any(begin + size > most for begin, size, most in zip(pads[:2], out, reach, strict=True))
    if outside or max(node.get_attribute("dilations", [1])) > 1 or node.get_attribute("auto_pad", "NOTSET") != "NOTSET":
        raise make_refusal(
            node, "it has dilations, auto_pad, or an output larger than its windows reach", "use target sockets"
        )
    channels = weight.shape[1]
    whole = writer.add_like(x, (batch, *reach, channels))
    sizes = writer.add_constant(np.asarray([batch, *reach, channels], np.int32), "size")
    filters = writer.add_constant(weight.transpose(1, 2, 3, 0), node.inputs[1])
    values = {"Padding": VALID_PADDING, "StrideW": strides[1], "StrideH": strides[0]}
    writer.add_operation("TRANSPOSE_CONV", [sizes, filters, x], [whole], "TransposeConv", **values)
    cropped = writer.add_like(x, (batch, *out, channels))
    ends = (batch, pads[0] + out[0], pads[1] + out[1], channels)
    ranges = [np.asarray(row, np.int32) for row in ((0, *pads[:2], 0), ends, (1, 1, 1, 1))]
    columns = [writer.add_constant(row, "range") for row in ranges]
    writer.add_operation("STRIDED_SLICE", [whole, *columns], [cropped], "StridedSlice")
    bias = writer.graph.constants[node.inputs[2]] if node.has_input(2) else np.zeros(channels, np.float32)
    activation = ACTIVATION_CODES[node.activation]
    output = writer.add_output(node.output, "image")
    writer.add_operation(
        "ADD", [cropped, writer.add_constant(bias, "bias")], [output], "Add", FusedActivationFunction=activation
    )


def make_zero_bias(writer: TfliteWriter, count: int, x: int, quantization: QuantizationParams | None) -> int:
    """Add a bias of `count` zeros, because LiteRT requires a bias; return the index of its tensor.

    `x` is the index of the convolution's input tensor. `quantization` is that of the weights.
    """
    source = writer.tensors[x].quantization
    if quantization is None or source is None:
        return writer.add_constant(np.zeros(count, np.float32), "bias")
    scale = tuple(source.scale[0] * weight_scale for weight_scale in quantization.scale)
    return writer.add_constant(np.zeros(count, np.int32), "bias", QuantizationParams(scale, (0,) * len(scale)))


def make_pool_axes(graph: SegmentGraph, node: SegmentNode) -> tuple[WindowAxis, WindowAxis]:
    """Return the windows of a pool along height and width.

    Raises:
        DicompilerError: The pool returns indices or has dilations.
    """
    if len([name for name in node.outputs if name]) > 1:
        raise make_refusal(node, "its second output is used", "TFLite-micro has no indices; use target sockets")
    if any(step != 1 for step in node.get_attribute("dilations", [1, 1])):
        raise make_refusal(node, "it has dilations", "TFLite-micro has no such pool; use target sockets")
    return make_window_axes(graph, node, node.get_attribute("kernel_shape"))


def add_pool(
    writer: TfliteWriter, node: SegmentNode, code: str, x: int, padding: int, windows: Sequence[WindowAxis]
) -> None:
    """Add the operator `code` (MAX_POOL_2D or AVERAGE_POOL_2D) that computes the node's output.

    `x` is the tensor index of the input image, and `padding` is TFLite's number of SAME or VALID.
    """
    output = writer.add_output(node.output, "image")
    values = {"Padding": padding, "StrideW": windows[1].stride, "StrideH": windows[0].stride}
    values |= {"FilterWidth": windows[1].span, "FilterHeight": windows[0].span}
    values["FusedActivationFunction"] = ACTIVATION_CODES[node.activation]
    writer.add_operation(code, [x], [output], "Pool2D", **values)


def lower_max_pool(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower MaxPool to MAX_POOL_2D; a PAD, if needed, adds the lowest float, which is never the maximum."""
    windows = make_pool_axes(writer.graph, node)
    lowest = float(np.finfo(np.float32).min)
    x, padding = choose_padding(writer, writer.require_tensor(node.inputs[0], "image"), windows, lowest)
    add_pool(writer, node, "MAX_POOL_2D", x, padding, windows)


def make_global_windows(graph: SegmentGraph, node: SegmentNode) -> list[WindowAxis]:
    """Return the windows of a global pool along height and width: one window that covers the whole image."""
    shape = graph.get_shape(node.inputs[0])
    if len(shape) != 4:
        raise make_refusal(
            node, f"its input has rank {len(shape)}, but TFLite-micro pools images of rank 4", "use target sockets"
        )
    return [WindowAxis(extent, 1, extent, 1, 0, 0) for extent in shape[2:]]


def lower_global_max_pool(writer: TfliteWriter, node: SegmentNode) -> None:
    windows = make_global_windows(writer.graph, node)
    add_pool(writer, node, "MAX_POOL_2D", writer.require_tensor(node.inputs[0], "image"), VALID_PADDING, windows)


_WINDOW_OPERATORS = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
_AXIS_ATTRIBUTE_DEFAULTS = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}
"""Attributes with one number for each axis, and the number for the axis that `widen_windows` adds."""


def widen_windows(graph: SegmentGraph) -> SegmentGraph:
    """Return the graph with 2-D windows instead of 1-D windows, which TFLite-micro does not have.

    The input becomes an image of height 1:

        Conv (N, C, L) ⇒ Reshape (N, C, 1, L) → Conv → Reshape (N, C, L)
    """
    for node in graph.nodes:
        if node.op in _WINDOW_OPERATORS and len(graph.get_shape(node.inputs[0])) == 3:
            graph = _widen_node(graph, node)
    return graph


def _widen_node(graph: SegmentGraph, node: SegmentNode) -> SegmentGraph:
    x, y = node.inputs[0], node.output
    names = {x: f"{y}/wide input", y: f"{y}/wide"}
    shapes, dtypes = dict(graph.shapes), dict(graph.dtypes)
    quantizations, constants = dict(graph.quantizations), dict(graph.constants)
    for name, wide in names.items():
        batch, channels, length = graph.shapes[name]
        shapes[wide], dtypes[wide] = (batch, channels, 1, length), graph.dtypes[name]
        if name in quantizations:
            quantizations[wide] = quantizations[name]
    inputs = [names[x], *node.inputs[1:]]
    if len(inputs) > 1 and inputs[1] in constants:
        inputs[1] = f"{y}/wide weight"
        constants[inputs[1]] = constants[node.inputs[1]][:, :, None]
        if node.inputs[1] in quantizations:
            quantizations[inputs[1]] = quantizations[node.inputs[1]]
    attributes = {
        k: [_AXIS_ATTRIBUTE_DEFAULTS[k], *v] if k in _AXIS_ATTRIBUTE_DEFAULTS else v for k, v in node.attributes.items()
    }
    if "pads" in attributes:
        begin, end = attributes["pads"]
        attributes["pads"] = [0, begin, 0, end]
    replacement = (
        SegmentNode("Reshape", f"{node.name}/widen", (x,), (names[x],)),
        replace(node, inputs=tuple(inputs), outputs=(names[y], *node.outputs[1:]), attributes=attributes),
        SegmentNode("Reshape", f"{node.name}/narrow", (names[y],), (y,)),
    )
    nodes = tuple(new for old in graph.nodes for new in (replacement if old is node else (old,)))
    return replace(graph, nodes=nodes, shapes=shapes, dtypes=dtypes, quantizations=quantizations, constants=constants)
