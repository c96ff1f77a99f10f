"""Writes a Program as an artifact: artifact.json, and per device its manifest, segments, weights and the runtime.

In: a Program. Out: files, the same bytes for the same program. Weights go straight from their views to the file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dicompiler.plugin_api import DeviceProgram, DicompilerError, Program, Segment, State, sealed_text, sized
from dicompiler_targets.files import (
    Contents,
    Json,
    artifact_document,
    given_inputs,
    json_text,
    runtime_sources,
    transfer_document,
    value_document,
    write_parts,
)
from dicompiler_targets.moves import Peeled
from dicompiler_targets.seams import bare, copies_document, seams
from dicompiler_targets.sockets.runtime import FORMAT

RESERVED = ("artifact.json", "plan.json", "platform.toml", "reference")
"""What stands beside the devices' directories."""


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
        ends = [seams(role.devices[index]) for role in program.roles]
        contents, names = bare(program, index, ends)
        manifest = _manifest(program, index, names, ends)
        manifests.append(manifest | head | {"files": dict(sorted(_files(contents, place)))})
    # The manifests name every file with its hash: what they hash to stands for the whole artifact.
    digest = hashlib.sha256("".join(map(json_text, manifests)).encode()).hexdigest()
    for manifest in manifests:
        text = sealed_text(manifest | {"digest": digest})
        (directory / manifest["device"] / "manifest.json").write_bytes(text.encode())
    files = {f"{one['device']}/{name}": record for one in manifests for name, record in one["files"].items()}
    document = artifact_document(program, "sockets", digest) | {"files": files}
    (directory / "artifact.json").write_bytes(json_text(document).encode())


def _check_name(device: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", device) or device in RESERVED:
        raise DicompilerError(f"device {device!r}: no name for the device's directory: give it another one")


def _manifest(program: Program, index: int, files: Sequence[Sequence[str]], ends: Sequence[Sequence[Peeled]]) -> Json:
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
        lost = {"lost": list(role.lost)} if role.lost else {}
        roles.append(_role(role, role.devices[index], role_files, own, first) | lost)
        first += len(role.transfers)
    return {
        "format": FORMAT,
        "device": device.device,
        "host": device.host,
        "peers": [{"device": name, "index": order[name]} for name in sorted(peers, key=order.__getitem__)],
        **roles[0],
        **({"others": roles[1:]} if len(roles) > 1 else {}),
    }


def _role(program: Program, device: DeviceProgram, files: Sequence[str], ends: Sequence[Peeled], first: int) -> Json:
    """What it does for the frames of one role, whose transfers are numbered from `first`."""
    mine = [replace(t, index=first + t.index) for t in program.transfers if device.device in (t.sender, t.receiver)]
    tensor_of = {output: tensor for tensor, output in device.sinks.items()}
    return {
        # A source that does not read an input need not be given it.
        "inputs": [value_document(v) | {"index": i} for i, v in given_inputs(program, device).items()],
        "outputs": [
            value_document(v) | {"index": i, "tensor": tensor_of[v.name]}
            for i, v in enumerate(program.outputs)
            if v.name in tensor_of
        ],
        **({"states": [_state(program, state) for state in device.states]} if device.states else {}),
        "segments": [
            {"name": s.name}
            | ({"file": file} if file else {})
            | {"inputs": list(s.inputs), "outputs": list(s.outputs)}
            | _unsized(s)
            | copies_document(seam)
            for s, file, seam in zip(device.segments, files, ends, strict=True)
        ],
        "steps": [[step.kind, step.index + (0 if step.kind == "run" else first)] for step in device.steps],
        "transfers": [transfer_document(transfer) for transfer in mine],
    }


def _unsized(segment: Segment) -> Json:
    """Which of its inputs and outputs are words or no tensors, where some are."""
    graph = segment.model.graph
    names = [value.name for value in (*graph.input, *graph.output) if not sized(value.type.tensor_type.elem_type)]
    return {"unsized": names} if names else {}


def _state(program: Program, state: State) -> Json:
    """What a device keeps of a state; its index is that of the state behind all inputs."""
    index = len(program.inputs) + [whole.name for whole in program.states].index(state.past)
    own = {"index": index, "tensor": state.made, "state": state.past, "region": [list(one) for one in state.region]}
    return value_document(state.value) | own


def _files(contents: Contents, place: Path) -> Iterator[tuple[str, Json]]:
    """Writes the device's files, the runtime too; gives the name, size and hash of each."""
    yield from contents.write(place)
    (place / "runtime").mkdir()
    for name, source in runtime_sources("sockets", (".py",)).items():
        yield f"runtime/{name}", write_parts(place / "runtime" / name, [source])
