"""Writes a Program as an artifact: artifact.json, and per device its manifest, segments, weights and the runtime.

In: a Program. Out: files, the same bytes for the same program. Weights go straight from their views to the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import onnx

from dicompiler.errors import DicompilerError
from dicompiler.program import DeviceProgram, Program, Segment, Transfer, Value
from dicompiler.weights import Weight, dtype_name, is_hollow
from dicompiler_targets.sockets.runtime import FORMAT
from dicompiler_targets.sockets.runtime.values import TYPES

ARTIFACT = "dicompiler.artifact/1"
WEIGHTS = "weights.bin"
ALIGN = 64
"""Bytes; each weight starts at a multiple of it, so that onnxruntime can use it in the mapped file."""
RESERVED = ("artifact.json", "plan.json", "platform.toml", "reference")
"""What stands beside the devices' directories."""

Json = dict[str, Any]


def write(program: Program, threads: Mapping[str, int], optimization: str, directory: Path) -> None:
    """Writes the artifact into `directory`. `threads`: per device. DicompilerError for a device name that cannot be a
    directory, or a tensor between devices whose type cannot be sent.
    """
    manifests = []
    for index, device in enumerate(program.devices):
        _check_name(device.device)
        place = directory / device.device
        place.mkdir()
        head = {"index": index, "threads": threads[device.device], "optimization": optimization}
        contents = _Contents(program, index)
        manifest = _manifest(program, index, contents.names)
        manifests.append(manifest | head | {"files": dict(sorted(_files(contents, place)))})
    # The manifests name every file with its hash: what they hash to stands for the whole artifact.
    digest = hashlib.sha256("".join(map(_text, manifests)).encode()).hexdigest()
    for manifest in manifests:
        (directory / manifest["device"] / "manifest.json").write_bytes(_text(manifest | {"digest": digest}).encode())
    artifact = {
        "format": ARTIFACT,
        "target": "sockets",
        "digest": digest,
        "devices": [device.device for device in program.devices],
        "inputs": [_value(value) for value in program.inputs],
        "outputs": [_value(value) for value in program.outputs],
        "transfers": [_transfer(transfer) for transfer in program.all_transfers],
    }
    (directory / "artifact.json").write_bytes(_text(artifact).encode())


def _check_name(device: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", device) or device in RESERVED:
        raise DicompilerError(f"device {device!r}: no name for the device's directory: give it another one")


def _text(document: Json) -> str:
    """JSON with one entry of each list per line, so that two artifacts can be compared by eye and by diff."""
    rows = []
    for key, value in sorted(document.items()):
        text = json.dumps(value, sort_keys=True)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry, sort_keys=True) for entry in value) + "]"
        rows.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _manifest(program: Program, index: int, files: Sequence[Sequence[str]]) -> Json:
    """What the device's runtime must know, without the files and what they depend on.

    files: the segments' files, role by role.
    """
    device = program.devices[index]
    ends = [(t.sender, t.receiver) for t in program.all_transfers]
    peers = {name for pair in ends if device.device in pair for name in pair} - {device.device}
    order = {d.device: i for i, d in enumerate(program.devices)}
    first = 0
    roles = []
    for role, own in zip(program.roles, files, strict=True):
        roles.append(_role(role, role.devices[index], own, first))
        first += len(role.transfers)
    return {
        "format": FORMAT,
        "device": device.device,
        "host": device.host,
        "peers": [{"device": name, "index": order[name]} for name in sorted(peers, key=order.__getitem__)],
        **roles[0],
        **({"others": roles[1:]} if len(roles) > 1 else {}),
    }


def _role(program: Program, device: DeviceProgram, files: Sequence[str], first: int) -> Json:
    """What it does for the frames of one role, whose transfers are numbered from `first`."""
    mine = [replace(t, index=first + t.index) for t in program.transfers if device.device in (t.sender, t.receiver)]
    needed = {name for s in device.segments for name in s.inputs} | set(device.sinks)
    needed |= {t.value.name for t in mine if t.sender == device.device}
    tensor_of = {output: tensor for tensor, output in device.sinks.items()}
    return {
        # A source that does not read an input need not be given it.
        "inputs": [
            _value(v) | {"index": i}
            for i, v in enumerate(program.inputs)
            if v.name in device.sources and v.name in needed
        ],
        "outputs": [
            _value(v) | {"index": i, "tensor": tensor_of[v.name]}
            for i, v in enumerate(program.outputs)
            if v.name in tensor_of
        ],
        "segments": [
            {"name": s.name, "file": file, "inputs": list(s.inputs), "outputs": list(s.outputs)}
            for s, file in zip(device.segments, files, strict=True)
        ],
        "steps": [[step.kind, step.index + (0 if step.kind == "run" else first)] for step in device.steps],
        "transfers": [_transfer(transfer) for transfer in mine],
    }


def _file(index: int) -> str:
    return f"segment{index:03}.onnx"


def _value(value: Value) -> Json:
    dtype = dtype_name(value.dtype)
    if dtype not in TYPES:
        raise DicompilerError(
            f"tensor {value.name!r}: values of type {dtype} cannot be sent between devices or into and out of them"
        )
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": dtype, "shape": shape, "bytes": None if shape is None else value.nbytes}


def _transfer(transfer: Transfer) -> Json:
    if transfer.value.shape is None:
        raise DicompilerError(f"tensor {transfer.value.name!r}: its shape is not static, so it cannot be sent")
    ends = {"index": transfer.index, "sender": transfer.sender, "receiver": transfer.receiver}
    return ends | _value(transfer.value)


class _Contents:
    """What is in a device's files: the weights of all roles, each once (a name stands for the same cut in all of them),
    and the segments by file, equal ones of several roles once. names: the files of each role's segments."""

    def __init__(self, program: Program, index: int) -> None:
        roles = [(role, role.devices[index].segments) for role in program.roles]
        self.weights = {
            tensor.name: role.weights[tensor.name]
            for role, segments in roles
            for segment in segments
            for tensor in segment.model.graph.initializer
            if is_hollow(tensor)
        }
        self.segments: dict[str, Segment] = {}
        self.names: list[list[str]] = []
        found: dict[bytes, str] = {}
        for _, segments in roles:
            self.names.append([])
            for segment in segments:
                key = segment.model.SerializeToString(deterministic=True) if program.others else segment.name.encode()
                file = found.setdefault(key, _file(len(found)))
                self.segments.setdefault(file, segment)
                self.names[-1].append(file)


def _files(contents: _Contents, place: Path) -> Iterator[tuple[str, Json]]:
    """Writes the device's files; gives the name, size and hash of each."""
    weights, offsets = contents.weights, _offsets(contents.weights)
    if weights:
        yield WEIGHTS, _write(place / WEIGHTS, _content(weights, offsets))
    for name, segment in contents.segments.items():
        yield name, _write(place / name, [_segment(segment, weights, offsets)])
    (place / "runtime").mkdir()
    runtime = resources.files("dicompiler_targets.sockets").joinpath("runtime")
    for source in sorted(runtime.iterdir(), key=lambda entry: entry.name):
        if source.name.endswith(".py"):
            name = f"runtime/{source.name}"
            yield name, _write(place / name, [source.read_bytes()])


def _offsets(weights: Mapping[str, Weight]) -> dict[str, int]:
    offsets, end = {}, 0
    for name, weight in weights.items():
        offsets[name] = -(-end // ALIGN) * ALIGN
        end = offsets[name] + weight.nbytes
    return offsets


def _content(weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> Iterator[bytes | memoryview]:
    end = 0
    for name, weight in weights.items():
        yield bytes(offsets[name] - end)
        yield from weight.chunks()
        end = offsets[name] + weight.nbytes


def _segment(segment: Segment, weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> bytes:
    """The segment's file: its large weights are external data in the device's weights file."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for tensor in model.graph.initializer:
        if is_hollow(tensor):
            del tensor.external_data[:]
            length = weights[tensor.name].nbytes
            for key, value in (("location", WEIGHTS), ("offset", offsets[tensor.name]), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    return bytes(model.SerializeToString(deterministic=True))


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> Json:
    """Writes the parts one after another; gives size and hash of the whole."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return {"bytes": size, "sha256": digest.hexdigest()}
