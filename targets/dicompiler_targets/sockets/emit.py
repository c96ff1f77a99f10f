"""Writes a Program as an artifact: artifact.json, and per device its manifest, segments, weights and the runtime.

In: a Program. Out: files, the same bytes for the same program. Weights go straight from their views to the file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dicompiler.plugin_api import DeviceProgram, DicompilerError, Program, Segment
from dicompiler.plugin_api.artifacts import DeviceState, format_checksummed_json
from dicompiler.plugin_api.onnx import is_fixed_size
from dicompiler_targets.artifact_files import (
    DeviceContents,
    Json,
    describe_artifact,
    describe_transfer,
    describe_value,
    find_device_inputs,
    format_json,
    read_runtime_sources,
    write_chunks,
)
from dicompiler_targets.copy_hoisting import HoistedSegment
from dicompiler_targets.segment_io import describe_copies, hoist_device_copies, make_device_contents
from dicompiler_targets.sockets.runtime import MANIFEST_FORMAT

RESERVED_NAMES = ("artifact.json", "plan.json", "platform.toml", "reference")
"""What stands beside the devices' directories."""


def write_artifact(program: Program, threads: Mapping[str, int], optimization: str, directory: Path) -> None:
    """Writes the artifact into `directory`. `threads`: per device. DicompilerError for a device name that cannot be a
    directory, or a tensor between devices whose type cannot be sent.
    """
    manifests = []
    for index, device in enumerate(program.devices):
        _check_device_name(device.device)
        place = directory / device.device
        place.mkdir()
        head = {"index": index, "threads": threads[device.device], "optimization": optimization}
        ends = [hoist_device_copies(role.devices[index]) for role in program.roles]
        contents, names = make_device_contents(program, index, ends)
        manifest = _device_manifest(program, index, names, ends)
        manifests.append(manifest | head | {"files": dict(sorted(_write_files(contents, place)))})
    # The manifests name every file with its hash: what they hash to stands for the whole artifact.
    digest = hashlib.sha256("".join(map(format_json, manifests)).encode()).hexdigest()
    for manifest in manifests:
        text = format_checksummed_json(manifest | {"digest": digest})
        (directory / manifest["device"] / "manifest.json").write_bytes(text.encode())
    files = {f"{one['device']}/{name}": record for one in manifests for name, record in one["files"].items()}
    document = describe_artifact(program, "sockets", digest) | {"files": files}
    (directory / "artifact.json").write_bytes(format_json(document).encode())


def _check_device_name(device: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", device) or device in RESERVED_NAMES:
        raise DicompilerError(f"device {device!r}: no name for the device's directory: give it another one")


def _device_manifest(
    program: Program, index: int, files: Sequence[Sequence[str]], ends: Sequence[Sequence[HoistedSegment]]
) -> Json:
    """What the device's runtime must know, without the files and what they depend on.

    files: the segments' files, role by role; ends: what is copied where segments meet.
    """
    device = program.devices[index]
    pairs = [(t.sender, t.receiver) for t in program.all_transfers]
    peers = {name for pair in pairs if device.device in pair for name in pair} - {device.device}
    order = {d.device: i for i, d in enumerate(program.devices)}
    first = 0
    roles = []
    for role, role_files, own in zip(program.roles, files, ends, strict=True):
        lost = {"lost": list(role.failed)} if role.failed else {}
        roles.append(_role_document(role, role.devices[index], role_files, own, first) | lost)
        first += len(role.transfers)
    return {
        "format": MANIFEST_FORMAT,
        "device": device.device,
        "host": device.host,
        "peers": [{"device": name, "index": order[name]} for name in sorted(peers, key=order.__getitem__)],
        **roles[0],
        **({"others": roles[1:]} if len(roles) > 1 else {}),
    }


def _role_document(
    program: Program, device: DeviceProgram, files: Sequence[str], ends: Sequence[HoistedSegment], first: int
) -> Json:
    """What it does for the frames of one role, whose transfers are numbered from `first`."""
    mine = [replace(t, index=first + t.index) for t in program.transfers if device.device in (t.sender, t.receiver)]
    tensor_of = {output: tensor for tensor, output in device.sinks.items()}
    return {
        # A source that does not read an input need not be given it.
        "inputs": [describe_value(v) | {"index": i} for i, v in find_device_inputs(program, device).items()],
        "outputs": [
            describe_value(v) | {"index": i, "tensor": tensor_of[v.name]}
            for i, v in enumerate(program.outputs)
            if v.name in tensor_of
        ],
        **({"states": [_state_document(program, state) for state in device.states]} if device.states else {}),
        "segments": [
            {"name": s.name}
            | ({"file": file} if file else {})
            | {"inputs": list(s.inputs), "outputs": list(s.outputs)}
            | _non_tensor_names(s)
            | describe_copies(seam)
            for s, file, seam in zip(device.segments, files, ends, strict=True)
        ],
        "steps": [[step.kind, step.index + (0 if step.kind == "run" else first)] for step in device.steps],
        "transfers": [describe_transfer(transfer) for transfer in mine],
    }


def _non_tensor_names(segment: Segment) -> Json:
    """Which of its inputs and outputs are words or no tensors, where some are."""
    graph = segment.model.graph
    names = [
        value.name for value in (*graph.input, *graph.output) if not is_fixed_size(value.type.tensor_type.elem_type)
    ]
    return {"unsized": names} if names else {}


def _state_document(program: Program, state: DeviceState) -> Json:
    """What a device keeps of a state; its index is that of the state behind all inputs."""
    index = len(program.inputs) + [whole.name for whole in program.states].index(state.past)
    own = {
        "index": index,
        "tensor": state.written_name,
        "state": state.past,
        "region": [list(one) for one in state.region],
    }
    return describe_value(state.value) | own


def _write_files(contents: DeviceContents, place: Path) -> Iterator[tuple[str, Json]]:
    """Writes the device's files, the runtime too; gives the name, size and hash of each."""
    yield from contents.write(place)
    (place / "runtime").mkdir()
    for name, source in read_runtime_sources("sockets", (".py",)).items():
        yield f"runtime/{name}", write_chunks(place / "runtime" / name, [source])
