"""Conversion of an ONNX submodel to the two files of an ncnn network: layers (.param) and weights (.bin).

ncnn has no batch axis, so a tensor of shape (1, C, H, W) becomes a blob of C×H×W, and axis 1 becomes axis 0. Operators
and shapes without an exact counterpart raise `UnsupportedByEngine`; onnxruntime then computes the submodel.

    Conv ⇒ Convolution 0=filters 1=kernel width 11=kernel height ..., and a following Relu becomes its activation

Layers and parameters: https://github.com/Tencent/ncnn/wiki/operators
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from dicompiler.plugin_api.artifacts import EngineFiles, UnsupportedByEngine
from dicompiler.plugin_api.onnx import Weight, is_placeholder
from dicompiler_targets.engines.static_shapes import Shape, infer_values, static_shapes

FLOAT32_MARK = bytes(4)
"""Bytes in the .bin file before the kernel of a convolution or inner product, which mean that it is in float32."""
MAGIC = 7767517
"""First line of a .param file: the version of its format."""
ARRAY_PARAMETER_BASE = -23300
"""Base of the numbers of array parameters: parameter i is written as ARRAY_PARAMETER_BASE - i in a .param file."""
ACTIVATION, ACTIVATION_LIMITS = 9, 10
"""Numbers of the parameters of a fused activation: its kind, and its own parameters."""
BIAS = {"Convolution": 5, "ConvolutionDepthWise": 5, "InnerProduct": 1}
"""Number of the parameter that is 1 if a layer has a bias, by the type of the layer."""
RELU, LEAKY_RELU, CLIP, SIGMOID, HARD_SWISH = 1, 2, 3, 4, 6
"""Numbers of the activations that ncnn fuses into a convolution or an inner product."""
SHAPE_HINTS = 30
"""Number of the array parameter with the shapes of a layer's outputs: four integers for each of them."""
MAX_HINTED_POSITIONS = 64
"""Largest number of output rows times columns for which a 3×3 convolution gets the shape of its input.

ncnn computes most 3×3 convolutions of unknown size by Winograd's algorithm F(4×4, 3×3), which reads four times the
bytes of the weights. For few positions, these reads take most of the time. If ncnn knows the shape, it chooses
F(2×2, 3×3) for such a convolution, with less than half of these bytes. For more positions, its choice is often slower.
"""
BINARY_OPERATORS = {"Add": 0, "Sub": 1, "Mul": 2, "Div": 3, "Max": 4, "Min": 5}
REVERSED_OPERATORS = {"Sub": 7, "Div": 8}
"""Numbers of ncnn's operators with exchanged operands, by ONNX operator.

They are used for a scalar first operand, because ncnn's scalar is always the second operand.
"""

Parameter = int | float | Sequence[int] | Sequence[float]
Array = NDArray[np.float32]


@dataclass(frozen=True)
class _NcnnLayer:
    """A layer of an ncnn network.

    Attributes:
        kind: The layer's type, such as "Convolution".
        inputs: Names of the blobs (tensors) that the layer reads.
        outputs: Names of the blobs that the layer computes.
        parameters: Parameters by their number in ncnn's documentation.
        weights: The layer's arrays in the .bin file. If `has_kernel`, the first of them is marked as float32.
        has_kernel: True for convolutions and inner products.
        hinted_shape: Shape of the input, if ncnn must know it when it loads the layer.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[int, Parameter] = field(default_factory=dict)
    weights: tuple[Array, ...] = ()
    has_kernel: bool = False
    hinted_shape: Shape | None = None

    @property
    def content(self) -> bytes:
        return FLOAT32_MARK * self.has_kernel + b"".join(array.tobytes() for array in self.weights)


def convert_to_ncnn(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles:
    """Convert an ONNX submodel of float tensors to the two files of an ncnn network.

    The inputs of the network are named in0, in1, …, and its outputs out0, out1, ….

    Args:
        model: The submodel.
        weights: The data of initializers that are placeholders, by name.

    Raises:
        UnsupportedByEngine: ncnn has no exact counterpart of a node, a type or a shape of the submodel.
    """
    return _Converter(model, weights).convert()


def find_unsupported_nodes(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> dict[int, str]:
    return _Converter(model, weights).find_unsupported()


class _Converter:
    """The state of a conversion to ncnn: shapes and constants of the submodel, and the ncnn layers so far."""

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, Weight]) -> None:
        self.graph = model.graph
        self.opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        self.constants = {tensor.name: _read_constant(tensor, weights) for tensor in model.graph.initializer}
        self.shapes = static_shapes(infer_values(model)) | {name: array.shape for name, array in self.constants.items()}
        self.readers = Counter(name for node in model.graph.node for name in node.input if name)
        self.readers.update(value.name for value in model.graph.output)
        self.layers: list[_NcnnLayer] = []
        self.producers: dict[str, int] = {}

    def convert(self) -> EngineFiles:
        for value in self.graph.input:
            self._check_tensor(value)
            self.add("Input", (), value.name)
        for node in self.graph.node:
            self._convert_node(node)
        for value in self.graph.output:
            self._check_tensor(value)
            if value.name not in self.producers or value.name in (other.name for other in self.graph.input):
                raise UnsupportedByEngine("an output that no node computes")
        return self._write()

    def _convert_node(self, node: onnx.NodeProto) -> None:
        convert_node = CONVERTERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if convert_node is None:
            raise UnsupportedByEngine(f"operator {node.op_type}")
        convert_node(self, node, _attributes(node))

    def find_unsupported(self) -> dict[int, str]:
        """Return, by index, the nodes that cannot be converted to ncnn, each with the reason.

        Do not use the converter's layers afterwards, because the layers of these nodes are missing.
        """
        reasons = {}
        for i, node in enumerate(self.graph.node):
            try:
                self._convert_node(node)
            except UnsupportedByEngine as error:
                reasons[i] = str(error)
        return reasons

    def _check_tensor(self, value: onnx.ValueInfoProto) -> None:
        if value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
            raise UnsupportedByEngine("a tensor that is not of type float")
        self.blob_shape(value.name)

    def add(
        self,
        kind: str,
        inputs: Sequence[str],
        output: str,
        parameters: Mapping[int, Parameter] | None = None,
        weights: tuple[Array, ...] = (),
        has_kernel: bool = False,
    ) -> None:
        self.producers[output] = len(self.layers)
        self.layers.append(_NcnnLayer(kind, tuple(inputs), (output,), parameters or {}, weights, has_kernel))

    def find_fusible(self, name: str) -> _NcnnLayer | None:
        """Return the layer that computes the tensor `name`, if the next operator can be fused into this layer."""
        index = self.producers.get(name)
        return None if index is None or self.readers[name] != 1 else self.layers[index]

    def replace_layer(self, name: str, layer: _NcnnLayer) -> None:
        index = self.producers[name]
        self.layers[index] = layer
        self.producers[layer.outputs[0]] = index

    def blob_shape(self, name: str) -> Shape:
        """Return the shape of the ncnn blob for a tensor, which is the tensor's shape without its batch axis.

        Raises:
            UnsupportedByEngine: The tensor does not have 2 to 4 axes, its batch size is not 1, or an axis has length 0.
        """
        shape: Shape | None = self.shapes.get(name)
        if shape is None or not 2 <= len(shape) <= 4 or shape[0] != 1 or 0 in shape:
            raise UnsupportedByEngine(f"a tensor of shape {shape}")
        return shape[1:]

    def axis(self, axis: int, name: str) -> int:
        """Return the axis of ncnn's blob, which has no batch axis, for an axis of the ONNX tensor `name`."""
        rank = len(self.blob_shape(name)) + 1
        if axis % rank == 0:
            raise UnsupportedByEngine("an operation along the batch axis")
        return axis % rank - 1

    def operand(self, name: str, rank: int) -> str:
        """Return the name of the blob for the input `name` of a node; add a layer for it if it is a constant.

        The constant's shape is extended by leading axes of length 1 to `rank` axes, including the batch axis.
        """
        if name not in self.constants:
            return name
        array = self.constants[name]
        shape = (1,) * (rank - array.ndim) + array.shape
        if shape[: len(shape) - rank + 1] != (1,) * (len(shape) - rank + 1):
            raise UnsupportedByEngine(f"a constant of shape {array.shape}")
        blob = f"{name}/{len(self.layers)}"
        self.add("MemoryData", (), blob, _size_parameters(shape[1:]), (_as_floats(array),))
        return blob

    def fuse_activation(self, node: onnx.NodeProto, activation: Mapping[int, Parameter]) -> bool:
        """Fuse an activation node into the convolution or inner product before it; return True if that is possible.

        `activation` has ncnn's parameters of the activation.
        """
        layer = self.find_fusible(node.input[0])
        if layer is None or not layer.has_kernel or ACTIVATION in layer.parameters:
            return False
        fused = replace(layer, outputs=(node.output[0],), parameters={**layer.parameters, **activation})
        self.replace_layer(node.input[0], fused)
        return True

    def _write(self) -> EngineFiles:
        layers = _split_shared_blobs(self.layers, {value.name for value in self.graph.output})
        blobs = sum(len(layer.outputs) for layer in layers)
        inputs = [layer.outputs[0] for layer in layers if layer.kind == "Input"]
        blob_names = {name: f"in{i}" for i, name in enumerate(inputs)}
        blob_names |= {value.name: f"out{i}" for i, value in enumerate(self.graph.output)}
        for layer in layers:
            for name in layer.outputs:
                blob_names.setdefault(name, str(len(blob_names)))
        hints = {layer.inputs[0]: layer.hinted_shape for layer in layers if layer.hinted_shape is not None}
        lines = [str(MAGIC), f"{len(layers)} {blobs}"]
        for i, layer in enumerate(_add_hints(layer, hints) for layer in layers):
            names = [blob_names[name] for name in (*layer.inputs, *layer.outputs)]
            parameters = [_format_parameter(key, value) for key, value in sorted(layer.parameters.items())]
            counts = [str(len(layer.inputs)), str(len(layer.outputs))]
            lines.append(" ".join([layer.kind, f"l{i}", *counts, *names, *parameters]))
        return EngineFiles("".join(f"{line}\n" for line in lines).encode(), b"".join(layer.content for layer in layers))


def _read_constant(tensor: onnx.TensorProto, weights: Mapping[str, Weight]) -> NDArray[Any]:
    if not is_placeholder(tensor):
        return numpy_helper.to_array(tensor)
    weight = weights[tensor.name]
    if tensor.data_type != onnx.TensorProto.FLOAT:
        return weight.array()
    return np.frombuffer(weight.data, np.float32).reshape(weight.shape)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _as_floats(array: NDArray[Any]) -> Array:
    if array.dtype != np.float32:
        raise UnsupportedByEngine(f"a constant of type {array.dtype}")
    return array


def _size_parameters(shape: Shape) -> dict[int, Parameter]:
    """Return ncnn's parameters for the extents of a blob: number 0 is the last axis, 1 the axis before it."""
    return dict(enumerate(reversed(shape)))


def _format_parameter(key: int, value: Parameter) -> str:
    if isinstance(value, Sequence):
        return f"{ARRAY_PARAMETER_BASE - key}={','.join([str(len(value)), *map(_format_number, value)])}"
    return f"{key}={_format_number(value)}"


def _format_number(value: float) -> str:
    """Format a number of a .param file; floats get an exponent, by which ncnn recognizes them."""
    return str(value) if isinstance(value, int) else f"{float(np.float32(value)):.9e}"


def _split_shared_blobs(layers: Sequence[_NcnnLayer], outputs: set[str]) -> list[_NcnnLayer]:
    """Add a layer `Split` after each blob (tensor) that has several readers, because ncnn allows only one.

    `outputs` has the names of the network's outputs, which count as readers.
    """
    readers = Counter(name for layer in layers for name in layer.inputs)
    copies: dict[str, list[str]] = {}
    result = []
    for layer in layers:
        inputs = tuple(copies[name].pop() if name in copies else name for name in layer.inputs)
        renamed = {name: f"{name}/whole" for name in layer.outputs if readers[name] + (name in outputs) > 1}
        result.append(replace(layer, inputs=inputs, outputs=tuple(renamed.get(name, name) for name in layer.outputs)))
        for name, whole in renamed.items():
            copies[name] = [f"{name}/{i}" for i in range(readers[name])]
            split = (*copies[name], name) if name in outputs else tuple(copies[name])
            result.append(_NcnnLayer("Split", (whole,), split))
    return result


def _add_hints(layer: _NcnnLayer, shapes: Mapping[str, Shape]) -> _NcnnLayer:
    """Return the layer with the parameter that states the shapes of its outputs; `shapes` has some of them, by name."""
    if not shapes.keys() & layer.outputs:
        return layer
    known = [shapes.get(name, ()) for name in layer.outputs]
    values = [value for shape in known for value in ((len(shape), *reversed(shape), 0, 0, 0)[:4])]
    return replace(layer, parameters={**layer.parameters, SHAPE_HINTS: values})


# -- conversion of single ONNX nodes


def _convert_convolution(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    weight = converter.constants.get(node.input[1])
    if weight is None or weight.ndim != 4:
        raise UnsupportedByEngine("a convolution that is not two-dimensional with constant weights")
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise UnsupportedByEngine("a convolution with auto_pad")
    filters, group = len(weight), attributes.get("group", 1)
    strides, dilations = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    bias = _read_bias(converter, node, filters)
    parameters: dict[int, Parameter] = {
        0: filters, 1: weight.shape[3], 11: weight.shape[2], 2: dilations[1], 12: dilations[0], 3: strides[1],
        13: strides[0], 4: left, 14: top, 15: right, 16: bottom, 5: len(bias), 6: weight.size,
    }  # fmt: skip
    if group > 1:
        parameters[7] = group
    kind = "ConvolutionDepthWise" if group > 1 else "Convolution"
    shape = converter.blob_shape(node.input[0])
    converter.add(kind, node.input[:1], node.output[0], parameters, (_as_floats(weight), *bias), has_kernel=True)
    if group == 1 and weight.shape[2:] == (3, 3) and {*strides, *dilations} == {1}:
        rows, columns = shape[1] + top + bottom - 2, shape[2] + left + right - 2
        if rows * columns <= MAX_HINTED_POSITIONS:
            converter.replace_layer(node.output[0], replace(converter.layers[-1], hinted_shape=shape))


def _read_bias(converter: _Converter, node: onnx.NodeProto, size: int) -> tuple[Array, ...]:
    """Return the bias of a node (its third input) as a tuple of one array; () if it has no bias."""
    if len(node.input) < 3 or not node.input[2]:
        return ()
    bias = converter.constants.get(node.input[2])
    if bias is None or bias.size not in (1, size):
        raise UnsupportedByEngine("a bias that is not a constant for each output channel")
    return (_as_floats(np.broadcast_to(bias.reshape(-1), (size,))),)


def _convert_gemm(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    weight = converter.constants.get(node.input[1])
    is_plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA", 0)
    if weight is None or weight.ndim != 2 or not is_plain or len(converter.blob_shape(node.input[0])) != 1:
        raise UnsupportedByEngine(f"a {node.op_type} that is not a vector times a constant matrix")
    rows = weight if attributes.get("transB", 0) else weight.T
    bias = _read_bias(converter, node, len(rows))
    parameters = {0: len(rows), 1: len(bias), 2: weight.size}
    weights = (_as_floats(rows), *bias)
    converter.add("InnerProduct", node.input[:1], node.output[0], parameters, weights, has_kernel=True)


def _convert_activation(
    number: int, kind: str, read: Callable[[_Converter, onnx.NodeProto, Mapping[str, Any]], Sequence[float]]
) -> Callable[[_Converter, onnx.NodeProto, Mapping[str, Any]], None]:
    """Return a function that converts an activation node: into a fused activation, or a layer of type `kind`.

    `number` is ncnn's number of the fused activation, or 0 if it is never fused. `read` returns the activation's
    parameters.
    """

    def convert(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
        values = [float(value) for value in read(converter, node, attributes)]
        fused: dict[int, Parameter] = {ACTIVATION: number, **({ACTIVATION_LIMITS: values} if values else {})}
        converter.blob_shape(node.input[0])
        if not number or not converter.fuse_activation(node, fused):
            converter.add(kind, node.input[:1], node.output[0], dict(enumerate(values)))

    return convert


def _read_clip(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> tuple[float, float]:
    limits = [float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)]
    for i, name in enumerate(("min", "max")):
        limits[i] = attributes.get(name, limits[i])
        if len(node.input) > i + 1 and node.input[i + 1]:
            if node.input[i + 1] not in converter.constants:
                raise UnsupportedByEngine("a Clip with computed limits")
            limits[i] = float(converter.constants[node.input[i + 1]].item())
    return limits[0], limits[1]


def _convert_pool(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    kernel = attributes["kernel_shape"]
    strides, pads = attributes.get("strides", (1, 1)), attributes.get("pads", (0, 0, 0, 0))
    is_plain = attributes.get("auto_pad", b"NOTSET") == b"NOTSET" and not attributes.get("storage_order", 0)
    is_plain = is_plain and set(attributes.get("dilations", (1,))) == {1}
    if len(kernel) != 2 or not is_plain or len(node.output) > 1:
        raise UnsupportedByEngine(f"a {node.op_type} with auto_pad, dilations or indices")
    sizes, counts = (converter.blob_shape(name)[1:] for name in (node.input[0], node.output[0]))
    # With ceil_mode, the last window may reach beyond the padding by `missing` rows or columns. The ncnn layer gets
    # them as additional padding.
    missing = [(counts[i] - 1) * strides[i] + kernel[i] - sizes[i] - pads[i] - pads[i + 2] for i in (0, 1)]
    if max(missing) > 0 and node.op_type == "AveragePool":
        raise UnsupportedByEngine("an AveragePool whose windows reach beyond the padding")
    bottom, right = (pads[i + 2] + max(0, missing[i]) for i in (0, 1))
    parameters: dict[int, Parameter] = {
        0: int(node.op_type == "AveragePool"), 1: kernel[1], 11: kernel[0], 2: strides[1], 12: strides[0], 3: pads[1],
        13: pads[0], 14: right, 15: bottom, 5: 1, 6: attributes.get("count_include_pad", 0),
    }  # fmt: skip
    converter.add("Pooling", node.input[:1], node.output[0], parameters)


def _convert_global_pool(converter: _Converter, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    if len(converter.blob_shape(node.input[0])) != 3:
        raise UnsupportedByEngine("a global pool that is not two-dimensional")
    pooled = f"{node.output[0]}/flat"
    converter.add("Pooling", node.input[:1], pooled, {0: int(node.op_type == "GlobalAveragePool"), 4: 1})
    converter.add("Reshape", [pooled], node.output[0], _size_parameters(converter.blob_shape(node.output[0])))


def _convert_binary(converter: _Converter, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    if len(node.input) != 2:
        raise UnsupportedByEngine(f"{node.op_type} of one tensor or of more than two tensors")
    first, second = node.input
    if node.op_type == "Mul" and _convert_swish(converter, node):
        return
    rank = len(converter.blob_shape(node.output[0])) + 1
    number = BINARY_OPERATORS[node.op_type]
    for scalar, other, code in ((second, first, number), (first, second, REVERSED_OPERATORS.get(node.op_type, number))):
        if scalar in converter.constants and converter.constants[scalar].size == 1:
            value = float(converter.constants[scalar].item())
            converter.blob_shape(other)
            converter.add("BinaryOp", [other], node.output[0], {0: code, 1: 1, 2: value})
            return
    ranks = {len(converter.blob_shape(name)) + 1 for name in node.input if name not in converter.constants}
    if ranks != {rank}:
        raise UnsupportedByEngine(f"{node.op_type} of tensors with different numbers of axes")
    converter.add("BinaryOp", [converter.operand(name, rank) for name in node.input], node.output[0], {0: number})


def _convert_swish(converter: _Converter, node: onnx.NodeProto) -> bool:
    """Replace a Sigmoid and the following Mul of its input and output by one Swish layer.

    The result is True if `node` is such a Mul.
    """
    for gate, value in (node.input, reversed(node.input)):
        layer = converter.find_fusible(gate)
        if layer is not None and layer.kind == "Sigmoid" and layer.inputs == (value,):
            converter.replace_layer(gate, replace(layer, kind="Swish", outputs=(node.output[0],)))
            converter.readers[value] -= 1
            return True
    return False


def _convert_concat(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    rank = len(converter.blob_shape(node.output[0])) + 1
    operands = [converter.operand(name, rank) for name in node.input]
    converter.add("Concat", operands, node.output[0], {0: converter.axis(attributes["axis"], node.output[0])})


def _convert_reshape(converter: _Converter, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    converter.blob_shape(node.input[0])
    sizes = _size_parameters(converter.blob_shape(node.output[0]))
    converter.add("Reshape", node.input[:1], node.output[0], sizes)


def _convert_identity(converter: _Converter, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    converter.blob_shape(node.input[0])
    converter.add("Noop", node.input[:1], node.output[0])


def _convert_softmax(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    (source, *_), (result, *_) = node.input, node.output
    shape, has_one_axis = converter.blob_shape(source), converter.opset >= 13
    axis = converter.axis(attributes.get("axis", -1 if has_one_axis else 1), source)
    if has_one_axis or axis == len(shape) - 1:
        converter.add("Softmax", [source], result, {0: axis, 1: 1})
        return
    # Before opset 13, Softmax treats `axis` and all later axes as one axis.
    flat, flat_result = f"{result}/flat", f"{result}/flat result"
    converter.add("Reshape", [source], flat, _size_parameters((math.prod(shape[:axis]), math.prod(shape[axis:]))))
    converter.add("Softmax", [flat], flat_result, {0: 1, 1: 1})
    converter.add("Reshape", [flat_result], result, _size_parameters(shape))


def _convert_lrn(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    values = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0, **attributes}
    if attributes["size"] % 2 == 0 or len(converter.blob_shape(node.input[0])) != 3:
        raise UnsupportedByEngine("LRN over an even number of channels")
    parameters = {0: 0, 1: attributes["size"], 2: values["alpha"], 3: values["beta"], 4: values["bias"]}
    converter.add("LRN", node.input[:1], node.output[0], parameters)


def _convert_pad(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    is_constant = attributes.get("mode", b"constant") == b"constant" and len(node.input) < 4
    pads = converter.constants.get(node.input[1]) if len(node.input) > 1 else None
    if not is_constant or pads is None or len(pads) != 8 or set(pads[[0, 1, 4, 5]]) != {0} or min(pads) < 0:
        raise UnsupportedByEngine("a Pad that does not add constant rows and columns to a feature map")
    value = 0.0
    if len(node.input) > 2 and node.input[2]:
        if node.input[2] not in converter.constants:
            raise UnsupportedByEngine("a Pad with a computed value")
        value = converter.constants[node.input[2]].item()
    top, left, bottom, right = (int(pads[i]) for i in (2, 3, 6, 7))
    parameters: dict[int, Parameter] = {0: top, 1: bottom, 2: left, 3: right, 4: 0, 5: float(value)}
    converter.blob_shape(node.input[0])
    converter.add("Padding", node.input[:1], node.output[0], parameters)


def _convert_slice(converter: _Converter, node: onnx.NodeProto, _: Mapping[str, Any]) -> None:
    if len(node.input) < 3 or not all(name in converter.constants for name in node.input[1:] if name):
        raise UnsupportedByEngine("a Slice with computed limits, or of an opset before 10")
    starts, ends, *rest = (converter.constants[name] for name in node.input[1:] if name)
    shape = (1, *converter.blob_shape(node.input[0]))
    axes = [int(axis) % len(shape) for axis in rest[0]] if rest else list(range(len(starts)))
    if len(rest) > 1 and set(rest[1]) != {1}:
        raise UnsupportedByEngine("a Slice with steps")
    limits = [slice(int(s), int(e)).indices(shape[axis])[:2] for s, e, axis in zip(starts, ends, axes, strict=True)]
    begins, stops = [begin for begin, _ in limits], [stop for _, stop in limits]
    parameters = {9: begins, 10: stops, 11: [converter.axis(axis, node.input[0]) for axis in axes]}
    converter.add("Crop", node.input[:1], node.output[0], parameters)


def _convert_split(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    axis = converter.axis(attributes.get("axis", 0), node.input[0])
    begin = 0
    for name in node.output:
        end = begin + converter.blob_shape(name)[axis]
        converter.add("Crop", node.input[:1], name, {9: [begin], 10: [end], 11: [axis]})
        begin = end


def _convert_resize(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    before, after = (converter.blob_shape(name) for name in (node.input[0], node.output[0]))
    is_nearest = attributes.get("mode", b"nearest") == b"nearest" and len(before) == len(after) == 3
    if not is_nearest or before[0] != after[0] or any(b % a for a, b in zip(before[1:], after[1:], strict=True)):
        raise UnsupportedByEngine("a Resize other than nearest-neighbour with integer factors")
    # ncnn repeats each row and column. With other modes of Resize that are accepted here, results may differ; the
    # comparison with onnxruntime then rejects the network.
    if attributes.get("coordinate_transformation_mode", b"half_pixel") not in (b"half_pixel", b"asymmetric"):
        raise UnsupportedByEngine("a Resize with aligned corners")
    if attributes.get("nearest_mode", b"round_prefer_floor") not in (b"floor", b"round_prefer_floor"):
        raise UnsupportedByEngine("a Resize that rounds up")
    converter.add("Interp", node.input[:1], node.output[0], {0: 1, 3: after[1], 4: after[2]})


def _convert_batch_normalization(converter: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    if not all(name in converter.constants for name in node.input[1:]) or attributes.get("training_mode", 0):
        raise UnsupportedByEngine("a BatchNormalization with computed statistics")
    scale, bias, mean, variance = (_as_floats(converter.constants[name]) for name in node.input[1:])
    epsilon = float(attributes.get("epsilon", 1e-5))
    converter.blob_shape(node.input[0])
    layer = converter.find_fusible(node.input[0])
    if layer is None or not layer.has_kernel or ACTIVATION in layer.parameters:
        statistics = (scale, mean, variance, bias)
        converter.add("BatchNorm", node.input[:1], node.output[0], {0: scale.size, 1: epsilon}, statistics)
        return
    kernel, *old_bias = layer.weights
    factors = scale / np.sqrt(variance + np.float32(epsilon))
    weights = (
        kernel * factors.reshape(-1, *(1,) * (kernel.ndim - 1)),
        (sum(old_bias) - mean) * factors + bias,
    )
    parameters = {**layer.parameters, BIAS[layer.kind]: 1}
    folded = replace(layer, outputs=(node.output[0],), parameters=parameters, weights=weights)
    converter.replace_layer(node.input[0], folded)


CONVERTERS: dict[str, Callable[[_Converter, onnx.NodeProto, Mapping[str, Any]], None]] = {
    "Conv": _convert_convolution,
    "Gemm": _convert_gemm,
    "MatMul": _convert_gemm,
    "Relu": _convert_activation(RELU, "ReLU", lambda *_: ()),
    "LeakyRelu": _convert_activation(LEAKY_RELU, "ReLU", lambda _c, _n, a: (a.get("alpha", 0.01),)),
    "Clip": _convert_activation(CLIP, "Clip", _read_clip),
    "Sigmoid": _convert_activation(SIGMOID, "Sigmoid", lambda *_: ()),
    "HardSwish": _convert_activation(HARD_SWISH, "HardSwish", lambda *_: (1 / 6, 0.5)),
    "HardSigmoid": _convert_activation(0, "HardSigmoid", lambda _c, _n, a: (a.get("alpha", 0.2), a.get("beta", 0.5))),
    "Tanh": _convert_activation(0, "TanH", lambda *_: ()),
    "MaxPool": _convert_pool,
    "AveragePool": _convert_pool,
    "GlobalAveragePool": _convert_global_pool,
    "GlobalMaxPool": _convert_global_pool,
    **dict.fromkeys(BINARY_OPERATORS, _convert_binary),
    "Concat": _convert_concat,
    "Flatten": _convert_reshape,
    "Reshape": _convert_reshape,
    "Squeeze": _convert_reshape,
    "Unsqueeze": _convert_reshape,
    "Identity": _convert_identity,
    "Dropout": _convert_identity,
    "Softmax": _convert_softmax,
    "LRN": _convert_lrn,
    "Pad": _convert_pad,
    "Slice": _convert_slice,
    "Split": _convert_split,
    "Resize": _convert_resize,
    "BatchNormalization": _convert_batch_normalization,
}
