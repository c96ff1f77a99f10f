"""Valid values of graph inputs that are indices, masks, lengths or shapes, found from the operators that read them."""

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
"""Operators that copy values of their first input to the output (Concat: of all inputs)."""
InputUse = tuple[onnx.NodeProto, int]
MASK_VALUES = 2
"""Number of valid values of a mask: 0 and 1."""
INDEXING_OPS = frozenset({"Gather", "GatherElements", "ScatterElements", "ScatterND"})
"""Operators with indices into the first input as the second input. Negative indices count from the end."""

ValueLimit = int | tuple[int, ...]
"""Valid values of an integer input: n if they are 0 … n-1, or a tuple if the input must have exactly these values."""


def find_value_limits(model: Model, names: Iterable[str] | None = None) -> dict[str, ValueLimit]:
    """Return the valid values of integer graph inputs, by name; inputs without a restriction are omitted.

    Examples are the indices of a Gather, the mask of an attention, and the target shape of a Reshape. `names` are
    tensors to examine instead of the graph inputs.
    """
    tensors, readers = model.tensors(), find_readers(model)
    limits = dict[str, ValueLimit]()
    inputs = (value.name for value in model.proto.graph.input if not tensors[value.name].is_constant)
    for name in inputs if names is None else names:
        counts = [_value_count(node, index, tensors) for node, index in _final_readers(name, readers)]
        valid_counts = [count for count in counts if count is not None]
        reshapes = [node for node, index in readers.get(name, ()) if (node.op_type, index) == ("Reshape", 1)]
        shape = _find_reshape_target(tensors, reshapes[0], name) if reshapes else None
        if shape:
            limits[name] = shape
        elif valid_counts:
            limits[name] = min(valid_counts)
    return limits


def find_readers(model: Model) -> dict[str, list[InputUse]]:
    """Return (node, input index) pairs of the nodes that read each tensor, by tensor name."""
    readers: dict[str, list[InputUse]] = {}
    for node in model.proto.graph.node:
        for index, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, index))
    return readers


def _find_reshape_target(
    tensors: Mapping[str, TensorInfo], node: onnx.NodeProto, shape_input: str
) -> tuple[int, ...] | None:
    """Return a valid target shape for a Reshape that reads its shape from the graph input `shape_input`.

    If the output has no static shape, the last axis of the target merges the remaining axes of the data. The result is
    None if a shape is unknown.
    """
    output, data, target = (tensors.get(name) for name in (node.output[0], node.input[0], shape_input))
    if output is not None and output.shape is not None:
        return output.shape
    if data is None or data.shape is None or target is None or target.shape is None or len(target.shape) != 1:
        return None
    extents, rank = data.shape, target.shape[0]
    if not rank:
        return None
    return (*extents[: rank - 1], *[1] * (rank - 1 - len(extents)), math.prod(extents[rank - 1 :]))


def _final_readers(name: str, readers: Mapping[str, list[InputUse]]) -> list[InputUse]:
    """Return the nodes that read a tensor's values, directly or after operators of PASS_THROUGH_OPS."""
    uses, waiting, seen = [], [name], {name}
    while waiting:
        for node, index in readers.get(waiting.pop(), ()):
            uses.append((node, index))
            if node.op_type in PASS_THROUGH_OPS and not node.domain and (index == 0 or node.op_type == "Concat"):
                waiting += [output for output in node.output if output not in seen]
                seen.update(node.output)
    return uses


def _value_count(node: onnx.NodeProto, index: int, tensors: Mapping[str, TensorInfo]) -> int | None:
    """Return the number n if the elements of a node's input must be in 0 … n-1; None if all values are valid."""
    rule = _VALUE_COUNTS.get((node.op_type, index))
    inputs = [tensors.get(name) for name in node.input]
    count = None if rule is None else rule(node, inputs)
    return count if count is None or count > 0 else None


InputTensors = list[TensorInfo | None]


def input_extent(index: int, axis: int | None = None) -> Callable[[onnx.NodeProto, InputTensors], int | None]:
    """Return a function that returns the extent of a node's input `index` along `axis`; None if it is unknown.

    If `axis` is None, the axis is the node's attribute `axis`.
    """

    def count(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
        tensor = inputs[index] if index < len(inputs) else None
        axis_attribute = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        used_axis = axis_attribute if axis is None else axis
        shape = None if tensor is None else tensor.shape
        return None if shape is None or not -len(shape) <= used_axis < len(shape) else shape[used_axis]

    return count


def _nd_index_limit(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return n if the indices of a ScatterND or GatherND must be in 0 … n-1; None if n is unknown.

    n is the smallest extent of all axes that an index addresses.
    """
    data, indices = (None if tensor is None else tensor.shape for tensor in inputs[:2])
    batch_axes = next((attribute.i for attribute in node.attribute if attribute.name == "batch_dims"), 0)
    return min(data[batch_axes : batch_axes + indices[-1]], default=None) if data and indices else None


def _one_hot_depth(_node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    depth = inputs[1]
    return None if depth is None or depth.value is None else int(depth.value.flat[0])


def _mask_values(_node: onnx.NodeProto, _inputs: InputTensors) -> int:
    return MASK_VALUES


def _rotary_positions_ort(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return n if the positions of com.microsoft's RotaryEmbedding must be in 0 … n-1; None if n is unknown.

    A vector of positions has only the position of each sequence's first row. n is then smaller, because the positions
    of the later rows must be valid too.
    """
    count = input_extent(2, 0)(node, inputs) if node.domain else None
    x, positions = (None if tensor is None else tensor.shape for tensor in inputs[:2])
    holds_first_only = x is not None and positions is not None and len(positions) == 1
    return count if count is None or x is None or not holds_first_only else count - x[-2] + 1


def _cache_rows(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the number of rows of the cache that GroupQueryAttention writes; None if it is unknown.

    It is the larger of two numbers: the rows of the cache that the node reads, and the constant input
    `total_sequence_length`.
    """
    past_rows, total = input_extent(3, 2)(node, inputs), inputs[6] if len(inputs) > 6 else None
    totals = [] if total is None or total.value is None else [int(total.value.flat[0])]
    return max([*totals, *([] if past_rows is None else [past_rows])], default=None)


def _rotary_positions(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return the number of positions of the standard RotaryEmbedding (the rows of its second input)."""
    return None if node.domain else input_extent(1, 0)(node, inputs)


def _sequence_length(node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return n, the number of time steps, so that sequence lengths are drawn from 0 … n-1; None if it is unknown."""
    axes = {attribute.name: attribute.i for attribute in node.attribute}
    return input_extent(0, axes.get("time_axis", axes.get("layout", 0)))(node, inputs)


def _counted_mask_values(_node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return MASK_VALUES (0 and 1) for an integer input of a ReduceSum: the node may count the ones of a mask."""
    tensor = inputs[0]
    return MASK_VALUES if tensor is not None and tensor.dtype in (TensorProto.INT32, TensorProto.INT64) else None


def _inverted_mask_values(_node: onnx.NodeProto, inputs: InputTensors) -> int | None:
    """Return MASK_VALUES (0 and 1) if a Sub computes `1 - input`: some exporters invert masks in this way."""
    minuend = None if inputs[0] is None else inputs[0].value
    return MASK_VALUES if minuend is not None and minuend.size == 1 and minuend.flat[0] == 1 else None


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
"""By (operator, input index): function that returns the number of valid values of a node's input."""


def limit_values(
    inputs: Mapping[str, NDArray[Any]], limits: Mapping[str, ValueLimit], seed: int
) -> dict[str, NDArray[Any]]:
    """Return the inputs, with the values of each input in `limits` replaced by valid values drawn with `seed`."""

    def limited(name: str, array: NDArray[Any]) -> NDArray[Any]:
        limit = limits.get(name)
        if limit is None:
            return array
        if isinstance(limit, tuple):
            return np.array(limit, array.dtype)
        return named_generator(seed, f"{name}/range").integers(0, limit, array.shape).astype(array.dtype)

    return {name: limited(name, array) for name, array in inputs.items()}
