"""Writing an artifact of the target `sockets`.

    Program ⇒ artifact.json, and for each device a directory with its manifest, segments, weights and the runtime

The same program gives the same bytes. The module `artifact` loads the result.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dicompiler.plugin_api import DeviceProgram, DicompilerError, Program, Segment
from dicompiler.plugin_api.artifacts import (
    DeviceState,
    EngineFiles,
    Json,
    describe_artifact,
    describe_transfer,
    describe_value,
    format_checksummed_json,
    format_json,
)
from dicompiler.plugin_api.onnx import is_fixed_size
from dicompiler_targets.artifact_files import (
    NETWORK_SUFFIX,
    HoistedSegment,
    describe_copies,
    find_device_inputs,
    hoist_device_copies,
    make_device_contents,
    network_weights_file,
    write_chunks,
)
from dicompiler_targets.bundled_runtime import read_runtime_sources
from dicompiler_targets.engine_segments import convert_segments, describe_network, describe_packages
from dicompiler_targets.sockets.runtime import MANIFEST_FORMAT

RESERVED_NAMES = ("artifact.json", "plan.json", "platform.toml", "reference")
"""File names that an artifact uses itself, so no device can have such a name."""


def write_program(program: Program, threads: Mapping[str, int], optimization: str, directory: Path) -> None:
    """Write the artifact of a program into an existing directory.

    `threads` has, by device, the number of threads that compute a segment. `optimization` is onnxruntime's level.

    Raises:
        DicompilerError: A device's name cannot be a directory's name, or a tensor's type cannot be sent.
    """
    # Slices and concatenations at the boundaries of segments are removed from the segments. The runtime makes these
    # copies before and after it runs a segment, which is faster than in the engine.
    hoisted_roles = [[hoist_device_copies(device) for device in role_program.devices] for role_program in program.roles]
    networks = convert_segments(program, hoisted_roles)
    manifests = []
    for index, device in enumerate(program.devices):
        name = device.device
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in RESERVED_NAMES:
            raise DicompilerError(f"device {name!r}: not a valid name for its directory: rename the device")
        hoisted = [devices[index] for devices in hoisted_roles]
        settings = {"index": index, "threads": threads[name], "optimization": optimization}
        manifest = _write_device_files(program, index, hoisted, networks.get(name, {}), directory / name)
        manifests.append(manifest | settings)
    _write_manifests(program, manifests, directory)


def _write_device_files(
    program: Program,
    index: int,
    hoisted: Sequence[Sequence[HoistedSegment]],
    networks: Mapping[bytes, EngineFiles],
    directory: Path,
) -> Json:
    """Write the segments, the weights and the runtime of the device with this index, and return its manifest.

    `hoisted` has the device's segments for the normal plan, each replica and each failure plan. `networks` has, by
    serialized ONNX model, the files that an engine's converter has made of it.
    """
    runtime = directory / "runtime"
    runtime.mkdir(parents=True)
    contents, names = make_device_contents(program, index, hoisted, networks)
    manifest = _device_manifest(program, index, names, hoisted)
    manifest |= _describe_onnx_versions(contents.segments.values())
    if networks:
        manifest["packages"] = describe_packages(program.devices[index].engine)
    files = dict(contents.write(directory))
    for file, source in read_runtime_sources("sockets", (".py",)).items():
        files[f"runtime/{file}"] = write_chunks(runtime / file, [source])
    return manifest | {"files": dict(sorted(files.items()))}


def _write_manifests(program: Program, manifests: Sequence[Json], directory: Path) -> None:
    """Write artifact.json and the device manifests, and add the artifact's digest to each of them."""
    # The manifests list every file with its digest, so a digest of all manifests identifies the whole artifact.
    digest = hashlib.sha256("".join(map(format_json, manifests)).encode()).hexdigest()
    for manifest in manifests:
        text = format_checksummed_json(manifest | {"digest": digest})
        (directory / manifest["device"] / "manifest.json").write_bytes(text.encode())
    all_files = {
        f"{manifest['device']}/{name}": record for manifest in manifests for name, record in manifest["files"].items()
    }
    document = describe_artifact(program, "sockets", digest) | {"files": all_files}
    (directory / "artifact.json").write_bytes(format_json(document).encode())


def _device_manifest(
    program: Program, index: int, files: Sequence[Sequence[str]], hoisted: Sequence[Sequence[HoistedSegment]]
) -> Json:
    """Return the manifest of the device with this index, without the list of its files.

    `files` and `hoisted` have one entry for the normal plan, each replica and each failure plan: the names of the
    segments' files, and the segments without the copies that the runtime makes instead.
    """
    device = program.devices[index]
    pairs = [(t.sender, t.receiver) for t in program.all_transfers]
    peers = {name for pair in pairs if device.device in pair for name in pair} - {device.device}
    order = {d.device: i for i, d in enumerate(program.devices)}
    first_transfer = 0
    roles = []
    for role_program, role_files, role_hoisted in zip(program.roles, files, hoisted, strict=True):
        failed = {"failed": list(role_program.failed)} if role_program.failed else {}
        device_program = role_program.devices[index]
        role = _role_document(role_program, device_program, role_files, role_hoisted, first_transfer)
        roles.append(role | failed)
        first_transfer += len(role_program.transfers)
    return {
        "format": MANIFEST_FORMAT,
        "device": device.device,
        "host": device.host,
        "peers": [{"device": name, "index": order[name]} for name in sorted(peers, key=order.__getitem__)],
        **roles[0],
        **({"other_roles": roles[1:]} if len(roles) > 1 else {}),
    }


def _role_document(
    program: Program,
    device: DeviceProgram,
    files: Sequence[str],
    hoisted: Sequence[HoistedSegment],
    first_transfer: int,
) -> Json:
    """Return the manifest entry of a device's work in one plan (the normal plan, a replica or a failure plan).

    `files` has each segment's file name, and `hoisted` the segments without the copies that the runtime makes instead.
    The transfers of all plans are numbered consecutively; `first_transfer` is the number of this plan's first one.
    """
    transfers = [
        replace(t, index=first_transfer + t.index) for t in program.transfers if device.device in (t.sender, t.receiver)
    ]
    tensor_of = {output: tensor for tensor, output in device.model_outputs.items()}
    return {
        # A source (device that gets inputs of the network) lists only those inputs that its segments and transfers use.
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
            | _describe_network(device.engine, hoisted_segment, file)
            | _non_tensor_names(s)
            | describe_copies(hoisted_segment)
            for s, file, hoisted_segment in zip(device.segments, files, hoisted, strict=True)
        ],
        "steps": [[step.kind, step.index + (0 if step.kind == "run" else first_transfer)] for step in device.steps],
        "transfers": [describe_transfer(transfer) for transfer in transfers],
    }


def _describe_onnx_versions(segments: Iterable[Segment]) -> Json:
    """Return the manifest entry `onnx`, the IR version and opset of the segments that onnxruntime computes.

    Return {} if there are no such segments.
    """
    models = [segment.model for segment in segments]
    if not models:
        return {}
    opsets = [entry.version for model in models for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    return {"onnx": {"ir_version": max(model.ir_version for model in models), "opset": max(opsets, default=1)}}


def _describe_network(engine: str, hoisted: HoistedSegment, file: str) -> Json:
    """Return the manifest entry `engine` of a segment; {} if onnxruntime computes the segment."""
    if hoisted.segment is None or not file.endswith(NETWORK_SUFFIX):
        return {}
    return {"engine": describe_network(engine, hoisted.segment.model.graph, network_weights_file(file))}


def _non_tensor_names(segment: Segment) -> Json:
    """Return the manifest entry `unsized` of a segment: names of inputs and outputs that are strings or not tensors."""
    graph = segment.model.graph
    values = (*graph.input, *graph.output)
    names = [value.name for value in values if not is_fixed_size(value.type.tensor_type.elem_type)]
    return {"unsized": names} if names else {}


def _state_document(program: Program, state: DeviceState) -> Json:
    """Return the manifest entry of a device's piece of a state (a tensor that is kept for the next frame).

    An INPUT message has the index of an input or state, so the indices of states follow those of the inputs.
    """
    index = len(program.inputs) + [whole.name for whole in program.states].index(state.past)
    piece = {"state": state.past, "region": [list(interval) for interval in state.region]}
    return describe_value(state.value) | {"index": index, "tensor": state.written_name} | piece
