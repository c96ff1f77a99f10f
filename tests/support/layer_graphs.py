"""Layer graphs from ONNX text, or from a table if real weights would only take time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Node, TensorInfo
from dicompiler.partition.operators import builtin_rules
from dicompiler_passes.form_layers import form_layers

FLOAT = onnx.TensorProto.FLOAT


def rules() -> dict[tuple[str, str], Any]:
    """Return the built-in operator rules by domain and operator."""
    return {(rule.domain, rule.op): rule for rule in builtin_rules()}


def formed(source: str | onnx.ModelProto, **weights: Sequence[int]) -> LayerGraph:
    """Return the layers of a model in ONNX text, with inferred shapes.

    `weights` has shapes of additional initializers, which are zeros.
    """
    proto = onnx.parser.parse_model(source) if isinstance(source, str) else source
    for name, shape in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    for i, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type.lower()}{i}"
    return form_layers(Model.load(onnx.shape_inference.infer_shapes(proto)), rules())


def stack(shape: tuple[int, ...], rows: Sequence[tuple[Any, ...]]) -> LayerGraph:
    """Return a row of layers with one node each, and weights without data.

    The rows are ("conv", out channels, kernel, stride, pad, groups), ("pool", kernel, stride, pad), ("flatten",) or
    ("fc", out features).
    """
    tensors: dict[str, TensorInfo] = {"input": TensorInfo("input", FLOAT, shape)}
    layers: list[Layer] = []
    at = "input"
    for number, (kind, *sizes) in enumerate(rows, 1):
        name = f"{kind}{number}"
        held = tensors[at].shape
        assert held is not None
        attributes: dict[str, Any] = {}
        inputs = [at]
        if kind in ("conv", "pool"):
            channels, (kernel, stride, pad), groups = held[1], sizes[-3:], 1
            if kind == "conv":
                channels, kernel, stride, pad, groups = sizes
                weight = TensorInfo(f"{name}.w", FLOAT, (channels, held[1] // groups, kernel, kernel), is_constant=True)
                tensors[weight.name] = weight
                inputs.append(weight.name)
                attributes["group"] = groups
            side = [(extent + 2 * pad - kernel) // stride + 1 for extent in held[2:]]
            out: tuple[int, ...] = (held[0], channels, *side)
            attributes |= {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        elif kind == "flatten":
            out = (held[0], int(np.prod(held[1:])))
        else:
            weight = TensorInfo(f"{name}.w", FLOAT, (held[1], sizes[0]), is_constant=True)
            tensors[weight.name] = weight
            inputs.append(weight.name)
            out = (held[0], sizes[0])
        op = {"conv": "Conv", "pool": "MaxPool", "flatten": "Flatten", "fc": "Gemm"}[kind]
        tensors[f"{name}.y"] = TensorInfo(f"{name}.y", FLOAT, out)
        node = Node(name, op, "", 17, attributes, tuple(inputs), (f"{name}.y",))
        layers.append(Layer(name, (node,), 0, (at,), (f"{name}.y",)))
        at = f"{name}.y"
    return LayerGraph(tuple(layers), tensors, ("input",), (at,), rules())


def vgg16() -> LayerGraph:
    """Return VGG16 (Simonyan and Zisserman, configuration D) for 224×224, without activations."""
    rows: list[tuple[Any, ...]] = []
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        rows += [("conv", channels, 3, 1, 1, 1)] * count + [("pool", 2, 2, 0)]
    return stack((1, 3, 224, 224), [*rows, ("flatten",), ("fc", 4096), ("fc", 4096), ("fc", 1000)])


def alexnet(groups: int = 2) -> LayerGraph:
    """Return Caffe's AlexNet for 227×227, with these `groups` of its second, fourth and fifth convolution."""
    rows = [
        ("conv", 96, 11, 4, 0, 1), ("pool", 3, 2, 0),
        ("conv", 256, 5, 1, 2, groups), ("pool", 3, 2, 0),
        ("conv", 384, 3, 1, 1, 1), ("conv", 384, 3, 1, 1, groups), ("conv", 256, 3, 1, 1, groups), ("pool", 3, 2, 0),
        ("flatten",), ("fc", 4096), ("fc", 4096), ("fc", 1000),
    ]  # fmt: skip
    return stack((1, 3, 227, 227), rows)
