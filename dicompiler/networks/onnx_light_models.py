"""The nine CNNs in the onnx package, with random weights instead of weights that are all 0.02.

Like models of early model zoos, they have IR version 3, opset 9, and initializers that are also inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.networks.weights import Role, make_weight

LIGHT_NAMES = tuple(
    "alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 zfnet512".split()
)
_FILE_STEMS = {"alexnet": "bvlc_alexnet"}
_ROLE_BY_INPUT: dict[tuple[str, int], Role] = {
    ("Conv", 1): "filter",
    ("Conv", 2): "bias",
    ("Gemm", 1): "filter",
    ("Gemm", 2): "bias",
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 2): "shift",
    ("BatchNormalization", 3): "mean",
    ("BatchNormalization", 4): "variance",
    ("Mul", 1): "scale",
    ("Add", 1): "shift",
}
#: Operators that may be between a weight and the operator that uses the weight.
_RESHAPING_OPERATORS = ("Unsqueeze", "Reshape")
#: Factor of a node's weights, by the role of the weights (their use) and the operator that reads the node's output:
#: - The scales at the end of a residual branch (before a Sum) are small, so that activations keep their size.
#: - The filters of the last layer (before a Softmax) are small, so that no class has all of the probability.
_GAIN_BY_READER = {("scale", "Sum"): 0.3, ("filter", "Softmax"): 0.1}


def build_light(name: str, seed: int = 0) -> onnx.ModelProto:
    """Return one of the networks LIGHT_NAMES with seeded weights. Everything else is as in the onnx package.

    Args:
        name: One of LIGHT_NAMES.
        seed: Seed of the weights.

    Returns:
        The model.

    Raises:
        UsageError: The name is unknown.
        DicompilerError: The installed onnx package does not contain the model.
    """
    if name not in LIGHT_NAMES:
        raise UsageError(f"unknown light network {name!r}{did_you_mean(name, LIGHT_NAMES)}")
    model = _load_light(name)
    graph = model.graph
    shapes = {tensor.name: tuple(numpy_helper.to_array(tensor).tolist()) for tensor in graph.initializer if tensor.dims}
    filled = {n.output[0]: (n.input[0], shapes[n.input[0]]) for n in graph.node if n.op_type == "ConstantOfShape"}
    floats = {t.name: tuple(t.dims) for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    floats |= {tensor: shape for tensor, (_, shape) in filled.items()}
    weights = {
        tensor: numpy_helper.from_array(
            make_weight(seed, tensor, floats[tensor], role, _fan_in(node, floats[tensor]), _gain(graph, node, role)),
            tensor,
        )
        for tensor, role, node in _weight_uses(graph)
        if tensor in floats
    }
    _replace_weights(graph, weights, {source for source, _ in filled.values()})
    return model


def _load_light(name: str) -> onnx.ModelProto:
    path = Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{_FILE_STEMS.get(name, name)}.onnx"
    try:
        return onnx.load(path)
    except OSError as error:
        raise DicompilerError(
            f"light network {name!r}: {path.name} is missing from onnx {onnx.__version__}: install another version"
        ) from error


def _weight_uses(graph: onnx.GraphProto) -> Iterator[tuple[str, Role, onnx.NodeProto]]:
    """Yield (weight name, role such as "filter", node that reads the weight directly or through a reshape)."""
    source: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in _RESHAPING_OPERATORS:
            source[node.output[0]] = node.input[0]
        for index, tensor in enumerate(node.input):
            role = _ROLE_BY_INPUT.get((node.op_type, index))
            if role is not None:
                yield source.get(tensor, tensor), role, node


def _fan_in(node: onnx.NodeProto, shape: tuple[int, ...]) -> int:
    """Return the number of products that a Conv or Gemm sums for one output element."""
    if node.op_type != "Gemm":
        return math.prod(shape[1:])
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return shape[-1] if transposed else shape[-2]


def _gain(graph: onnx.GraphProto, node: onnx.NodeProto, role: Role) -> float:
    readers = [reader.op_type for reader in graph.node if node.output[0] in reader.input]
    return min((_GAIN_BY_READER.get((role, reader), 1.0) for reader in readers), default=1.0)


def _replace_weights(graph: onnx.GraphProto, weights: dict[str, TensorProto], sources: set[str]) -> None:
    """Add `weights` as initializers and, as IR version 3 requires, as inputs.

    The nodes that computed them are removed, and also the inputs of these nodes, `sources`.
    """
    kept = [tensor for tensor in graph.initializer if tensor.name not in weights and tensor.name not in sources]
    inputs = [value for value in graph.input if value.name not in weights and value.name not in sources]
    inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights.values()]
    nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    for field, values in ((graph.initializer, [*kept, *weights.values()]), (graph.input, inputs), (graph.node, nodes)):
        del field[:]
        field.extend(values)
