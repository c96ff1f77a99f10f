"""Loads artifacts of target `mpi`, writes the inputs of their programs (.npz files), and reads the outputs (.npy)."""

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
"""For each frame (inference request): the outputs that each device delivered, by device name and output name."""


@dataclass(frozen=True)
class MpiArtifact:
    """A loaded artifact of target `mpi`.

    Attributes:
        directory: The artifact's directory.
        document: The content of its artifact.json.
        packages: For each device, in the order of ranks (MPI processes): the directory of its host's package. A package
            has the sources of the program, and the files of all devices of the host.
    """

    directory: Path
    document: Mapping[str, Any]
    packages: Mapping[str, Path]

    @classmethod
    def load(cls, directory: Path) -> MpiArtifact:
        """Load an artifact and check its sources.

        Segments (ONNX submodels of the devices) and weights are not checked, because the C++ program checks them.

        Raises:
            DicompilerError: The artifact is invalid, or another version of dicompiler has written its sources.
        """
        document = load_artifact(directory)
        try:
            return cls(directory, document, _find_packages(directory, document))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DicompilerError(
                f"{directory}: not an artifact of this version ({error}): compile the model again"
            ) from None

    @property
    def files(self) -> Mapping[str, Any]:
        """A record with the size and digest of each file, by path in the artifact."""
        files: Mapping[str, Any] = self.document["files"]
        return files

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.packages)

    @cached_property
    def program(self) -> Mapping[str, Any]:
        """The content of program.json, which describes the work of all ranks (MPI processes)."""
        program: Mapping[str, Any] = load_json(next(iter(self.packages.values())) / PROGRAM_FILE)
        return program

    @cached_property
    def outputs(self) -> tuple[tuple[str, str, str], ...]:
        """A tuple (name, element type, suffix of its file names) for each output of the network."""
        values = self.document["outputs"]
        files = assign_output_files([value["name"] for value in values])
        return tuple((value["name"], value["dtype"], files[value["name"]]) for value in values)

    def find_roles(self, down: Collection[str]) -> tuple[int, int] | None:
        """Find the plan that computes frames without the devices in `down`, and return its roles.

        A role is the normal plan, a failure plan (which does not use certain devices), or a replica of either. If
        several plans exclude the devices in `down`, the plan that excludes the fewest devices is used.

        Returns:
            The index of the plan's first role and the number of its roles, which are consecutive. None if no plan
            excludes these devices.
        """
        plans = self.program.get("failed", [[]])
        found = min((failed for failed in plans if {*down} <= {*failed}), key=len, default=None)
        return None if found is None else (plans.index(found), plans.count(found))

    def merge_outputs(self, delivered: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        """Return the outputs of a frame (inference request) by name.

        An output that several devices delivered is taken from the first device.
        """
        return {
            name: next(outputs[name] for outputs in delivered.values() if name in outputs)
            for name, _, _ in self.outputs
        }

    def describe_rank(self, rank: int) -> str:
        device = self.devices[rank]
        return f"rank {rank} (device {device!r} on host {self.packages[device].name!r})"


def _find_packages(directory: Path, document: Mapping[str, Any]) -> dict[str, Path]:
    """Check the sources in the packages (one for each host); return the directory of each device's package.

    Raise KeyError, TypeError or ValueError if a program.json is invalid or does not match artifact.json. Raise
    DicompilerError if a source or a package is missing or was changed.
    """
    files, host_of = document["files"], dict[str, str]()
    hosts = sorted(name.split("/")[0] for name in files if re.fullmatch(rf"[^/]+/{MANIFEST_FILE}", name))
    for host in hosts:
        host_files = [name for name in files if name.startswith(f"{host}/")]
        check_files(directory, files, [f"{host}/{PROGRAM_FILE}"])
        description = load_json(directory / host / PROGRAM_FILE)
        placements = {placement.device: placement.host for placement in codegen.read_placements(description)}
        devices = [device for device, device_host in placements.items() if device_host == host]
        host_of |= dict.fromkeys(devices, host)
        if list(placements) != document["devices"]:
            raise ValueError(f"{host}/{PROGRAM_FILE} names other devices than artifact.json")
        device_directories = {f"{host}/{device}/" for device in devices}
        common = [name for name in host_files if not name.startswith(tuple(device_directories))]
        check_files(directory, files, [*common, *(f"{path}{CONTENTS_FILE}" for path in device_directories)])
        digests = {name.removeprefix(f"{host}/"): files[name]["digest"] for name in common}
        found = {name: digest for name, digest in digests.items() if name not in UNBUILT_FILES}
        expected = hash_sources(make_package_sources(description))
        check_bundled_sources(directory / host, document, found, expected)
    missing = next((device for device in document["devices"] if device not in host_of), None)
    if missing is not None:
        raise DicompilerError(f"{directory}: the package of device {missing!r} is missing: compile the model again")
    return {device: directory.absolute() / host_of[device] for device in document["devices"]}


def write_inputs(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]]) -> None:
    """Write an .npz file with the inputs of each frame (inference request).

    If all frames are the same object, write a single file, which the program reads for all frames.
    """
    directory.mkdir()
    for index, frame in enumerate(frames[:1] if all(frame is frames[0] for frame in frames) else frames):
        with zipfile.ZipFile(directory / f"{index:08}.npz", "w") as archive:
            for name, value in frame.items():
                array = np.asarray(value, order="C")
                # NumPy files cannot store types such as bfloat16, so unsigned integers of the same size are stored.
                plain = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, plain, allow_pickle=False)


def read_finished_outputs(artifact: MpiArtifact, directory: Path, kept_frames: int, role: int) -> DeliveredFrames:
    """Read the outputs of the first frames of a failed run, up to the first frame with a missing output.

    Args:
        artifact: The artifact that was run.
        directory: The directory in which the ranks wrote the outputs.
        kept_frames: Number of frames whose outputs the program writes.
        role: Index of the first role that the run used. A role is the normal plan, a failure plan (which does not use
            certain devices), or a replica of either.
    """
    sinks = sum(call[0] == "output" for rank in artifact.program["ranks"] for call in rank["roles"][role])
    for device in artifact.devices:
        if (partial := directory / f".{device}.part").is_dir():
            partial.rename(directory / device)
    finished: list[dict[str, dict[str, NDArray[Any]]]] = []
    # The last file may be incomplete, because the run failed while the file was written. Reading it then raises an
    # error, which ends the loop. The frame of this file is computed again.
    with contextlib.suppress(OSError, ValueError, EOFError):
        for frame in range(kept_frames):
            outputs = _read_frame(artifact, directory, frame)
            if sum(map(len, outputs.values())) < sinks:
                break
            finished.append(outputs)
    return tuple(finished)


def read_outputs(artifact: MpiArtifact, directory: Path, kept_frames: int) -> DeliveredFrames:
    """Read the outputs of the first `kept_frames` frames of a complete run."""
    return tuple(_read_frame(artifact, directory, frame) for frame in range(kept_frames))


def _read_frame(artifact: MpiArtifact, directory: Path, frame: int) -> dict[str, dict[str, NDArray[Any]]]:
    outputs: dict[str, dict[str, NDArray[Any]]] = {}
    for device in artifact.devices:
        for name, dtype, file in artifact.outputs:
            path = directory / device / f"frame{frame:06}_{file}"
            if path.is_file():
                outputs.setdefault(device, {})[name] = _read_array(path, dtype)
    return outputs


def _read_array(path: Path, dtype: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    numpy_dtype = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(dtype))
    return array if array.dtype == numpy_dtype else array.view(numpy_dtype)
