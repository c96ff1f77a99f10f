"""Lowering of operators that only move data, such as slices, concatenations, reshapes, transposes and pads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dicompiler_targets.tflm.elementwise import find_common_form
from dicompiler_targets.tflm.graph import SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, AxisForm, TfliteWriter, permute


def get_axis_position(axis: int, rank: int, form: AxisForm) -> int:
    """Return the position of an ONNX axis in a TFLite tensor with `rank` axes.

    `form` is its order of axes: "plain" is ONNX's order, and "image" has channels last.
    """
    axis %= rank
    return NCHW_TO_NHWC.index(axis) if form == "image" else axis


def lower_concat(writer: TfliteWriter, node: SegmentNode) -> None:
    form = find_common_form(writer, node.inputs, node.output)
    rank = len(writer.graph.shapes[node.output])
    inputs = [writer.require_tensor(name, form) for name in node.inputs]
    axis = get_axis_position(node.get_attribute("axis", 1), rank, form)
    output = writer.add_output(node.output, form)
    writer.add_operation("CONCATENATION", inputs, [output], "Concatenation", Axis=axis, FusedActivationFunction=0)


def read_integers(writer: TfliteWriter, node: SegmentNode, index: int, key: str) -> list[int] | None:
    """Return a parameter of a node: the values of input `index`, or attribute `key` in older opsets, or None.

    Raises:
        DicompilerError: The input is not constant.
    """
    if node.has_input(index):
        value = writer.graph.constants.get(node.inputs[index])
        if value is None:
            raise make_refusal(
                node, f"its {key} are not constant", "TFLite-micro requires constants; use target sockets"
            )
        return [int(v) for v in value.reshape(-1)]
    attribute = node.get_attribute(key)
    return None if attribute is None else [int(number) for number in attribute]


def add_strided_slice(writer: TfliteWriter, name: str, output: str, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Add a STRIDED_SLICE of the tensor `name`, which computes the tensor `output`.

    `ranges` has (start, stop, step) for each axis in ONNX's order.
    """
    form = writer.get_form(name)
    ordered = permute(ranges, NCHW_TO_NHWC) if form == "image" else tuple(ranges)  # type: ignore[arg-type]
    x = writer.require_tensor(name, form)
    columns = [writer.add_constant(np.asarray(column, np.int32), "range") for column in zip(*ordered, strict=True)]
    writer.add_operation("STRIDED_SLICE", [x, *columns], [writer.add_output(output, form)], "StridedSlice")


def lower_slice(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Slice with constant ranges and positive steps to STRIDED_SLICE."""
    shape = writer.graph.get_shape(node.inputs[0])
    starts, ends = read_integers(writer, node, 1, "starts"), read_integers(writer, node, 2, "ends")
    assert starts is not None and ends is not None
    along = read_integers(writer, node, 3, "axes") or list(range(len(starts)))
    steps = read_integers(writer, node, 4, "steps") or [1] * len(starts)
    if min(steps) < 1:
        raise make_refusal(node, "a step is below 1", "use target sockets")
    ranges = [(0, extent, 1) for extent in shape]
    for axis, start, end, step in zip(along, starts, ends, steps, strict=True):
        begin, stop, _ = slice(start, end, step).indices(shape[axis])
        ranges[axis % len(shape)] = (begin, stop, step)
    add_strided_slice(writer, node.inputs[0], node.output, ranges)


def lower_split(writer: TfliteWriter, node: SegmentNode) -> None:
    shape = writer.graph.get_shape(node.inputs[0])
    axis, start = node.get_attribute("axis", 0) % len(shape), 0
    for output in node.outputs:
        stop = start + writer.graph.shapes[output][axis]
        add_strided_slice(
            writer, node.inputs[0], output, [(start, stop, 1) if i == axis else (0, e, 1) for i, e in enumerate(shape)]
        )
        start = stop


def lower_reshape(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Reshape, Flatten, Squeeze or Unsqueeze to RESHAPE in ONNX's order of axes.

    An image that is flattened to a matrix gets no RESHAPE here, because FULLY_CONNECTED can read the image itself.
    """
    name, shape = node.inputs[0], writer.graph.shapes[node.output]
    source = writer.graph.get_shape(name)
    if len(source) == 4 and tuple(shape) == (source[0], math.prod(source[1:])) and name not in writer.graph.constants:
        writer.flattened_images[node.output] = name
        return
    writer.set_alias(node.output, "plain", writer.add_reshape(writer.require_tensor(name), shape))


def lower_transpose(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Transpose to at most one TRANSPOSE.

    It reads the input in the order of axes in which it is stored: as an image (channels last) or plain (ONNX's order).
    An output with four axes is stored as an image, all others plain.
    """
    name = node.inputs[0]
    rank = len(writer.graph.get_shape(name))
    order = node.get_attribute("perm", list(range(rank))[::-1])
    form = writer.get_form(name)
    if rank == 4:
        wanted = [
            order[axis] for axis in NCHW_TO_NHWC
        ]  # Entry i is the input's axis, in ONNX's order, that becomes axis i of the output in the order N, H, W, C.
        writer.set_alias(
            node.output,
            "image",
            writer.add_transpose(
                writer.require_tensor(name, form), [get_axis_position(axis, 4, form) for axis in wanted]
            ),
        )
    else:
        writer.set_alias(node.output, "plain", writer.add_transpose(writer.require_tensor(name), order))


def lower_pad(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Pad with a constant to PAD or PADV2."""
    rank = len(writer.graph.get_shape(node.inputs[0]))
    amounts = read_integers(writer, node, 1, "pads")
    if amounts is None or node.get_attribute("mode", "constant") != "constant" or node.has_input(3) or min(amounts) < 0:
        raise make_refusal(
            node, "its mode is not constant, a pad is negative, or it has the input axes", "use target sockets"
        )
    number = (
        writer.graph.constants[node.inputs[2]] if node.has_input(2) else np.float32(node.get_attribute("value", 0.0))
    )
    form = writer.get_form(node.inputs[0])
    pairs = list(zip(amounts[:rank], amounts[rank:], strict=True))
    ordered = [pairs[axis] for axis in NCHW_TO_NHWC] if form == "image" else pairs
    x = writer.require_tensor(node.inputs[0], form)
    inputs = [x, writer.add_constant(np.asarray(ordered, np.int32), "pads")]
    output = writer.add_output(node.output, form)
    if float(number.reshape(())) == 0 and writer.tensors[x].dtype in ("float32", "int8"):
        writer.add_operation("PAD", inputs, [output], "Pad")
    else:
        value = writer.add_constant(np.asarray([number.reshape(())], writer.tensors[x].dtype), "value")
        writer.add_operation("PADV2", [*inputs, value], [output], "PadV2")


def lower_depth_space(code: str, options: str, writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower DepthToSpace (mode DCR) or SpaceToDepth to the TFLite operator of the same name."""
    if node.get_attribute("mode", "DCR") != "DCR":
        raise make_refusal(node, "mode CRD", "TFLite-micro has DCR only; use target sockets")
    x = writer.require_tensor(node.inputs[0], "image")
    writer.add_operation(
        code, [x], [writer.add_output(node.output, "image")], options, BlockSize=node.get_attribute("blocksize")
    )
