"""What an artifact of this target says, and the files by which frames go into and come out of its programs.

In: an artifact's directory, arrays. Out: records, .npz files; arrays from .npy files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, load_json, validate
from dicompiler_targets.mpi.emit import FORMAT, MANIFEST
from dicompiler_targets.mpi.source import output_files

Delivered = tuple[dict[str, dict[str, NDArray[Any]]], ...]
"""For each frame, by device and name, what it delivered."""


@dataclass(frozen=True)
class Artifact:
    """packages: of each device in rank order the directory of its host's package."""

    directory: Path
    document: Mapping[str, Any]
    packages: Mapping[str, Path]

    @classmethod
    def load(cls, directory: Path) -> Artifact:
        """The artifact in `directory`. DicompilerError where something is missing."""
        document = load_json(directory / "artifact.json")
        validate(document, "artifact", str(directory / "artifact.json"))
        packages: dict[str, Path] = {}
        for path in sorted(directory.glob(f"*/{MANIFEST}")):
            manifest = load_json(path)
            if manifest.get("format") == FORMAT:
                packages |= {rank["device"]: path.parent.absolute() for rank in manifest["ranks"]}
        for device in document["devices"]:
            if device not in packages:
                raise DicompilerError(f"{directory}: the package with device {device!r} is missing: compile it again")
        return cls(directory, document, {device: packages[device] for device in document["devices"]})

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.packages)

    def title(self, rank: int) -> str:
        """What messages call a rank."""
        device = self.devices[rank]
        return f"rank {rank} (device {device!r} on host {self.packages[device].name!r})"


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


def read_outputs(artifact: Artifact, place: Path, keep: int) -> Delivered:
    """For each frame that was kept, by device and name, what was delivered."""
    values = {value["name"]: value for value in artifact.document["outputs"]}
    files = output_files(list(values))
    delivered: list[dict[str, dict[str, NDArray[Any]]]] = []
    for frame in range(keep):
        outputs: dict[str, dict[str, NDArray[Any]]] = {}
        for device in artifact.devices:
            for name, value in values.items():
                path = place / device / f"frame{frame:06}_{files[name]}"
                if path.is_file():
                    outputs.setdefault(device, {})[name] = _array(path, value["dtype"])
        delivered.append(outputs)
    return tuple(delivered)


def _array(path: Path, dtype: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, allow_pickle=False)
    wanted = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(dtype))
    return array if array.dtype == wanted else array.view(wanted)
