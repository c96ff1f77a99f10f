"""What an artifact of this target says about its devices, inputs and outputs; arrays become bytes and bytes arrays.

In: an artifact's directory, arrays. Out: records, payloads. Needs numpy and nothing of ONNX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.artifacts import (
    check_files,
    check_index_range,
    coerce_input,
    load_artifact,
    read_checksummed_json,
)
from dicompiler.plugin_api.utilities import check_type, did_you_mean
from dicompiler_targets.bundled_runtime import WEIGHTS_FILE, check_bundled_sources, hash_sources, read_runtime_sources
from dicompiler_targets.sockets.runtime.role_schedule import RoleSchedule, active_roles, role_manifests
from dicompiler_targets.sockets.runtime.value_codec import (
    NON_TENSOR_TYPE,
    STRING_TYPE,
    UNSIZED_TYPES,
    decode_value,
    encode_value,
)

Manifest = Mapping[str, Any]
MANIFEST = "manifest.json"

_NUMPY_TYPE_NAMES = {
    "FLOAT": "float32", "DOUBLE": "float64", "BFLOAT16": "bfloat16", "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz", "FLOAT8E5M2": "float8_e5m2", "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""numpy's names of the types where they are not ONNX's in small letters."""


@dataclass(frozen=True)
class RoleIO:
    """By device what it is given in the frames of a role, and what it delivers, by index of the output. states: by
    device what it keeps, and is given where states begin anew. players: the devices that are told of these frames."""

    inputs: Mapping[str, Sequence[Mapping[str, Any]]]
    outputs: Mapping[str, Mapping[int, Mapping[str, Any]]]
    states: Mapping[str, Sequence[Mapping[str, Any]]]
    active_devices: frozenset[str]


@dataclass(frozen=True)
class SocketsArtifact:
    """`manifests` in the order of devices; the rest as artifact.json has it."""

    directory: Path
    digest: str
    manifests: tuple[Manifest, ...]
    inputs: tuple[Mapping[str, Any], ...]
    outputs: tuple[Mapping[str, Any], ...]
    files: Mapping[str, Any]
    states: tuple[Mapping[str, Any], ...] = ()
    table_indices: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> SocketsArtifact:
        """The artifact in `directory`: what it says of itself is whole and holds together, and its copies of the
        runtime are the installed one. What the files of the devices hold, they check themselves. DicompilerError."""
        document = load_artifact(directory)
        try:
            names = [f"{device}/{MANIFEST}" for device in document["devices"]]
            check_files(directory, document["files"], names)
            manifests = [read_checksummed_json(directory / name, "manifest") for name in names]
            for device, manifest in zip(document["devices"], manifests, strict=True):
                _check_manifest(directory, document, device, manifest)
            inputs, outputs = tuple(document["inputs"]), tuple(document["outputs"])
            for manifest in manifests:
                transfers = [transfer for role in role_manifests(manifest) for transfer in role["transfers"]]
                for peer in {t[end] for t in transfers for end in ("sender", "receiver")}:
                    if peer not in document["devices"]:
                        raise KeyError(f"{manifest['device']} needs {peer}, which is not there")
            states, rows = tuple(document.get("states", ())), document.get("rows", {})
            known = (directory, document["digest"], tuple(manifests))
            artifact = cls(*known, inputs, outputs, document["files"], states, rows)
            if (
                len({tuple(tuple(role.get("lost", ())) for role in role_manifests(manifest)) for manifest in manifests})
                > 1
            ):
                raise KeyError("the devices have different numbers of roles, or for other losses")
            return artifact
        except (KeyError, TypeError) as error:
            raise DicompilerError(f"{directory}: no artifact of this version ({error}): compile it again") from None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(manifest["device"] for manifest in self.manifests)

    def device_files(self, device: str) -> list[str]:
        """Each file in the device's directory, by its path there."""
        own = f"{device}/"
        return [name.removeprefix(own) for name in self.files if name.startswith(own)]

    def make_schedule(self) -> RoleSchedule:
        """Which of `roles` the frames of a run go by, anew for each run."""
        return RoleSchedule.from_manifest(self.manifests[0])

    @property
    def roles(self) -> tuple[RoleIO, ...]:
        """Of all ways that a frame can go, as the manifests number them."""
        return tuple(
            RoleIO(
                {manifest["device"]: manifest["inputs"] for manifest in manifests},
                {manifest["device"]: {v["index"]: v for v in manifest["outputs"]} for manifest in manifests},
                {manifest["device"]: manifest.get("states", ()) for manifest in manifests},
                frozenset(device for device, part in zip(self.devices, parts, strict=True) if part),
            )
            for manifests, parts in zip(
                zip(*map(role_manifests, self.manifests), strict=True),
                zip(*map(active_roles, self.manifests), strict=True),
                strict=True,
            )
        )

    def check_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as contiguous arrays, what is no tensor as it is; where a state is among them, all states, as
        zeros if they are not. DicompilerError for a missing, unknown or unfitting one, and for a number that is no row
        of the table that it is looked up in."""
        check_type(inputs, (Mapping,), "the inputs", "arrays by name, as {'x': array}")
        states = [value for value in self.states if any(state["name"] in inputs for state in self.states)]
        missing = [value for value in states if value["name"] not in inputs]
        zeros = {v["name"]: np.zeros(v["shape"], numpy_type(v["dtype"])) for v in missing}
        known = [value["name"] for value in (*self.inputs, *self.states)]
        for name in inputs:
            if name not in known:
                raise DicompilerError(f"the network has no input {name!r}{did_you_mean(name, known)}")
        given = {value["name"]: _check_input(value, {**zeros, **inputs}) for value in (*self.inputs, *states)}
        for name, tables in self.table_indices.items():
            check_index_range(given.get(name), tables, f"input {name!r}")
        return given

    def copy_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as arrays of their own. DicompilerError as for `arrays`."""
        return {name: deepcopy(array) for name, array in self.check_inputs(inputs).items()}

    def first_outputs(self, delivered: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Each output as the first device that has it delivered it."""
        names = [value["name"] for value in self.outputs]
        return {name: next(outputs[name] for outputs in delivered.values() if name in outputs) for name in names}


def _check_manifest(directory: Path, document: Manifest, device: str, manifest: Manifest) -> None:
    """That a device's manifest is of this artifact, and names the files that it needs and no others. KeyError for what
    does not hold together, DicompilerError for another runtime."""
    files, parts = manifest["files"], (role["segments"] for role in role_manifests(manifest))
    if (manifest["device"], manifest["digest"]) != (device, document["digest"]):
        raise KeyError(f"the manifest of {device} is of another artifact")
    own = {name: record for name, record in document["files"].items() if name.startswith(f"{device}/")}
    del own[f"{device}/{MANIFEST}"]
    if {f"{device}/{name}": record for name, record in files.items()} != own:
        raise KeyError(f"{device} and artifact.json name different files")
    found = {name: record["digest"] for name, record in files.items()}
    segments = {s["file"]: found[s["file"]] for part in parts for s in part if "file" in s}
    if not all(re.fullmatch(r"segment\d{3,}\.onnx", name) for name in segments):
        raise KeyError(f"{device}: names of segments")
    code = {name: digest for name, digest in found.items() if name != WEIGHTS_FILE and name not in segments}
    own = {f"runtime/{name}": content for name, content in read_runtime_sources("sockets", (".py",)).items()}
    check_bundled_sources(directory / device, document, code, hash_sources(own))


def _check_input(value: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    name = value["name"]
    if name not in inputs:
        raise DicompilerError(f"input {name!r} is missing: give all of the network's inputs")
    if value["dtype"] == NON_TENSOR_TYPE:
        return inputs[name]
    shape = None if value["shape"] is None else tuple(value["shape"])
    return coerce_input(inputs[name], numpy_type(value["dtype"]), shape, f"input {name!r}")


def numpy_type(name: str) -> np.dtype[Any]:
    """numpy's type for the name of ONNX's. DicompilerError where that takes a package that is missing."""
    if name == STRING_TYPE:
        return np.dtype(object)
    name = _NUMPY_TYPE_NAMES.get(name, name.lower())
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise DicompilerError(f"type {name}: numpy lacks it: install the package ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def state_piece(array: NDArray[Any], state: Mapping[str, Any]) -> NDArray[Any]:
    """What a device keeps of a state, as the manifest has it."""
    return np.asarray(array[tuple(slice(start, stop) for start, stop in state["region"])], order="C")


def to_payload(array: Any, value: Mapping[str, Any]) -> Any:
    """The bytes of an input; rank and dimensions stand before them where the manifest knows no shape. DicompilerError
    for words and nested values that cannot be packed."""
    if value["dtype"] in UNSIZED_TYPES:
        try:
            return encode_value(array)
        except ValueError as error:
            raise DicompilerError(f"input {value['name']!r}: {error}") from None
    raw = array.reshape(-1).view(np.uint8)
    if value["shape"] is not None:
        return raw
    return np.concatenate([np.array([array.ndim, *array.shape], np.int64).view(np.uint8), raw])


def from_payload(payload: Any, value: Mapping[str, Any]) -> Any:
    """The output on the bytes that came: the reverse of `to_payload`. ValueError if they do not hold what they say."""
    if value["dtype"] in UNSIZED_TYPES:
        try:
            return decode_value(payload)
        except ValueError as error:
            raise ValueError(f"output {value['name']!r}: {error}") from None
    shape, start = value["shape"], 0
    if shape is None:
        dims: Sequence[int] = payload[: len(payload) // 8 * 8].view(np.int64)
        rank = int(dims[0]) if len(dims) and 0 <= dims[0] < len(dims) else -1
        if rank < 0:
            raise ValueError(f"output {value['name']!r}: {len(payload)} bytes do not hold what their shape says")
        shape, start = [int(size) for size in dims[1 : rank + 1]], 8 * (rank + 1)
    array: NDArray[Any] = payload[start:].view(numpy_type(value["dtype"])).reshape(shape)
    return array
