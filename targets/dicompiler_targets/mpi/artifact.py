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
from dicompiler_targets.frame_outputs import merge_outputs
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
        packages: By device name, in the order of ranks (MPI processes): the directory with the program of the device's
            host.
    """

    directory: Path
    document: Mapping[str, Any]
    packages: Mapping[str, Path]

    @classmethod
    def load(cls, directory: Path) -> MpiArtifact:
        """Load an artifact and check its sources. The C++ program checks segments and weights.

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
        files: Mapping[str, Any] = self.document["files"]
        return files

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.packages)

    @cached_property
    def program(self) -> Mapping[str, Any]:
        program: Mapping[str, Any] = load_json(next(iter(self.packages.values())) / PROGRAM_FILE)
        return program

    @cached_property
    def outputs(self) -> tuple[tuple[str, str, str], ...]:
        """A tuple (name, element type, suffix of its file names) for each output of the network."""
        values = self.document["outputs"]
        files = assign_output_files([value["name"] for value in values])
        return tuple((value["name"], value["dtype"], files[value["name"]]) for value in values)

    def find_roles(self, down: Collection[str]) -> tuple[int, int] | None:
        """Return (first role, number of roles) of the plan that does not use the devices in `down`.

        A role is the normal plan, a failure plan or a replica. Of several plans, the one that excludes the fewest
        devices is used. The result is None if there is none.
        """
        plans = self.program.get("failed", [[]])
        found = min((failed for failed in plans if {*down} <= {*failed}), key=len, default=None)
        return None if found is None else (plans.index(found), plans.count(found))

    def merge_outputs(self, delivered: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        """Return the outputs of a frame by name; an output of several devices is taken from the first one."""
        return merge_outputs((name for name, _, _ in self.outputs), delivered)

    def describe_rank(self, rank: int) -> str:
        device = self.devices[rank]
        return f"rank {rank} (device {device!r} on host {self.packages[device].name!r})"


def _find_packages(directory: Path, document: Mapping[str, Any]) -> dict[str, Path]:
    """Check the sources in the packages (one for each host); return the directory of each device's package.

    Raises:
        KeyError, TypeError, ValueError: A program.json is invalid or does not match artifact.json.
        DicompilerError: A source or a package is missing or was changed.
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
    """Write an .npz file with the inputs of each frame; a single file if all frames are the same object."""
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
        kept_frames: Number of frames with outputs that the program writes.
        role: Index of the first role (normal plan, failure plan or replica) that the run used.
    """
    sinks = sum(call[0] == "output" for rank in artifact.program["ranks"] for call in rank["roles"][role])
    for device in artifact.devices:
        if (partial := directory / f".{device}.part").is_dir():
            partial.rename(directory / device)
    finished: list[dict[str, dict[str, NDArray[Any]]]] = []
    # Reading the last file may fail, because the run failed while the file was written. Its frame is computed again.
    with contextlib.suppress(OSError, ValueError, EOFError):
        for frame in range(kept_frames):
            outputs = _read_frame(artifact, directory, frame)
            if sum(map(len, outputs.values())) < sinks:
                break
            finished.append(outputs)
    return tuple(finished)


def read_outputs(artifact: MpiArtifact, directory: Path, kept_frames: int) -> DeliveredFrames:
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
