"""Inputs whose numbers are rows of a table, as they are or after a step that is known: what a client can check.

In: a model, names of its inputs. Out: for each the tables, what is added to its numbers first, and which of them are
looked up. A number that goes through anything else (a Clip, a product, a sum with another input) is the engine's to
check: it may be right there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from dicompiler.base.given import check_rows
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.regions import Region, full
from dicompiler.ir.rule import OWN_DOMAIN, Tensor
from dicompiler.verify.ranges import INDEXING, Read, extent, readers_of

Rows = tuple[str, int]
"""A table's name, and how many rows it has."""
TURNS = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that keep how many rows there are."""
ARRANGE = frozenset("Concat Expand Flatten Reshape Squeeze Tile Transpose Unsqueeze".split())
"""Operators that hand on every number of an input, elsewhere: of Concat of any, of the others of the first."""
WHOLE: Mapping[int, str] = {TensorProto.INT32: "int32", TensorProto.INT64: "int64"}
"""Whole numbers of so many bits that a sum with a constant does not begin anew at the other end."""


@dataclass(frozen=True)
class _Handed:
    """Numbers of a graph input that a tensor holds: those of `region` (None: all, of a shape that is not known), each
    cast to `type` ("": as it is), which drops higher bits, and with `offset` added; `inplace`: where they were."""

    tensor: str
    region: Region | None
    offset: int = 0
    inplace: bool = True
    type: str = ""


def check_range(model: Model, given: Mapping[str, Any]) -> None:
    """DicompilerError, naming the input, the number and the table, where a number is no row of a table that it is
    looked up in, or written to: a token beyond the vocabulary, a position beyond a cache."""
    for name, tables in looked_up(model, given).items():
        check_rows(given[name], tables, f"input {name!r}")


def looked_up(model: Model, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Input → the tables whose rows its numbers are, by what `check_rows` takes; of those that are as long the first.
    Without the inputs that are none."""
    tensors, readers = model.tensors(), readers_of(model)
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        tables: dict[tuple[Any, ...], dict[str, Any]] = {}
        for handed, (node, place) in _looks(name, tensors, readers):
            rows = _TABLES.get((node.domain.removeprefix("ai.onnx"), node.op_type, place), _none)(node, tensors)
            if rows is None or rows[1] < 1:
                continue
            least = -rows[1] if node.op_type in INDEXING else 0
            own: dict[str, Any] = {"table": _table(rows[0], makers), "rows": rows[1], "least": least}
            if handed.type:
                own["type"] = handed.type
            if handed.offset:
                own["offset"] = handed.offset
            if handed.region is not None and handed.region != full(tensors[name].shape or ()):
                own["region"] = [list(interval) for interval in handed.region]
            tables.setdefault((rows[1], least, handed.type, handed.offset, handed.region), own)
        if tables:
            found[name] = list(tables.values())
    return found


def _table(name: str, makers: Mapping[str, onnx.NodeProto]) -> str:
    """The tensor whose rows a node takes, or writes, before it was turned."""
    while name in makers and makers[name].op_type in TURNS:
        name = makers[name].input[0]
    return name


def _looks(
    name: str, tensors: Mapping[str, Tensor], readers: Mapping[str, list[Read]]
) -> Iterator[tuple[_Handed, Read]]:
    """Who reads whole numbers of a graph input, and what it reads of them."""
    if _dtype(tensors[name]).kind not in "iu":
        return
    shape = tensors[name].shape
    waiting = [_Handed(name, None if shape is None else full(shape), inplace=shape is not None)]
    seen = set(waiting)
    while waiting:
        handed = waiting.pop()
        for node, place in readers.get(handed.tensor, ()):
            yield handed, (node, place)
            further = _further(handed, node, place, tensors)
            if further is not None and further not in seen:
                seen.add(further)
                waiting.append(further)


def _further(handed: _Handed, node: onnx.NodeProto, place: int, tensors: Mapping[str, Tensor]) -> _Handed | None:
    """What `node` hands on; None where a number that is no row may become one, or is not known to be read."""
    if node.domain or (place and node.op_type not in ("Add", "Concat")):
        return None
    handed = replace(handed, tensor=node.output[0])
    if node.op_type == "Identity":
        return handed
    if node.op_type == "Cast":
        return _cast(handed, tensors.get(node.input[0]), next(one.i for one in node.attribute if one.name == "to"))
    if node.op_type in ARRANGE:
        return replace(handed, inplace=False)
    if node.op_type in ("Add", "Sub"):
        other, given = _constant(tensors, node.input[1 - place]), tensors.get(node.input[place])
        if other is None or len(other) != 1 or given is None or given.dtype not in WHOLE:
            return None
        added = int(other[0]) if node.op_type == "Add" else -int(other[0])
        return replace(handed, offset=handed.offset + added)
    return _sliced(handed, node, tensors) if node.op_type == "Slice" else None


def _cast(handed: _Handed, given: Tensor | None, to: int) -> _Handed | None:
    """To a type that cannot hold all of them numbers lose their higher bits; floats are not followed: they round."""
    if to not in WHOLE or given is None or _dtype(given).kind not in "iu":
        return None
    return handed if np.can_cast(_dtype(given), WHOLE[to]) else replace(handed, type=WHOLE[to])


def _sliced(handed: _Handed, node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> _Handed | None:
    """The numbers that a Slice with known bounds and steps of 1 takes."""
    bounds, given = [_constant(tensors, name) for name in node.input[1:]], tensors.get(node.input[0])
    if not handed.inplace or handed.region is None or given is None or len(given.shape or ()) != len(handed.region):
        return None  # a sum can have put axes before theirs
    if len(bounds) < 2 or bounds[0] is None or bounds[1] is None:
        return None
    region, starts, ends = list(handed.region), bounds[0], bounds[1]
    axes = bounds[2] if len(bounds) > 2 and node.input[3] else range(len(starts))
    steps = bounds[3] if len(bounds) > 3 else ()
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    for axis, start, end in zip(axes, starts, ends, strict=True):
        low, high = region[int(axis)]
        first, last, _ = slice(int(start), int(end)).indices(high - low)
        region[int(axis)] = (low + first, low + max(first, last))
    return replace(handed, region=tuple(region))


def _constant(tensors: Mapping[str, Tensor], name: str) -> list[Any] | None:
    tensor = tensors.get(name)
    return None if tensor is None or tensor.value is None else list(tensor.value.reshape(-1).tolist())


def _dtype(tensor: Tensor) -> np.dtype[Any]:
    """As numpy has it; of what is no tensor, objects."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype) if tensor.dtype else object)


def _none(_node: onnx.NodeProto, _tensors: Mapping[str, Tensor]) -> Rows | None:
    return None


def _rows(of: int, axis: int | None = 0) -> _Finding:
    """Input `of`, along `axis`, or the attribute of that name."""

    def found(node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> Rows | None:
        count = extent(of, axis)(node, [tensors.get(name) for name in node.input])
        return None if count is None else (node.input[of], count)

    return found


def _scattered(node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> Rows | None:
    """With places of several numbers each counts along another axis."""
    indices = tensors[node.input[1]].shape if node.input[1] in tensors else None
    return _rows(0)(node, tensors) if indices and indices[-1] == 1 else None


def _turned(node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> Rows | None:
    """Of positions that nothing is turned by, none is read."""
    turns = any(one.name == "do_rotary" and one.i for one in node.attribute)
    return _rows(7)(node, tensors) if turns else None


def _cache(node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> Rows | None:
    """Rows are written to the cache that is made, which can have more than the one that is given."""
    made = tensors.get(node.output[1]) if len(node.output) > 1 else None
    past = _rows(3, 2)(node, tensors)
    if made is None or made.shape is None or len(made.shape) != 4:
        return None
    return past if past is not None and past[1] == made.shape[2] else (made.name, made.shape[2])


_Finding = Callable[[onnx.NodeProto, Mapping[str, Tensor]], Rows | None]
_TABLES: Mapping[tuple[str, str, int], _Finding] = {
    **{("", name, 1): _rows(0, None) for name in INDEXING},
    ("", "ScatterND", 1): _scattered,
    (OWN_DOMAIN, "EmbedLayerNormalization", 0): _rows(2),
    (OWN_DOMAIN, "EmbedLayerNormalization", 1): _rows(4),
    (OWN_DOMAIN, "EmbedLayerNormalization", 8): _rows(3),
    (OWN_DOMAIN, "GroupQueryAttention", 5): _cache,
    (OWN_DOMAIN, "GroupQueryAttention", 9): _turned,
    (OWN_DOMAIN, "RotaryEmbedding", 1): _rows(2),
}
"""(domain, operator, place of the input) → the table of which it has numbers of rows: tokens, positions, rows of a
cache."""
