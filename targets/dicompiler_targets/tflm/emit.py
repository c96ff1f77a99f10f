"""Writing of an artifact of target `tflm`: artifact.json, memory.json, and a directory for each device.

The directory of a device contains its models as .tflite files and as C++ arrays, the sources generated for the device,
and the sources that are the same for all devices. The same program gives the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dicompiler.plugin_api import DeviceProgram, DicompilerError, Host, Program
from dicompiler.plugin_api.artifacts import Json, describe_artifact, format_json
from dicompiler_targets.artifact_files import HoistedSegment, StridedCopy, find_device_inputs, write_chunks
from dicompiler_targets.bundled_runtime import read_runtime_sources
from dicompiler_targets.tflm import codegen
from dicompiler_targets.tflm.arena_size import measure_arenas
from dicompiler_targets.tflm.flatbuffer import read_operator_codes
from dicompiler_targets.tflm.lowering import (
    LoweredModel,
    WireTensor,
    hoist_segment_copies,
    lower_segment,
    make_wire_copies,
)
from dicompiler_targets.tflm.memory_layout import MemoryLayout, make_wire_tensor, plan_memory
from dicompiler_targets.tflm.memory_report import DeviceSizes, add_margin, make_memory_report

MANIFEST_FORMAT = "dicompiler.tflm/2"
MANIFEST_FILE, MEMORY_FILE = "manifest.json", "memory.json"
RESERVED_NAMES = ("artifact.json", "plan.json", "platform.toml", "reference", MEMORY_FILE)
"""Invalid device names: each device has a directory with its name, next to files with these names."""


@dataclass(frozen=True)
class CompiledDevice:
    """A device with its compiled models and its memory layout.

    Attributes:
        program: The device's part of the program.
        hoisted_segments: Segments (ONNX submodels) of the device, in which Slices and Concats at inputs and outputs are
            replaced by copies.
        lowered_models: The TFLite model of each segment; None if the segment only copies data.
        models: The distinct models of the device. Segments with equal models share one.
        needed_arenas: For each distinct model, the smallest arena (working memory of TFLite-micro) in bytes.
        layout: Memory layout of the device.
        peers: The devices that this device exchanges tensors with.
    """

    program: DeviceProgram
    hoisted_segments: tuple[HoistedSegment, ...]
    lowered_models: tuple[LoweredModel | None, ...]
    models: codegen.DeviceModels
    needed_arenas: tuple[int, ...]
    layout: MemoryLayout
    peers: tuple[str, ...]

    @property
    def model_files(self) -> dict[str, bytes]:
        pairs = zip(self.models.model_of_segment, self.lowered_models, strict=True)
        return {self.models.names[k]: model.data for k, model in pairs if model is not None and k is not None}

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(sorted({code for model in self.lowered_models if model is not None for code in model.operators}))

    @property
    def sizes(self) -> DeviceSizes:
        return DeviceSizes(
            max(self.models.arena_bytes, default=0),
            max(self.needed_arenas, default=0),
            max((model.activation_bytes for model in self.lowered_models if model is not None), default=0),
            self.layout.size_bytes,
            sum(map(len, self.model_files.values())),
        )


def compile_devices(program: Program, margin: float) -> tuple[CompiledDevice, ...]:
    """Compile the segments of all devices to TFLite models, and plan the memory of each device.

    `margin` is the fraction by which arenas (working memory of TFLite-micro) are larger than necessary: 0.05 adds 5 %.

    Raises:
        DicompilerError: TFLite-micro cannot express or run a segment.
    """
    for value in (*program.inputs, *program.outputs, *(t.value for t in program.transfers)):
        if value.shape is None:
            raise DicompilerError(
                f"target tflm: tensor {value.name!r} has no static shape: give the shapes of the inputs (--shape)"
            )
    hoisted_segments = [tuple(map(hoist_segment_copies, device.segments)) for device in program.devices]
    lowered_models = [
        tuple(None if s.segment is None else lower_segment(s.segment, program.weights) for s in segments)
        for segments in hoisted_segments
    ]
    distinct: dict[bytes, str] = {}
    for device, models in zip(program.devices, lowered_models, strict=True):
        for segment, model in zip(device.segments, models, strict=True):
            if model is not None:
                distinct.setdefault(model.data, f"segment {segment.name!r} of device {device.device!r}")
    least = dict(zip(distinct, measure_arenas(list(distinct), list(distinct.values())), strict=True))
    return tuple(
        _compile_device(program, *each, least, margin)
        for each in zip(program.devices, hoisted_segments, lowered_models, strict=True)
    )


def _compile_device(
    program: Program,
    device: DeviceProgram,
    hoisted_segments: tuple[HoistedSegment, ...],
    lowered_models: tuple[LoweredModel | None, ...],
    least: Mapping[bytes, int],
    margin: float,
) -> CompiledDevice:
    firsts: dict[bytes, int] = {}  # For each distinct model, by its content: the index of its first segment.
    for i, model in enumerate(lowered_models):
        if model is not None:
            firsts.setdefault(model.data, i)
    places = {data: k for k, data in enumerate(firsts)}
    needed = tuple(least[data] for data in firsts)
    models = codegen.DeviceModels(
        tuple(f"{i:03}" for i in firsts.values()),
        tuple(None if model is None else places[model.data] for model in lowered_models),
        tuple(add_margin(size, margin) for size in needed),
    )
    mine = [t for t in program.transfers if device.device in (t.sender, t.receiver)]
    others = {name for t in mine for name in (t.sender, t.receiver)} - {device.device}
    peers = tuple(one.device for one in program.devices if one.device in others)
    memory = plan_memory(program, device, hoisted_segments, models.model_of_segment, models.arena_bytes)
    return CompiledDevice(device, hoisted_segments, lowered_models, models, needed, memory, peers)


def write_program(program: Program, margin: float, boards: Mapping[str, Host], directory: Path) -> None:
    """Write the artifact of a program to a directory.

    Args:
        program: Program of all devices.
        margin: Fraction by which arenas (working memory of TFLite-micro) are larger than necessary: 0.05 adds 5 %.
        boards: Host of each device. memory.json lists its RAM and flash next to the needed sizes.
        directory: The artifact's directory, which exists.

    Raises:
        DicompilerError: A device's name cannot be the name of a directory, or TFLite-micro cannot express a segment.
    """
    for name in (device.device for device in program.devices):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in RESERVED_NAMES:
            raise DicompilerError(f"device {name!r}: its name cannot be the name of a directory: rename the device")
    compiled = compile_devices(program, margin)
    memory = make_memory_report({device.program.device: device.sizes for device in compiled}, boards, margin)
    digest = hashlib.sha256()
    for device in compiled:
        name = device.program.device
        device_directory = directory / name
        device_directory.mkdir()
        for file, content in sorted(dict(_make_files(program, device)).items()):
            digest.update(f"{name}/{file} {write_chunks(device_directory / file, [content])['digest']}\n".encode())
    (directory / MEMORY_FILE).write_text(format_json(memory), encoding="utf-8")
    artifact = describe_artifact(program, "tflm", digest.hexdigest())
    (directory / "artifact.json").write_text(format_json(artifact), encoding="utf-8")


def _make_files(program: Program, device: CompiledDevice) -> Iterable[tuple[str, bytes]]:
    yield from read_runtime_sources("tflm", (".cc", ".h", ".txt")).items()
    for name, data in device.model_files.items():
        yield f"model_{name}.tflite", data
        yield f"model_{name}_data.h", codegen.make_data_header(name, data).encode()
        yield f"model_{name}_data.cc", codegen.make_data_source(name, data).encode()
    codes = tuple(sorted({code for data in device.model_files.values() for code in read_operator_codes(data)}))
    assert codes == device.operators
    yield "resolver.cc", codegen.make_resolver(codes).encode()
    incoming = sum(step.kind == "receive" for step in device.program.steps)
    yield "arena.h", codegen.make_arena_header(device.layout, len(device.peers), incoming).encode()
    moves = tuple(_collect_copies(segment, device.layout.views) for segment in device.hoisted_segments)
    tables = codegen.make_program_source(program, device.program, device.layout, device.models, device.peers, moves)
    yield "program.cc", tables.encode()
    yield MANIFEST_FILE, format_json(_make_manifest(program, device)).encode()


def _make_manifest(program: Program, device: CompiledDevice) -> Json:
    """Return the device's manifest, a description of the device for people and for `run_artifact`."""
    part = device.program
    return {
        "format": MANIFEST_FORMAT,
        "device": part.device,
        "layout": "NHWC",
        "operators": list(device.operators),
        "inputs": [_describe_tensor(make_wire_tensor(value)) for value in find_device_inputs(program, part).values()],
        "outputs": [
            _describe_tensor(device.layout.buffers[name].tensor) | {"name": output, "tensor": name}
            for name, output in part.model_outputs.items()
        ],
        "segments": [_describe_segment(device, i) for i in range(len(part.segments))],
        "steps": [[step.kind, step.index] for step in part.steps],
        "tensors": [
            _describe_tensor(tensor_buffer.tensor)
            | {
                "offset": tensor_buffer.offset,
                "first_step": tensor_buffer.first_step,
                "last_step": tensor_buffer.last_step,
            }
            for tensor_buffer in device.layout.buffers.values()
        ],
    }


def _describe_segment(device: CompiledDevice, index: int) -> Json:
    segment, k, moves = (
        device.program.segments[index],
        device.models.model_of_segment[index],
        _collect_copies(device.hoisted_segments[index]),
    )
    return {
        "name": segment.name,
        "model": None if k is None else f"model_{device.models.names[k]}.tflite",
        "arena": 0 if k is None else device.models.arena_bytes[k],
        "arena_offset": device.layout.arena_offsets[index],
        "inputs": list(segment.inputs),
        "outputs": list(segment.outputs),
        "input_copies": [_describe_copy(copy) for copy in moves.input_copies],
        "output_copies": [_describe_copy(copy) for copy in moves.output_copies],
        "tensor_copies": [_describe_copy(copy) for copy in moves.tensor_copies],
    }


def _describe_copy(copy: StridedCopy) -> Json:
    keys = ("source", "target", "source_offset", "target_offset", "run_bytes", "loops")
    return {key: getattr(copy, key) for key in keys}


def _collect_copies(hoisted: HoistedSegment, views: Container[str] = ()) -> codegen.SegmentCopies:
    """Return the copies that a device makes before and after it runs the model of a segment.

    An index in a copy is an input or output of the model, and a name is a tensor of the device. Tensors in `views` are
    parts of another tensor, so they need no copy.
    """
    inner = hoisted.segment
    ports = {name: i for i, name in enumerate(inner.outputs)} if inner is not None else {}
    gathers = [
        copy
        for i, copied in enumerate(hoisted.input_tensors.values())
        for copy in make_wire_copies(i, copied, hoisted.values)
    ]
    every = [
        copy
        for name, copied in hoisted.output_tensors.items()
        if name not in views
        for copy in make_wire_copies(name, copied, hoisted.values)
    ]
    places = [replace(copy, source=ports[copy.source]) for copy in every if copy.source in ports]
    return codegen.SegmentCopies(
        tuple(gathers), tuple(places), tuple(copy for copy in every if copy.source not in ports)
    )


def _describe_tensor(value: WireTensor) -> Json:
    return {"name": value.name, "dtype": value.dtype, "shape": list(value.shape), "bytes": value.nbytes}
