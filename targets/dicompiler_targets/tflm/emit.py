"""Writes a Program as an artifact of the tflm target: artifact.json, memory.json, and a directory for each device.

A device's directory holds its models as .tflite files and as C++ arrays, the sources that differ from device to device,
and those that are the same for all. In: a Program. Out: files, the same bytes for the same program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dicompiler.plugin_api import DeviceProgram, DicompilerError, Host, Program
from dicompiler_targets.boxes import Copy
from dicompiler_targets.files import Json, artifact_document, given_inputs, json_text, runtime_sources, write_parts
from dicompiler_targets.moves import Peeled
from dicompiler_targets.tflm import sources
from dicompiler_targets.tflm.flatbuffer import codes_of
from dicompiler_targets.tflm.layout import Layout, border, layout
from dicompiler_targets.tflm.lowering import Border, Lowered, lower
from dicompiler_targets.tflm.measure import arenas
from dicompiler_targets.tflm.moves import copies, peel
from dicompiler_targets.tflm.sizes import Sizes, document, with_margin

FORMAT = "dicompiler.tflm/1"
MANIFEST, MEMORY = "manifest.json", "memory.json"
OUTSIDE = ("artifact.json", "plan.json", "platform.toml", "reference", MEMORY)
"""What stands beside the devices' directories."""


@dataclass(frozen=True)
class Device:
    """A device as it is written. peeled, lowered: of each segment (None where nothing is computed); needed: of each
    model the least bytes of an arena."""

    program: DeviceProgram
    peeled: tuple[Peeled, ...]
    lowered: tuple[Lowered | None, ...]
    models: sources.DeviceModels
    needed: tuple[int, ...]
    layout: Layout
    peers: tuple[str, ...]

    @property
    def data(self) -> dict[str, bytes]:
        """The models by name."""
        pairs = zip(self.models.of, self.lowered, strict=True)
        return {self.models.names[k]: model.data for k, model in pairs if model is not None and k is not None}

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of all its models, sorted."""
        return tuple(sorted({code for model in self.lowered if model is not None for code in model.operators}))

    @property
    def sizes(self) -> Sizes:
        """What it takes of RAM and flash."""
        return Sizes(
            max(self.models.arenas, default=0),
            max(self.needed, default=0),
            max((model.activations for model in self.lowered if model is not None), default=0),
            self.layout.size,
            sum(map(len, self.data.values())),
        )


def devices(program: Program, margin: float) -> tuple[Device, ...]:
    """Every device's models, measured. DicompilerError for what TFLite-micro cannot express or run."""
    for value in (*program.inputs, *program.outputs, *(t.value for t in program.transfers)):
        if value.shape is None:
            raise DicompilerError(f"target tflm: tensor {value.name!r} has no static shape: fix the inputs' (--shape)")
    peeled = [tuple(map(peel, one.segments)) for one in program.devices]
    lowered = [
        tuple(None if one.segment is None else lower(one.segment, program.weights) for one in parts) for parts in peeled
    ]
    distinct: dict[bytes, str] = {}
    for one, models in zip(program.devices, lowered, strict=True):
        for segment, model in zip(one.segments, models, strict=True):
            if model is not None:
                distinct.setdefault(model.data, f"segment {segment.name!r} of device {one.device!r}")
    least = dict(zip(distinct, arenas(list(distinct), list(distinct.values())), strict=True))
    return tuple(_device(program, *each, least, margin) for each in zip(program.devices, peeled, lowered, strict=True))


def _device(
    program: Program,
    device: DeviceProgram,
    peeled: tuple[Peeled, ...],
    lowered: tuple[Lowered | None, ...],
    least: Mapping[bytes, int],
    margin: float,
) -> Device:
    firsts: dict[bytes, int] = {}  # model → the first segment that has it
    for i, model in enumerate(lowered):
        if model is not None:
            firsts.setdefault(model.data, i)
    places = {data: k for k, data in enumerate(firsts)}
    needed = tuple(least[data] for data in firsts)
    models = sources.DeviceModels(
        tuple(f"{i:03}" for i in firsts.values()),
        tuple(None if model is None else places[model.data] for model in lowered),
        tuple(with_margin(size, margin) for size in needed),
    )
    mine = [t for t in program.transfers if device.device in (t.sender, t.receiver)]
    others = {name for t in mine for name in (t.sender, t.receiver)} - {device.device}
    peers = tuple(one.device for one in program.devices if one.device in others)
    memory = layout(program, device, peeled, models.of, models.arenas)
    return Device(device, peeled, lowered, models, needed, memory, peers)


def write(program: Program, margin: float, boards: Mapping[str, Host], directory: Path) -> None:
    """Writes the artifact into `directory`. boards: by device, for memory.json.

    DicompilerError for names that cannot be directories, and for what TFLite-micro cannot express.
    """
    for one in program.devices:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", one.device) or one.device in OUTSIDE:
            raise DicompilerError(f"device {one.device!r}: no name for the device's directory: give it another one")
    compiled = devices(program, margin)
    memory = document({device.program.device: device.sizes for device in compiled}, boards, margin)
    digest = hashlib.sha256()
    for device in compiled:
        name = device.program.device
        place = directory / name
        place.mkdir()
        for file, content in sorted(dict(_files(program, device)).items()):
            digest.update(f"{name}/{file} {write_parts(place / file, [content])['digest']}\n".encode())
    (directory / MEMORY).write_text(json_text(memory), encoding="utf-8")
    artifact = artifact_document(program, "tflm", digest.hexdigest())
    (directory / "artifact.json").write_text(json_text(artifact), encoding="utf-8")


def _files(program: Program, device: Device) -> Iterable[tuple[str, bytes]]:
    """The device's files by name."""
    yield from runtime_sources("tflm", (".cc", ".h", ".txt")).items()
    for name, data in device.data.items():
        yield f"model_{name}.tflite", data
        yield f"model_{name}_data.h", sources.data_header(name, data).encode()
        yield f"model_{name}_data.cc", sources.data_source(name, data).encode()
    codes = tuple(sorted({code for data in device.data.values() for code in codes_of(data)}))
    if codes != device.operators:
        raise DicompilerError(f"device {device.program.device!r}: its models hold other operators than were written")
    yield "resolver.cc", sources.resolver(codes).encode()
    incoming = sum(step.kind == "receive" for step in device.program.steps)
    yield "arena.h", sources.arena_header(device.layout, len(device.peers), incoming).encode()
    moves = tuple(_moves(one, device.layout.views) for one in device.peeled)
    tables = sources.program_source(program, device.program, device.layout, device.models, device.peers, moves)
    yield "program.cc", tables.encode()
    yield MANIFEST, json_text(_manifest(program, device)).encode()


def _manifest(program: Program, device: Device) -> Json:
    """What the device does, for people and for running it on this host."""
    part = device.program
    return {
        "format": FORMAT,
        "device": part.device,
        "layout": "NHWC",
        "operators": list(device.operators),
        "inputs": [_border(border(value)) for value in given_inputs(program, part).values()],
        "outputs": [
            _border(device.layout.held[name].border) | {"name": output, "tensor": name}
            for name, output in part.sinks.items()
        ],
        "segments": [_segment(device, i) for i in range(len(part.segments))],
        "steps": [[step.kind, step.index] for step in part.steps],
        "tensors": [
            _border(held.border) | {"offset": held.offset, "first": held.first, "last": held.last}
            for held in device.layout.held.values()
        ],
    }


def _segment(device: Device, index: int) -> Json:
    """A segment, with what is copied before its model runs and behind it."""
    segment, k, moves = device.program.segments[index], device.models.of[index], _moves(device.peeled[index])
    return {
        "name": segment.name,
        "model": None if k is None else f"model_{device.models.names[k]}.tflite",
        "arena": 0 if k is None else device.models.arenas[k],
        "arena_offset": device.layout.arenas[index],
        "inputs": list(segment.inputs),
        "outputs": list(segment.outputs),
        "gathers": [_copy(copy) for copy in moves.gathers],
        "places": [_copy(copy) for copy in moves.places],
        "copies": [_copy(copy) for copy in moves.copies],
    }


def _copy(copy: Copy) -> Json:
    keys = ("source", "target", "start", "to", "run", "loops")
    return {key: getattr(copy, key) for key in keys}


def _moves(peeled: Peeled, views: Container[str] = ()) -> sources.Moves:
    """The copies of a segment: ports of its model are numbers there, tensors that are held have names. views: what
    needs no copy."""
    inner = peeled.segment
    ports = {name: i for i, name in enumerate(inner.outputs)} if inner is not None else {}
    gathers = [copy for i, one in enumerate(peeled.gathers.values()) for copy in copies(i, one, peeled.values)]
    every = [
        copy for name, one in peeled.places.items() if name not in views for copy in copies(name, one, peeled.values)
    ]
    places = [replace(copy, source=ports[copy.source]) for copy in every if copy.source in ports]
    return sources.Moves(tuple(gathers), tuple(places), tuple(copy for copy in every if copy.source not in ports))


def _border(value: Border) -> Json:
    return {"name": value.name, "dtype": value.dtype, "shape": list(value.shape), "bytes": value.nbytes}
