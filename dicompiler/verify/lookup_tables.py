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

from dicompiler.base.input_arrays import check_index_range
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import ORT_DOMAIN, TensorInfo
from dicompiler.ir.regions import Region, full_region
from dicompiler.verify.index_inputs import INDEXING_OPS, InputUse, find_readers, input_extent

TableRows = tuple[str, int]
"""A table's name, and how many rows it has."""
ROW_PRESERVING_OPS = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that keep how many rows there are."""
REARRANGING_OPS = frozenset("Concat Expand Flatten Reshape Squeeze Tile Transpose Unsqueeze".split())
"""Operators that hand on every number of an input, elsewhere: of Concat of any, of the others of the first."""
INDEX_TYPES: Mapping[int, str] = {TensorProto.INT32: "int32", TensorProto.INT64: "int64"}
"""Whole numbers of so many bits that a sum with a constant does not begin anew at the other end."""


@dataclass(frozen=True)
class _IndexValues:
    """Numbers of a graph input that a tensor holds: those of `region` (None: all, of a shape that is not known), each
    cast to `type` ("": as it is), which drops higher bits, and with `offset` added; `inplace`: where they were."""

    tensor: str
    region: Region | None
    offset: int = 0
    is_in_place: bool = True
    cast_type: str = ""


def check_indices(model: Model, given: Mapping[str, Any]) -> None:
    """DicompilerError, naming the input, the number and the table, where a number is no row of a table that it is
    looked up in, or written to: a token beyond the vocabulary, a position beyond a cache."""
    for name, tables in find_lookup_tables(model, given).items():
        check_index_range(given[name], tables, f"input {name!r}")


def find_lookup_tables(model: Model, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Input → the tables whose rows its numbers are, by what `check_rows` takes; of those that are as long the first.
    Without the inputs that are none."""
    tensors, readers = model.tensors(), find_readers(model)
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        tables: dict[tuple[Any, ...], dict[str, Any]] = {}
        for handed, (node, place) in _index_uses(name, tensors, readers):
            rows = _TABLES.get((node.domain.removeprefix("ai.onnx"), node.op_type, place), _no_table)(node, tensors)
            if rows is None or rows[1] < 1:
                continue
            least = -rows[1] if node.op_type in INDEXING_OPS else 0
            own: dict[str, Any] = {"table": _original_table(rows[0], makers), "rows": rows[1], "least": least}
            if handed.cast_type:
                own["type"] = handed.cast_type
            if handed.offset:
                own["offset"] = handed.offset
            if handed.region is not None and handed.region != full_region(tensors[name].shape or ()):
                own["region"] = [list(interval) for interval in handed.region]
            tables.setdefault((rows[1], least, handed.cast_type, handed.offset, handed.region), own)
        if tables:
            found[name] = list(tables.values())
    return found


def _original_table(name: str, makers: Mapping[str, onnx.NodeProto]) -> str:
    """The tensor whose rows a node takes, or writes, before it was turned."""
    while name in makers and makers[name].op_type in ROW_PRESERVING_OPS:
        name = makers[name].input[0]
    return name


def _index_uses(
    name: str, tensors: Mapping[str, TensorInfo], readers: Mapping[str, list[InputUse]]
) -> Iterator[tuple[_IndexValues, InputUse]]:
    """Who reads whole numbers of a graph input, and what it reads of them."""
    if _numpy_dtype(tensors[name]).kind not in "iu":
        return
    shape = tensors[name].shape
    waiting = [_IndexValues(name, None if shape is None else full_region(shape), is_in_place=shape is not None)]
    seen = set(waiting)
    while waiting:
        handed = waiting.pop()
        for node, place in readers.get(handed.tensor, ()):
            yield handed, (node, place)
            further = _after_node(handed, node, place, tensors)
            if further is not None and further not in seen:
                seen.add(further)
                waiting.append(further)


def _after_node(
    handed: _IndexValues, node: onnx.NodeProto, place: int, tensors: Mapping[str, TensorInfo]
) -> _IndexValues | None:
    """What `node` hands on; None where a number that is no row may become one, or is not known to be read."""
    if node.domain or (place and node.op_type not in ("Add", "Concat")):
        return None
    handed = replace(handed, tensor=node.output[0])
    if node.op_type == "Identity":
        return handed
    if node.op_type == "Cast":
        return _after_cast(
            handed, tensors.get(node.input[0]), next(one.i for one in node.attribute if one.name == "to")
        )
    if node.op_type in REARRANGING_OPS:
        return replace(handed, is_in_place=False)
    if node.op_type in ("Add", "Sub"):
        other, given = _constant_values(tensors, node.input[1 - place]), tensors.get(node.input[place])
        if other is None or len(other) != 1 or given is None or given.dtype not in INDEX_TYPES:
            return None
        added = int(other[0]) if node.op_type == "Add" else -int(other[0])
        return replace(handed, offset=handed.offset + added)
    return _after_slice(handed, node, tensors) if node.op_type == "Slice" else None


def _after_cast(handed: _IndexValues, given: TensorInfo | None, to: int) -> _IndexValues | None:
    """To a type that cannot hold all of them numbers lose their higher bits; floats are not followed: they round."""
    if to not in INDEX_TYPES or given is None or _numpy_dtype(given).kind not in "iu":
        return None
    return handed if np.can_cast(_numpy_dtype(given), INDEX_TYPES[to]) else replace(handed, cast_type=INDEX_TYPES[to])


def _after_slice(handed: _IndexValues, node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> _IndexValues | None:
    """The numbers that a Slice with known bounds and steps of 1 takes."""
    bounds, given = [_constant_values(tensors, name) for name in node.input[1:]], tensors.get(node.input[0])
    if not handed.is_in_place or handed.region is None or given is None or len(given.shape or ()) != len(handed.region):
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


def _constant_values(tensors: Mapping[str, TensorInfo], name: str) -> list[Any] | None:
    tensor = tensors.get(name)
    return None if tensor is None or tensor.value is None else list(tensor.value.reshape(-1).tolist())


def _numpy_dtype(tensor: TensorInfo) -> np.dtype[Any]:
    """As numpy has it; of what is no tensor, objects."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype) if tensor.dtype else object)


def _no_table(_node: onnx.NodeProto, _tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    return None


def _rows_of_input(of: int, axis: int | None = 0) -> _FindRows:
    """Input `of`, along `axis`, or the attribute of that name."""

    def found(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
        count = input_extent(of, axis)(node, [tensors.get(name) for name in node.input])
        return None if count is None else (node.input[of], count)

    return found


def _scatter_nd_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    """With places of several numbers each counts along another axis."""
    indices = tensors[node.input[1]].shape if node.input[1] in tensors else None
    return _rows_of_input(0)(node, tensors) if indices and indices[-1] == 1 else None


def _rotary_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    """Of positions that nothing is turned by, none is read."""
    turns = any(one.name == "do_rotary" and one.i for one in node.attribute)
    return _rows_of_input(7)(node, tensors) if turns else None


def _cache_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    """Rows are written to the cache that is made, which can have more than the one that is given."""
    made = tensors.get(node.output[1]) if len(node.output) > 1 else None
    past = _rows_of_input(3, 2)(node, tensors)
    if made is None or made.shape is None or len(made.shape) != 4:
        return None
    return past if past is not None and past[1] == made.shape[2] else (made.name, made.shape[2])


_FindRows = Callable[[onnx.NodeProto, Mapping[str, TensorInfo]], TableRows | None]
_TABLES: Mapping[tuple[str, str, int], _FindRows] = {
    **{("", name, 1): _rows_of_input(0, None) for name in INDEXING_OPS},
    ("", "ScatterND", 1): _scatter_nd_rows,
    (ORT_DOMAIN, "EmbedLayerNormalization", 0): _rows_of_input(2),
    (ORT_DOMAIN, "EmbedLayerNormalization", 1): _rows_of_input(4),
    (ORT_DOMAIN, "EmbedLayerNormalization", 8): _rows_of_input(3),
    (ORT_DOMAIN, "GroupQueryAttention", 5): _cache_rows,
    (ORT_DOMAIN, "GroupQueryAttention", 9): _rotary_rows,
    (ORT_DOMAIN, "RotaryEmbedding", 1): _rows_of_input(2),
}
"""(domain, operator, place of the input) → the table of which it has numbers of rows: tokens, positions, rows of a
cache."""
