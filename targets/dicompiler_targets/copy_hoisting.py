"""Hoisting of data movement out of segments.

A segment's Slice, Concat and Identity nodes at its inputs and outputs become strided copies, which the runtime makes
itself. The engine would take 3 to 10 µs for each such node, however little it copies. Without them, tiles of equal
shape share a model, and no tensor is stored twice for a Slice.

Segment → HoistedSegment: the segment without these nodes, and the pieces that its inputs and outputs consist of.

    x[0:5] → Conv → y          ⇒   copy rows 0..5 of x into the model's input; Conv
    a, b → Concat → Relu → y   ⇒   copy a, then b behind it, into the model's input; Relu
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import Region, Segment, Shape, TensorSpec
from dicompiler.plugin_api.onnx import is_placeholder, raw_nbytes
from dicompiler.plugin_api.regions import full_region, is_empty, with_interval

BoxStart = tuple[Sequence[int], Sequence[int]]
"""A tensor that contains a box: its shape, and the box's start."""
MAX_AXES = 64
"""An upper bound of the number of axes of a tensor."""


@dataclass(frozen=True)
class StridedCopy:
    """A copy of blocks of contiguous bytes from one tensor to another, repeated by nested loops.

    Attributes:
        source: Name of a tensor that the device holds, or the number of one of the model's outputs.
        target: Name of a tensor that the device holds, or the number of one of the model's inputs.
        source_offset: Offset of the first byte in the source.
        target_offset: Offset of the first byte in the target.
        run_bytes: Bytes of a block.
        loops: Nested loops, the outermost first: (count, stride in the source, stride in the target), in bytes.
    """

    source: str | int
    target: str | int
    source_offset: int
    target_offset: int
    run_bytes: int
    loops: tuple[tuple[int, int, int], ...]

    @property
    def end_offsets(self) -> tuple[int, int]:
        """The first offsets behind all copied bytes: (in the source, in the target)."""
        source_end, target_end = self.source_offset + self.run_bytes, self.target_offset + self.run_bytes
        for count, source_stride, target_stride in self.loops:
            source_end += (count - 1) * source_stride
            target_end += (count - 1) * target_stride
        return source_end, target_end


@dataclass(frozen=True)
class AssemblyPiece:
    """A box of one tensor that is a part of another tensor, in ONNX's order of axes.

    Attributes:
        source: Name of the tensor that the box is taken from.
        source_start: Start of the box in that tensor.
        target_start: Start of the box in the assembled tensor.
        extent: Extent of the box.
    """

    source: str
    source_start: Shape
    target_start: Shape
    extent: Shape


@dataclass(frozen=True)
class Assembly:
    """A tensor that is assembled from pieces.

    Attributes:
        shape: Shape of the tensor.
        dtype: Its type, an onnx.TensorProto.DataType.
        pieces: The pieces.
    """

    shape: Shape
    dtype: int
    pieces: tuple[AssemblyPiece, ...]

    def is_identity(self, name: str) -> bool:
        """Return True if it is exactly the tensor of that name."""
        zero = (0,) * len(self.shape)
        return self.pieces == (AssemblyPiece(name, zero, zero, self.shape),)


@dataclass(frozen=True)
class HoistedSegment:
    """A segment without its data movement, which has been hoisted.

    Attributes:
        segment: The rest, which the model computes; None if the segment only moves data.
        input_assemblies: For each input of the model, in order, the pieces of tensors that the device holds.
        output_assemblies: For each output of the whole segment, the pieces of tensors that the device holds and of
            the model's outputs.
        values: Inputs and outputs of the whole segment and of the model.
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
        """The input assemblies that need a copy."""
        assemblies = self.input_assemblies.items()
        return {name: assembly for name, assembly in assemblies if not assembly.is_identity(name)}

    @property
    def assembled_outputs(self) -> Mapping[str, Assembly]:
        """The output assemblies that need a copy."""
        assemblies = self.output_assemblies.items()
        return {name: assembly for name, assembly in assemblies if not assembly.is_identity(name)}


def hoist_copies(
    segment: Segment, dtypes: Container[int], max_axes: int = MAX_AXES, kept_outputs: Collection[str] = ()
) -> HoistedSegment:
    """Hoist the nodes at a segment's inputs and outputs that only move data.

    The segment stays as it is if an input or output has no static shape or none of the types, or if it has control
    flow, because inner graphs may read any tensor.

    Args:
        segment: The segment.
        dtypes: Element types of tensors that can be copied (onnx.TensorProto.DataType).
        max_axes: Maximum number of axes of tensors that can be copied.
        kept_outputs: Tensors that the model must compute.
    """
    nodes = segment.model.graph.node
    if any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute):
        return HoistedSegment(segment, {}, {}, {})
    graph = onnx.shape_inference.infer_shapes(segment.model).graph
    infos = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    identities = {
        name: identity for name, value in infos.items() if (identity := _make_identity(value, dtypes)) is not None
    }
    if not all(name in identities for name in (*segment.inputs, *segment.outputs)):
        return HoistedSegment(segment, {}, {}, {})
    from_inputs, to_outputs = _find_assemblies(segment, identities, max_axes, kept_outputs)
    inner = [node for node in nodes if node.output[0] not in from_inputs and node.output[0] not in to_outputs]
    output_assemblies = {name: {**identities, **from_inputs, **to_outputs}[name] for name in segment.outputs}
    read = dict.fromkeys(name for node in inner for name in node.input)
    input_assemblies = {name: from_inputs[name] for name in read if name in from_inputs}
    sources = [piece.source for assembly in output_assemblies.values() for piece in assembly.pieces]
    outputs = tuple(dict.fromkeys(name for name in sources if name not in segment.inputs))
    rest: Segment | None = segment
    if len(inner) < len(nodes):
        rest = _make_inner_segment(segment, inner, input_assemblies, outputs, infos) if inner else None
    else:
        input_assemblies = {name: from_inputs[name] for name in segment.inputs}
    ends = dict.fromkeys((*segment.inputs, *segment.outputs, *input_assemblies, *outputs))
    values = {name: TensorSpec(name, identities[name].dtype, identities[name].shape) for name in ends}
    return HoistedSegment(rest, input_assemblies, output_assemblies, values)


def make_copies(
    target: str | int, assembly: Assembly, values: Mapping[str, TensorSpec], order: Sequence[int] | None = None
) -> tuple[StridedCopy, ...]:
    """Return the copies that assemble a tensor.

    Args:
        target: The tensor; see `StridedCopy.target`.
        assembly: Its pieces.
        values: The tensors that the pieces are taken from, by name.
        order: Order of the axes in memory, if it is not ONNX's.
    """
    itemsize = raw_nbytes(assembly.dtype, (1,))

    def permute(entries: Shape) -> Shape:
        return entries if order is None else tuple(entries[axis] for axis in order)

    def make_copy(piece: AssemblyPiece) -> StridedCopy:
        source = permute(values[piece.source].shape or ()), permute(piece.source_start)
        ends = source, (permute(assembly.shape), permute(piece.target_start))
        return make_box_copy(piece.source, target, ends, permute(piece.extent), itemsize)

    return tuple(map(make_copy, assembly.pieces))


def make_box_copy(
    source: str | int, target: str | int, ends: tuple[BoxStart, BoxStart], extent: Shape, itemsize: int
) -> StridedCopy:
    """Return the copy of a box, with as few loops as possible.

    Args:
        source: See `StridedCopy.source`.
        target: See `StridedCopy.target`.
        ends: Shape and start of the box in the source, and in the target.
        extent: Extent of the box.
        itemsize: Bytes of an element.
    """
    strides = [_get_strides(shape, itemsize) for shape, _ in ends]
    offsets = [sum(map(int.__mul__, own, start)) for own, (_, start) in zip(strides, ends, strict=True)]
    # Starts with a loop over the bytes of one element. An axis that continues the outermost loop on both sides makes
    # that loop longer instead of adding one.
    loops = [(itemsize, 1, 1)]
    for count, source_stride, target_stride in reversed(list(zip(extent, *strides, strict=True))):
        outer_count, *outer_strides = loops[0]
        if count > 1 and [source_stride, target_stride] == [outer_count * stride for stride in outer_strides]:
            loops[0] = (outer_count * count, *outer_strides)
        elif count > 1:
            loops.insert(0, (count, source_stride, target_stride))
    *outer_loops, (run_bytes, _, _) = loops
    return StridedCopy(source, target, offsets[0], offsets[1], run_bytes, tuple(outer_loops))


def _get_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the stride of each axis in bytes."""
    return [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def find_slice_region(node: onnx.NodeProto, shape: Shape, constants: Mapping[str, NDArray[Any]]) -> Region | None:
    """Return the region that a Slice takes of its input; None if it has steps, is not constant, or is empty.

    Args:
        node: The Slice node.
        shape: Shape of its input.
        constants: Constants by name.
    """
    keys = ("starts", "ends", "axes", "steps")
    parameters: dict[str, list[int]] = {attribute.name: list(attribute.ints) for attribute in node.attribute}
    for key, name in zip(keys, node.input[1:], strict=False):
        if name and name not in constants:
            return None
        if name:
            parameters[key] = [int(number) for number in constants[name].reshape(-1)]
    if any(step != 1 for step in parameters.get("steps", [])):
        return None
    region = full_region(shape)
    axes = parameters.get("axes") or range(len(parameters["starts"]))
    for axis, start, end in zip(axes, parameters["starts"], parameters["ends"], strict=True):
        begin, stop, _ = slice(start, end).indices(shape[axis])
        region = with_interval(region, axis % len(shape), (begin, stop))
    return None if is_empty(region) else region


def _find_assemblies(
    segment: Segment, identities: Mapping[str, Assembly], max_axes: int, kept_outputs: Collection[str]
) -> tuple[dict[str, Assembly], dict[str, Assembly]]:
    """Return the tensors that are only moved from the inputs, and those that are only moved to the outputs."""
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in segment.model.graph.initializer
        if len(tensor.dims) < 2 and not is_placeholder(tensor)
    }
    from_inputs, rest = {name: identities[name] for name in segment.inputs}, list[onnx.NodeProto]()
    for node in segment.model.graph.node:
        moved = None
        if node.output[0] not in kept_outputs:
            moved = _assemble_node(node, from_inputs, constants, max_axes)
        if moved is None:
            rest.append(node)
        else:
            from_inputs[node.output[0]] = moved
    known = {**identities, **from_inputs}
    movable = {node.output[0] for node in rest if _assemble_node(node, known, constants, max_axes) is not None}
    hoistable = _find_hoistable_outputs(segment, rest, movable.difference(kept_outputs))
    known, to_outputs = {**from_inputs}, dict[str, Assembly]()
    for node in rest:
        moved = _assemble_node(node, known, constants, max_axes) if node.output[0] in hoistable else None
        if moved is not None:
            to_outputs[node.output[0]] = moved
        known |= {name: to_outputs.get(name) or identities[name] for name in node.output if name in identities}
    return from_inputs, to_outputs


def _make_identity(value: onnx.ValueInfoProto, dtypes: Container[int]) -> Assembly | None:
    """Return a tensor as an assembly of itself; None if it has no static shape, is empty, or has none of the types."""
    tensor_type = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in tensor_type.shape.dim)
    if not tensor_type.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor_type.shape.dim):
        return None
    if tensor_type.elem_type not in dtypes or 0 in shape:
        return None
    zero = (0,) * len(shape)
    return Assembly(shape, tensor_type.elem_type, (AssemblyPiece(value.name, zero, zero, shape),))


def _assemble_node(
    node: onnx.NodeProto, known: Mapping[str, Assembly], constants: Mapping[str, NDArray[Any]], max_axes: int
) -> Assembly | None:
    """Return the node's output as an assembly, if the node only moves known tensors; else None."""
    first = known.get(node.input[0]) if node.input and node.domain in ("", "ai.onnx") else None
    if first is None or len(first.shape) > max_axes:
        return None
    if node.op_type == "Identity":
        return first
    if node.op_type == "Slice":
        region = find_slice_region(node, first.shape, constants)
        return None if region is None else _slice_assembly(first, region)
    if node.op_type == "Concat" and all(name in known for name in node.input):
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        return _concat_assemblies([known[name] for name in node.input], axis)
    return None


def _slice_assembly(assembly: Assembly, region: Region) -> Assembly:
    pieces = []
    for piece in assembly.pieces:
        low = [max(start, begin) for start, (begin, _) in zip(piece.target_start, region, strict=True)]
        ends = zip(piece.target_start, piece.extent, region, strict=True)
        high = [min(start + count, stop) for start, count, (_, stop) in ends]
        if all(begin < end for begin, end in zip(low, high, strict=True)):
            starts = zip(piece.source_start, low, piece.target_start, strict=True)
            source_start = tuple(source + begin - target for source, begin, target in starts)
            target_start = tuple(begin - start for begin, (start, _) in zip(low, region, strict=True))
            extent = tuple(end - begin for begin, end in zip(low, high, strict=True))
            pieces.append(AssemblyPiece(piece.source, source_start, target_start, extent))
    return Assembly(tuple(stop - start for start, stop in region), assembly.dtype, tuple(pieces))


def _concat_assemblies(parts: Sequence[Assembly], axis: int) -> Assembly:
    shape = list(parts[0].shape)
    axis %= len(shape)
    shape[axis], pieces = 0, []
    for part in parts:
        for piece in part.pieces:
            start = tuple(n + shape[axis] if a == axis else n for a, n in enumerate(piece.target_start))
            pieces.append(replace(piece, target_start=start))
        shape[axis] += part.shape[axis]
    return Assembly(tuple(shape), parts[0].dtype, tuple(pieces))


def _find_hoistable_outputs(segment: Segment, nodes: Sequence[onnx.NodeProto], movable: Collection[str]) -> set[str]:
    """Return the tensors that are only moved before they become outputs of the segment.

    Their sources must not be read by other nodes of the segment, unless they are outputs too. Otherwise, a source
    would have to be stored for longer.

    Args:
        segment: The segment.
        nodes: Its nodes.
        movable: Outputs of nodes that only move data.
    """
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node.output[0])
    computed = {name for node in nodes for name in node.output}
    hoistable = {node.output[0]: node for node in nodes if node.output[0] in movable}

    def can_hoist(name: str, node: onnx.NodeProto) -> bool:
        sources = [source for source in node.input if source in computed and source not in segment.outputs]
        return all(reader in hoistable for read in (name, *sources) for reader in readers.get(read, []))

    while blocked := [name for name, node in hoistable.items() if not can_hoist(name, node)]:
        for name in blocked:
            del hoistable[name]
    return set(hoistable)


def _make_inner_segment(
    segment: Segment,
    nodes: Sequence[onnx.NodeProto],
    input_assemblies: Mapping[str, Assembly],
    outputs: Sequence[str],
    infos: Mapping[str, onnx.ValueInfoProto],
) -> Segment:
    """Return the nodes that are left to be computed as a segment."""
    source, proto = segment.model, onnx.ModelProto()
    proto.CopyFrom(source)
    del proto.graph.node[:], proto.graph.input[:], proto.graph.output[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, assembly.dtype, assembly.shape)
        for name, assembly in input_assemblies.items()
    )
    proto.graph.output.extend(infos[name] for name in outputs)
    read = {name for node in nodes for name in node.input}
    proto.graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in read)
    return Segment(segment.name, segment.device, proto, tuple(input_assemblies), tuple(outputs))
