"""Inputs whose numbers are rows of a table, as they are or after a step that is known: what a client can check.

In: a model, names of its inputs. Out: for each the tables, what is added to its numbers first, and which of them are
looked up. A number that goes through anything else (a Clip, a product, a sum with another input) is the engine's to
check: it may be right there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx
from onnx import TensorProto

from dicompiler.base.given import check_rows
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.regions import Region, full
from dicompiler.ir.rule import Tensor
from dicompiler.verify.ranges import INDEXING, Read, readers_of, taken

TABLES: Mapping[tuple[str, int], int] = {
    **{(name, 1): 0 for name in INDEXING},
    ("EmbedLayerNormalization", 0): 2,
    ("EmbedLayerNormalization", 1): 4,
    ("EmbedLayerNormalization", 8): 3,
    ("GroupQueryAttention", 5): 3,
    ("GroupQueryAttention", 9): 7,
    ("RotaryEmbedding", 1): 2,
}
"""(operator, place of the input) → the table of which it has numbers of rows: tokens, positions, rows of a cache."""
TURNS = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that keep how many rows there are."""
ARRANGE = frozenset("Concat Expand Flatten Reshape Squeeze Tile Transpose Unsqueeze".split())
"""Operators that hand on every number of an input, elsewhere: of Concat of any, of the others of the first."""
WIDE = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE})
"""Types in which a number that is no row stays none."""


@dataclass(frozen=True)
class _Handed:
    """Numbers of a graph input that a tensor holds: those of `region` (None: all, of a shape that is not known), each
    with `offset` added; `inplace`: where they were."""

    tensor: str
    region: Region | None
    offset: int = 0
    inplace: bool = True


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
            of = TABLES.get((node.op_type, place))
            if of is None or not (count := taken(node, place, tensors)):
                continue
            least = -count if node.op_type in INDEXING else 0
            own: dict[str, Any] = {"table": _table(node.input[of], makers), "rows": count, "least": least}
            shape = tensors[name].shape
            if handed.offset:
                own["offset"] = handed.offset
            if handed.region is not None and handed.region != full(shape or ()):
                own["region"] = [list(interval) for interval in handed.region]
            tables.setdefault((count, least, handed.offset, handed.region), own)
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
    """Who reads numbers of a graph input, and what it reads of them."""
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
    if node.op_type == "Identity" or (node.op_type == "Cast" and node.attribute[0].i in WIDE):
        return handed
    if node.op_type in ARRANGE:
        return replace(handed, inplace=False)
    if node.op_type in ("Add", "Sub"):
        other = _constant(tensors, node.input[1 - place])
        if other is None or len(other) != 1 or other[0] != int(other[0]):
            return None
        added = int(other[0]) if node.op_type == "Add" else -int(other[0])
        return replace(handed, offset=handed.offset + added)
    return _sliced(handed, node, tensors) if node.op_type == "Slice" else None


def _sliced(handed: _Handed, node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> _Handed | None:
    """The numbers that a Slice with known bounds and steps of 1 takes."""
    bounds = [_constant(tensors, name) for name in node.input[1:]]
    if not handed.inplace or handed.region is None or len(bounds) < 2 or bounds[0] is None or bounds[1] is None:
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
