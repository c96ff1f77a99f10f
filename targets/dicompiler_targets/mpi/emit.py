"""Writes a Program as an artifact of the MPI target: artifact.json, and a package for each host.

A package holds the program's source, which is the same everywhere, and for each of the host's devices a directory with
its own segments and weights. In: a Program. Out: files, the same bytes for the same program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from dicompiler.plugin_api import DicompilerError, Program
from dicompiler.plugin_api.onnx import is_fixed_size
from dicompiler_targets.artifact_files import (
    Json,
    describe_artifact,
    describe_value,
    find_device_inputs,
    format_json,
    read_runtime_sources,
    write_chunks,
)
from dicompiler_targets.mpi import codegen, package_files
from dicompiler_targets.mpi.codegen import ImagePreprocessing, RankPlacement, describe_program
from dicompiler_targets.segment_io import hoist_device_copies, make_device_contents

MANIFEST_FORMAT = "dicompiler.mpi/4"
MANIFEST_FILE, CONTENTS_FILE, PROGRAM_FILE = "manifest.json", "contents.txt", "program.json"
RESERVED_HOST_NAMES = ("artifact.json", "plan.json", "platform.toml", "reference")
"""What stands beside the packages."""
RESERVED_DEVICE_NAMES = ("build", "runtime", "main.cc", "CMakeLists.txt", "run.sh", "rankfile", "hostfile", "sender.json",
          "receiver.json", MANIFEST_FILE, PROGRAM_FILE, "include")  # fmt: skip
"""What stands beside the devices' directories in a package."""
UNBUILT_FILES = ("sender.json", "receiver.json", MANIFEST_FILE, PROGRAM_FILE)
"""What a package says and nothing is built of."""
MAX_MESSAGE_BYTES = 2**31 - 1
"""The most bytes of a transfer: MPI counts them in an int."""


def write_artifact(
    program: Program,
    places: Sequence[RankPlacement],
    optimization: str,
    provider: str,
    preprocessing: ImagePreprocessing,
    directory: Path,
) -> None:
    """Writes the artifact into `directory`. `places`: of each rank, in the order of the program's devices.

    DicompilerError for names that cannot be directories, and for a tensor that cannot be sent.
    """
    _check_program(program, places)
    describe_artifact(program, "mpi", "")  # raises for tensors that cannot be exchanged, before anything is written
    ends = [
        [hoist_device_copies(role.devices[index]) for role in program.roles] for index in range(len(program.devices))
    ]
    contents, names = zip(*(make_device_contents(program, index, own) for index, own in enumerate(ends)), strict=True)
    document = describe_program(program, places, names, ends, optimization, provider, preprocessing)
    common: dict[str, bytes] = {
        PROGRAM_FILE: format_json(document).encode(),
        "sender.json": package_files.make_sender_table(program).encode(),
        "receiver.json": package_files.make_receiver_table(program).encode(),
        **make_package_sources(document),
    }
    files = {}
    for one, place in zip(contents, places, strict=True):
        folder = directory / place.host / place.device
        folder.mkdir(parents=True)
        files[place.device] = dict(one.write(folder))
    digest = _compute_digest(common, files)
    for host in dict.fromkeys(place.host for place in places):
        package = directory / host
        for name, content in common.items():
            (package / name).parent.mkdir(exist_ok=True)
            write_chunks(package / name, [content])
        (package / "run.sh").chmod(0o755)
        for name in (place.device for place in places if place.host == host):
            (package / name / CONTENTS_FILE).write_text(_format_contents(digest, files[name]), encoding="utf-8")
        manifest = _make_manifest(program, places, host, preprocessing) | {"digest": digest}
        (package / MANIFEST_FILE).write_text(format_json(manifest), encoding="utf-8")
    written = {
        f"{place.host}/{place.device}/{name}": record
        for place in places
        for name, record in files[place.device].items()
    }
    artifact = describe_artifact(program, "mpi", digest) | {"files": written}
    (directory / "artifact.json").write_text(format_json(artifact), encoding="utf-8")


def make_package_sources(document: Json) -> dict[str, bytes]:
    """What of a package is built or run, and follows from its program.json, by path. KeyError, TypeError or ValueError
    where that is none."""
    places = codegen.read_placements(document)
    return {
        "main.cc": codegen.generate_main(document).encode(),
        "run.sh": package_files.make_run_script(places).encode(),
        "rankfile": package_files.make_rankfile(places).encode(),
        "hostfile": package_files.make_hostfile(places).encode(),
        **read_common_sources(),
    }


def read_common_sources() -> dict[str, bytes]:
    """The part of the source that is the same for all programs, by path in a package."""
    sources = {f"runtime/{name}": content for name, content in read_runtime_sources("mpi", (".cc", ".hpp")).items()}
    return {
        "CMakeLists.txt": resources.files("dicompiler_targets.mpi").joinpath("CMakeLists.txt").read_bytes()
    } | sources


def _check_program(program: Program, places: Iterable[RankPlacement]) -> None:
    for place in places:
        for name, what, reserved in (
            (place.host, "host", RESERVED_HOST_NAMES),
            (place.device, "device", RESERVED_DEVICE_NAMES),
        ):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in reserved:
                raise DicompilerError(f"{what} {name!r}: no name for the {what}'s directory: give it another one")
    for value in (*program.inputs, *program.outputs):
        if not is_fixed_size(value.dtype):
            what = "words" if value.dtype else "no tensor but a sequence, a map or an optional value"
            raise DicompilerError(
                f"{value.name!r} is {what}, which programs of target mpi neither take nor give: "
                "compile for target sockets"
            )
    for transfer in program.all_transfers:
        if transfer.value.shape is not None and transfer.value.nbytes > MAX_MESSAGE_BYTES:
            raise DicompilerError(
                f"tensor {transfer.value.name!r}: {transfer.value.nbytes} bytes from {transfer.sender!r} to "
                f"{transfer.receiver!r} are more than one MPI message can hold (2 GiB): cut it into more parts"
            )


def _compute_digest(common: Mapping[str, bytes], files: Mapping[str, Mapping[str, Json]]) -> str:
    """SHA-256 over the source and the hashes of all devices' files."""
    digest = hashlib.sha256()
    for name, content in sorted(common.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    for device, records in files.items():
        for name, record in sorted(records.items()):
            digest.update(f"{device}/{name} {record['digest']}\n".encode())
    return digest.hexdigest()


def _format_contents(digest: str, files: Mapping[str, Json]) -> str:
    """contents.txt of a device: the artifact's digest; the bytes, digest and name of each file; the SHA-256 of all
    this."""
    lines = [f"{record['bytes']} {record['digest']} {name}\n" for name, record in sorted(files.items())]
    text = "".join([f"{digest}\n", *lines])
    return f"{text}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _make_manifest(
    program: Program, places: Sequence[RankPlacement], host: str, preprocessing: ImagePreprocessing
) -> Json:
    """What a package says of itself: its host's ranks, and how images become inputs."""
    ranks = []
    for rank, place in enumerate(places):
        if place.host == host:
            roles = [role.devices[rank] for role in program.roles]
            given = [find_device_inputs(role, role.devices[rank]) for role in program.roles]
            kept = {state.past for state in program.devices[rank].states}  # which a frame may give
            ranks.append(
                {
                    "rank": rank,
                    "device": place.device,
                    "cores": list(place.cores),
                    "threads": place.threads,
                    "gpu": place.gpu,
                    "inputs": sorted(kept.union(value.name for inputs in given for value in inputs.values())),
                    "outputs": sorted({name for device in roles for name in device.sinks.values()}),
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
