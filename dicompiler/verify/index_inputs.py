"""Value limits of inputs that are indices, masks, lengths or shapes.

The limits follow from the operators that read an input.

Model → number of valid values for each such graph input; arrays → arrays with valid values for these inputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from dicompiler.base.rng import named_generator
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import TensorInfo

PASS_THROUGH_OPS = frozenset(
    "Cast Clip Concat Expand Flatten Gather Identity Reshape Slice Split Squeeze Tile Transpose Unsqueeze".split()
)
"""Operators that pass on the values of their first input; Concat passes on all inputs."""
InputUse = tuple[onnx.NodeProto, int]
MASK_VALUES = 2
INDEXING_OPS = frozenset({"Gather", "GatherElements", "ScatterElements", "ScatterND"})
"""Operators whose second input indexes rows of the first. Negative indices count from the end."""

ValueLimit = int | tuple[int, ...]
"""n: values are 0 … n-1; a tuple: exactly these values."""


def find_value_limits(model: Model, names: Iterable[str] | None = None) -> dict[str, ValueLimit]:
    """Return the value limits of graph inputs, by name.

    An input has a limit if its values become the index of a Gather, the token, segment or position of an embedding, the
    class of a OneHot, the mask of an attention, and so on, or the target shape of a Reshape. Other inputs are omitted.

    Args:
        model: The network.
        names: Names of tensors to look at instead of the graph inputs.

    Returns:
        Limits by input name.
    """
    tensors, readers = model.tensors(), find_readers(model)
    limits = dict[str, ValueLimit]()
    inputs = (value.name for value in model.proto.graph.input if not tensors[value.name].is_constant)
    for name in inputs if names is None else names:
        counts = [
            n for node, index in _final_readers(name, readers) if (n := _value_count(node, index, tensors)) is not None
        ]
        reshapes = [node for node, index in readers.get(name, ()) if (node.op_type, index) == ("Reshape", 1)]
        shape = _find_reshape_target(tensors, reshapes[0], name) if reshapes else None
        if shape:
            limits[name] = shape
        elif counts:
            limits[name] = min(counts)
    return limits


def find_readers(model: Model) -> dict[str, list[InputUse]]:
    """Return the nodes that read each tensor, with the index of the input."""
    readers: dict[str, list[InputUse]] = {}
    for node in model.proto.graph.node:
        for index, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, index))
    return readers


def _find_reshape_target(tensors: Mapping[str, TensorInfo], node: onnx.NodeProto, shape: str) -> tuple[int, ...] | None:
    """Return a target shape for a Reshape that reads its shape from a graph input.

    It is the shape of the Reshape's output if known. Otherwise it keeps the first axes of the data and merges the
    others.
    """
    output, data, target = (tensors.get(name) for name in (node.output[0], node.input[0], shape))
    if output is not None and output.shape is not None:
        return output.shape
    if data is None or data.shape is None or target is None or target.shape is None or len(target.shape) != 1:
        return None
    extents, rank = data.shape, target.shape[0]
    if not rank:
        return None
    return (*extents[: rank - 1], *[1] * (rank - 1 - len(extents)), math.prod(extents[rank - 1 :]))


def _final_readers(name: str, readers: Mapping[str, list[InputUse]]) -> list[InputUse]:
    """Return all reads of a tensor's values, directly or behind operators that pass them on."""
    uses, waiting, seen = [], [name], {name}
    while waiting:
        for node, index in readers.get(waiting.pop(), ()):
            uses.append((node, index))
            if node.op_type in PASS_THROUGH_OPS and not node.domain and (index == 0 or node.op_type == "Concat"):
                waiting += [output for output in node.output if output not in seen]
                seen.update(node.output)
    return uses


def _value_count(node: onnx.NodeProto, index: int, tensors: Mapping[str, TensorInfo]) -> int | None:
    """Return the number of valid values of a node's input; None if all values are valid."""
    rule = _VALUE_COUNTS.get((node.op_type, index))
    inputs = [tensors.get(name) for name in node.input]
    count = None if rule is None else rule(node, inputs)
    return count if count is None or count > 0 else None


InputTensors = list[TensorInfo | None]


def input_extent(index: int, axis: int | None = None) -> Callable[[onnx.NodeProto, InputTensors], int | None]:
    """Return a function for the extent of input `of` along `axis` (None: the attribute `axis`)."""

    def count(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
        tensor = inputs[index] if index < len(inputs) else None
        used_axis = (
            next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0) if axis is None else axis
        )
        shape = None if tensor is None else tensor.shape
        return None if shape is None or not -len(shape) <= used_axis < len(shape) else shape[used_axis]

    return count


def _nd_index_limit(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the smallest extent of the axes that ScatterND or GatherND addresses."""
    data, indices = (None if tensor is None else tensor.shape for tensor in inputs[:2])
    batch_axes = next((attribute.i for attribute in node.attribute if attribute.name == "batch_dims"), 0)
    return min(data[batch_axes : batch_axes + indices[-1]], default=None) if data and indices else None


def _one_hot_depth(_node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    depth = inputs[1]
    return None if depth is None or depth.value is None else int(depth.value.flat[0])


def _mask_values(_node: onnx.NodeProto, _given: InputTensors) -> int:
    return MASK_VALUES


def _rotary_positions_ort(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the number of positions of com.microsoft RotaryEmbedding (its second input).

    A vector of positions holds the first position of each sequence, so the following rows need positions too.
    """
    count = input_extent(2, 0)(node, inputs) if node.domain else None
    x, positions = (None if tensor is None else tensor.shape for tensor in inputs[:2])
    holds_first_only = x is not None and positions is not None and len(positions) == 1
    return count if count is None or x is None or not holds_first_only else count - x[-2] + 1


def _cache_rows(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the rows of the resulting cache: those of the given one, or the total length if larger."""
    past_rows, total = input_extent(3, 2)(node, inputs), inputs[6] if len(inputs) > 6 else None
    totals = [] if total is None or total.value is None else [int(total.value.flat[0])]
    return max([*totals, *([] if past_rows is None else [past_rows])], default=None)


def _rotary_positions(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the number of positions of the standard RotaryEmbedding (its fourth input)."""
    return None if node.domain else input_extent(1, 0)(node, inputs)


def _sequence_length(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the number of time steps, which limits sequence lengths."""
    axes = {attribute.name: attribute.i for attribute in node.attribute}
    return input_extent(0, axes.get("time_axis", axes.get("layout", 0)))(node, inputs)


def _counted_mask_values(_node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return 2 for an integer input of a ReduceSum: a mask with ones to be counted."""
    tensor = inputs[0]
    return MASK_VALUES if tensor is not None and tensor.dtype in (TensorProto.INT32, TensorProto.INT64) else None


def _inverted_mask_values(_node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return 2 for `1 - input`, the inverted mask of some exporters."""
    tensor = inputs[0]
    return (
        MASK_VALUES
        if tensor is not None and tensor.value is not None and tensor.value.size == 1 and tensor.value.flat[0] == 1
        else None
    )


_VALUE_COUNTS: Mapping[tuple[str, int], Callable[[onnx.NodeProto, InputTensors], int | None]] = {
    **{(name, 1): input_extent(0) for name in INDEXING_OPS - {"ScatterND"}},
    **{(name, 1): _nd_index_limit for name in ("GatherND", "ScatterND")},
    **{(name, 4): _sequence_length for name in ("GRU", "LSTM", "RNN")},
    ("ReverseSequence", 1): _sequence_length,
    ("ArrayFeatureExtractor", 1): input_extent(0, -1),
    ("OneHot", 0): _one_hot_depth,
    ("EmbedLayerNormalization", 0): input_extent(2, 0),
    ("EmbedLayerNormalization", 1): input_extent(4, 0),
    ("EmbedLayerNormalization", 7): _mask_values,
    ("EmbedLayerNormalization", 8): input_extent(3, 0),
    ("Attention", 3): _mask_values,
    ("ReduceSum", 0): _counted_mask_values,
    ("GroupQueryAttention", 5): _cache_rows,
    ("GroupQueryAttention", 9): input_extent(7, 0),
    ("RotaryEmbedding", 1): _rotary_positions_ort,
    ("RotaryEmbedding", 3): _rotary_positions,
    ("Sub", 1): _inverted_mask_values,
}
"""(operator, input index) → function that returns the number of valid values."""


def limit_values(
    inputs: Mapping[str, NDArray[Any]], limits: Mapping[str, ValueLimit], seed: int
) -> dict[str, NDArray[Any]]:
    """Return the inputs with seeded values in range for the inputs that have a limit."""

    def limited(name: str, array: NDArray[Any]) -> NDArray[Any]:
        limit = limits.get(name)
        if limit is None:
            return array
        if isinstance(limit, tuple):
            return np.array(limit, array.dtype)
        return named_generator(seed, f"{name}/range").integers(0, limit, array.shape).astype(array.dtype)

    return {name: limited(name, array) for name, array in inputs.items()}
