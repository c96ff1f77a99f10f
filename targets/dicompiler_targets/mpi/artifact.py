"""What an artifact of this target says, and the files by which frames go into and come out of its programs.

In: an artifact's directory, arrays. Out: records, .npz files; arrays from .npy files.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.artifacts import check_files, load_artifact
from dicompiler.plugin_api.utilities import load_json
from dicompiler_targets.bundled_runtime import check_bundled_sources, hash_sources
from dicompiler_targets.mpi import codegen
from dicompiler_targets.mpi.codegen import assign_output_files
from dicompiler_targets.mpi.emit import CONTENTS_FILE, MANIFEST_FILE, PROGRAM_FILE, UNBUILT_FILES, make_package_sources

DeliveredFrames = tuple[dict[str, dict[str, NDArray[Any]]], ...]
"""For each frame, by device and name, what it delivered."""


@dataclass(frozen=True)
class MpiArtifact:
    """packages: of each device in rank order the directory of its host's package."""

    directory: Path
    document: Mapping[str, Any]
    packages: Mapping[str, Path]

    @classmethod
    def load(cls, directory: Path) -> MpiArtifact:
        """The artifact in `directory`: what it says of itself is whole and holds together, and what is built of it is
        what this dicompiler writes. What the devices' files hold, the program itself checks. DicompilerError."""
        document = load_artifact(directory)
        try:
            return cls(directory, document, _find_packages(directory, document))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DicompilerError(f"{directory}: no artifact of this version ({error}): compile it again") from None

    @property
    def files(self) -> Mapping[str, Any]:
        """Size and digest of every file, by path in the artifact."""
        found: Mapping[str, Any] = self.document["files"]
        return found

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.packages)

    @cached_property
    def program(self) -> Mapping[str, Any]:
        """program.json, which all packages have."""
        found: Mapping[str, Any] = load_json(next(iter(self.packages.values())) / PROGRAM_FILE)
        return found

    @cached_property
    def outputs(self) -> tuple[tuple[str, str, str], ...]:
        """Of each of the network's outputs its name, its type, and how the file ends that holds it."""
        values = self.document["outputs"]
        files = assign_output_files([value["name"] for value in values])
        return tuple((value["name"], value["dtype"], files[value["name"]]) for value in values)

    def find_roles(self, away: Collection[str]) -> tuple[int, int] | None:
        """Which roles go without those devices, by the plan for the least loss that holds them: the first one's place
        and how many; None where there are none."""
        lost = self.program.get("lost", [[]])
        found = min((one for one in lost if {*away} <= {*one}), key=len, default=None)
        return None if found is None else (lost.index(found), lost.count(found))

    def take_first_outputs(self, delivered: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        """Each output of a frame as the first device that has it delivered it."""
        return {name: next(o[name] for o in delivered.values() if name in o) for name, _, _ in self.outputs}

    def describe_rank(self, rank: int) -> str:
        """What messages call a rank."""
        device = self.devices[rank]
        return f"rank {rank} (device {device!r} on host {self.packages[device].name!r})"


def _find_packages(directory: Path, document: Mapping[str, Any]) -> dict[str, Path]:
    """The package of each device. KeyError and the like for what does not hold together."""
    files, owners = document["files"], dict[str, str]()
    hosts = sorted(name.split("/")[0] for name in files if re.fullmatch(rf"[^/]+/{MANIFEST_FILE}", name))
    for host in hosts:
        own = [name for name in files if name.startswith(f"{host}/")]
        check_files(directory, files, [f"{host}/{PROGRAM_FILE}"])
        described = load_json(directory / host / PROGRAM_FILE)
        places = {place.device: place.host for place in codegen.read_placements(described)}
        owners |= {device: host for device, at in places.items() if at == host}
        if list(places) != document["devices"]:
            raise ValueError(f"{host}: its program is of other devices")
        data = {f"{host}/{device}/" for device, at in places.items() if at == host}
        plain = [name for name in own if not any(name.startswith(place) for place in data)]
        check_files(directory, files, [*plain, *(f"{place}{CONTENTS_FILE}" for place in data)])
        built = {name.removeprefix(f"{host}/"): files[name]["digest"] for name in plain}
        found = {name: digest for name, digest in built.items() if name not in UNBUILT_FILES}
        check_bundled_sources(directory / host, document, found, hash_sources(make_package_sources(described)))
    for device in document["devices"]:
        if device not in owners:
            raise DicompilerError(f"{directory}: the package with device {device!r} is missing: compile it again")
    return {device: directory.absolute() / owners[device] for device in document["devices"]}


def write_inputs(place: Path, frames: Sequence[Mapping[str, NDArray[Any]]]) -> None:
    """A file for each frame, or one for all where they are the same."""
    place.mkdir()
    for index, frame in enumerate(frames[:1] if all(frame is frames[0] for frame in frames) else frames):
        with zipfile.ZipFile(place / f"{index:08}.npz", "w") as archive:
            for name, given in frame.items():
                array = np.asarray(given, order="C")
                # Types that numpy itself lacks go as unsigned numbers of their size.
                plain = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, plain, allow_pickle=False)


def read_finished_outputs(artifact: MpiArtifact, place: Path, keep: int, role: int) -> DeliveredFrames:
    """As `read_outputs`, after a run by that role that failed: the first frames, as far as they are whole."""
    sinks = sum(call[0] == "output" for rank in artifact.program["ranks"] for call in rank["roles"][role])
    for device in artifact.devices:
        if (part := place / f".{device}.part").is_dir():
            part.rename(place / device)
    whole: list[dict[str, dict[str, NDArray[Any]]]] = []
    with contextlib.suppress(OSError, ValueError, EOFError):  # of a file that was being written
        for frame in range(keep):
            found = _read_frame(artifact, place, frame)
            if sum(map(len, found.values())) < sinks:
                break
            whole.append(found)
    return tuple(whole)


def read_outputs(artifact: MpiArtifact, place: Path, keep: int) -> DeliveredFrames:
    """For each frame that was kept, by device and name, what was delivered."""
    return tuple(_read_frame(artifact, place, frame) for frame in range(keep))


def _read_frame(artifact: MpiArtifact, place: Path, frame: int) -> dict[str, dict[str, NDArray[Any]]]:
    outputs: dict[str, dict[str, NDArray[Any]]] = {}
    for device in artifact.devices:
        for name, dtype, file in artifact.outputs:
            path = place / device / f"frame{frame:06}_{file}"
            if path.is_file():
                outputs.setdefault(device, {})[name] = _read_array(path, dtype)
    return outputs


def _read_array(path: Path, dtype: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    wanted = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(dtype))
    return array if array.dtype == wanted else array.view(wanted)
