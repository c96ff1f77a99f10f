"""Operators that work on each element by itself, with ONNX's broadcasting: sums, products, activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dicompiler_targets.tflm.folding import activation_of, batch_norm, clip_bounds
from dicompiler_targets.tflm.graph import Node, refusal
from dicompiler_targets.tflm.windows import ACTIVATIONS
from dicompiler_targets.tflm.writer import IMAGE, Form, Writer, permuted

_FUSED = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div"}


def common_form(writer: Writer, names: Sequence[str], output: str) -> Form:
    """The form in which an operation on these works: that of its first operand that is no constant."""
    rank = len(writer.graph.shapes[output])
    if rank != 4:
        return "plain"
    computed = [n for n in names if n not in writer.graph.constants and len(writer.graph.shapes[n]) == 4]
    return writer.form(computed[0]) if computed else "image"


def operand(writer: Writer, name: str, form: Form, rank: int) -> int:
    """An operand of an operation of this rank, in this form: axes of extent 1 are put before its own."""
    shape = writer.graph.shape(name)
    if len(shape) == rank:
        return writer.read(name, form)
    wide = (1,) * (rank - len(shape)) + tuple(shape)
    if name in writer.graph.constants:
        value = writer.graph.constants[name].reshape(wide)
        about = writer.graph.quantisations.get(name)
        return writer.constant(value.transpose(IMAGE) if form == "image" else value, name, about)
    index = writer.reshape(writer.read(name), wide)
    return writer.transpose(index, IMAGE) if form == "image" else index


def operate(writer: Writer, code: str, inputs: Sequence[int], output: int, activation: str = "NONE") -> None:
    """A binary operation; its activation is fused where the operator can."""
    if code in _FUSED:
        writer.add(code, inputs, [output], _FUSED[code], FusedActivationFunction=ACTIVATIONS[activation])
    else:
        writer.add(code, inputs, [output], "MaximumMinimum" if code in ("MAXIMUM", "MINIMUM") else "")


def chained(writer: Writer, x: int, steps: Sequence[tuple[str, float]]) -> int:
    """x after binary operations in turn, each with a number as its second operand."""
    for code, number in steps:
        output = writer.like(x, writer.shape(x))
        operate(writer, code, [x, writer.constant(np.asarray([number], np.float32), "number")], output)
        x = output
    return x


def combine(code: str, writer: Writer, node: Node) -> None:
    """Add, Sub, Mul, Div, Max, Min, Sum: two operands at a time, from the left."""
    shape = writer.graph.shapes[node.output]
    form = common_form(writer, node.inputs, node.output)
    if len(node.inputs) == 1:
        writer.alias(node.output, form, writer.read(node.inputs[0], form))
        return
    held = permuted(shape, IMAGE) if form == "image" else shape
    left = operand(writer, node.inputs[0], form, len(shape))
    for name in node.inputs[1:-1]:
        between = writer.tensor(f"{node.output}/{name}", writer.graph.dtypes[node.output], held)
        operate(writer, code, [left, operand(writer, name, form, len(shape))], between)
        left = between
    right = operand(writer, node.inputs[-1], form, len(shape))
    operate(writer, code, [left, right], writer.make(node.output, form), node.activation)


def unary(code: str, options: str, writer: Writer, node: Node) -> None:
    """An operator of one input that TFLite has too."""
    x, form = writer.held(node.inputs[0])
    writer.add(code, [x], [writer.make(node.output, form)], options)


def alias(writer: Writer, node: Node) -> None:
    """Identity, and Dropout as it is after training: another name."""
    if len(node.outputs) > 1 or (node.op == "Dropout" and node.has(2)):
        raise refusal(node, "it drops elements", "export the network for inference")
    x, form = writer.held(node.inputs[0])
    writer.alias(node.output, form, x)


def cast(writer: Writer, node: Node) -> None:
    """Cast between types of TFLite-micro."""
    if writer.graph.dtypes[node.output] == writer.tensors[writer.read(node.inputs[0])].dtype:
        alias(writer, node)
    else:
        unary("CAST", "", writer, node)


def clip(writer: Writer, node: Node) -> None:
    """Clip, Relu → RELU or RELU6 where they are it, else MAXIMUM and MINIMUM with constants."""
    x, form = writer.held(node.inputs[0])
    activation = activation_of(writer.graph, node)
    if activation is not None:
        writer.add(activation, [x], [writer.make(node.output, form)])
        return
    if writer.graph.dtypes[node.output] != "float32":
        raise refusal(node, "bounds other than 0 and 6 in int8", "leave the model in float32")
    low, high = clip_bounds(writer.graph, node)
    steps = [(code, bound) for code, bound in (("MAXIMUM", low), ("MINIMUM", high)) if bound is not None]
    for place, (code, bound) in enumerate(steps, 1):
        output = writer.make(node.output, form) if place == len(steps) else writer.like(x, writer.shape(x))
        operate(writer, code, [x, writer.constant(np.asarray([bound], np.float32), "bound")], output)
        x = output
    if not steps:
        writer.alias(node.output, form, x)


def leaky_relu(writer: Writer, node: Node) -> None:
    """LeakyRelu → LEAKY_RELU."""
    x, form = writer.held(node.inputs[0])
    slope = node.attribute("alpha", 0.01)
    writer.add("LEAKY_RELU", [x], [writer.make(node.output, form)], "LeakyRelu", Alpha=slope)


def prelu(writer: Writer, node: Node) -> None:
    """PRelu → PRELU; the slope broadcasts to x."""
    form = common_form(writer, node.inputs, node.output)
    rank = len(writer.graph.shapes[node.output])
    inputs = [operand(writer, name, form, rank) for name in node.inputs]
    writer.add("PRELU", inputs, [writer.make(node.output, form)])


def hard_sigmoid(writer: Writer, node: Node) -> None:
    """HardSigmoid = min(max(alpha x + beta, 0), 1), as it is written out."""
    x, form = writer.held(node.inputs[0])
    steps = (("MUL", node.attribute("alpha", 0.2)), ("ADD", node.attribute("beta", 0.5)), ("MINIMUM", 1.0))
    x = chained(writer, x, steps)
    writer.add("RELU", [x], [writer.make(node.output, form)])


def batch_normalization(writer: Writer, node: Node) -> None:
    """BatchNormalization that no convolution stands before → MUL and ADD."""
    if len(node.outputs) > 1 or node.attribute("training_mode", 0):
        raise refusal(node, "it is in training mode", "export the network for inference")
    if any(name not in writer.graph.constants for name in node.inputs[1:5]):
        raise refusal(node, "its statistics are computed", "TFLite-micro wants constants; use target sockets")
    x, form = writer.held(node.inputs[0])
    shape = [1] * len(writer.shape(x))
    shape[-1 if form == "image" else 1] = -1
    factor, shift = (value.reshape(shape).astype(np.float32) for value in batch_norm(writer.graph, node))
    between = writer.like(x, writer.shape(x))
    operate(writer, "MUL", [x, writer.constant(factor, "factor")], between)
    output = writer.make(node.output, form)
    operate(writer, "ADD", [between, writer.constant(shift, "shift")], output, node.activation)


def elu(writer: Writer, node: Node) -> None:
    """Elu with alpha 1 → ELU."""
    if node.attribute("alpha", 1.0) != 1.0:
        raise refusal(node, "alpha is not 1", "use target sockets")
    unary("ELU", "", writer, node)


def reciprocal(writer: Writer, node: Node) -> None:
    """Reciprocal → DIV."""
    form = writer.form(node.inputs[0])
    inputs = [writer.constant(np.ones(1, np.float32), "one"), writer.read(node.inputs[0], form)]
    operate(writer, "DIV", inputs, writer.make(node.output, form))


def power(writer: Writer, node: Node) -> None:
    """Pow with one constant exponent: 2 and 3 → MUL, 0.5 → SQRT, -0.5 → RSQRT."""
    given = writer.graph.constants.get(node.inputs[1])
    exponent = float(given.reshape(())) if given is not None and given.size == 1 else None
    x, form = writer.held(node.inputs[0])
    if exponent in (2, 3):
        factor = x
        if exponent == 3:
            factor = writer.like(x, writer.shape(x))
            operate(writer, "MUL", [x, x], factor)
        operate(writer, "MUL", [factor, x], writer.make(node.output, form))
    elif exponent in (0.5, -0.5):
        writer.add("SQRT" if exponent > 0 else "RSQRT", [x], [writer.make(node.output, form)])
    else:
        raise refusal(node, "its exponent is none of 2, 3, 0.5 and -0.5", "use target sockets")
