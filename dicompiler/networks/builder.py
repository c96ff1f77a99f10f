"""Builder: writes a network as ONNX, one method for each operator, and keeps every tensor's shape.

In: calls in the order of the network. Out: the number of parameters (no weight is made for it), or a ModelProto.
"""

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
    """A float32 weight that is not yet made: see `weights.weight` for the meaning of the fields."""

    shape: tuple[int, ...]
    role: Role
    fan_in: int = 1
    gain: float = 1.0


def to_pair(value: IntOrPair) -> tuple[int, int]:
    """3 → (3, 3)."""
    return (value, value) if isinstance(value, int) else value


def _renamed_copy(node: onnx.NodeProto, new: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of `node` in which tensors have the names that `new` gives them."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [new.get(name, name) for name in node.input]
    copy.output[:] = [new.get(name, name) for name in node.output]
    return copy


@dataclass
class NetworkBuilder:
    """Grows one network. Methods take and return tensor names; a node's output is named `<node>.out`.

    `shape[tensor]` is (N, C, H, W), or (N, features) after `flatten`. The graph's inputs, with their element types, are
    `inputs`, each of shape `image` but for those of `input`. `outputs`: tensors that leave beside the last one, by the
    names that they get.
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
        """The number of trained parameters: all weights but running statistics, as training frameworks count."""
        return sum(math.prod(spec.shape) for spec in self.weights.values() if spec.role not in STATISTIC_ROLES)

    def channels(self, tensor: str) -> int:
        return self.shapes[tensor][1]

    def add_input(self, name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> str:
        """One more input of the graph."""
        self.inputs[name], self.shapes[name] = kind, shape
        return name

    def add_node(self, op: str, name: str, inputs: Sequence[str], shape: tuple[int, ...], **attributes: Any) -> str:
        """Appends one node with one output of `shape`; the output's name comes back."""
        if min(shape) < 1:
            raise DicompilerError(
                f"network {self.name!r}: nothing is left of the image at {name!r}: take a larger size"
            )
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
        """Conv. `pads` is one number or ONNX's (top, left, bottom, right); None keeps H and W where stride is 1."""
        sizes, strides = to_pair(kernel), to_pair(stride)
        if pads is None:
            pads = (sizes[0] // 2 * dilation, sizes[1] // 2 * dilation) * 2
        border = (pads,) * 4 if isinstance(pads, int) else pads
        each = self.channels(x) // group
        inputs = [
            x,
            self.add_weight(f"{name}.weight", (channels, each, *sizes), "filter", each * math.prod(sizes), gain),
        ]
        if bias:
            inputs.append(self.add_weight(f"{name}.bias", (channels,), "bias"))
        reach = tuple((size - 1) * dilation + 1 for size in sizes)
        shape = (self.input_shape[0], channels, *self._window_counts(x, reach, strides, border))
        windows = {"kernel_shape": sizes, "strides": strides, "pads": border, "dilations": (dilation, dilation)}
        return self.add_node("Conv", name, inputs, shape, **windows, group=group)

    def conv1d(self, x: str, name: str, channels: int, kernel: int, stride: int, pad: int) -> str:
        """Conv along one axis, with bias: (N, C, length) → (N, channels, …)."""
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
        """MaxPool or AveragePool; `attributes` such as ceil_mode or count_include_pad go to the node."""
        sizes, strides = to_pair(kernel), to_pair(stride)
        border = (pads,) * 4 if isinstance(pads, int) else pads
        extent = self._window_counts(x, sizes, strides, border, bool(attributes.get("ceil_mode")))
        shape = (*self.shapes[x][:2], *extent)
        return self.add_node(op, name, [x], shape, kernel_shape=sizes, strides=strides, pads=border, **attributes)

    def batch_norm(self, x: str, name: str, gain: float = 1.0) -> str:
        """BatchNormalization; `gain` scales its gamma (below 1 at the end of a residual branch: no growth by depth)."""
        size = (self.channels(x),)
        inputs = [
            self.add_weight(f"{name}.weight", size, "scale", gain=gain),
            self.add_weight(f"{name}.bias", size, "shift"),
            self.add_weight(f"{name}.running_mean", size, "mean"),
            self.add_weight(f"{name}.running_var", size, "variance"),
        ]
        return self.add_node("BatchNormalization", name, [x, *inputs], self.shapes[x], epsilon=1e-5)

    def gemm(self, x: str, name: str, features: int) -> str:
        """A fully connected layer, (N, K) → (N, features); the weight is (features, K)."""
        length = self.shapes[x][1]
        inputs = [
            x,
            self.add_weight(f"{name}.weight", (features, length), "filter", length),
            self.add_weight(f"{name}.bias", (features,), "bias"),
        ]
        return self.add_node("Gemm", name, inputs, (self.shapes[x][0], features), transB=1)

    def unary(self, op: str, x: str, name: str, **attributes: Any) -> str:
        """Any operator with one input whose output has the same shape: Relu, LeakyRelu, LRN, Softmax …"""
        return self.add_node(op, name, [x], self.shapes[x], **attributes)

    def relu(self, x: str, name: str) -> str:
        return self.unary("Relu", x, name)

    def clip(self, x: str, name: str, low: float, high: float) -> str:
        """Clip to low…high (ReLU6 is 0…6)."""
        bounds = [self.add_constant(f"{name}.{key}", np.float32(v)) for key, v in (("min", low), ("max", high))]
        return self.add_node("Clip", name, [x, *bounds], self.shapes[x])

    def add(self, a: str, b: str, name: str) -> str:
        return self.add_node("Add", name, [a, b], self.shapes[a])

    def mul(self, a: str, b: str, name: str) -> str:
        return self.add_node("Mul", name, [a, b], self.shapes[a])

    def matmul(self, a: str, b: str, name: str) -> str:
        """(…, M, K) times (…, K, N), a tensor or a weight."""
        second = self.shapes[b] if b in self.shapes else self.weights[b].shape
        return self.add_node("MatMul", name, [a, b], (*self.shapes[a][:-1], second[-1]))

    def concat(self, tensors: Sequence[str], name: str, axis: int = 1) -> str:
        """Joins along an axis, the channels by default."""
        first = self.shapes[tensors[0]]
        shape = (*first[:axis], sum(self.shapes[tensor][axis] for tensor in tensors), *first[axis + 1 :])
        return self.add_node("Concat", name, list(tensors), shape, axis=axis)

    def split(self, x: str, name: str, sizes: Sequence[int], axis: int = 1) -> list[str]:
        """The opposite: pieces of these sizes, `<name>.out0` and so on."""
        shape = self.shapes[x]
        outputs = [f"{name}.out{number}" for number in range(len(sizes))]
        lengths = self.add_constant(f"{name}.sizes", np.array(sizes, np.int64))
        self.nodes.append(helper.make_node("Split", [x, lengths], outputs, name, axis=axis))
        self.shapes |= {out: (*shape[:axis], n, *shape[axis + 1 :]) for out, n in zip(outputs, sizes, strict=True)}
        return outputs

    def resize(self, x: str, name: str, factor: int, **attributes: Any) -> str:
        """Height and width times `factor`."""
        batch, channels, height, width = self.shapes[x]
        scales = self.add_constant(f"{name}.scales", np.array([1, 1, factor, factor], np.float32))
        shape = (batch, channels, factor * height, factor * width)
        return self.add_node("Resize", name, [x, "", scales], shape, **attributes)

    def global_average(self, x: str, name: str) -> str:
        return self.add_node("GlobalAveragePool", name, [x], (*self.shapes[x][:2], 1, 1))

    def flatten(self, x: str, name: str) -> str:
        """(N, C, H, W) → (N, C * H * W)."""
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
        """The network up to tensor `output`, which becomes the graph's output `output`, with weights of `seed`."""
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
        self,
        x: str,
        sizes: tuple[int, ...],
        strides: tuple[int, int],
        pads: tuple[int, ...],
        ceil: bool = False,
    ) -> tuple[int, ...]:
        """How many windows fit along H and W."""
        room = [
            extent + pads[axis] + pads[axis + 2] - size
            for axis, (extent, size) in enumerate(zip(self.shapes[x][2:], sizes, strict=True))
        ]
        step = [-(-r // s) if ceil else r // s for r, s in zip(room, strides, strict=True)]
        return tuple(s + 1 for s in step)
