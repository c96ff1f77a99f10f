"""Writes a Program as an artifact of target `mpi`: artifact.json, and a package (a directory) for each host.

A package has the sources of the C++ program, which are the same on all hosts, and a directory with segments and weights
for each of the host's devices. The same program gives the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path

from dicompiler.plugin_api import DicompilerError, Program
from dicompiler.plugin_api.artifacts import Json, describe_artifact, describe_value, format_json
from dicompiler.plugin_api.onnx import is_fixed_size
from dicompiler_targets.artifact_files import (
    find_device_inputs,
    hoist_device_copies,
    make_device_contents,
    write_chunks,
)
from dicompiler_targets.bundled_runtime import read_runtime_sources
from dicompiler_targets.engine_segments import convert_segments
from dicompiler_targets.mpi import codegen, package_files
from dicompiler_targets.mpi.codegen import ImagePreprocessing, RankPlacement, describe_program

MANIFEST_FORMAT = "dicompiler.mpi/4"
MANIFEST_FILE, CONTENTS_FILE, PROGRAM_FILE = "manifest.json", "contents.txt", "program.json"
NCNN, NCNN_SOURCE = "ncnn", "engine_ncnn.cc"
"""Name of the engine ncnn, and name of its source file among the sources of the runtime."""
RESERVED_HOST_NAMES = ("artifact.json", "plan.json", "platform.toml", "reference")
"""Invalid host names: each package is a directory with its host's name, next to files with these names."""
RESERVED_DEVICE_NAMES = (
    "build", "runtime", "main.cc", "CMakeLists.txt", "run.sh", "rankfile", "hostfile", "sender.json", "receiver.json",
    MANIFEST_FILE, PROGRAM_FILE, "include", NCNN,
)  # fmt: skip
"""Invalid device names: a package has a directory with each device's name, next to files with these names."""
UNBUILT_FILES = ("sender.json", "receiver.json", MANIFEST_FILE, PROGRAM_FILE)
"""Files of a package that are neither compiled nor run."""
MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum bytes of a tensor that is sent, because MPI counts bytes with a C++ int."""


def write_program(
    program: Program,
    placements: Sequence[RankPlacement],
    optimization: str,
    provider: str,
    preprocessing: ImagePreprocessing,
    directory: Path,
) -> None:
    """Write the artifact of a program: artifact.json, and a package (directory) for each host.

    Args:
        program: The program of all devices.
        placements: The host and cores of each rank (MPI process), in the order of the program's devices.
        optimization: The optimization level of onnxruntime.
        provider: The execution provider of onnxruntime for devices that are GPUs.
        preprocessing: How images become inputs.
        directory: The artifact's directory.

    Raises:
        DicompilerError: A host or device has a name that cannot be used for a directory, or a tensor cannot be sent.
    """
    _check_program(program, placements)
    # `describe_artifact` raises an error if a tensor cannot be sent, so it is called before any file is written.
    describe_artifact(program, "mpi", "")
    devices = range(len(program.devices))
    hoisted = [[hoist_device_copies(role.devices[index]) for role in program.roles] for index in devices]
    networks = convert_segments(program, list(zip(*hoisted, strict=True)))
    contents, files = zip(
        *(
            make_device_contents(program, index, roles, networks.get(program.devices[index].device, {}))
            for index, roles in enumerate(hoisted)
        ),
        strict=True,
    )
    version = metadata.version(NCNN) if networks else ""
    document = describe_program(program, placements, files, hoisted, optimization, provider, preprocessing, version)
    common: dict[str, bytes] = {
        PROGRAM_FILE: format_json(document).encode(),
        "sender.json": package_files.make_transfer_table(program, "sender", "receiver").encode(),
        "receiver.json": package_files.make_transfer_table(program, "receiver", "sender").encode(),
        **make_package_sources(document),
    }
    records = {}
    for device_contents, placement in zip(contents, placements, strict=True):
        folder = directory / placement.host / placement.device
        folder.mkdir(parents=True)
        records[placement.device] = dict(device_contents.write(folder))
    digest = _compute_digest(common, records)
    for host in dict.fromkeys(placement.host for placement in placements):
        package = directory / host
        for name, content in common.items():
            (package / name).parent.mkdir(exist_ok=True)
            write_chunks(package / name, [content])
        (package / "run.sh").chmod(0o755)
        for name in (placement.device for placement in placements if placement.host == host):
            (package / name / CONTENTS_FILE).write_text(_format_contents(digest, records[name]), encoding="utf-8")
        manifest = _make_manifest(program, placements, host, preprocessing) | {"digest": digest}
        (package / MANIFEST_FILE).write_text(format_json(manifest), encoding="utf-8")
    written = {
        f"{placement.host}/{placement.device}/{name}": record
        for placement in placements
        for name, record in records[placement.device].items()
    }
    artifact = describe_artifact(program, "mpi", digest) | {"files": written}
    (directory / "artifact.json").write_text(format_json(artifact), encoding="utf-8")


def make_package_sources(document: Json) -> dict[str, bytes]:
    """Return the content of those files of a package that are compiled or run, by path.

    `document` is the content of program.json.

    Raises:
        KeyError, TypeError, ValueError: `document` is invalid.
    """
    placements = codegen.read_placements(document)
    runtime = read_runtime_sources("mpi", (".cc", ".hpp"))
    if "ncnn" not in document:
        del runtime[NCNN_SOURCE]
    return {
        "main.cc": codegen.generate_main(document).encode(),
        "run.sh": package_files.make_run_script(placements).encode(),
        "rankfile": package_files.make_rankfile(placements).encode(),
        "hostfile": package_files.make_hostfile(placements).encode(),
        "CMakeLists.txt": resources.files("dicompiler_targets.mpi").joinpath("CMakeLists.txt").read_bytes(),
        **{f"runtime/{name}": content for name, content in runtime.items()},
    }


def _check_program(program: Program, placements: Iterable[RankPlacement]) -> None:
    for placement in placements:
        for name, noun, reserved in (
            (placement.host, "host", RESERVED_HOST_NAMES),
            (placement.device, "device", RESERVED_DEVICE_NAMES),
        ):
            if not re.fullmatch(codegen.NAME_PATTERN, name) or name in reserved:
                raise DicompilerError(f"{noun} {name!r}: the name cannot be used for a directory: rename the {noun}")
    for value in (*program.inputs, *program.outputs):
        if not is_fixed_size(value.dtype):
            kind = "a tensor of strings" if value.dtype else "a sequence, a map or an optional value"
            raise DicompilerError(
                f"input or output {value.name!r} is {kind}, which target mpi does not support: use target sockets"
            )
    for transfer in program.all_transfers:
        if transfer.value.shape is not None and transfer.value.nbytes > MAX_MESSAGE_BYTES:
            raise DicompilerError(
                f"tensor {transfer.value.name!r}: {transfer.value.nbytes} bytes from device {transfer.sender!r} to "
                f"device {transfer.receiver!r} exceed the limit of MPI (2 GiB): split the layer into more parts"
            )


def _compute_digest(common: Mapping[str, bytes], records: Mapping[str, Mapping[str, Json]]) -> str:
    """Return the digest of the artifact: the SHA-256 over the names and digests of its files.

    Args:
        common: Contents of the files that are the same for all hosts, by name.
        records: Digests of each device's own files, by device and file name.
    """
    digest = hashlib.sha256()
    for name, content in sorted(common.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    for device, files in records.items():
        for name, record in sorted(files.items()):
            digest.update(f"{device}/{name} {record['digest']}\n".encode())
    return digest.hexdigest()


def _format_contents(digest: str, records: Mapping[str, Json]) -> str:
    """Return the text of contents.txt: the artifact's digest, then bytes, digest and name of each of a device's files.

    The last line is the SHA-256 of all lines before it.
    """
    lines = [f"{record['bytes']} {record['digest']} {name}\n" for name, record in sorted(records.items())]
    text = "".join([f"{digest}\n", *lines])
    return f"{text}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _make_manifest(
    program: Program, placements: Sequence[RankPlacement], host: str, preprocessing: ImagePreprocessing
) -> Json:
    """Return the manifest of a host's package: its ranks (MPI processes), and how images become inputs."""
    ranks = []
    for rank, placement in enumerate(placements):
        if placement.host == host:
            roles = [role.devices[rank] for role in program.roles]
            inputs = [find_device_inputs(role, role.devices[rank]) for role in program.roles]
            # States (tensors kept for the next frame) are inputs too, because a frame may set them.
            states = {state.past for state in program.devices[rank].states}
            ranks.append(
                {
                    "rank": rank,
                    "device": placement.device,
                    "cores": list(placement.cores),
                    "threads": placement.threads,
                    "gpu": placement.gpu,
                    "inputs": sorted(states.union(value.name for values in inputs for value in values.values())),
                    "outputs": sorted({name for device in roles for name in device.model_outputs.values()}),
                    "segments": [len(device.segments) for device in roles],
                }
            )
    return {
        "format": MANIFEST_FORMAT,
        "host": host,
        "ranks": ranks,
        "inputs": [describe_value(value) for value in program.inputs],
        "preprocessing": {
            "order": preprocessing.order,
            "mean": list(preprocessing.mean),
            "scale": list(preprocessing.scale),
            "size": [list(value.shape[2:4]) for value in program.inputs if value.shape and len(value.shape) == 4],
        },
    }
