"""Files that several targets write: segments (ONNX submodels), and one file of weights for each device.

    segments and weights of a Program ⇒ files; the same program gives the same bytes

A device runs a segment in one call of its engine. Slice, Concat and Identity nodes at its inputs and outputs only move
data. They are hoisted: removed from the model, and the target's runtime makes strided copies of bytes instead. The
engine would take 3 to 10 µs for each of these nodes. Without them, tiles of equal shape share a model.

Segment ⇒ HoistedSegment: the segment without these nodes, and the pieces that its inputs and outputs consist of.

    x[0:5] → Conv → y          ⇒   copy rows 0..5 of x into the model's input; Conv
    a, b → Concat → Relu → y   ⇒   copy a, then b behind it, into the model's input; Relu
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from dicompiler.plugin_api import DeviceProgram, Program, Region, Segment, Shape, TensorSpec
from dicompiler.plugin_api.artifacts import (
    SENDABLE_TYPES,
    CopyFunction,
    EngineFiles,
    Json,
    SegmentCall,
    describe_value,
    make_file_record,
)
from dicompiler.plugin_api.onnx import Weight, is_placeholder, raw_nbytes
from dicompiler.plugin_api.regions import full_region, intersect, is_empty, region_shape, with_interval
from dicompiler_targets.bundled_runtime import WEIGHTS_FILE

MAX_AXES = 64
"""Default limit for the number of axes of copied tensors, which no tensor exceeds."""


@dataclass(frozen=True)
class StridedCopy:
    """A copy of blocks of contiguous bytes from one tensor to another, repeated by nested loops.

    Attributes:
        source: The tensor that is read: the name of a stored tensor, or the index of one of the model's outputs.
        target: The tensor that is written: the name of a stored tensor, or the index of one of the model's inputs.
        source_offset: Offset of the first copied byte in the source tensor.
        target_offset: Offset of the first copied byte in the target tensor.
        run_bytes: Size of a block in bytes.
        loops: A tuple (count, source stride in bytes, target stride in bytes) for each loop, the outermost loop first.
    """

    source: str | int
    target: str | int
    source_offset: int
    target_offset: int
    run_bytes: int
    loops: tuple[tuple[int, int, int], ...]

    @property
    def end_offsets(self) -> tuple[int, int]:
        """Offsets of the end of the bytes read in the source, and of those written in the target."""
        source_end, target_end = self.source_offset + self.run_bytes, self.target_offset + self.run_bytes
        for count, source_stride, target_stride in self.loops:
            source_end += (count - 1) * source_stride
            target_end += (count - 1) * target_stride
        return source_end, target_end


@dataclass(frozen=True)
class CopiedRegion:
    """A region of a source tensor that is copied to a region of another tensor.

    Attributes:
        source: Name of the source tensor.
        source_start: First index of the region in the source tensor, for each axis in ONNX's order.
        target_start: First index of the region in the other tensor, for each axis.
        extent: Extent of the region, for each axis.
    """

    source: str
    source_start: Shape
    target_start: Shape
    extent: Shape


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor that consists of copies of regions of other tensors.

    Attributes:
        shape: Shape of the tensor.
        dtype: Its element type, an onnx.TensorProto.DataType.
        pieces: The regions of other tensors. Together their copies cover the tensor.
    """

    shape: Shape
    dtype: int
    pieces: tuple[CopiedRegion, ...]

    def is_identity(self, name: str) -> bool:
        """Return True if this tensor is a copy of the whole tensor `name`, so that no copy is needed."""
        return self.pieces == _make_whole_tensor(name, self.shape, self.dtype).pieces


@dataclass(frozen=True)
class HoistedSegment:
    """A segment (ONNX submodel) without the data movement (Slice, Concat, Identity) at its inputs and outputs.

    Attributes:
        segment: The remaining segment, which computes; None if the original segment only moves data.
        input_tensors: For each input of the remaining model: the regions of the original segment's inputs that it
            consists of.
        output_tensors: For each output of the original segment: the regions of its inputs or of the remaining model's
            outputs that it consists of.
        values: Type and shape of the inputs and outputs of the original segment and of the remaining model, by name.
    """

    segment: Segment | None
    input_tensors: Mapping[str, CopiedTensor]
    output_tensors: Mapping[str, CopiedTensor]
    values: Mapping[str, TensorSpec]

    @property
    def inputs(self) -> tuple[str, ...]:
        return () if self.segment is None else self.segment.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return () if self.segment is None else self.segment.outputs

    @property
    def copied_inputs(self) -> dict[str, CopiedTensor]:
        """The remaining model's inputs that the runtime assembles by copies, by name."""
        return _select_copied(self.input_tensors)

    @property
    def copied_outputs(self) -> dict[str, CopiedTensor]:
        """The original segment's outputs that the runtime assembles by copies, by name."""
        return _select_copied(self.output_tensors)


def _select_copied(tensors: Mapping[str, CopiedTensor]) -> dict[str, CopiedTensor]:
    return {name: copied for name, copied in tensors.items() if not copied.is_identity(name)}


def hoist_copies(
    segment: Segment, dtypes: Container[int], max_axes: int = MAX_AXES, kept_outputs: Collection[str] = ()
) -> HoistedSegment:
    """Move the Slice, Concat and Identity nodes at a segment's inputs and outputs out of its model.

    The segment is returned unchanged if the runtime cannot copy one of its inputs or outputs, or if it has control
    flow.

    Args:
        segment: The segment (an ONNX submodel).
        dtypes: Element types of tensors that the runtime can copy (onnx.TensorProto.DataType).
        max_axes: Maximum number of axes of tensors that the runtime can copy.
        kept_outputs: Names of tensors that the model must still compute itself, because other segments or the network's
            outputs need them.
    """
    nodes = segment.model.graph.node
    if any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute):
        return HoistedSegment(segment, {}, {}, {})
    graph = onnx.shape_inference.infer_shapes(segment.model).graph
    infos = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    identities = _find_copyable_tensors(infos, dtypes)
    if not all(name in identities for name in (*segment.inputs, *segment.outputs)):
        return HoistedSegment(segment, {}, {}, {})
    from_inputs, to_outputs = _find_copied_tensors(segment, identities, max_axes, kept_outputs)
    inner = [node for node in nodes if node.output[0] not in from_inputs and node.output[0] not in to_outputs]
    output_tensors = {name: {**identities, **from_inputs, **to_outputs}[name] for name in segment.outputs}
    read = dict.fromkeys(name for node in inner for name in node.input)
    input_tensors = {name: from_inputs[name] for name in read if name in from_inputs}
    sources = [piece.source for copied in output_tensors.values() for piece in copied.pieces]
    outputs = tuple(dict.fromkeys(name for name in sources if name not in segment.inputs))
    rest: Segment | None = segment
    if len(inner) < len(nodes):
        rest = _make_inner_segment(segment, inner, input_tensors, outputs, infos) if inner else None
    else:
        input_tensors = {name: from_inputs[name] for name in segment.inputs}
    ends = dict.fromkeys((*segment.inputs, *segment.outputs, *input_tensors, *outputs))
    values = {name: TensorSpec(name, identities[name].dtype, identities[name].shape) for name in ends}
    return HoistedSegment(rest, input_tensors, output_tensors, values)


def _find_copyable_tensors(infos: Mapping[str, onnx.ValueInfoProto], dtypes: Container[int]) -> dict[str, CopiedTensor]:
    """Return, by name, each tensor with a known shape and an element type in `dtypes`, as a copy of itself."""
    found = {}
    for name, value in infos.items():
        tensor_type = value.type.tensor_type
        dims = tensor_type.shape.dim
        has_shape = tensor_type.HasField("shape") and all(dim.dim_value for dim in dims)
        if has_shape and tensor_type.elem_type in dtypes:
            found[name] = _make_whole_tensor(name, tuple(dim.dim_value for dim in dims), tensor_type.elem_type)
    return found


def make_copies(
    target: str | int, copied: CopiedTensor, values: Mapping[str, TensorSpec], order: Sequence[int] | None = None
) -> tuple[StridedCopy, ...]:
    """Return the copies that fill a tensor.

    Args:
        target: The tensor to fill: its name, or its index among the model's inputs or outputs.
        copied: The regions of other tensors that the tensor consists of.
        values: Type and shape of each source tensor, by name.
        order: The order of the axes in memory, if it is not the order of ONNX.
    """
    itemsize = raw_nbytes(copied.dtype, (1,))

    def permute(entries: Shape) -> Shape:
        return entries if order is None else tuple(entries[axis] for axis in order)

    def make_copy(piece: CopiedRegion) -> StridedCopy:
        source = permute(values[piece.source].shape or ()), permute(piece.source_start)
        ends = source, (permute(copied.shape), permute(piece.target_start))
        return make_box_copy(piece.source, target, ends, permute(piece.extent), itemsize)

    return tuple(map(make_copy, copied.pieces))


def make_box_copy(
    source: str | int,
    target: str | int,
    ends: Sequence[tuple[Sequence[int], Sequence[int]]],
    extent: Shape,
    itemsize: int,
) -> StridedCopy:
    """Return the copy of a region from one tensor to another, with as few loops as possible.

    Args:
        source: The tensor that is read: its name, or its index among the model's outputs.
        target: The tensor that is written: its name, or its index among the model's inputs.
        ends: For the source and then for the target: the tensor's shape, and the first index of the region in it.
        extent: Extent of the region.
        itemsize: Bytes of an element.
    """
    strides = [[itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))] for shape, _ in ends]
    offsets = [sum(map(int.__mul__, stride, start)) for stride, (_, start) in zip(strides, ends, strict=True)]
    # At first, the only loop copies one element. If an axis continues the outermost loop without a gap in both tensors,
    # that loop becomes longer; otherwise, the axis gets its own loop.
    loops = [(itemsize, 1, 1)]
    for count, source_stride, target_stride in reversed(list(zip(extent, *strides, strict=True))):
        outer_count, *outer_strides = loops[0]
        if count > 1 and [source_stride, target_stride] == [outer_count * stride for stride in outer_strides]:
            loops[0] = (outer_count * count, *outer_strides)
        elif count > 1:
            loops.insert(0, (count, source_stride, target_stride))
    *outer_loops, (run_bytes, _, _) = loops
    return StridedCopy(source, target, offsets[0], offsets[1], run_bytes, tuple(outer_loops))


def _find_slice_region(node: onnx.NodeProto, shape: Shape, constants: Mapping[str, NDArray[Any]]) -> Region | None:
    """Return the region of its input, a tensor of this `shape`, that a Slice node returns.

    The result is None if the region is empty, has steps other than 1, or depends on a tensor that is not in
    `constants`.
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


def _find_copied_tensors(
    segment: Segment, identities: Mapping[str, CopiedTensor], max_axes: int, kept_outputs: Collection[str]
) -> tuple[dict[str, CopiedTensor], dict[str, CopiedTensor]]:
    """Return the tensors that the runtime can copy before a segment's model runs, and those after it runs.

    The first ones are the segment's inputs, and results of Slice, Concat and Identity nodes after them. The others are
    results of such nodes before the segment's outputs. `identities` has the tensors that the runtime can copy.
    """
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in segment.model.graph.initializer
        if len(tensor.dims) < 2 and not is_placeholder(tensor)
    }
    from_inputs, rest = {name: identities[name] for name in segment.inputs}, list[onnx.NodeProto]()
    for node in segment.model.graph.node:
        moved = None
        if node.output[0] not in kept_outputs:
            moved = _find_copies_of_node(node, from_inputs, constants, max_axes)
        if moved is None:
            rest.append(node)
        else:
            from_inputs[node.output[0]] = moved
    known = {**identities, **from_inputs}
    movable = {node.output[0] for node in rest if _find_copies_of_node(node, known, constants, max_axes) is not None}
    hoistable = _find_hoistable_outputs(segment, rest, movable.difference(kept_outputs))
    known, to_outputs = {**from_inputs}, dict[str, CopiedTensor]()
    for node in rest:
        moved = _find_copies_of_node(node, known, constants, max_axes) if node.output[0] in hoistable else None
        if moved is not None:
            to_outputs[node.output[0]] = moved
        known |= {name: to_outputs.get(name) or identities[name] for name in node.output if name in identities}
    return from_inputs, to_outputs


def _make_whole_tensor(name: str, shape: Shape, dtype: int) -> CopiedTensor:
    zero = (0,) * len(shape)
    return CopiedTensor(shape, dtype, (CopiedRegion(name, zero, zero, shape),))


def _find_copies_of_node(
    node: onnx.NodeProto, known: Mapping[str, CopiedTensor], constants: Mapping[str, NDArray[Any]], max_axes: int
) -> CopiedTensor | None:
    """Return the copies that replace a node; None unless the node only moves elements of tensors in `known`."""
    first = known.get(node.input[0]) if node.input and node.domain in ("", "ai.onnx") else None
    if first is None or len(first.shape) > max_axes:
        return None
    if node.op_type == "Identity":
        return first
    if node.op_type == "Slice":
        region = _find_slice_region(node, first.shape, constants)
        return None if region is None else _slice_copied_tensor(first, region)
    if node.op_type == "Concat" and all(name in known for name in node.input):
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        return _concat_copied_tensors([known[name] for name in node.input], axis)
    return None


def _slice_copied_tensor(copied: CopiedTensor, region: Region) -> CopiedTensor:
    pieces = []
    for piece in copied.pieces:
        starts = zip(piece.target_start, piece.extent, strict=True)
        kept = intersect(region, tuple((start, start + count) for start, count in starts))
        if kept is not None:
            offsets = zip(piece.source_start, kept, piece.target_start, strict=True)
            source_start = tuple(source + begin - target for source, (begin, _), target in offsets)
            target_start = tuple(begin - start for (begin, _), (start, _) in zip(kept, region, strict=True))
            pieces.append(CopiedRegion(piece.source, source_start, target_start, region_shape(kept)))
    return CopiedTensor(region_shape(region), copied.dtype, tuple(pieces))


def _concat_copied_tensors(parts: Sequence[CopiedTensor], axis: int) -> CopiedTensor:
    shape = list(parts[0].shape)
    axis %= len(shape)
    shape[axis], pieces = 0, []
    for part in parts:
        for piece in part.pieces:
            start = tuple(n + shape[axis] if a == axis else n for a, n in enumerate(piece.target_start))
            pieces.append(replace(piece, target_start=start))
        shape[axis] += part.shape[axis]
    return CopiedTensor(tuple(shape), parts[0].dtype, tuple(pieces))


def _find_hoistable_outputs(segment: Segment, nodes: Sequence[onnx.NodeProto], movable: Collection[str]) -> set[str]:
    """Return the tensors that are only copied into segment outputs, so that they can be hoisted.

    `movable` has the outputs of all nodes that only move data. Such an output is not hoisted if a node that stays in
    the model reads it or its source, because the source would stay in memory for longer.
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
    input_tensors: Mapping[str, CopiedTensor],
    outputs: Sequence[str],
    infos: Mapping[str, onnx.ValueInfoProto],
) -> Segment:
    """Return the part of a segment that stays: a model of `nodes` with the given inputs and outputs."""
    source, proto = segment.model, onnx.ModelProto()
    proto.CopyFrom(source)
    del proto.graph.node[:], proto.graph.input[:], proto.graph.output[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, copied.dtype, copied.shape) for name, copied in input_tensors.items()
    )
    proto.graph.output.extend(infos[name] for name in outputs)
    read = {name for node in nodes for name in node.input}
    proto.graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in read)
    return Segment(segment.name, segment.device, proto, tuple(input_tensors), tuple(outputs))


WEIGHT_ALIGNMENT_BYTES = 64
"""Alignment of weights in their file, so that onnxruntime can use them in the mapped file without a copy."""
NETWORK_SUFFIX = ".net"
"""Suffix of the file with a segment's operators, if the segment is converted for another engine than onnxruntime."""


def find_device_inputs(program: Program, device: DeviceProgram) -> dict[int, TensorSpec]:
    """Return the network's inputs that a device reads, sends or outputs, by index among all network inputs."""
    used = {name for segment in device.segments for name in segment.inputs} | set(device.model_outputs)
    used |= {transfer.value.name for transfer in program.transfers if transfer.sender == device.device}
    used &= set(device.model_inputs)
    return {index: value for index, value in enumerate(program.inputs) if value.name in used}


class DeviceContents:
    """The segments (ONNX submodels) and weights of a device for all its roles, each stored once.

    A role is the normal plan, a replica of it, or a failure plan.

    Attributes:
        weights: Large weights by name, which are stored in the file of weights.
        nested_weights: For each weight that is a contiguous piece of a larger one: the larger one's name, and the
            offset in it in bytes. Such a weight is not stored again.
        segments: The segments that onnxruntime computes, by name of their ONNX file.
        networks: The segments that are converted for another engine than onnxruntime, by name of their file.
        segment_files: For each role, the file name of each segment.
    """

    def __init__(
        self, program: Program, index: int, networks: Mapping[bytes, EngineFiles] = MappingProxyType({})
    ) -> None:
        """Collect the contents of device number `index`.

        `networks` has the segments that are converted for another engine than onnxruntime, by their serialized models.
        """
        roles = [(role, role.devices[index].segments) for role in program.roles]
        self.weights = {
            tensor.name: role.weights[tensor.name]
            for role, segments in roles
            for segment in segments
            if not networks or serialize_model(segment) not in networks
            for tensor in segment.model.graph.initializer
            if is_placeholder(tensor)
        }
        self.nested_weights = _find_nested_weights(self.weights) if any(role.failed for role, _ in roles) else {}
        self.segments: dict[str, Segment] = {}
        self.networks: dict[str, EngineFiles] = {}
        self.segment_files: list[list[str]] = []
        files: dict[bytes, str] = {}
        for _, segments in roles:
            self.segment_files.append([])
            for segment in segments:
                key = segment.name.encode()
                if program.other_roles or networks:
                    key = serialize_model(segment)
                suffix = NETWORK_SUFFIX if key in networks else ".onnx"
                file = files.setdefault(key, f"segment{len(files):03}{suffix}")
                if key in networks:
                    self.networks[file] = networks[key]
                else:
                    self.segments.setdefault(file, segment)
                self.segment_files[-1].append(file)

    def write(self, directory: Path) -> Iterator[tuple[str, Json]]:
        """Write the files into `directory`, and yield the name and the record (size, digest) of each file."""
        stored = {name: weight for name, weight in self.weights.items() if name not in self.nested_weights}
        offsets = _assign_offsets(stored)
        if stored:
            yield WEIGHTS_FILE, write_chunks(directory / WEIGHTS_FILE, _iterate_weights(stored, offsets))
        offsets |= {name: offsets[larger] + offset for name, (larger, offset) in self.nested_weights.items()}
        for name, segment in self.segments.items():
            yield name, write_chunks(directory / name, [_serialize_segment(segment, self.weights, offsets)])
        for name, network in self.networks.items():
            yield name, write_chunks(directory / name, [network.network])
            weights_name = network_weights_file(name)
            yield weights_name, write_chunks(directory / weights_name, [network.weights])


def serialize_model(segment: Segment) -> bytes:
    return bytes(segment.model.SerializeToString(deterministic=True))


def network_weights_file(file: str) -> str:
    """Return the name of the file of weights, from the name of a converted segment's file of operators."""
    return f"{file.removesuffix(NETWORK_SUFFIX)}.bin"


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Json:
    """Write the chunks into a file, and return the file's record (size, digest)."""
    with path.open("wb") as file:
        file.writelines(chunks)
    return make_file_record(path)


def _find_nested_weights(weights: Mapping[str, Weight]) -> dict[str, tuple[str, int]]:
    """Return the weights that are contiguous pieces of larger weights in memory, at an aligned offset.

    The result has, by name of the piece, the name of the larger weight and the offset in it in bytes.
    """
    ranges = [
        (int(np.frombuffer(weight.content, np.uint8).ctypes.data), -weight.nbytes, name)
        for name, weight in weights.items()
        if weight.content.ndim == 1
    ]
    nested: dict[str, tuple[str, int]] = {}
    larger, larger_start, larger_end = "", 0, 0
    for start, negative_size, name in sorted(ranges):
        end = start - negative_size
        if end <= larger_end and (start - larger_start) % WEIGHT_ALIGNMENT_BYTES == 0:
            nested[name] = larger, start - larger_start
        elif end > larger_end:
            larger, larger_start, larger_end = name, start, end
    return nested


def _assign_offsets(weights: Mapping[str, Weight]) -> dict[str, int]:
    offsets, end = {}, 0
    for name, weight in weights.items():
        offsets[name] = -(-end // WEIGHT_ALIGNMENT_BYTES) * WEIGHT_ALIGNMENT_BYTES
        end = offsets[name] + weight.nbytes
    return offsets


def _iterate_weights(weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> Iterator[bytes | memoryview]:
    """Yield the content of the file of weights: each weight, after zeros that fill the gap before its offset."""
    end = 0
    for name, weight in weights.items():
        yield bytes(offsets[name] - end)
        yield from weight.chunks()
        end = offsets[name] + weight.nbytes


def _serialize_segment(segment: Segment, weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> bytes:
    """Return the content of a segment's ONNX file, in which large weights refer to the file of weights."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for tensor in model.graph.initializer:
        if is_placeholder(tensor):
            del tensor.external_data[:]
            length = weights[tensor.name].nbytes
            entries = (("location", WEIGHTS_FILE), ("offset", offsets[tensor.name]), ("length", length))
            for key, value in entries:
                tensor.external_data.add(key=key, value=str(value))
    return bytes(model.SerializeToString(deterministic=True))


HOISTABLE_TYPES = frozenset(TensorProto.DataType.Value(name) for name in SENDABLE_TYPES)
"""Element types of tensors that the runtimes can copy (onnx.TensorProto.DataType)."""
CopyViews = tuple[NDArray[Any], NDArray[Any]]
"""Two array views for a copy: of the target tensor, which is written, and of the source tensor, which is read."""


def hoist_device_copies(device: DeviceProgram) -> tuple[HoistedSegment, ...]:
    """Move operators that only copy data, such as Slice, out of the models of a device's segments.

    An operator stays in its model if its output is read by another segment, is an output of the network, or is a state
    for the next frame.
    """
    kept_outputs = {name for segment in device.segments for name in segment.inputs} | set(device.model_outputs)
    kept_outputs |= {state.written_name for state in device.states}
    return tuple(hoist_copies(segment, HOISTABLE_TYPES, kept_outputs=kept_outputs) for segment in device.segments)


def make_device_contents(
    program: Program,
    index: int,
    hoisted: Sequence[Sequence[HoistedSegment]],
    networks: Mapping[bytes, EngineFiles] = MappingProxyType({}),
) -> tuple[DeviceContents, list[list[str]]]:
    """Return the segment and weight files of a device, and for each role the file name of each segment.

    A role is the normal plan, a replica or a failure plan. The file name of a segment that only moves data is "".

    Args:
        program: The program of all devices.
        index: Index of the device.
        hoisted: For each role, the device's segments without the copies at their inputs and outputs.
        networks: Segments that are converted for another engine than onnxruntime, by their serialized models.
    """
    roles = []
    for role, role_segments in zip(program.roles, hoisted, strict=True):
        segments = tuple(entry.segment for entry in role_segments if entry.segment is not None)
        devices = (replace(d, segments=segments) if i == index else d for i, d in enumerate(role.devices))
        roles.append(replace(role, devices=tuple(devices)))
    contents = DeviceContents(replace(roles[0], other_roles=tuple(roles[1:])), index, networks)
    names = []
    for role_segments, segment_files in zip(hoisted, contents.segment_files, strict=True):
        files = iter(segment_files)
        names.append(["" if entry.segment is None else next(files) for entry in role_segments])
    return contents, names


def describe_copies(hoisted: HoistedSegment) -> Json:
    """Return the entries of a manifest (JSON) for the copies before and after a segment; {} without copies."""
    sides = {"assembled_inputs": hoisted.copied_inputs, "assembled_outputs": hoisted.copied_outputs}
    return {
        key: [_describe_copied_tensor(name, copied, hoisted.values) for name, copied in tensors.items()]
        for key, tensors in sides.items()
        if tensors
    }


def _describe_copied_tensor(name: str, copied: CopiedTensor, values: Mapping[str, TensorSpec]) -> Json:
    pieces = [
        {
            "name": piece.source,
            "shape": list(values[piece.source].shape or ()),
            "source_region": _describe_region(piece.source_start, piece.extent),
            "target_region": _describe_region(piece.target_start, piece.extent),
        }
        for piece in copied.pieces
    ]
    return describe_value(TensorSpec(name, copied.dtype, copied.shape)) | {"pieces": pieces}


def _describe_region(start: Shape, extent: Shape) -> list[list[int]]:
    return [[begin, begin + count] for begin, count in zip(start, extent, strict=True)]


def make_input_arrays(hoisted: HoistedSegment, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Make the copies before a segment's model runs, and return the model's inputs by name.

    `values` has the tensors that the device stores, by name.
    """
    memory = {name: np.ascontiguousarray(values[name]) for name in values}
    for name, copied in hoisted.copied_inputs.items():
        memory[name] = np.zeros(copied.shape, tensor_dtype_to_np_dtype(copied.dtype))
    _copy_views(_make_views(hoisted, hoisted.copied_inputs, memory))
    return {name: memory[name] for name in hoisted.inputs}


def make_segment_calls(device: DeviceProgram) -> tuple[SegmentCall, ...]:
    """Return, for each segment of a device, its model and functions that make the copies before and after it."""
    hoisted = hoist_device_copies(device)
    return tuple(SegmentCall(entry.segment, partial(_make_copy_functions, entry)) for entry in hoisted)


def _make_copy_functions(
    hoisted: HoistedSegment, memory: Mapping[str, NDArray[Any]]
) -> tuple[CopyFunction, CopyFunction]:
    """Return two functions that make the copies before and after a segment between the arrays in `memory`.

    They also serve to time the copies of the C++ runtime, which take at most a microsecond more or less.
    """
    before, after = (
        _make_views(hoisted, tensors, memory) for tensors in (hoisted.copied_inputs, hoisted.copied_outputs)
    )
    return partial(_copy_views, before), partial(_copy_views, after)


def _make_views(
    hoisted: HoistedSegment, tensors: Mapping[str, CopiedTensor], memory: Mapping[str, NDArray[Any]]
) -> list[CopyViews]:
    """Return a pair of views (target, source) for each copy that fills one of `tensors`.

    Args:
        hoisted: The segment that has these tensors as inputs or outputs.
        tensors: The tensors to fill, by name.
        memory: The arrays of all tensors, by name.
    """
    return [
        _make_copy_views(name, copy, memory)
        for name, copied in tensors.items()
        for copy in make_copies(name, copied, hoisted.values)
    ]


def _make_copy_views(target: str, copy: StridedCopy, memory: Mapping[str, NDArray[Any]]) -> CopyViews:
    """Return strided views of the target and source arrays; each element is a block of contiguous bytes."""
    block = np.dtype(f"u{copy.run_bytes}" if copy.run_bytes in (1, 2, 4, 8) else f"V{copy.run_bytes}")
    counts, source_strides, target_strides = zip(*copy.loops, strict=True) if copy.loops else ((), (), ())
    source_bytes, target_bytes = (memory[name].reshape(-1).view(np.uint8) for name in (str(copy.source), target))
    return (
        np.ndarray(counts, block, target_bytes, copy.target_offset, target_strides),
        np.ndarray(counts, block, source_bytes, copy.source_offset, source_strides),
    )


def _copy_views(views: Sequence[CopyViews]) -> None:
    for target, source in views:
        np.copyto(target, source)
