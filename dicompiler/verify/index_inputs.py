"""Inputs that stand for one of a few: token numbers, positions, classes, masks, found by where they lead to.

Model → how many values each such input of its graph may have; arrays → arrays in which these inputs have such values.
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
"""Operators that hand on the values of an input: of Concat any, of the others the first."""
InputUse = tuple[onnx.NodeProto, int]
MASK_VALUES = 2
INDEXING_OPS = frozenset({"Gather", "GatherElements", "ScatterElements", "ScatterND"})
"""Operators whose second input has numbers of rows of the first, of which those below 0 count from the end."""

ValueLimit = int | tuple[int, ...]
"""n: the values are 0 … n-1; numbers: the very values."""


def find_value_limits(model: Model, names: Iterable[str] | None = None) -> dict[str, ValueLimit]:
    """Graph input → n, where its values must be 0 … n-1: as the index of a Gather, the token, segment or position of an
    embedding, the class of a OneHot, or the mask of an attention; or the very values, where it is the shape that a
    Reshape gives. An input that leads to none of these is not in it. names: of tensors, in place of the inputs."""
    tensors, readers = model.tensors(), find_readers(model)
    found = dict[str, ValueLimit]()
    inputs = (value.name for value in model.proto.graph.input if not tensors[value.name].is_constant)
    for name in inputs if names is None else names:
        known = [
            n for node, place in _final_readers(name, readers) if (n := _value_count(node, place, tensors)) is not None
        ]
        reshapes = [node for node, place in readers.get(name, ()) if (node.op_type, place) == ("Reshape", 1)]
        shape = _find_reshape_target(tensors, reshapes[0], name) if reshapes else None
        if shape:
            found[name] = shape
        elif known:
            found[name] = min(known)
    return found


def find_readers(model: Model) -> dict[str, list[InputUse]]:
    """Tensor → the nodes that read it, each with the place of its input."""
    readers: dict[str, list[InputUse]] = {}
    for node in model.proto.graph.node:
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
    return readers


def _find_reshape_target(tensors: Mapping[str, TensorInfo], node: onnx.NodeProto, shape: str) -> tuple[int, ...] | None:
    """A shape for the Reshape `node`, which reads it from the graph's input `shape`: that of what it makes where it
    is known, else the first axes of what it is given and all that is left."""
    made, before, count = (tensors.get(name) for name in (node.output[0], node.input[0], shape))
    if made is not None and made.shape is not None:
        return made.shape
    if before is None or before.shape is None or count is None or count.shape is None or len(count.shape) != 1:
        return None
    axes, rank = before.shape, count.shape[0]
    if not rank:
        return None
    return (*axes[: rank - 1], *[1] * (rank - 1 - len(axes)), math.prod(axes[rank - 1 :]))


def _final_readers(name: str, readers: Mapping[str, list[InputUse]]) -> list[InputUse]:
    """Who reads the values of a tensor, as they are or carried elsewhere."""
    ends, waiting, seen = [], [name], {name}
    while waiting:
        for node, place in readers.get(waiting.pop(), ()):
            ends.append((node, place))
            if node.op_type in PASS_THROUGH_OPS and not node.domain and (place == 0 or node.op_type == "Concat"):
                waiting += [one for one in node.output if one not in seen]
                seen.update(node.output)
    return ends


def _value_count(node: onnx.NodeProto, place: int, tensors: Mapping[str, TensorInfo]) -> int | None:
    """How many values an operator takes there; None: any."""
    rule = _VALUE_COUNTS.get((node.op_type, place))
    given = [tensors.get(name) for name in node.input]
    count = None if rule is None else rule(node, given)
    return count if count is None or count > 0 else None


InputTensors = list[TensorInfo | None]


def input_extent(of: int, axis: int | None = None) -> Callable[[onnx.NodeProto, InputTensors], int | None]:
    """The extent of an input along an axis, that of the attribute `axis` where it is None."""

    def count(node: onnx.NodeProto, given: InputTensors) -> int | None:
        tensor = given[of] if of < len(given) else None
        along = next((one.i for one in node.attribute if one.name == "axis"), 0) if axis is None else axis
        shape = None if tensor is None else tensor.shape
        return None if shape is None or not -len(shape) <= along < len(shape) else shape[along]

    return count


def _nd_index_limit(node: onnx.NodeProto, given: InputTensors) -> int | None:
    """The least extent of the axes that the last axis of the indices of a ScatterND or GatherND counts."""
    data, indices = (None if tensor is None else tensor.shape for tensor in given[:2])
    batch = next((one.i for one in node.attribute if one.name == "batch_dims"), 0)
    return min(data[batch : batch + indices[-1]], default=None) if data and indices else None


def _one_hot_depth(_node: onnx.NodeProto, given: InputTensors) -> int | None:
    depth = given[1]
    return None if depth is None or depth.value is None else int(depth.value.flat[0])


def _mask_values(_node: onnx.NodeProto, _given: InputTensors) -> int:
    return MASK_VALUES


def _rotary_positions_ort(node: onnx.NodeProto, given: InputTensors) -> int | None:
    """Positions are the second input of onnxruntime's own operator alone; one for all rows is that of the first."""
    count = input_extent(2, 0)(node, given) if node.domain else None
    x, places = (None if tensor is None else tensor.shape for tensor in given[:2])
    first = x is not None and places is not None and len(places) == 1
    return count if count is None or x is None or not first else count - x[-2] + 1


def _cache_rows(node: onnx.NodeProto, given: InputTensors) -> int | None:
    """Rows of the cache that is made: it has as many as the given one, or those that come behind it too."""
    past, total = input_extent(3, 2)(node, given), given[6] if len(given) > 6 else None
    known = [] if total is None or total.value is None else [int(total.value.flat[0])]
    return max([*known, *([] if past is None else [past])], default=None)


def _rotary_positions(node: onnx.NodeProto, given: InputTensors) -> int | None:
    """Positions are the fourth input of the standard's operator."""
    return None if node.domain else input_extent(1, 0)(node, given)


def _sequence_length(node: onnx.NodeProto, given: InputTensors) -> int | None:
    """How many steps there are, of which a length tells how many count."""
    axes = {one.name: one.i for one in node.attribute}
    return input_extent(0, axes.get("time_axis", axes.get("layout", 0)))(node, given)


def _counted_mask_values(_node: onnx.NodeProto, given: InputTensors) -> int | None:
    """Whole numbers are summed up where a mask tells how many rows there are."""
    one = given[0]
    return MASK_VALUES if one is not None and one.dtype in (TensorProto.INT32, TensorProto.INT64) else None


def _inverted_mask_values(_node: onnx.NodeProto, given: InputTensors) -> int | None:
    """1 - mask, as exporters write it."""
    one = given[0]
    return (
        MASK_VALUES
        if one is not None and one.value is not None and one.value.size == 1 and one.value.flat[0] == 1
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
"""(operator, place of the input) → how many values it takes there."""


def limit_values(
    feed: Mapping[str, NDArray[Any]], known: Mapping[str, ValueLimit], seed: int
) -> dict[str, NDArray[Any]]:
    """`feed` with seeded numbers in range for the inputs that have one, of the same types and shapes."""

    def one(name: str, array: NDArray[Any]) -> NDArray[Any]:
        limit = known.get(name)
        if limit is None:
            return array
        if isinstance(limit, tuple):
            return np.array(limit, array.dtype)
        return named_generator(seed, f"{name}/range").integers(0, limit, array.shape).astype(array.dtype)

    return {name: one(name, array) for name, array in feed.items()}
