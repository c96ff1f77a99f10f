"""Operators that look at several elements along an axis: softmax, reductions, and the response normalisation (LRN)."""

from __future__ import annotations

import math

import numpy as np

from dicompiler.plugin_api import Shape
from dicompiler_targets.tflm.elementwise import chained, operate
from dicompiler_targets.tflm.graph import Node, refusal
from dicompiler_targets.tflm.shaping import integers, place
from dicompiler_targets.tflm.windows import VALID
from dicompiler_targets.tflm.writer import Writer


def softmax(code: str, options: str, writer: Writer, node: Node) -> None:
    """Softmax, LogSoftmax → over the last axis, which the one in question is brought to. Before opset 13 all axes from
    it on count as one."""
    name, shape = node.inputs[0], writer.graph.shape(node.inputs[0])
    rank = len(shape)
    values = {"Beta": 1.0} if code == "SOFTMAX" else {}
    axis = node.attribute("axis", -1 if node.opset >= 13 else 1) % rank
    form = writer.form(name)
    if node.opset < 13 and axis != rank - 1:
        rows = (math.prod(shape[:axis]), math.prod(shape[axis:]))
        flat = writer.reshape(writer.read(name), rows)
        result = _result(writer, node, rows)
        writer.add(code, [flat], [result], options, **values)
        writer.alias(node.output, "plain", writer.reshape(result, shape))
    elif rank == 4 and axis in (1, 3):
        form = "image" if axis == 1 else "plain"
        writer.add(code, [writer.read(name, form)], [writer.make(node.output, form)], options, **values)
    else:
        order = [*(i for i in range(rank) if i != axis), axis]
        last = writer.transpose(writer.read(name), order)
        result = _result(writer, node, writer.shape(last))
        writer.add(code, [last], [result], options, **values)
        writer.alias(node.output, "plain", writer.transpose(result, [order.index(i) for i in range(rank)]))


def _result(writer: Writer, node: Node, shape: Shape) -> int:
    """A tensor of the type and scale of the node's output, of another shape."""
    name = node.output
    return writer.tensor(name, writer.graph.dtypes[name], shape, writer.graph.quantisations.get(name))


def reduction(code: str, writer: Writer, node: Node) -> None:
    """ReduceMean, ReduceSum, ReduceMax, ReduceMin → MEAN, SUM, REDUCE_MAX, REDUCE_MIN over constant axes."""
    name, shape = node.inputs[0], writer.graph.shape(node.inputs[0])
    along = integers(writer, node, 1, "axes")
    if not along:
        along = [] if node.attribute("noop_with_empty_axes", 0) else list(range(len(shape)))
    if not along:
        raise refusal(node, "it reduces no axis", "leave it out")
    kept, form = bool(node.attribute("keepdims", 1)), writer.form(name)
    if not kept:
        form = "plain"  # what is left of an image would be in another order
    where = sorted(place(axis, len(shape), form) for axis in along)
    inputs = [writer.read(name, form), writer.constant(np.asarray(where, np.int32), "axes")]
    writer.add(code, inputs, [writer.make(node.output, form if kept else "plain")], "Reducer", KeepDims=kept)


def lrn(writer: Writer, node: Node) -> None:
    """LRN, y = x / (bias + alpha / size * sum of x² over `size` channels) ^ beta, as it is written out: the sum is a
    pool over the channels of the squares, and t ^ -beta is made of RSQRT and SQRT, or EXP and LOG."""
    size, alpha = node.attribute("size"), node.attribute("alpha", 1e-4)
    beta, bias = node.attribute("beta", 0.75), node.attribute("bias", 1.0)
    if len(writer.graph.shape(node.inputs[0])) != 4 or writer.graph.dtypes[node.output] != "float32":
        raise refusal(node, "only images of rank 4 in float32 can be expressed", "use target sockets")
    x = writer.read(node.inputs[0], "image")
    shape = writer.shape(x)
    batch, height, width, channels = shape
    squares = writer.like(x, shape)
    operate(writer, "MUL", [x, x], squares)
    rows = writer.reshape(squares, (batch, height * width, channels, 1))
    before = (size - 1) // 2
    around = writer.like(rows, (batch, height * width, channels + size - 1, 1))
    amounts = np.asarray([[0, 0], [0, 0], [before, size - 1 - before], [0, 0]], np.int32)
    writer.add("PAD", [rows, writer.constant(amounts, "pads")], [around], "Pad")
    means = writer.like(rows, (batch, height * width, channels, 1))
    window = {"FilterWidth": size, "FilterHeight": 1, "StrideW": 1, "StrideH": 1, "Padding": VALID}
    writer.add("AVERAGE_POOL_2D", [around], [means], "Pool2D", **window)
    term = chained(writer, means, (("MUL", alpha), ("ADD", bias)))
    power = writer.reshape(_power(writer, term, beta), shape)
    operate(writer, "MUL", [x, power], writer.make(node.output, "image"))


def _power(writer: Writer, x: int, beta: float) -> int:
    """x ^ -beta for x above 0."""

    def unary(code: str, source: int, options: str = "") -> int:
        output = writer.like(source, writer.shape(source))
        writer.add(code, [source], [output], options)
        return output

    if beta in (0.5, 0.75):
        root = unary("RSQRT", x)
        if beta == 0.5:
            return root
        output = writer.like(x, writer.shape(x))
        operate(writer, "MUL", [root, unary("SQRT", root)], output)
        return output
    return unary("EXP", chained(writer, unary("LOG", x), (("MUL", -beta),)), "Exp")
