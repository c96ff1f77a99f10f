"""Writes a Program as an artifact of the tflm target: artifact.json, memory.json, and a directory for each device.

A device's directory holds its models as .tflite files and as C++ arrays, the sources that differ from device to device,
and those that are the same for all. In: a Program. Out: files, the same bytes for the same program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from dicompiler.errors import DicompilerError
from dicompiler.program import DeviceProgram, Program
from dicompiler_targets.files import Json, artifact_document, json_text, write_parts
from dicompiler_targets.tflm import sources
from dicompiler_targets.tflm.flatbuffer import codes_of
from dicompiler_targets.tflm.layout import Held, border, buffer_bytes, given, layout
from dicompiler_targets.tflm.lowering import Border, Lowered, lower
from dicompiler_targets.tflm.measure import arenas
from dicompiler_targets.tflm.sizes import Limits, Sizes, check, document, with_margin

FORMAT = "dicompiler.tflm/1"
MANIFEST, MEMORY = "manifest.json", "memory.json"
OUTSIDE = ("artifact.json", "plan.json", "platform.toml", "reference", MEMORY)
"""What stands beside the devices' directories."""


@dataclass(frozen=True)
class Device:
    """A device as it is written. lowered: of each segment; needed: of each model the least bytes of an arena."""

    program: DeviceProgram
    lowered: tuple[Lowered, ...]
    models: sources.DeviceModels
    needed: tuple[int, ...]
    held: Mapping[str, Held]
    peers: tuple[str, ...]

    @property
    def data(self) -> dict[str, bytes]:
        """The models by name."""
        return {self.models.names[k]: self.lowered[i].data for i, k in enumerate(self.models.of)}

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of all its models, sorted."""
        return tuple(sorted({code for model in self.lowered for code in model.operators}))

    @property
    def sizes(self) -> Sizes:
        """What it takes of RAM and flash."""
        return Sizes(
            max(self.models.arenas, default=0),
            max(self.needed, default=0),
            max((model.activations for model in self.lowered), default=0),
            buffer_bytes(self.held),
            sum(map(len, self.data.values())),
        )


def devices(program: Program, margin: float) -> tuple[Device, ...]:
    """Every device's models, measured. DicompilerError for what TFLite-micro cannot express or run."""
    for value in (*program.inputs, *program.outputs, *(t.value for t in program.transfers)):
        if value.shape is None:
            raise DicompilerError(f"target tflm: tensor {value.name!r} has no static shape: fix the inputs' (--shape)")
    lowered = [tuple(lower(segment, program.weights) for segment in one.segments) for one in program.devices]
    distinct: dict[bytes, str] = {}
    for one, own in zip(program.devices, lowered, strict=True):
        for segment, model in zip(one.segments, own, strict=True):
            distinct.setdefault(model.data, f"segment {segment.name!r} of device {one.device!r}")
    least = dict(zip(distinct, arenas(list(distinct), list(distinct.values())), strict=True))
    return tuple(_device(program, one, own, least, margin) for one, own in zip(program.devices, lowered, strict=True))


def _device(
    program: Program, device: DeviceProgram, lowered: tuple[Lowered, ...], least: Mapping[bytes, int], margin: float
) -> Device:
    distinct = {model.data: i for i, model in reversed(list(enumerate(lowered)))}  # → the first segment that has it
    firsts = sorted(distinct.values())
    needed = tuple(least[lowered[i].data] for i in firsts)
    models = sources.DeviceModels(
        tuple(f"{i:03}" for i in firsts),
        tuple(firsts.index(distinct[model.data]) for model in lowered),
        tuple(with_margin(size, margin) for size in needed),
    )
    mine = [t for t in program.transfers if device.device in (t.sender, t.receiver)]
    others = {name for t in mine for name in (t.sender, t.receiver)} - {device.device}
    peers = tuple(one.device for one in program.devices if one.device in others)
    return Device(device, lowered, models, needed, layout(program, device, lowered), peers)


def write(program: Program, margin: float, limits: Mapping[str, Limits], directory: Path) -> Json:
    """Writes the artifact into `directory`; gives what memory.json says. `limits`: of the devices' boards, by device.

    DicompilerError for names that cannot be directories, for what TFLite-micro cannot express, and for a device whose
    RAM or flash is too small.
    """
    for one in program.devices:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", one.device) or one.device in OUTSIDE:
            raise DicompilerError(f"device {one.device!r}: no name for the device's directory: give it another one")
    found = devices(program, margin)
    memory = document({device.program.device: device.sizes for device in found}, limits, margin)
    for device in found:
        check(device.program, device.sizes, device.models, device.data, limits.get(device.program.device))
    digest = hashlib.sha256()
    for device in found:
        name = device.program.device
        place = directory / name
        place.mkdir()
        for file, content in sorted(dict(_files(program, device)).items()):
            digest.update(f"{name}/{file} {write_parts(place / file, [content])['sha256']}\n".encode())
    (directory / MEMORY).write_text(json_text(memory), encoding="utf-8")
    artifact = artifact_document(program, "tflm", digest.hexdigest())
    (directory / "artifact.json").write_text(json_text(artifact), encoding="utf-8")
    return memory


def runtime() -> dict[str, bytes]:
    """The sources that are the same for all devices, by name."""
    own = resources.files("dicompiler_targets.tflm").joinpath("runtime")
    names = sorted(e.name for e in own.iterdir() if e.name.endswith((".cc", ".h", ".txt")))
    return {name: own.joinpath(name).read_bytes() for name in names}


def _files(program: Program, device: Device) -> Iterable[tuple[str, bytes]]:
    """The device's files by name."""
    yield from runtime().items()
    for name, data in device.data.items():
        yield f"model_{name}.tflite", data
        yield f"model_{name}_data.h", sources.data_header(name, data).encode()
        yield f"model_{name}_data.cc", sources.data_source(name, data).encode()
    codes = tuple(sorted({code for data in device.data.values() for code in codes_of(data)}))
    if codes != device.operators:
        raise DicompilerError(f"device {device.program.device!r}: its models hold other operators than were written")
    yield "resolver.cc", sources.resolver(codes).encode()
    incoming = sum(step.kind == "receive" for step in device.program.steps)
    sizes = (device.models.arenas, buffer_bytes(device.held), len(device.peers), incoming)
    yield "arena.h", sources.arena_header(*sizes).encode()
    tables = sources.program_source(program, device.program, device.held, device.models, device.peers)
    yield "program.cc", tables.encode()
    yield MANIFEST, json_text(_manifest(program, device)).encode()


def _manifest(program: Program, device: Device) -> Json:
    """What the device does, for people and for running it on this host."""
    own = device.program
    return {
        "format": FORMAT,
        "device": own.device,
        "layout": "NHWC",
        "operators": list(device.operators),
        "inputs": [_border(border(v)) for v in program.inputs if v.name in given(program, own)],
        "outputs": [
            _border(device.held[name].border) | {"name": output, "tensor": name} for name, output in own.sinks.items()
        ],
        "segments": [
            {
                "name": segment.name,
                "model": f"model_{device.models.names[k]}.tflite",
                "arena": device.models.arenas[k],
                "inputs": list(segment.inputs),
                "outputs": list(segment.outputs),
            }
            for segment, k in zip(own.segments, device.models.of, strict=True)
        ],
        "steps": [[step.kind, step.index] for step in own.steps],
        "tensors": [
            _border(held.border) | {"offset": held.offset, "first": held.first, "last": held.last}
            for held in device.held.values()
        ],
    }


def _border(value: Border) -> Json:
    return {"name": value.name, "dtype": value.dtype, "shape": list(value.shape), "bytes": value.nbytes}
