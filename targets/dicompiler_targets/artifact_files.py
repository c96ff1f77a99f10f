"""Files that several targets write: segments (ONNX sub-models), and one file of weights for each device.

Segments and weights of a Program ⇒ files. The same program gives the same bytes. Weights are written without a copy in
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx

from dicompiler.plugin_api import DeviceProgram, Program, Segment, TensorSpec
from dicompiler.plugin_api.artifacts import EngineFiles, Json, make_file_record
from dicompiler.plugin_api.onnx import Weight, is_placeholder
from dicompiler_targets.bundled_runtime import WEIGHTS_FILE

WEIGHT_ALIGNMENT_BYTES = 64
"""Each weight starts at a multiple of this offset, so that onnxruntime can use the weight in the mapped file."""
NETWORK_SUFFIX = ".net"
"""Suffix of the file with a segment's operators, if the segment is converted for another engine than onnxruntime."""


def find_device_inputs(program: Program, device: DeviceProgram) -> dict[int, TensorSpec]:
    """Return the network's inputs that a device reads, sends to another device or delivers as outputs.

    The keys of the result are the indices of the inputs among all inputs of the network.
    """
    used = {name for segment in device.segments for name in segment.inputs} | set(device.model_outputs)
    used |= {transfer.value.name for transfer in program.transfers if transfer.sender == device.device}
    used &= set(device.model_inputs)
    return {index: value for index, value in enumerate(program.inputs) if value.name in used}


class DeviceContents:
    """The segments and weights of a device for all its roles, each stored once.

    A role is the normal plan, a replica of it, or a failure plan. All roles use the same name for the same piece of a
    weight, and segments that are equal in several roles share a file. With failure plans, a device may need both a
    weight and a piece of it. If the piece is contiguous, it is not stored again: it is an offset into the larger
    weight.

    Attributes:
        weights: Weights by name.
        nested_weights: For each weight that is stored inside a larger one, the larger one's name and the offset in
            bytes.
        segments: Segments by file name.
        networks: Segments that are converted for another engine than onnxruntime, by file name. They have no ONNX file.
        segment_files: For each role, the file name of each segment.
    """

    def __init__(
        self, program: Program, index: int, networks: Mapping[bytes, EngineFiles] = MappingProxyType({})
    ) -> None:
        """Collect the contents of the device with the given index.

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
        """Write the files, and yield the name and the record (size, digest) of each file."""
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
    """Return the bytes that identify the model of a segment. Segments with equal models share their files."""
    return bytes(segment.model.SerializeToString(deterministic=True))


def network_weights_file(file: str) -> str:
    """Return the name of the file with a converted segment's weights, given the name of its file of operators."""
    return f"{file.removesuffix(NETWORK_SUFFIX)}.bin"


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Json:
    """Write the chunks one after another into a file, and return the file's record (size, digest)."""
    with path.open("wb") as file:
        file.writelines(chunks)
    return make_file_record(path)


def _find_nested_weights(weights: Mapping[str, Weight]) -> dict[str, tuple[str, int]]:
    """Return the weights that are contiguous pieces of larger weights, at an aligned offset.

    A weight is a piece of another if its memory lies within the other's memory. The result has, for the name of each
    such weight, the larger one's name and the offset in it in bytes.
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
    """Yield the content of the file of weights. Zeros pad the file up to the offset of each weight."""
    end = 0
    for name, weight in weights.items():
        yield bytes(offsets[name] - end)
        yield from weight.chunks()
        end = offsets[name] + weight.nbytes


def _serialize_segment(segment: Segment, weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> bytes:
    """Return the content of a segment's file. Large weights are external data: references into the file of weights."""
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
