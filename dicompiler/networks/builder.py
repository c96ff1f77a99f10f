"""Builder of ONNX networks, with one method per operator, which tracks the shape of every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dicompiler.base.errors import DicompilerError
from dicompiler.networks.weights import STATISTIC_ROLES, Role, make_weight

IR_VERSION = 10
IntOrPair = int | tuple[int, int]


@dataclass(frozen=True)
class WeightSpec:
    """float32 weight that is created when the model is built (see `weights.make_weight`).

    Attributes:
        shape: Shape of the weight.
        role: Use of the weight, which determines the distribution of its random values.
        fan_in: Number of products that are summed for one output element.
        gain: Factor of the values of a filter or scale.
    """

    shape: tuple[int, ...]
    role: Role
    fan_in: int = 1
    gain: float = 1.0


def to_pair(value: IntOrPair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _renamed_copy(node: onnx.NodeProto, new: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [new.get(name, name) for name in node.input]
    copy.output[:] = [new.get(name, name) for name in node.output]
    return copy


@dataclass
class NetworkBuilder:
    """Builder of one network. Methods take and return tensor names; the output of a node is called `<node>.out`.

    Attributes:
        name: Name of the network.
        input_shape: Shape of the inputs, except those added by `add_input`.
        opset: Opset version of the standard domain.
        inputs: Element type of each input of the graph, by input name.
        outputs: Tensors that are additional outputs of the graph, by output name.
        shapes: Shape of each tensor: (N, C, H, W) for images, (N, features) after `flatten`.
        weights: Shape and kind of each weight, by name. Values are created by `to_model`.
        constants: Values of constants such as shapes and axes, by name.
        nodes: The nodes that have been appended, in order.
    """

    name: str
    input_shape: tuple[int, ...]
    opset: int = 17
    inputs: dict[str, int] = field(default_factory=lambda: {"input": TensorProto.FLOAT})
    outputs: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    constants: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes.update(dict.fromkeys(self.inputs, self.input_shape))

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters. Running statistics are not counted, as in training frameworks."""
        return sum(math.prod(spec.shape) for spec in self.weights.values() if spec.role not in STATISTIC_ROLES)

    def channels(self, tensor: str) -> int:
        return self.shapes[tensor][1]

    def add_input(self, name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> str:
        self.inputs[name], self.shapes[name] = kind, shape
        return name

    def add_node(self, op: str, name: str, inputs: Sequence[str], shape: tuple[int, ...], **attributes: Any) -> str:
        """Append a node with one output of `shape`, and return the output's name."""
        if min(shape) < 1:
            raise DicompilerError(f"network {self.name!r}: the image is too small at {name!r}: use a larger size")
        output = f"{name}.out"
        self.nodes.append(helper.make_node(op, inputs, [output], name, **attributes))
        self.shapes[output] = shape
        return output

    def conv(
        self,
        x: str,
        name: str,
        channels: int,
        kernel: IntOrPair,
        stride: IntOrPair = 1,
        pads: int | tuple[int, int, int, int] | None = None,
        group: int = 1,
        bias: bool = True,
        dilation: int = 1,
        gain: float = 1.0,
    ) -> str:
        """Append a Conv. `pads` is a number or (top, left, bottom, right); None keeps height and width at stride 1."""
        sizes, strides = to_pair(kernel), to_pair(stride)
        if pads is None:
            pads = (sizes[0] // 2 * dilation, sizes[1] // 2 * dilation) * 2
        border = (pads,) * 4 if isinstance(pads, int) else pads
        group_channels = self.channels(x) // group
        weight_shape, fan_in = (channels, group_channels, *sizes), group_channels * math.prod(sizes)
        inputs = [x, self.add_weight(f"{name}.weight", weight_shape, "filter", fan_in, gain)]
        if bias:
            inputs.append(self.add_weight(f"{name}.bias", (channels,), "bias"))
        reach = tuple((size - 1) * dilation + 1 for size in sizes)
        shape = (self.input_shape[0], channels, *self._window_counts(x, reach, strides, border))
        windows = {"kernel_shape": sizes, "strides": strides, "pads": border, "dilations": (dilation, dilation)}
        return self.add_node("Conv", name, inputs, shape, **windows, group=group)

    def conv1d(self, x: str, name: str, channels: int, kernel: int, stride: int, pad: int) -> str:
        """Append a Conv with bias along one axis, from the shape (N, C, length) to (N, channels, new length)."""
        batch, before, length = self.shapes[x]
        weight = self.add_weight(f"{name}.weight", (channels, before, kernel), "filter", before * kernel)
        inputs = [x, weight, self.add_weight(f"{name}.bias", (channels,), "bias")]
        shape = (batch, channels, (length + 2 * pad - kernel) // stride + 1)
        return self.add_node("Conv", name, inputs, shape, kernel_shape=[kernel], strides=[stride], pads=[pad, pad])

    def pool(
        self,
        x: str,
        name: str,
        kernel: IntOrPair,
        stride: IntOrPair,
        pads: int | tuple[int, int, int, int] = 0,
        op: str = "MaxPool",
        **attributes: int,
    ) -> str:
        """Append a MaxPool or AveragePool. `attributes` are other attributes, such as ceil_mode."""
        sizes, strides = to_pair(kernel), to_pair(stride)
        border = (pads,) * 4 if isinstance(pads, int) else pads
        extent = self._window_counts(x, sizes, strides, border, bool(attributes.get("ceil_mode")))
        shape = (*self.shapes[x][:2], *extent)
        return self.add_node(op, name, [x], shape, kernel_shape=sizes, strides=strides, pads=border, **attributes)

    def batch_norm(self, x: str, name: str, gain: float = 1.0) -> str:
        """Append a BatchNormalization with a scale that is multiplied by `gain`.

        A gain below 1 at the end of a residual branch keeps activations from growing with the depth of the network.
        """
        size = (self.channels(x),)
        inputs = [
            self.add_weight(f"{name}.weight", size, "scale", gain=gain),
            self.add_weight(f"{name}.bias", size, "shift"),
            self.add_weight(f"{name}.running_mean", size, "mean"),
            self.add_weight(f"{name}.running_var", size, "variance"),
        ]
        return self.add_node("BatchNormalization", name, [x, *inputs], self.shapes[x], epsilon=1e-5)

    def gemm(self, x: str, name: str, features: int) -> str:
        """Append a fully connected layer with a weight of shape (`features`, input features)."""
        length = self.shapes[x][1]
        inputs = [
            x,
            self.add_weight(f"{name}.weight", (features, length), "filter", length),
            self.add_weight(f"{name}.bias", (features,), "bias"),
        ]
        return self.add_node("Gemm", name, inputs, (self.shapes[x][0], features), transB=1)

    def unary(self, op: str, x: str, name: str, **attributes: Any) -> str:
        """Append an operator with one input and an output of the same shape, such as Relu, LRN or Softmax."""
        return self.add_node(op, name, [x], self.shapes[x], **attributes)

    def relu(self, x: str, name: str) -> str:
        return self.unary("Relu", x, name)

    def clip(self, x: str, name: str, low: float, high: float) -> str:
        """Append a Clip to the range from `low` to `high`; 0 to 6 is ReLU6."""
        bounds = [self.add_constant(f"{name}.{key}", np.float32(v)) for key, v in (("min", low), ("max", high))]
        return self.add_node("Clip", name, [x, *bounds], self.shapes[x])

    def add(self, a: str, b: str, name: str) -> str:
        return self.add_node("Add", name, [a, b], self.shapes[a])

    def mul(self, a: str, b: str, name: str) -> str:
        return self.add_node("Mul", name, [a, b], self.shapes[a])

    def matmul(self, a: str, b: str, name: str) -> str:
        """Append a MatMul of a tensor of shape (…, M, K) and a tensor or weight of shape (…, K, N)."""
        second = self.shapes[b] if b in self.shapes else self.weights[b].shape
        return self.add_node("MatMul", name, [a, b], (*self.shapes[a][:-1], second[-1]))

    def concat(self, tensors: Sequence[str], name: str, axis: int = 1) -> str:
        first = self.shapes[tensors[0]]
        shape = (*first[:axis], sum(self.shapes[tensor][axis] for tensor in tensors), *first[axis + 1 :])
        return self.add_node("Concat", name, list(tensors), shape, axis=axis)

    def split(self, x: str, name: str, sizes: Sequence[int], axis: int = 1) -> list[str]:
        """Append a Split along `axis` into pieces of the lengths `sizes`, called `<name>.out0`, `<name>.out1`, …."""
        shape = self.shapes[x]
        outputs = [f"{name}.out{number}" for number in range(len(sizes))]
        lengths = self.add_constant(f"{name}.sizes", np.array(sizes, np.int64))
        self.nodes.append(helper.make_node("Split", [x, lengths], outputs, name, axis=axis))
        self.shapes |= {out: (*shape[:axis], n, *shape[axis + 1 :]) for out, n in zip(outputs, sizes, strict=True)}
        return outputs

    def resize(self, x: str, name: str, factor: int, **attributes: Any) -> str:
        batch, channels, height, width = self.shapes[x]
        scales = self.add_constant(f"{name}.scales", np.array([1, 1, factor, factor], np.float32))
        shape = (batch, channels, factor * height, factor * width)
        return self.add_node("Resize", name, [x, "", scales], shape, **attributes)

    def global_average(self, x: str, name: str) -> str:
        return self.add_node("GlobalAveragePool", name, [x], (*self.shapes[x][:2], 1, 1))

    def flatten(self, x: str, name: str) -> str:
        return self.add_node("Flatten", name, [x], (self.shapes[x][0], math.prod(self.shapes[x][1:])), axis=1)

    def reshape(self, x: str, name: str, shape: tuple[int, ...]) -> str:
        target = self.add_constant(f"{name}.shape", np.array(shape, np.int64))
        return self.add_node("Reshape", name, [x, target], shape)

    def transpose(self, x: str, name: str, perm: tuple[int, ...]) -> str:
        return self.add_node("Transpose", name, [x], tuple(self.shapes[x][axis] for axis in perm), perm=perm)

    def add_constant(self, name: str, value: Any) -> str:
        self.constants[name] = np.asarray(value)
        return name

    def add_weight(self, name: str, shape: tuple[int, ...], role: Role, fan_in: int = 1, gain: float = 1.0) -> str:
        self.weights[name] = WeightSpec(shape, role, fan_in, gain)
        return name

    def to_model(self, output: str, seed: int) -> onnx.ModelProto:
        """Return the model with seeded weights. The tensor `output` becomes the graph output "output"."""
        outputs = {"output": output} | self.outputs
        names = {tensor: name for name, tensor in outputs.items()}
        nodes = [_renamed_copy(node, names) for node in self.nodes]
        tensors = [
            numpy_helper.from_array(make_weight(seed, name, spec.shape, spec.role, spec.fan_in, spec.gain), name)
            for name, spec in self.weights.items()
        ]
        tensors += [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(
            nodes,
            self.name,
            [helper.make_tensor_value_info(name, kind, self.shapes[name]) for name, kind in self.inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, self.shapes[t]) for name, t in outputs.items()],
            tensors,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name="dicompiler")

    def _window_counts(
        self, x: str, sizes: tuple[int, ...], strides: tuple[int, int], pads: tuple[int, ...], ceil: bool = False
    ) -> tuple[int, ...]:
        counts = []
        for axis, extent in enumerate(self.shapes[x][2:]):
            room = extent + pads[axis] + pads[axis + 2] - sizes[axis]
            counts.append((-(-room // strides[axis]) if ceil else room // strides[axis]) + 1)
        return tuple(counts)
