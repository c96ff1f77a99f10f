"""Lowering of operators that combine elements along an axis: softmax, reductions and local response normalization."""

from __future__ import annotations

import math

import numpy as np

from dicompiler.plugin_api import Shape
from dicompiler_targets.tflm.conv_pool import VALID_PADDING
from dicompiler_targets.tflm.data_movement import get_axis_position, read_integers
from dicompiler_targets.tflm.elementwise import add_binary, add_scalar_chain
from dicompiler_targets.tflm.graph import SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import TfliteWriter


def lower_softmax(code: str, options: str, writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Softmax or LogSoftmax to the TFLite operator `code`, which works along the last axis.

    Before opset 13, ONNX treats the axes from the attribute `axis` to the last one as a single axis.
    """
    name, shape = node.inputs[0], writer.graph.get_shape(node.inputs[0])
    rank = len(shape)
    values = {"Beta": 1.0} if code == "SOFTMAX" else {}
    axis = node.get_attribute("axis", -1 if node.opset >= 13 else 1) % rank
    form = writer.get_form(name)
    if node.opset < 13 and axis != rank - 1:
        rows = (math.prod(shape[:axis]), math.prod(shape[axis:]))
        flat = writer.add_reshape(writer.require_tensor(name), rows)
        result = _make_output_tensor(writer, node, rows)
        writer.add_operation(code, [flat], [result], options, **values)
        writer.set_alias(node.output, "plain", writer.add_reshape(result, shape))
    elif rank == 4 and axis in (1, 3):
        form = "image" if axis == 1 else "plain"
        writer.add_operation(
            code, [writer.require_tensor(name, form)], [writer.add_output(node.output, form)], options, **values
        )
    else:
        order = [*(i for i in range(rank) if i != axis), axis]
        last = writer.add_transpose(writer.require_tensor(name), order)
        result = _make_output_tensor(writer, node, writer.get_shape(last))
        writer.add_operation(code, [last], [result], options, **values)
        writer.set_alias(node.output, "plain", writer.add_transpose(result, [order.index(i) for i in range(rank)]))


def _make_output_tensor(writer: TfliteWriter, node: SegmentNode, shape: Shape) -> int:
    name = node.output
    return writer.add_tensor(name, writer.graph.dtypes[name], shape, writer.graph.quantizations.get(name))


def lower_reduction(code: str, writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower ReduceMean, ReduceSum, ReduceMax or ReduceMin to MEAN, SUM, REDUCE_MAX or REDUCE_MIN over constant axes."""
    name, shape = node.inputs[0], writer.graph.get_shape(node.inputs[0])
    along = read_integers(writer, node, 1, "axes")
    if not along:
        along = [] if node.get_attribute("noop_with_empty_axes", 0) else list(range(len(shape)))
    if not along:
        raise make_refusal(node, "it reduces no axis", "remove it")
    kept, form = bool(node.get_attribute("keepdims", 1)), writer.get_form(name)
    if not kept:
        form = "plain"  # The result has fewer than four axes, so its axes must have ONNX's order, not channels last.
    where = sorted(get_axis_position(axis, len(shape), form) for axis in along)
    inputs = [writer.require_tensor(name, form), writer.add_constant(np.asarray(where, np.int32), "axes")]
    writer.add_operation(
        code, inputs, [writer.add_output(node.output, form if kept else "plain")], "Reducer", KeepDims=kept
    )


def lower_lrn(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower LRN: y = x / (bias + alpha / size * sum of x² over `size` channels) ^ beta.

    The sum is an average pool over the channels of x².
    """
    size, alpha = node.get_attribute("size"), node.get_attribute("alpha", 1e-4)
    beta, bias = node.get_attribute("beta", 0.75), node.get_attribute("bias", 1.0)
    if len(writer.graph.get_shape(node.inputs[0])) != 4 or writer.graph.dtypes[node.output] != "float32":
        raise make_refusal(node, "only images of rank 4 in float32 can be expressed", "use target sockets")
    x = writer.require_tensor(node.inputs[0], "image")
    shape = writer.get_shape(x)
    batch, height, width, channels = shape
    squares = writer.add_like(x, shape)
    add_binary(writer, "MUL", [x, x], squares)
    rows = writer.add_reshape(squares, (batch, height * width, channels, 1))
    before = (size - 1) // 2
    around = writer.add_like(rows, (batch, height * width, channels + size - 1, 1))
    amounts = np.asarray([[0, 0], [0, 0], [before, size - 1 - before], [0, 0]], np.int32)
    writer.add_operation("PAD", [rows, writer.add_constant(amounts, "pads")], [around], "Pad")
    means = writer.add_like(rows, (batch, height * width, channels, 1))
    window = {"FilterWidth": size, "FilterHeight": 1, "StrideW": 1, "StrideH": 1, "Padding": VALID_PADDING}
    writer.add_operation("AVERAGE_POOL_2D", [around], [means], "Pool2D", **window)
    term = add_scalar_chain(writer, means, (("MUL", alpha), ("ADD", bias)))
    power = writer.add_reshape(_negative_power(writer, term, beta), shape)
    add_binary(writer, "MUL", [x, power], writer.add_output(node.output, "image"))


def _negative_power(writer: TfliteWriter, x: int, beta: float) -> int:
    """Add operations that compute x ^ -beta for positive numbers; return the result's tensor index."""

    def unary(code: str, source: int, options: str = "") -> int:
        output = writer.add_like(source, writer.get_shape(source))
        writer.add_operation(code, [source], [output], options)
        return output

    if beta in (0.5, 0.75):
        root = unary("RSQRT", x)
        if beta == 0.5:
            return root
        output = writer.add_like(x, writer.get_shape(x))
        add_binary(writer, "MUL", [root, unary("SQRT", root)], output)
        return output
    return unary("EXP", add_scalar_chain(writer, unary("LOG", x), (("MUL", -beta),)), "Exp")
