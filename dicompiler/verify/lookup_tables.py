"""Check of input values that index rows of a table, such as tokens of an embedding, before a frame is sent.

The values are followed through operators that move or cast them, or that add a constant. Values after any other
operator (a Clip, a product, a sum of two inputs) are not checked, because it may bring them into the valid range.
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
"""Name of a table and its number of rows."""
ROW_PRESERVING_OPS = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that may be between a table and the node that reads its rows. Errors name the table before them."""
REARRANGING_OPS = frozenset("Concat Expand Flatten Reshape Squeeze Tile Transpose Unsqueeze".split())
"""Operators that only move values. A Concat moves the values of all inputs, the others those of the first input."""
INDEX_TYPES: Mapping[int, str] = {TensorProto.INT32: "int32", TensorProto.INT64: "int64"}
"""Types of indices. They are so wide that adding a constant to an index does not wrap around."""


@dataclass(frozen=True)
class _IndexValues:
    """A tensor with values of a graph input that were moved, cast or increased by a constant.

    Attributes:
        tensor: Name of the tensor.
        region: The region of the graph input that the tensor contains; None for the whole of an input of unknown shape.
        offset: The number that was added to each value.
        is_in_place: True if the values are at the same positions as in the region.
        cast_type: The type of a cast that dropped the higher bits of the values; "" if there was no such cast.
    """

    tensor: str
    region: Region | None
    offset: int = 0
    is_in_place: bool = True
    cast_type: str = ""


def check_indices(model: Model, inputs: Mapping[str, Any]) -> None:
    """Raise DicompilerError if an input value, such as a token, is not a row of the table that it indexes."""
    for name, tables in find_lookup_tables(model, inputs).items():
        check_index_range(inputs[name], tables, f"input {name!r}")


def find_lookup_tables(model: Model, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables that each input in `names` indexes, as arguments of `check_index_range`, by input name.

    Inputs that index no table are omitted. Of several tables with the same valid values, only the first is returned.
    """
    tensors, readers = model.tensors(), find_readers(model)
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    tables_by_input: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        tables: dict[tuple[Any, ...], dict[str, Any]] = {}
        for values, (node, index) in _index_uses(name, tensors, readers):
            find_rows = _TABLES.get((node.domain.removeprefix("ai.onnx"), node.op_type, index))
            rows = None if find_rows is None else find_rows(node, tensors)
            if rows is None or rows[1] < 1:
                continue
            min_index = -rows[1] if node.op_type in INDEXING_OPS else 0
            entry: dict[str, Any] = {"table": _original_table(rows[0], makers), "rows": rows[1], "min_index": min_index}
            if values.cast_type:
                entry["cast_dtype"] = values.cast_type
            if values.offset:
                entry["offset"] = values.offset
            if values.region is not None and values.region != full_region(tensors[name].shape or ()):
                entry["region"] = [list(interval) for interval in values.region]
            tables.setdefault((rows[1], min_index, values.cast_type, values.offset, values.region), entry)
        if tables:
            tables_by_input[name] = list(tables.values())
    return tables_by_input


def _original_table(name: str, makers: Mapping[str, onnx.NodeProto]) -> str:
    while name in makers and makers[name].op_type in ROW_PRESERVING_OPS:
        name = makers[name].input[0]
    return name


def _index_uses(
    name: str, tensors: Mapping[str, TensorInfo], readers: Mapping[str, list[InputUse]]
) -> Iterator[tuple[_IndexValues, InputUse]]:
    """Yield the nodes that read integer values of a graph input, each with a description of the values it reads."""
    if _numpy_dtype(tensors[name]).kind not in "iu":
        return
    shape = tensors[name].shape
    pending = [_IndexValues(name, None if shape is None else full_region(shape), is_in_place=shape is not None)]
    seen = set(pending)
    while pending:
        values = pending.pop()
        for node, index in readers.get(values.tensor, ()):
            yield values, (node, index)
            next_values = _after_node(values, node, index, tensors)
            if next_values is not None and next_values not in seen:
                seen.add(next_values)
                pending.append(next_values)


def _after_node(
    values: _IndexValues, node: onnx.NodeProto, index: int, tensors: Mapping[str, TensorInfo]
) -> _IndexValues | None:
    """Return a description of a graph input's values in the first output of a node; None if the node may change them.

    `values` describes input `index` of the node.
    """
    if node.domain or (index and node.op_type not in ("Add", "Concat")):
        return None
    values = replace(values, tensor=node.output[0])
    if node.op_type == "Identity":
        return values
    if node.op_type == "Cast":
        dtype = next(attribute.i for attribute in node.attribute if attribute.name == "to")
        return _after_cast(values, tensors.get(node.input[0]), dtype)
    if node.op_type in REARRANGING_OPS:
        return replace(values, is_in_place=False)
    if node.op_type in ("Add", "Sub"):
        constant, source = _constant_values(tensors, node.input[1 - index]), tensors.get(node.input[index])
        if constant is None or len(constant) != 1 or source is None or source.dtype not in INDEX_TYPES:
            return None
        offset = int(constant[0]) if node.op_type == "Add" else -int(constant[0])
        return replace(values, offset=values.offset + offset)
    return _after_slice(values, node, tensors) if node.op_type == "Slice" else None


def _after_cast(values: _IndexValues, source: TensorInfo | None, dtype: int) -> _IndexValues | None:
    """Return the description of index values after a Cast to integers; None for a Cast from floats, which rounds."""
    if dtype not in INDEX_TYPES or source is None or _numpy_dtype(source).kind not in "iu":
        return None
    is_lossless = np.can_cast(_numpy_dtype(source), INDEX_TYPES[dtype])
    return values if is_lossless else replace(values, cast_type=INDEX_TYPES[dtype])


def _after_slice(values: _IndexValues, node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> _IndexValues | None:
    """Return the description of index values after a Slice with constant bounds and steps of 1; otherwise None."""
    bounds, source = [_constant_values(tensors, name) for name in node.input[1:]], tensors.get(node.input[0])
    if not values.is_in_place or values.region is None or source is None:
        return None
    if len(source.shape or ()) != len(values.region):
        # The values have more axes than the graph input, because a constant of higher rank was added to them. The Slice
        # then selects no region of the graph input.
        return None
    if len(bounds) < 2 or bounds[0] is None or bounds[1] is None:
        return None
    region, starts, ends = list(values.region), bounds[0], bounds[1]
    axes = bounds[2] if len(bounds) > 2 and node.input[3] else range(len(starts))
    steps = bounds[3] if len(bounds) > 3 else ()
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    for axis, start, end in zip(axes, starts, ends, strict=True):
        low, high = region[int(axis)]
        first, last, _ = slice(int(start), int(end)).indices(high - low)
        region[int(axis)] = (low + first, low + max(first, last))
    return replace(values, region=tuple(region))


def _constant_values(tensors: Mapping[str, TensorInfo], name: str) -> list[Any] | None:
    tensor = tensors.get(name)
    return None if tensor is None or tensor.value is None else list(tensor.value.reshape(-1).tolist())


def _numpy_dtype(tensor: TensorInfo) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype) if tensor.dtype else object)


def _rows_of_input(index: int, axis: int | None = 0) -> _FindRows:
    """Return a function that returns name and number of rows of the table in a node's input `index`.

    The rows are counted along `axis` (None: the node's attribute `axis`).
    """

    def find_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
        count = input_extent(index, axis)(node, [tensors.get(name) for name in node.input])
        return None if count is None else (node.input[index], count)

    return find_rows


def _scatter_nd_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    """Return name and number of rows of the first input of a ScatterND; None if its indices address several axes."""
    indices = tensors[node.input[1]].shape if node.input[1] in tensors else None
    return _rows_of_input(0)(node, tensors) if indices and indices[-1] == 1 else None


def _rotary_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    """Return name and number of rows of GroupQueryAttention's rotary table; None if `do_rotary` is not set."""
    is_rotated = any(attribute.name == "do_rotary" and attribute.i for attribute in node.attribute)
    return _rows_of_input(7)(node, tensors) if is_rotated else None


def _cache_rows(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> TableRows | None:
    """Return name and number of rows of the cache that GroupQueryAttention writes; None if its shape is unknown.

    If the cache that the node reads has as many rows, its name is returned instead.
    """
    cache = tensors.get(node.output[1]) if len(node.output) > 1 else None
    past_rows = _rows_of_input(3, 2)(node, tensors)
    if cache is None or cache.shape is None or len(cache.shape) != 4:
        return None
    return past_rows if past_rows is not None and past_rows[1] == cache.shape[2] else (cache.name, cache.shape[2])


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
"""By (domain, operator, input index): function that finds the indexed table."""
