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

from dicompiler.plugin_api import DicompilerError, Program, sized
from dicompiler_targets.files import (
    Json,
    artifact_document,
    given_inputs,
    json_text,
    runtime_sources,
    value_document,
    write_parts,
)
from dicompiler_targets.mpi import packages, source
from dicompiler_targets.mpi.source import Place, Preprocessing, describe
from dicompiler_targets.seams import bare, seams

FORMAT = "dicompiler.mpi/4"
MANIFEST, CONTENTS, PROGRAM = "manifest.json", "contents.txt", "program.json"
OUTSIDE = ("artifact.json", "plan.json", "platform.toml", "reference")
"""What stands beside the packages."""
INSIDE = ("build", "runtime", "main.cc", "CMakeLists.txt", "run.sh", "rankfile", "hostfile", "sender.json",
          "receiver.json", MANIFEST, PROGRAM, "include")  # fmt: skip
"""What stands beside the devices' directories in a package."""
TABLES = ("sender.json", "receiver.json", MANIFEST, PROGRAM)
"""What a package says and nothing is built of."""
MESSAGE = 2**31 - 1
"""The most bytes of a transfer: MPI counts them in an int."""


def write(
    program: Program,
    places: Sequence[Place],
    optimization: str,
    provider: str,
    preprocessing: Preprocessing,
    directory: Path,
) -> None:
    """Writes the artifact into `directory`. `places`: of each rank, in the order of the program's devices.

    DicompilerError for names that cannot be directories, and for a tensor that cannot be sent.
    """
    _check(program, places)
    artifact_document(program, "mpi", "")  # raises for tensors that cannot be exchanged, before anything is written
    ends = [[seams(role.devices[index]) for role in program.roles] for index in range(len(program.devices))]
    contents, names = zip(*(bare(program, index, own) for index, own in enumerate(ends)), strict=True)
    document = describe(program, places, names, ends, optimization, provider, preprocessing)
    common: dict[str, bytes] = {
        PROGRAM: json_text(document).encode(),
        "sender.json": packages.senders(program).encode(),
        "receiver.json": packages.receivers(program).encode(),
        **sources(document),
    }
    files = {}
    for one, place in zip(contents, places, strict=True):
        folder = directory / place.host / place.device
        folder.mkdir(parents=True)
        files[place.device] = dict(one.write(folder))
    digest = _digest(common, files)
    for host in dict.fromkeys(place.host for place in places):
        package = directory / host
        for name, content in common.items():
            (package / name).parent.mkdir(exist_ok=True)
            write_parts(package / name, [content])
        (package / "run.sh").chmod(0o755)
        for name in (place.device for place in places if place.host == host):
            (package / name / CONTENTS).write_text(_contents(digest, files[name]), encoding="utf-8")
        manifest = _manifest(program, places, host, preprocessing) | {"digest": digest}
        (package / MANIFEST).write_text(json_text(manifest), encoding="utf-8")
    written = {
        f"{place.host}/{place.device}/{name}": record
        for place in places
        for name, record in files[place.device].items()
    }
    artifact = artifact_document(program, "mpi", digest) | {"files": written}
    (directory / "artifact.json").write_text(json_text(artifact), encoding="utf-8")


def sources(document: Json) -> dict[str, bytes]:
    """What of a package is built or run, and follows from its program.json, by path. KeyError, TypeError or ValueError
    where that is none."""
    places = source.places(document)
    return {
        "main.cc": source.main_source(document).encode(),
        "run.sh": packages.run_script(places).encode(),
        "rankfile": packages.rankfile(places).encode(),
        "hostfile": packages.hostfile(places).encode(),
        **runtime(),
    }


def runtime() -> dict[str, bytes]:
    """The part of the source that is the same for all programs, by path in a package."""
    sources = {f"runtime/{name}": content for name, content in runtime_sources("mpi", (".cc", ".hpp")).items()}
    return {
        "CMakeLists.txt": resources.files("dicompiler_targets.mpi").joinpath("CMakeLists.txt").read_bytes()
    } | sources


def _check(program: Program, places: Iterable[Place]) -> None:
    for place in places:
        for name, what, reserved in ((place.host, "host", OUTSIDE), (place.device, "device", INSIDE)):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in reserved:
                raise DicompilerError(f"{what} {name!r}: no name for the {what}'s directory: give it another one")
    for value in (*program.inputs, *program.outputs):
        if not sized(value.dtype):
            what = "words" if value.dtype else "no tensor but a sequence, a map or an optional value"
            raise DicompilerError(
                f"{value.name!r} is {what}, which programs of target mpi neither take nor give: "
                "compile for target sockets"
            )
    for transfer in program.all_transfers:
        if transfer.value.shape is not None and transfer.value.nbytes > MESSAGE:
            raise DicompilerError(
                f"tensor {transfer.value.name!r}: {transfer.value.nbytes} bytes from {transfer.sender!r} to "
                f"{transfer.receiver!r} are more than one MPI message can hold (2 GiB): cut it into more parts"
            )


def _digest(common: Mapping[str, bytes], files: Mapping[str, Mapping[str, Json]]) -> str:
    """SHA-256 over the source and the hashes of all devices' files."""
    digest = hashlib.sha256()
    for name, content in sorted(common.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    for device, records in files.items():
        for name, record in sorted(records.items()):
            digest.update(f"{device}/{name} {record['digest']}\n".encode())
    return digest.hexdigest()


def _contents(digest: str, files: Mapping[str, Json]) -> str:
    """contents.txt of a device: the artifact's digest; the bytes, digest and name of each file; the SHA-256 of all
    this."""
    lines = [f"{record['bytes']} {record['digest']} {name}\n" for name, record in sorted(files.items())]
    text = "".join([f"{digest}\n", *lines])
    return f"{text}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _manifest(program: Program, places: Sequence[Place], host: str, preprocessing: Preprocessing) -> Json:
    """What a package says of itself: its host's ranks, and how images become inputs."""
    ranks = []
    for rank, place in enumerate(places):
        if place.host == host:
            roles = [role.devices[rank] for role in program.roles]
            given = [given_inputs(role, role.devices[rank]) for role in program.roles]
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
        "format": FORMAT,
        "host": host,
        "ranks": ranks,
        "inputs": [value_document(value) for value in program.inputs],
        "preprocessing": {
            "order": preprocessing.order,
            "mean": list(preprocessing.mean),
            "scale": list(preprocessing.scale),
            "size": [list(value.shape[2:4]) for value in program.inputs if value.shape and len(value.shape) == 4],
        },
    }
