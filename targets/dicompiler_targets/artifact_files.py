"""What targets write alike: the runtime's sources, segments, a file of weights for each device, and JSON that can be
compared.

In: segments and weights of a Program. Out: bytes, the same for the same program; weights go straight from their views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx

from dicompiler.plugin_api import DeviceProgram, Program, Segment, TensorSpec
from dicompiler.plugin_api.artifacts import (
    ARTIFACT_FORMAT,
    SENDABLE_TYPES,
    Json,
    describe_artifact,
    describe_transfer,
    describe_value,
    format_json,
    make_file_record,
)
from dicompiler.plugin_api.onnx import Weight, is_placeholder
from dicompiler_targets.bundled_runtime import WEIGHTS_FILE, read_runtime_sources

__all__ = [
    "ARTIFACT_FORMAT",
    "SENDABLE_TYPES",
    "WEIGHTS_FILE",
    "WEIGHT_ALIGNMENT_BYTES",
    "DeviceContents",
    "Json",
    "describe_artifact",
    "describe_transfer",
    "describe_value",
    "find_device_inputs",
    "format_json",
    "read_runtime_sources",
    "write_chunks",
]  # fmt: skip

WEIGHT_ALIGNMENT_BYTES = 64
"""Bytes; each weight starts at a multiple of it, so that onnxruntime can use it in the mapped file."""


def find_device_inputs(program: Program, device: DeviceProgram) -> dict[int, TensorSpec]:
    """The network's inputs that the device must be given, those that it reads, sends or delivers, by their place among
    all inputs."""
    used = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    used |= {transfer.value.name for transfer in program.transfers if transfer.sender == device.device}
    return {i: v for i, v in enumerate(program.inputs) if v.name in device.sources and v.name in used}


class DeviceContents:
    """What a device's files hold: the weights of all roles, each once (a name stands for the same cut in all of them;
    with plans for losses, a cut that lies in one piece within a larger one is that piece of it), and the segments by
    file, equal ones of several roles once. names: the files of each role's segments."""

    def __init__(self, program: Program, index: int) -> None:
        """Of the device at that place."""
        roles = [(role, role.devices[index].segments) for role in program.roles]
        self.weights = {
            tensor.name: role.weights[tensor.name]
            for role, segments in roles
            for segment in segments
            for tensor in segment.model.graph.initializer
            if is_placeholder(tensor)
        }
        self.nested_weights = _find_nested_weights(self.weights) if any(role.failed for role, _ in roles) else {}
        self.segments: dict[str, Segment] = {}
        self.segment_files: list[list[str]] = []
        names: dict[bytes, str] = {}
        for _, segments in roles:
            self.segment_files.append([])
            for segment in segments:
                key = (
                    segment.model.SerializeToString(deterministic=True)
                    if program.other_roles
                    else segment.name.encode()
                )
                file = names.setdefault(key, f"segment{len(names):03}.onnx")
                self.segments.setdefault(file, segment)
                self.segment_files[-1].append(file)

    def write(self, place: Path) -> Iterator[tuple[str, Json]]:
        """Writes the files into `place`; gives the name, size and digest of each."""
        own = {name: weight for name, weight in self.weights.items() if name not in self.nested_weights}
        offsets = _assign_offsets(own)
        if own:
            yield WEIGHTS_FILE, write_chunks(place / WEIGHTS_FILE, _iterate_weights(own, offsets))
        offsets |= {name: offsets[larger] + at for name, (larger, at) in self.nested_weights.items()}
        for name, segment in self.segments.items():
            yield name, write_chunks(place / name, [_serialize_segment(segment, self.weights, offsets)])


def write_chunks(path: Path, parts: Iterable[bytes | memoryview]) -> Json:
    """Writes the parts one after another; gives size and digest of the whole."""
    with path.open("wb") as file:
        file.writelines(parts)
    return make_file_record(path)


def _find_nested_weights(weights: Mapping[str, Weight]) -> dict[str, tuple[str, int]]:
    """Weight → the larger one whose bytes hold its own in one piece, and from which on (a multiple of ALIGN)."""
    places = [
        (int(np.frombuffer(weight.content, np.uint8).ctypes.data), -weight.nbytes, name)
        for name, weight in weights.items()
        if weight.content.ndim == 1
    ]
    within: dict[str, tuple[str, int]] = {}
    larger, begin, end = "", 0, 0
    for start, size, name in sorted(places):
        if start - size <= end and (start - begin) % WEIGHT_ALIGNMENT_BYTES == 0:
            within[name] = larger, start - begin
        elif start - size > end:
            larger, begin, end = name, start, start - size
    return within


def _assign_offsets(weights: Mapping[str, Weight]) -> dict[str, int]:
    offsets, end = {}, 0
    for name, weight in weights.items():
        offsets[name] = -(-end // WEIGHT_ALIGNMENT_BYTES) * WEIGHT_ALIGNMENT_BYTES
        end = offsets[name] + weight.nbytes
    return offsets


def _iterate_weights(weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> Iterator[bytes | memoryview]:
    end = 0
    for name, weight in weights.items():
        yield bytes(offsets[name] - end)
        yield from weight.chunks()
        end = offsets[name] + weight.nbytes


def _serialize_segment(segment: Segment, weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> bytes:
    """The segment's file: its large weights are external data in the device's weights file."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for tensor in model.graph.initializer:
        if is_placeholder(tensor):
            del tensor.external_data[:]
            length = weights[tensor.name].nbytes
            for key, value in (("location", WEIGHTS_FILE), ("offset", offsets[tensor.name]), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    return bytes(model.SerializeToString(deterministic=True))
