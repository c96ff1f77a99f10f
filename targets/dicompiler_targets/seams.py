"""What segments only copy where they meet: joins of what they read, slices of what they make for other devices.

An engine takes 3 to 10 µs for such a node however little it copies; a runtime writes what has come straight into its
place, and cuts what leaves out of the memory in which it lies.

In: a device of a Program. Out: its segments without those nodes, and beside each what is to be copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from dicompiler.plugin_api import DeviceProgram, Program, Region, Segment, Value, full, shape_of, sized, with_interval
from dicompiler_targets.boxes import Copy, End, boxed
from dicompiler_targets.files import TYPES, Json, value_document
from dicompiler_targets.slicing import sliced


@dataclass(frozen=True)
class Piece:
    """A region of an input, and where it goes."""

    whole: Value
    cut: Region
    region: Region

    @property
    def document(self) -> Json:
        """As manifests have it."""
        shape = list(self.whole.shape or ())
        return {"name": self.whole.name, "shape": shape, "cut": _listed(self.cut), "region": _listed(self.region)}

    def into(self, value: Value) -> Copy:
        """What is copied of it into the tensor that its region is of."""
        ends = (_end(self.whole, self.cut), _end(value, self.region))
        return boxed(self.whole.name, value.name, ends, shape_of(self.cut), _width(value))


@dataclass(frozen=True)
class Join:
    """A tensor that the segment's model reads, put together of inputs before it runs."""

    value: Value
    pieces: tuple[Piece, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What puts it together."""
        return tuple(piece.into(self.value) for piece in self.pieces)


@dataclass(frozen=True)
class Cut:
    """A tensor for other devices: a region of one of the outputs of the segment's model, once it has run."""

    name: str
    whole: Value
    region: Region

    @property
    def copy(self) -> Copy:
        """What makes it."""
        value = Value(self.name, self.whole.dtype, shape_of(self.region))
        return Piece(self.whole, self.region, full(shape_of(self.region))).into(value)


@dataclass(frozen=True)
class Seam:
    """A segment: its inputs and outputs as they are in the program, its model without what is copied at its ends."""

    segment: Segment
    joins: tuple[Join, ...] = ()
    cuts: tuple[Cut, ...] = ()

    @property
    def document(self) -> Json:
        """As manifests have it; empty where nothing is copied."""
        joins = [value_document(j.value) | {"pieces": [piece.document for piece in j.pieces]} for j in self.joins]
        cuts = [{"name": c.name, "whole": value_document(c.whole), "region": _listed(c.region)} for c in self.cuts]
        return ({"joins": joins} if joins else {}) | ({"cuts": cuts} if cuts else {})

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the model reads, in its order."""
        graph = self.segment.model.graph
        if not self.joins:
            return self.segment.inputs
        constants = {tensor.name for tensor in graph.initializer}
        return tuple(value.name for value in graph.input if value.name not in constants)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the model makes, in the segment's order."""
        gone = {cut.name for cut in self.cuts}
        return tuple(name for name in self.segment.outputs if name not in gone)


def bare(program: Program, index: int, ends: Sequence[Sequence[Seam]]) -> Program:
    """The program with the segments of the device at that place as its sessions have them. ends: role by role."""
    roles = [
        replace(role, devices=tuple(_bare(one, own) if i == index else one for i, one in enumerate(role.devices)))
        for role, own in zip(program.roles, ends, strict=True)
    ]
    return replace(roles[0], others=tuple(roles[1:]))


def _bare(device: DeviceProgram, ends: Sequence[Seam]) -> DeviceProgram:
    return replace(device, segments=tuple(seam.segment for seam in ends))


def seams(device: DeviceProgram) -> tuple[Seam, ...]:
    """Of all segments of a device, in order. Those that do nothing but copy stay as they are, and those with control
    flow, whose inner graphs may read anything."""
    stay = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    stay |= {state.made for state in device.states}
    return tuple(_seam(segment, stay) for segment in device.segments)


def _listed(region: Region) -> list[list[int]]:
    return [list(interval) for interval in region]


def _end(value: Value, region: Region) -> End:
    return value.shape or (), [begin for begin, _ in region]


def _width(value: Value) -> int:
    """Bytes of an element."""
    return value.nbytes // math.prod(value.shape or ())


def _seam(segment: Segment, stay: Collection[str]) -> Seam:
    """stay: the tensors that are no cuts, because something on the device needs them."""
    graph = segment.model.graph
    if any(attribute.HasField("g") or attribute.graphs for node in graph.node for attribute in node.attribute):
        return Seam(segment)
    if not all(sized(value.type.tensor_type.elem_type) for value in (*graph.input, *graph.output)):
        return Seam(segment)  # words and what is no tensor go in and out in another way
    cuts = _cuts(segment, stay)
    joins, joining = _joins(segment)
    gone = joining | {cut.name for cut in cuts}
    nodes = [node for node in graph.node if node.output[0] not in gone]
    if not gone or not nodes:
        return Seam(segment)
    return Seam(replace(segment, model=_left(segment.model, nodes, joins, gone)), joins, cuts)


def _left(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], joins: Sequence[Join], gone: Collection[str]
) -> onnx.ModelProto:
    """The model of these nodes, which reads what is joined."""
    left = onnx.ModelProto()
    left.CopyFrom(model)
    read = {name for node in nodes for name in node.input} | {value.name for value in model.graph.output}
    joined = [onnx.helper.make_tensor_value_info(j.value.name, j.value.dtype, j.value.shape) for j in joins]
    for field, kept in (
        (left.graph.node, nodes),
        (left.graph.input, [*(value for value in model.graph.input if value.name in read), *joined]),
        (left.graph.output, [value for value in model.graph.output if value.name not in gone]),
        (left.graph.initializer, [tensor for tensor in model.graph.initializer if tensor.name in read]),
    ):
        del field[:]
        field.extend(kept)
    return left


def _known(values: Sequence[onnx.ValueInfoProto]) -> dict[str, Value]:
    """Those of which a runtime knows every byte before they are there."""
    found = dict[str, Value]()
    for value in values:
        kind = value.type.tensor_type
        shape = tuple(d.dim_value for d in kind.shape.dim)
        named = onnx.TensorProto.DataType.Name(kind.elem_type) in TYPES
        if named and kind.HasField("shape") and shape and min(shape) > 0:
            found[value.name] = Value(value.name, kind.elem_type, shape)
    return found


def _cuts(segment: Segment, stay: Collection[str]) -> tuple[Cut, ...]:
    """Slices that are made of outputs, and for others alone."""
    graph = segment.model.graph
    made = _known(graph.output)
    numbers = _constants(graph)
    read = {name for node in graph.node for name in node.input}
    found = []
    for node in graph.node:
        name = node.output[0]
        if node.op_type != "Slice" or node.domain or name not in made or name in stay or name in read:
            continue
        region = sliced(node, made[node.input[0]].shape or (), numbers) if node.input[0] in made else None
        if region is not None:
            found.append(Cut(name, made[node.input[0]], region))
    names = {cut.name for cut in found}
    return tuple(cut for cut in found if cut.whole.name not in names)


def _constants(graph: onnx.GraphProto) -> dict[str, NDArray[Any]]:
    """What stands in the model of where its Slices cut."""
    asked = {name for node in graph.node if node.op_type == "Slice" for name in node.input[1:]}
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in asked}


def _joins(segment: Segment) -> tuple[tuple[Join, ...], set[str]]:
    """Slices and Concats of nothing but inputs, those of one tensor together, and all tensors that are not made any
    more."""
    graph = segment.model.graph
    numbers, initializers = _constants(graph), {tensor.name for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    given = {name: value for name, value in _known(graph.input).items() if name not in initializers}
    joins: dict[str, Join] = {name: _taken(name, v, full(v.shape or ())) for name, v in given.items()}
    outputs = {value.name for value in graph.output}
    inner = set(given)
    for node in graph.node:
        name = node.output[0]
        if node.domain or name in outputs:
            continue
        join = None
        if node.op_type == "Slice" and node.input[0] in given:
            whole = given[node.input[0]]
            region = sliced(node, whole.shape or (), numbers)
            join = None if region is None else _taken(name, whole, region)
        elif node.op_type == "Concat" and all(n in given or (n in joins and readers[n] == 1) for n in node.input):
            join = _side_by_side(name, [joins[one] for one in node.input], node.attribute[0].i)
            inner |= set(node.input)
        if join is not None:
            joins[name] = join
    return tuple(join for name, join in joins.items() if name not in inner), joins.keys() - given.keys()


def _taken(name: str, whole: Value, cut: Region) -> Join:
    """What one input, or a region of it, becomes."""
    shape = shape_of(cut)
    return Join(Value(name, whole.dtype, shape), (Piece(whole, cut, full(shape)),))


def _side_by_side(name: str, joins: Sequence[Join], axis: int) -> Join:
    """The join of several along an axis."""
    shape = list(joins[0].value.shape or ())
    axis %= len(shape)
    pieces, end = list[Piece](), 0
    for join in joins:
        for piece in join.pieces:
            first, last = piece.region[axis]
            pieces.append(replace(piece, region=with_interval(piece.region, axis, (end + first, end + last))))
        end += (join.value.shape or ())[axis]
    shape[axis] = end
    return Join(Value(name, joins[0].value.dtype, tuple(shape)), tuple(pieces))
