"""What a segment only moves is done by who runs it: its inputs are cut and joined on their way into the model, its
outputs on their way out. An engine takes 3 to 10 µs for such a node however little it copies; and so tiles of equal
shape share a model, and nothing is held twice for a Slice.

Segment → Peeled: the segment without those nodes, and for its ends the boxes to be copied.

x[0:5] → Conv → y          ⇒   copy rows 0..5 of x into the model's input; Conv
a, b → Concat → Relu → y   ⇒   copy a, then b behind it; Relu
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import Region, Segment, Shape, TensorSpec
from dicompiler.plugin_api.onnx import is_placeholder, raw_nbytes
from dicompiler_targets.boxes import StridedCopy, make_box_copy
from dicompiler_targets.slicing import find_slice_region

MAX_AXES = 64
"""More axes than tensors have."""


@dataclass(frozen=True)
class AssemblyPiece:
    """A box of one tensor at its place in another; starts and extents in ONNX's order of axes."""

    source: str
    source_start: Shape
    target_start: Shape
    extent: Shape


@dataclass(frozen=True)
class Assembly:
    """A tensor put together of pieces. `dtype`: an onnx.TensorProto.DataType."""

    shape: Shape
    dtype: int
    pieces: tuple[AssemblyPiece, ...]

    def is_identity(self, name: str) -> bool:
        """Whether it is just the tensor of that name."""
        zero = (0,) * len(self.shape)
        return self.pieces == (AssemblyPiece(name, zero, zero, self.shape),)


@dataclass(frozen=True)
class HoistedSegment:
    """segment: what a model computes, under the name of the whole; None where all is moved. gathers: of each input of
    the model, in order, what it is put together of, all of it held by the device. places: of each output of the whole
    segment the same, of what the device holds and of the model's outputs. values: the ends of the whole segment, and
    the model's outputs.
    """

    segment: Segment | None
    input_assemblies: Mapping[str, Assembly]
    output_assemblies: Mapping[str, Assembly]
    values: Mapping[str, TensorSpec]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model's inputs."""
        return () if self.segment is None else self.segment.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The model's outputs."""
        return () if self.segment is None else self.segment.outputs

    @property
    def assembled_inputs(self) -> Mapping[str, Assembly]:
        """The gathers that are not just an input."""
        return {name: one for name, one in self.input_assemblies.items() if not one.is_identity(name)}

    @property
    def assembled_outputs(self) -> Mapping[str, Assembly]:
        """The places that are not just an output of the model."""
        return {name: one for name, one in self.output_assemblies.items() if not one.is_identity(name)}


def hoist_copies(
    segment: Segment, dtypes: Container[int], max_axes: int = MAX_AXES, kept_outputs: Collection[str] = ()
) -> HoistedSegment:
    """The segment without the nodes that only move what it is given, or what it gives away; as it is where the shape of
    an end is not static or its type is none of `dtypes`, and with control flow, whose inner graphs may read anything.
    axes: at most so many has what is moved. stay: outputs that the model is to make."""
    nodes = segment.model.graph.node
    if any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute):
        return HoistedSegment(segment, {}, {}, {})
    graph = onnx.shape_inference.infer_shapes(segment.model).graph
    infos = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    wholes = {name: whole for name, value in infos.items() if (whole := _make_identity(value, dtypes)) is not None}
    if not all(name in wholes for name in (*segment.inputs, *segment.outputs)):
        return HoistedSegment(segment, {}, {}, {})
    given, made = _find_assemblies(segment, wholes, max_axes, kept_outputs)
    inner = [node for node in nodes if node.output[0] not in given and node.output[0] not in made]
    places = {name: {**wholes, **given, **made}[name] for name in segment.outputs}
    gathers = {n: given[n] for n in dict.fromkeys(n for node in inner for n in node.input) if n in given}
    sources = [piece.source for place in places.values() for piece in place.pieces]
    outputs = tuple(dict.fromkeys(name for name in sources if name not in segment.inputs))
    left: Segment | None = segment
    if len(inner) < len(nodes):
        left = _make_inner_segment(segment, inner, gathers, outputs, infos) if inner else None
    else:
        gathers = {name: given[name] for name in segment.inputs}
    ends = dict.fromkeys((*segment.inputs, *segment.outputs, *gathers, *outputs))
    return HoistedSegment(left, gathers, places, {n: TensorSpec(n, wholes[n].dtype, wholes[n].shape) for n in ends})


def _find_assemblies(
    segment: Segment, wholes: Mapping[str, Assembly], axes: int, stay: Collection[str]
) -> tuple[dict[str, Assembly], dict[str, Assembly]]:
    """What is given, with all that is only moved of it; and what is only moved of what the rest makes."""
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in segment.model.graph.initializer
        if len(tensor.dims) < 2 and not is_placeholder(tensor)
    }
    given, rest = {name: wholes[name] for name in segment.inputs}, list[onnx.NodeProto]()
    for node in segment.model.graph.node:
        moved = None if node.output[0] in stay else _assemble_node(node, given, constants, axes)
        if moved is None:
            rest.append(node)
        else:
            given[node.output[0]] = moved
    held = {**wholes, **given}
    movable = {n.output[0] for n in rest if _assemble_node(n, held, constants, axes) is not None}.difference(stay)
    last = _find_hoistable_outputs(segment, rest, movable)
    held, made = {**given}, dict[str, Assembly]()
    for node in rest:
        moved = _assemble_node(node, held, constants, axes) if node.output[0] in last else None
        if moved is not None:
            made[node.output[0]] = moved
        held |= {name: made.get(name) or wholes[name] for name in node.output if name in wholes}
    return given, made


def make_copies(
    target: str | int, assembly: Assembly, values: Mapping[str, TensorSpec], order: Sequence[int] | None = None
) -> tuple[StridedCopy, ...]:
    """What is to be copied for an assembly. values: its sources; order: of the axes in memory, where that is not
    ONNX's."""
    itemsize = raw_nbytes(assembly.dtype, (1,))

    def permuted(entries: Shape) -> Shape:
        return entries if order is None else tuple(entries[axis] for axis in order)

    def box(piece: AssemblyPiece) -> StridedCopy:
        source = permuted(values[piece.source].shape or ()), permuted(piece.source_start)
        ends = source, (permuted(assembly.shape), permuted(piece.target_start))
        return make_box_copy(piece.source, target, ends, permuted(piece.extent), itemsize)

    return tuple(map(box, assembly.pieces))


def _make_identity(value: onnx.ValueInfoProto, dtypes: Container[int]) -> Assembly | None:
    """A tensor as itself; None where its shape is not static, it is empty, or its type is none of these."""
    kind = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in kind.shape.dim)
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    if kind.elem_type not in dtypes or 0 in shape:
        return None
    zero = (0,) * len(shape)
    return Assembly(shape, kind.elem_type, (AssemblyPiece(value.name, zero, zero, shape),))


def _assemble_node(
    node: onnx.NodeProto, known: Mapping[str, Assembly], constants: Mapping[str, NDArray[Any]], axes: int
) -> Assembly | None:
    """What a node makes, if it only moves what is known; else None."""
    first = known.get(node.input[0]) if node.input and node.domain in ("", "ai.onnx") else None
    if first is None or len(first.shape) > axes:
        return None
    if node.op_type == "Identity":
        return first
    if node.op_type == "Slice":
        region = find_slice_region(node, first.shape, constants)
        return None if region is None else _slice_assembly(first, region)
    if node.op_type == "Concat" and all(name in known for name in node.input):
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        return _concat_assemblies([known[name] for name in node.input], axis)
    return None


def _slice_assembly(whole: Assembly, ranges: Region) -> Assembly:
    """A box of an assembly, from the pieces that it touches."""
    pieces = []
    for piece in whole.pieces:
        low = [max(to, start) for to, (start, _) in zip(piece.target_start, ranges, strict=True)]
        high = [min(to + n, stop) for to, n, (_, stop) in zip(piece.target_start, piece.extent, ranges, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            start = tuple(s + a - to for s, a, to in zip(piece.source_start, low, piece.target_start, strict=True))
            to = tuple(a - begin for a, (begin, _) in zip(low, ranges, strict=True))
            pieces.append(AssemblyPiece(piece.source, start, to, tuple(b - a for a, b in zip(low, high, strict=True))))
    return Assembly(tuple(stop - start for start, stop in ranges), whole.dtype, tuple(pieces))


def _concat_assemblies(parts: Sequence[Assembly], axis: int) -> Assembly:
    """Assemblies side by side."""
    shape = list(parts[0].shape)
    axis %= len(shape)
    shape[axis], pieces = 0, []
    for part in parts:
        for piece in part.pieces:
            to = tuple(n + shape[axis] if a == axis else n for a, n in enumerate(piece.target_start))
            pieces.append(replace(piece, target_start=to))
        shape[axis] += part.shape[axis]
    return Assembly(tuple(shape), parts[0].dtype, tuple(pieces))


def _find_hoistable_outputs(segment: Segment, nodes: Sequence[onnx.NodeProto], movable: Collection[str]) -> set[str]:
    """What is only moved before it leaves the segment, out of tensors that nothing else needs there, or that leave it
    too: a tensor that would be held for longer stays as it is. movable: outputs of nodes that only move."""
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node.output[0])
    inside = {name for node in nodes for name in node.output}
    moves = {node.output[0]: node for node in nodes if node.output[0] in movable}

    def can(name: str, node: onnx.NodeProto) -> bool:
        sources = [source for source in node.input if source in inside and source not in segment.outputs]
        return all(reader in moves for read in (name, *sources) for reader in readers.get(read, []))

    while stays := [name for name, node in moves.items() if not can(name, node)]:
        for name in stays:
            del moves[name]
    return set(moves)


def _make_inner_segment(
    segment: Segment,
    nodes: Sequence[onnx.NodeProto],
    gathers: Mapping[str, Assembly],
    outputs: Sequence[str],
    infos: Mapping[str, onnx.ValueInfoProto],
) -> Segment:
    """What is left to be computed, as a segment of its own."""
    source, proto = segment.model, onnx.ModelProto()
    proto.CopyFrom(source)
    del proto.graph.node[:], proto.graph.input[:], proto.graph.output[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    given = [onnx.helper.make_tensor_value_info(name, a.dtype, a.shape) for name, a in gathers.items()]
    proto.graph.input.extend(given)
    proto.graph.output.extend(infos[name] for name in outputs)
    read = {name for node in nodes for name in node.input}
    proto.graph.initializer.extend(t for t in source.graph.initializer if t.name in read)
    return Segment(segment.name, segment.device, proto, tuple(gathers), tuple(outputs))
