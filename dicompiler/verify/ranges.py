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

from dicompiler.base.seeded import generator
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.rule import Tensor

CARRIES = frozenset(
    "Cast Clip Concat Expand Flatten Gather Identity Reshape Slice Split Squeeze Tile Transpose Unsqueeze".split()
)
"""Operators that hand on the values of an input: of Concat any, of the others the first."""
Read = tuple[onnx.NodeProto, int]
MASK = 2
INDEXING = frozenset({"Gather", "GatherElements", "ScatterElements", "ScatterND"})
"""Operators whose second input has numbers of rows of the first, of which those below 0 count from the end."""

Limit = int | tuple[int, ...]
"""n: the values are 0 … n-1; numbers: the very values."""


def limits(model: Model, names: Iterable[str] | None = None) -> dict[str, Limit]:
    """Graph input → n, where its values must be 0 … n-1: as the index of a Gather, the token, segment or position of an
    embedding, the class of a OneHot, or the mask of an attention; or the very values, where it is the shape that a
    Reshape gives. An input that leads to none of these is not in it. names: of tensors, in place of the inputs."""
    tensors, readers = model.tensors(), readers_of(model)
    found = dict[str, Limit]()
    inputs = (value.name for value in model.proto.graph.input if not tensors[value.name].constant)
    for name in inputs if names is None else names:
        known = [n for node, place in _ends(name, readers) if (n := _taken(node, place, tensors)) is not None]
        reshapes = [node for node, place in readers.get(name, ()) if (node.op_type, place) == ("Reshape", 1)]
        shape = _reshaped(tensors, reshapes[0], name) if reshapes else None
        if shape:
            found[name] = shape
        elif known:
            found[name] = min(known)
    return found


def readers_of(model: Model) -> dict[str, list[Read]]:
    """Tensor → the nodes that read it, each with the place of its input."""
    readers: dict[str, list[Read]] = {}
    for node in model.proto.graph.node:
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
    return readers


def _reshaped(tensors: Mapping[str, Tensor], node: onnx.NodeProto, shape: str) -> tuple[int, ...] | None:
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


def _ends(name: str, readers: Mapping[str, list[Read]]) -> list[Read]:
    """Who reads the values of a tensor, as they are or carried elsewhere."""
    ends, waiting, seen = [], [name], {name}
    while waiting:
        for node, place in readers.get(waiting.pop(), ()):
            ends.append((node, place))
            if node.op_type in CARRIES and not node.domain and (place == 0 or node.op_type == "Concat"):
                waiting += [one for one in node.output if one not in seen]
                seen.update(node.output)
    return ends


def _taken(node: onnx.NodeProto, place: int, tensors: Mapping[str, Tensor]) -> int | None:
    """How many values an operator takes there; None: any."""
    rule = _TAKES.get((node.op_type, place))
    given = [tensors.get(name) for name in node.input]
    count = None if rule is None else rule(node, given)
    return count if count is None or count > 0 else None


Given = list[Tensor | None]


def extent(of: int, axis: int | None = None) -> Callable[[onnx.NodeProto, Given], int | None]:
    """The extent of an input along an axis, that of the attribute `axis` where it is None."""

    def count(node: onnx.NodeProto, given: Given) -> int | None:
        tensor = given[of] if of < len(given) else None
        along = next((one.i for one in node.attribute if one.name == "axis"), 0) if axis is None else axis
        shape = None if tensor is None else tensor.shape
        return None if shape is None or not -len(shape) <= along < len(shape) else shape[along]

    return count


def _places(node: onnx.NodeProto, given: Given) -> int | None:
    """The least extent of the axes that the last axis of the indices of a ScatterND or GatherND counts."""
    data, indices = (None if tensor is None else tensor.shape for tensor in given[:2])
    batch = next((one.i for one in node.attribute if one.name == "batch_dims"), 0)
    return min(data[batch : batch + indices[-1]], default=None) if data and indices else None


def _depth(_node: onnx.NodeProto, given: Given) -> int | None:
    depth = given[1]
    return None if depth is None or depth.value is None else int(depth.value.flat[0])


def _mask(_node: onnx.NodeProto, _given: Given) -> int:
    return MASK


def _rotated(node: onnx.NodeProto, given: Given) -> int | None:
    """Positions are the second input of onnxruntime's own operator alone; one for all rows is that of the first."""
    count = extent(2, 0)(node, given) if node.domain else None
    x, places = (None if tensor is None else tensor.shape for tensor in given[:2])
    first = x is not None and places is not None and len(places) == 1
    return count if count is None or x is None or not first else count - x[-2] + 1


def _written(node: onnx.NodeProto, given: Given) -> int | None:
    """Rows of the cache that is made: it has as many as the given one, or those that come behind it too."""
    past, total = extent(3, 2)(node, given), given[6] if len(given) > 6 else None
    known = [] if total is None or total.value is None else [int(total.value.flat[0])]
    return max([*known, *([] if past is None else [past])], default=None)


def _turned(node: onnx.NodeProto, given: Given) -> int | None:
    """Positions are the fourth input of the standard's operator."""
    return None if node.domain else extent(1, 0)(node, given)


def _long(node: onnx.NodeProto, given: Given) -> int | None:
    """How many steps there are, of which a length tells how many count."""
    axes = {one.name: one.i for one in node.attribute}
    return extent(0, axes.get("time_axis", axes.get("layout", 0)))(node, given)


def _counted(_node: onnx.NodeProto, given: Given) -> int | None:
    """Whole numbers are summed up where a mask tells how many rows there are."""
    one = given[0]
    return MASK if one is not None and one.dtype in (TensorProto.INT32, TensorProto.INT64) else None


def _inverted(_node: onnx.NodeProto, given: Given) -> int | None:
    """1 - mask, as exporters write it."""
    one = given[0]
    return (
        MASK if one is not None and one.value is not None and one.value.size == 1 and one.value.flat[0] == 1 else None
    )


_TAKES: Mapping[tuple[str, int], Callable[[onnx.NodeProto, Given], int | None]] = {
    **{(name, 1): extent(0) for name in INDEXING - {"ScatterND"}},
    **{(name, 1): _places for name in ("GatherND", "ScatterND")},
    **{(name, 4): _long for name in ("GRU", "LSTM", "RNN")},
    ("ReverseSequence", 1): _long,
    ("ArrayFeatureExtractor", 1): extent(0, -1),
    ("OneHot", 0): _depth,
    ("EmbedLayerNormalization", 0): extent(2, 0),
    ("EmbedLayerNormalization", 1): extent(4, 0),
    ("EmbedLayerNormalization", 7): _mask,
    ("EmbedLayerNormalization", 8): extent(3, 0),
    ("Attention", 3): _mask,
    ("ReduceSum", 0): _counted,
    ("GroupQueryAttention", 5): _written,
    ("GroupQueryAttention", 9): extent(7, 0),
    ("RotaryEmbedding", 1): _rotated,
    ("RotaryEmbedding", 3): _turned,
    ("Sub", 1): _inverted,
}
"""(operator, place of the input) → how many values it takes there."""


def ranged(feed: Mapping[str, NDArray[Any]], known: Mapping[str, Limit], seed: int) -> dict[str, NDArray[Any]]:
    """`feed` with seeded numbers in range for the inputs that have one, of the same types and shapes."""

    def one(name: str, array: NDArray[Any]) -> NDArray[Any]:
        limit = known.get(name)
        if limit is None:
            return array
        if isinstance(limit, tuple):
            return np.array(limit, array.dtype)
        return generator(seed, f"{name}/range").integers(0, limit, array.shape).astype(array.dtype)

    return {name: one(name, array) for name, array in feed.items()}
