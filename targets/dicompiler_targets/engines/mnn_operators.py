"""Operators that MNN computes as onnxruntime does, and attributes that its converter needs.

Comparisons with onnxruntime over generated attributes and shapes have shown which nodes MNN computes differently, and
for which nodes it crashes. The checks refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from dicompiler.plugin_api.artifacts import UnsupportedByEngine
from dicompiler.plugin_api.onnx import Weight, is_placeholder
from dicompiler_targets.engines.static_shapes import infer_values, static_shapes

MAX_AXES = 6
"""Largest number of axes of a tensor."""


class SubmodelFacts:
    """A submodel with the types, shapes and constants of its tensors.

    Attributes:
        model: The submodel. Its large initializers are placeholders without data.
        weights: The data of the placeholders, by name.
        shapes: Static shapes of tensors, by name.
        types: ONNX element types of tensors, by name.
    """

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> None:
        self.model, self.weights = model, weights
        self.opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        values = infer_values(model)
        self.shapes = static_shapes(values)
        self.types: dict[str, int] = {value.name: value.type.tensor_type.elem_type for value in values}
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        for tensor in model.graph.initializer:
            self.types[tensor.name], self.shapes[tensor.name] = tensor.data_type, tuple(tensor.dims)

    def check_interface(self) -> None:
        """Raise UnsupportedByEngine if an input or output of the submodel has a form that MNN does not support."""
        graph = self.model.graph
        inputs = [value.name for value in graph.input]
        computed = {name for node in graph.node for name in node.output}
        read = {name for node in graph.node for name in node.input}
        for name in (*inputs, *(value.name for value in graph.output)):
            self.check_tensor(name)
        if not read.issuperset(inputs):
            raise UnsupportedByEngine("an input that no node reads")
        if not computed.issuperset(value.name for value in graph.output):
            raise UnsupportedByEngine("an output that no node computes")

    def check_tensor(self, name: str) -> None:
        """Raise UnsupportedByEngine if a tensor is not of type float, or has an unsupported shape."""
        shape = self.shapes.get(name)
        if self.types.get(name) != onnx.TensorProto.FLOAT:
            raise UnsupportedByEngine("a tensor that is not of type float")
        if shape is None or not 1 <= len(shape) <= MAX_AXES or 0 in shape:
            raise UnsupportedByEngine(f"a tensor of shape {shape}")

    def is_constant(self, name: str) -> bool:
        return name in self._initializers

    def constant(self, node: onnx.NodeProto, index: int) -> NDArray[Any] | None:
        """Return the values of a constant input of a node; None if the input is missing or computed."""
        if index >= len(node.input) or node.input[index] not in self._initializers:
            return None
        tensor = self._initializers[node.input[index]]
        return self.weights[tensor.name].array() if is_placeholder(tensor) else numpy_helper.to_array(tensor)


def find_unsupported_nodes(facts: SubmodelFacts) -> dict[int, str]:
    """Return, by index, the nodes that MNN does not compute as onnxruntime does, each with the reason."""
    reasons = {}
    for i, node in enumerate(facts.model.graph.node):
        try:
            _check_node(facts, node)
        except UnsupportedByEngine as error:
            reasons[i] = str(error)
    return reasons


def _check_node(facts: SubmodelFacts, node: onnx.NodeProto) -> None:
    """Raise UnsupportedByEngine if MNN does not compute a node as onnxruntime does."""
    if node.op_type not in OPERATOR_CHECKS or node.domain not in ("", "ai.onnx"):
        raise UnsupportedByEngine(f"operator {node.op_type}")
    for name in (*node.input, *node.output):
        if name and not facts.is_constant(name):
            facts.check_tensor(name)
    if not any(name and not facts.is_constant(name) for name in node.input):
        raise UnsupportedByEngine(f"{node.op_type} of constants")
    if sum(map(bool, node.output)) > 1 and node.op_type != "Split":
        raise UnsupportedByEngine(f"{node.op_type} with several outputs")
    OPERATOR_CHECKS[node.op_type](facts, node, read_attributes(facts, node))


def read_attributes(facts: SubmodelFacts, node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node, including the defaults that ONNX defines."""
    schema = onnx.defs.get_schema(node.op_type, facts.opset, "")
    defaults = {
        name: helper.get_attribute_value(attribute.default_value)
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type != onnx.AttributeProto.UNDEFINED
    }
    return defaults | {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def explicit_attributes(facts: SubmodelFacts, node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node with all defaults, because MNN's converter does not know some of them.

    Pools with `ceil_mode` get the padding that gives the same number of windows without it.
    """
    attributes = read_attributes(facts, node)
    if node.op_type in ("Conv", "ConvTranspose", "MaxPool", "AveragePool"):
        attributes = {"strides": (1, 1), "pads": (0, 0, 0, 0), **attributes}
    if node.op_type in ("Conv", "ConvTranspose"):
        attributes.setdefault("dilations", (1, 1))
    if node.op_type in ("MaxPool", "AveragePool") and attributes.get("ceil_mode"):
        begins, ends = attributes["pads"][:2], _needed_end_pads(facts, node, attributes)
        attributes |= {"ceil_mode": 0, "pads": (*begins, *(max(0, end) for end in ends))}
    return attributes


def _needed_end_pads(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> list[int]:
    """Return how many rows and columns of padding a pool's last windows reach at the end; negative: unread ones."""
    kernel, strides = attributes["kernel_shape"], attributes.get("strides", (1, 1))
    begins = attributes.get("pads", (0, 0, 0, 0))[:2]
    sizes, counts = facts.shapes[node.input[0]][2:], facts.shapes[node.output[0]][2:]
    return [(counts[i] - 1) * strides[i] + kernel[i] - sizes[i] - begins[i] for i in (0, 1)]


# -- checks of single operators

Check = Callable[[SubmodelFacts, onnx.NodeProto, Mapping[str, Any]], None]


def _accept(_facts: SubmodelFacts, _node: onnx.NodeProto, _attributes: Mapping[str, Any]) -> None:
    """Accept all nodes of an operator."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UnsupportedByEngine(message)


def _check_convolution(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    weight = facts.shapes.get(node.input[1], ())
    is_plain = facts.is_constant(node.input[1]) and len(weight) == 4
    _require(is_plain, f"a {node.op_type} that is not two-dimensional with constant weights")
    _require(attributes["auto_pad"] == b"NOTSET", f"a {node.op_type} with auto_pad")
    _require("output_shape" not in attributes, f"a {node.op_type} with output_shape")
    _check_bias(facts, node)


def _check_bias(facts: SubmodelFacts, node: onnx.NodeProto) -> None:
    has_bias = len(node.input) > 2 and bool(node.input[2])
    channels = facts.shapes[node.output[0]][1]
    is_constant = has_bias and facts.is_constant(node.input[2]) and facts.shapes[node.input[2]] == (channels,)
    _require(is_constant or not has_bias, "a bias that is not a constant for each output channel")


def _check_pool(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    kind = node.op_type
    _require(len(attributes["kernel_shape"]) == 2, f"a {kind} that is not two-dimensional")
    is_plain = attributes["auto_pad"] == b"NOTSET" and not attributes.get("storage_order", 0)
    is_plain = is_plain and set(attributes.get("dilations", (1,))) == {1}
    _require(is_plain, f"a {kind} with auto_pad, dilations or storage_order")
    strides, pads = attributes.get("strides", (1, 1)), attributes.get("pads", (0, 0, 0, 0))
    ends = _needed_end_pads(facts, node, attributes)
    _require(all(-end < stride for end, stride in zip(ends, strides, strict=True)), f"a {kind} with unread windows")
    if attributes.get("count_include_pad"):
        is_symmetric = tuple(pads[:2]) == tuple(pads[2:]) and not attributes.get("ceil_mode")
        _require(is_symmetric, f"an {kind} that counts asymmetric padding, or with ceil_mode")


def _check_global_pool(facts: SubmodelFacts, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    _require(len(facts.shapes[node.input[0]]) == 4, "a global pool that is not two-dimensional")


def _check_gemm(_facts: SubmodelFacts, _node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _require(not attributes["transA"], "a Gemm with transA")


def _check_batch_normalization(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    is_constant = all(map(facts.is_constant, node.input[1:])) and not attributes.get("training_mode", 0)
    _require(is_constant, "a BatchNormalization with computed statistics")


def _check_constants(first: int) -> Check:
    """Return a check that all inputs of a node from number `first` are constants."""

    def check(facts: SubmodelFacts, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
        is_constant = all(facts.is_constant(name) for name in node.input[first:] if name)
        _require(is_constant, f"a {node.op_type} with computed parameters")

    return check


def _check_pad(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_constants(1)(facts, node, attributes)
    pads, has_axes = facts.constant(node, 1), len(node.input) > 3 and bool(node.input[3])
    is_plain = pads is not None and len(pads) == 8 and set(pads[[0, 1, 4, 5]]) == {0} and min(pads) >= 0
    is_plain = is_plain and not has_axes and attributes["mode"] in (b"constant", b"reflect", b"edge")
    _require(is_plain, "a Pad that does not add rows and columns to a feature map")


def _check_split(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_constants(1)(facts, node, attributes)
    axis = attributes["axis"]
    sizes = {facts.shapes[name][axis] for name in node.output}
    has_sizes = facts.constant(node, 1) is not None or "split" in attributes
    _require(has_sizes or len(sizes) == 1, "a Split into pieces of unequal size")


def _check_slice(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_constants(1)(facts, node, attributes)
    steps = facts.constant(node, 4)
    _require(steps is None or min(steps) > 0, "a Slice with negative steps")


def _check_prelu(facts: SubmodelFacts, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    shape, slopes = facts.shapes[node.input[0]], facts.shapes[node.input[1]]
    is_plain = facts.is_constant(node.input[1]) and len(shape) == 4
    _require(is_plain and slopes in ((1,), (shape[1], 1, 1)), "a PRelu without a constant slope for each channel")


def _check_binary(facts: SubmodelFacts, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    _require(len(node.input) > 1, f"{node.op_type} of one tensor")
    shape = facts.shapes[node.input[0]]
    is_single = facts.is_constant(node.input[0]) and math.prod(shape) == 1 and len(shape) > 1
    _require(not is_single, f"{node.op_type} with a first operand of one element and several axes")


def _check_reduction(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_constants(1)(facts, node, attributes)
    _require(not attributes.get("noop_with_empty_axes"), f"a {node.op_type} with noop_with_empty_axes")


def _check_layer_normalization(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_constants(1)(facts, node, attributes)
    is_whole = attributes["axis"] % len(facts.shapes[node.input[0]]) == 0
    _require(not is_whole, "a LayerNormalization over all axes")


def _check_log_softmax(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """Before opset 13, a LogSoftmax treats `axis` and all later axes as one axis, and MNN only `axis`."""
    shape = facts.shapes[node.input[0]]
    later_sizes = shape[attributes["axis"] % len(shape) + 1 :]
    _require(facts.opset >= 13 or set(later_sizes) <= {1}, "a LogSoftmax over several axes")


def _check_dropout(_facts: SubmodelFacts, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    _require(len(node.input) < 3, "a Dropout with training_mode")


def _check_resize(facts: SubmodelFacts, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    before, after = facts.shapes[node.input[0]], facts.shapes[node.output[0]]
    _require(len(before) == 4 and before[:2] == after[:2], "a Resize that is not two-dimensional")
    _check_constants(1)(facts, node, attributes)
    _require(len(node.input) > 2 and not attributes.get("axes"), "a Resize with axes, or of an opset before 11")
    mode, transformation = attributes["mode"], attributes["coordinate_transformation_mode"]
    _require(not attributes.get("antialias") and not attributes["exclude_outside"], "a Resize with antialias")
    if mode == b"nearest":
        is_repeated = all(b % a == 0 for a, b in zip(before, after, strict=True))
        is_plain = transformation in (b"half_pixel", b"pytorch_half_pixel", b"asymmetric") and is_repeated
        is_plain = is_plain and attributes["nearest_mode"] in (b"floor", b"round_prefer_floor")
        _require(is_plain, "a nearest-neighbour Resize without integer factors")
    else:
        known = (b"half_pixel", b"pytorch_half_pixel", b"align_corners", b"asymmetric")
        _require(mode == b"linear" and transformation in known, "a cubic Resize, or a Resize of a region")


OPERATOR_CHECKS: dict[str, Check] = {
    "Conv": _check_convolution,
    "ConvTranspose": _check_convolution,
    "Gemm": _check_gemm,
    "MatMul": _accept,
    **dict.fromkeys(("Relu", "LeakyRelu", "Elu", "Selu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh"), _accept),
    **dict.fromkeys(("Softplus", "Softsign", "Exp", "Sqrt", "Abs", "Neg", "Erf"), _accept),
    "PRelu": _check_prelu,
    "Clip": _check_constants(1),
    "MaxPool": _check_pool,
    "AveragePool": _check_pool,
    "GlobalAveragePool": _check_global_pool,
    "GlobalMaxPool": _check_global_pool,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum"), _check_binary),
    "Concat": _accept,
    **dict.fromkeys(("Flatten", "Identity", "Transpose", "DepthToSpace", "SpaceToDepth"), _accept),
    "Dropout": _check_dropout,
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), _check_constants(1)),
    **dict.fromkeys(("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum"), _check_reduction),
    "Softmax": _accept,
    "LogSoftmax": _check_log_softmax,
    "LRN": _accept,
    "Pad": _check_pad,
    "Slice": _check_slice,
    "Split": _check_split,
    "Resize": _check_resize,
    "BatchNormalization": _check_batch_normalization,
    "LayerNormalization": _check_layer_normalization,
    "InstanceNormalization": _check_constants(1),
}
"""For each operator that MNN computes, a function that raises UnsupportedByEngine for the nodes that it does not."""
