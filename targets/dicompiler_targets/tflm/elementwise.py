"""Lowering of element-wise operators with ONNX's broadcasting: arithmetic, activations and normalization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dicompiler_targets.tflm.conv_pool import ACTIVATION_CODES
from dicompiler_targets.tflm.fusion import find_activation, get_batch_norm_affine, get_clip_bounds
from dicompiler_targets.tflm.graph import SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, AxisForm, TfliteWriter, permute

_FUSED_OPTIONS = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div"}


def find_common_form(writer: TfliteWriter, names: Sequence[str], output: str) -> AxisForm:
    """Return the order of axes in which an operation reads the tensors `names` and writes `output`.

    It is "image" (channels last) or "plain" (ONNX's order). Results with four axes have the order of the first operand
    that has four axes and is not constant. All other results are plain.
    """
    rank = len(writer.graph.shapes[output])
    if rank != 4:
        return "plain"
    computed = [n for n in names if n not in writer.graph.constants and len(writer.graph.shapes[n]) == 4]
    return writer.get_form(computed[0]) if computed else "image"


def read_operand(writer: TfliteWriter, name: str, form: AxisForm, rank: int) -> int:
    """Return the tensor index of an operand with `rank` axes in the order `form`: "image" (channels last) or "plain".

    Leading axes of length 1 are added, as ONNX's broadcasting does.
    """
    shape = writer.graph.get_shape(name)
    if len(shape) == rank:
        return writer.require_tensor(name, form)
    wide = (1,) * (rank - len(shape)) + tuple(shape)
    if name in writer.graph.constants:
        value = writer.graph.constants[name].reshape(wide)
        quantization = writer.graph.quantizations.get(name)
        return writer.add_constant(value.transpose(NCHW_TO_NHWC) if form == "image" else value, name, quantization)
    index = writer.add_reshape(writer.require_tensor(name), wide)
    return writer.add_transpose(index, NCHW_TO_NHWC) if form == "image" else index


def add_binary(writer: TfliteWriter, code: str, inputs: Sequence[int], output: int, activation: str = "NONE") -> None:
    """Add an operation with two operands and, if the operator supports it, a fused activation.

    `inputs` and `output` are indices of tensors. MAXIMUM and MINIMUM ignore the activation.
    """
    if code in _FUSED_OPTIONS:
        writer.add_operation(
            code, inputs, [output], _FUSED_OPTIONS[code], FusedActivationFunction=ACTIVATION_CODES[activation]
        )
    else:
        writer.add_operation(code, inputs, [output], "MaximumMinimum" if code in ("MAXIMUM", "MINIMUM") else "")


def add_scalar_chain(writer: TfliteWriter, x: int, steps: Sequence[tuple[str, float]]) -> int:
    """Apply operations one after another to the tensor with index `x`; return the result's tensor index.

    Each step is the name of a TFLite operator, and its second operand, a number.
    """
    for code, number in steps:
        output = writer.add_like(x, writer.get_shape(x))
        add_binary(writer, code, [x, writer.add_constant(np.asarray([number], np.float32), "number")], output)
        x = output
    return x


def lower_variadic(code: str, writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Add, Sub, Mul, Div, Max, Min or Sum to binary operations, from left to right."""
    shape = writer.graph.shapes[node.output]
    form = find_common_form(writer, node.inputs, node.output)
    if len(node.inputs) == 1:
        writer.set_alias(node.output, form, writer.require_tensor(node.inputs[0], form))
        return
    held_shape = permute(shape, NCHW_TO_NHWC) if form == "image" else shape
    left = read_operand(writer, node.inputs[0], form, len(shape))
    for name in node.inputs[1:-1]:
        between = writer.add_tensor(f"{node.output}/{name}", writer.graph.dtypes[node.output], held_shape)
        add_binary(writer, code, [left, read_operand(writer, name, form, len(shape))], between)
        left = between
    right = read_operand(writer, node.inputs[-1], form, len(shape))
    add_binary(writer, code, [left, right], writer.add_output(node.output, form), node.activation)


def lower_unary(code: str, options: str, writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower an operator with one input to the TFLite operator `code`.

    `options` is the name of the TFLite operator's options table without "Options", or "".
    """
    x, form = writer.require_known_form(node.inputs[0])
    writer.add_operation(code, [x], [writer.add_output(node.output, form)], options)


def lower_alias(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Identity, or Dropout at inference, to another name of the same tensor."""
    if len(node.outputs) > 1 or (node.op == "Dropout" and node.has_input(2)):
        raise make_refusal(node, "it is in training mode or returns its mask", "export the network for inference")
    x, form = writer.require_known_form(node.inputs[0])
    writer.set_alias(node.output, form, x)


def lower_cast(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Cast to CAST; a Cast to the same type becomes another name of the tensor."""
    if writer.graph.dtypes[node.output] == writer.tensors[writer.require_tensor(node.inputs[0])].dtype:
        lower_alias(writer, node)
    else:
        lower_unary("CAST", "", writer, node)


def lower_clip(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Clip or Relu to RELU or RELU6 if possible, else to MAXIMUM and MINIMUM with constants."""
    x, form = writer.require_known_form(node.inputs[0])
    activation = find_activation(writer.graph, node)
    if activation is not None:
        writer.add_operation(activation, [x], [writer.add_output(node.output, form)])
        return
    if writer.graph.dtypes[node.output] != "float32":
        raise make_refusal(node, "it has bounds other than 0 and 6 in int8", "leave the model in float32")
    low, high = get_clip_bounds(writer.graph, node)
    steps = [(code, bound) for code, bound in (("MAXIMUM", low), ("MINIMUM", high)) if bound is not None]
    for position, (code, bound) in enumerate(steps, 1):
        output = (
            writer.add_output(node.output, form) if position == len(steps) else writer.add_like(x, writer.get_shape(x))
        )
        add_binary(writer, code, [x, writer.add_constant(np.asarray([bound], np.float32), "bound")], output)
        x = output
    if not steps:
        writer.set_alias(node.output, form, x)


def lower_leaky_relu(writer: TfliteWriter, node: SegmentNode) -> None:
    x, form = writer.require_known_form(node.inputs[0])
    slope = node.get_attribute("alpha", 0.01)
    writer.add_operation("LEAKY_RELU", [x], [writer.add_output(node.output, form)], "LeakyRelu", Alpha=slope)


def lower_prelu(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower PRelu to PRELU. The slope is broadcast to the shape of the input."""
    form = find_common_form(writer, node.inputs, node.output)
    rank = len(writer.graph.shapes[node.output])
    inputs = [read_operand(writer, name, form, rank) for name in node.inputs]
    writer.add_operation("PRELU", inputs, [writer.add_output(node.output, form)])


def lower_hard_sigmoid(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower HardSigmoid to its definition min(max(alpha x + beta, 0), 1)."""
    x, form = writer.require_known_form(node.inputs[0])
    steps = (("MUL", node.get_attribute("alpha", 0.2)), ("ADD", node.get_attribute("beta", 0.5)), ("MINIMUM", 1.0))
    x = add_scalar_chain(writer, x, steps)
    writer.add_operation("RELU", [x], [writer.add_output(node.output, form)])


def lower_batch_normalization(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower a BatchNormalization that could not be fused into another node to MUL and ADD."""
    if len(node.outputs) > 1 or node.get_attribute("training_mode", 0):
        raise make_refusal(node, "it is in training mode", "export the network for inference")
    if any(name not in writer.graph.constants for name in node.inputs[1:5]):
        raise make_refusal(
            node, "its statistics are not constant", "TFLite-micro requires constants; use target sockets"
        )
    x, form = writer.require_known_form(node.inputs[0])
    shape = [1] * len(writer.get_shape(x))
    shape[-1 if form == "image" else 1] = -1
    factor, shift = (value.reshape(shape).astype(np.float32) for value in get_batch_norm_affine(writer.graph, node))
    between = writer.add_like(x, writer.get_shape(x))
    add_binary(writer, "MUL", [x, writer.add_constant(factor, "factor")], between)
    output = writer.add_output(node.output, form)
    add_binary(writer, "ADD", [between, writer.add_constant(shift, "shift")], output, node.activation)


def lower_elu(writer: TfliteWriter, node: SegmentNode) -> None:
    if node.get_attribute("alpha", 1.0) != 1.0:
        raise make_refusal(node, "alpha is not 1", "use target sockets")
    lower_unary("ELU", "", writer, node)


def lower_reciprocal(writer: TfliteWriter, node: SegmentNode) -> None:
    form = writer.get_form(node.inputs[0])
    inputs = [writer.add_constant(np.ones(1, np.float32), "one"), writer.require_tensor(node.inputs[0], form)]
    add_binary(writer, "DIV", inputs, writer.add_output(node.output, form))


def lower_power(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Pow with a constant exponent: 2 and 3 become MUL, 0.5 becomes SQRT, -0.5 becomes RSQRT."""
    exponent_array = writer.graph.constants.get(node.inputs[1])
    exponent = float(exponent_array.reshape(())) if exponent_array is not None and exponent_array.size == 1 else None
    x, form = writer.require_known_form(node.inputs[0])
    if exponent in (2, 3):
        factor = x
        if exponent == 3:
            factor = writer.add_like(x, writer.get_shape(x))
            add_binary(writer, "MUL", [x, x], factor)
        add_binary(writer, "MUL", [factor, x], writer.add_output(node.output, form))
    elif exponent in (0.5, -0.5):
        writer.add_operation("SQRT" if exponent > 0 else "RSQRT", [x], [writer.add_output(node.output, form)])
    else:
        raise make_refusal(node, "its exponent is not 2, 3, 0.5 or -0.5", "use target sockets")
