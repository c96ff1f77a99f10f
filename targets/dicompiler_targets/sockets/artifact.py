"""An artifact of this target as the coordinator reads it, and the conversion between arrays and payloads.

An artifact's directory ⇒ manifests, roles, inputs and outputs. Needs numpy, but no ONNX package.
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
from dicompiler_targets.bundled_runtime import (
    WEIGHTS_FILE,
    check_bundled_sources,
    hash_sources,
    read_runtime_sources,
)
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
"""numpy's names of types that are not ONNX's names in lower case."""


@dataclass(frozen=True)
class RoleIO:
    """Inputs and outputs of the devices in the frames of one role.

    Attributes:
        inputs: By device, the inputs that it gets.
        outputs: By device, the outputs that it delivers, by index of the output.
        states: By device, the states that it keeps, and gets when states are set.
        active_devices: The devices that take part in these frames.
    """

    inputs: Mapping[str, Sequence[Mapping[str, Any]]]
    outputs: Mapping[str, Mapping[int, Mapping[str, Any]]]
    states: Mapping[str, Sequence[Mapping[str, Any]]]
    active_devices: frozenset[str]


@dataclass(frozen=True)
class SocketsArtifact:
    """An artifact of this target.

    Attributes:
        directory: Its directory.
        digest: Its digest.
        manifests: The manifests, in the order of devices.
        inputs: Descriptions of the inputs, as in artifact.json, like all the following.
        outputs: Descriptions of the outputs.
        files: Size and digest of each file.
        states: Descriptions of the states.
        table_indices: By input, the tables of which it selects rows.
    """

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
        """Load an artifact and check that its documents are intact and consistent.

        The copied runtime must be the installed one. Devices check the content of their other files themselves. Raise
        DicompilerError if the artifact is damaged, inconsistent, or of another version.
        """
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
                        raise KeyError(f"{manifest['device']} needs {peer}, which is missing")
            failed_sets = {tuple(tuple(role.get("failed", ())) for role in role_manifests(m)) for m in manifests}
            if len(failed_sets) > 1:
                raise KeyError("the devices have roles for different failures")
            states, table_indices = tuple(document.get("states", ())), document.get("lookup_tables", {})
            return cls(
                directory,
                document["digest"],
                tuple(manifests),
                inputs,
                outputs,
                document["files"],
                states,
                table_indices,
            )
        except (KeyError, TypeError) as error:
            raise DicompilerError(
                f"{directory}: not an artifact of this version ({error}): compile the model again"
            ) from None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(manifest["device"] for manifest in self.manifests)

    def device_files(self, device: str) -> list[str]:
        """Return the paths of the files in the device's directory, relative to it."""
        prefix = f"{device}/"
        return [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]

    def make_schedule(self) -> RoleSchedule:
        """Return a new schedule of `roles` for a run."""
        return RoleSchedule.from_manifest(self.manifests[0])

    @property
    def roles(self) -> tuple[RoleIO, ...]:
        """All roles, in the order of the manifests."""
        return tuple(
            RoleIO(
                {manifest["device"]: manifest["inputs"] for manifest in manifests},
                {manifest["device"]: {v["index"]: v for v in manifest["outputs"]} for manifest in manifests},
                {manifest["device"]: manifest.get("states", ()) for manifest in manifests},
                frozenset(device for device, is_active in zip(self.devices, active, strict=True) if is_active),
            )
            for manifests, active in zip(
                zip(*map(role_manifests, self.manifests), strict=True),
                zip(*map(active_roles, self.manifests), strict=True),
                strict=True,
            )
        )

    def check_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs as contiguous arrays, and non-tensors as they are.

        If one state is given, all missing states are zeros. Raise DicompilerError if an input is missing, unknown or of
        another type or shape, or if an index exceeds its table.
        """
        check_type(inputs, (Mapping,), "the inputs", "arrays by name, as {'x': array}")
        states = [value for value in self.states if any(state["name"] in inputs for state in self.states)]
        missing = [value for value in states if value["name"] not in inputs]
        zeros = {v["name"]: np.zeros(v["shape"], numpy_type(v["dtype"])) for v in missing}
        known = [value["name"] for value in (*self.inputs, *self.states)]
        for name in inputs:
            if name not in known:
                raise DicompilerError(f"the network has no input {name!r}{did_you_mean(name, known)}")
        checked = {value["name"]: _check_input(value, {**zeros, **inputs}) for value in (*self.inputs, *states)}
        for name, tables in self.table_indices.items():
            check_index_range(checked.get(name), tables, f"input {name!r}")
        return checked

    def copy_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the inputs; errors: see check_inputs."""
        return {name: deepcopy(array) for name, array in self.check_inputs(inputs).items()}

    def first_outputs(self, outputs_by_device: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return each output of the first device that delivers it."""
        names = [value["name"] for value in self.outputs]
        return {
            name: next(outputs[name] for outputs in outputs_by_device.values() if name in outputs) for name in names
        }


def _check_manifest(directory: Path, document: Manifest, device: str, manifest: Manifest) -> None:
    """Check that a manifest belongs to the artifact, and lists the files that the device needs and no others.

    Raise KeyError if the manifest is inconsistent, and DicompilerError if the copied runtime is not the installed one.
    """
    if (manifest["device"], manifest["digest"]) != (device, document["digest"]):
        raise KeyError(f"the manifest of {device} belongs to another artifact")
    files = manifest["files"]
    listed = {name: record for name, record in document["files"].items() if name.startswith(f"{device}/")}
    del listed[f"{device}/{MANIFEST}"]
    if {f"{device}/{name}": record for name, record in files.items()} != listed:
        raise KeyError(f"{device} and artifact.json list different files")
    digests = {name: record["digest"] for name, record in files.items()}
    segments = [segment for role in role_manifests(manifest) for segment in role["segments"]]
    segment_files = {s["file"]: digests[s["file"]] for s in segments if "file" in s}
    if not all(re.fullmatch(r"segment\d{3,}\.onnx", name) for name in segment_files):
        raise KeyError(f"{device}: names of segments")
    code = {name: digest for name, digest in digests.items() if name != WEIGHTS_FILE and name not in segment_files}
    sources = {f"runtime/{name}": content for name, content in read_runtime_sources("sockets", (".py",)).items()}
    check_bundled_sources(directory / device, document, code, hash_sources(sources))


def _check_input(value: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    name = value["name"]
    if name not in inputs:
        raise DicompilerError(f"input {name!r} is missing: give all inputs of the network")
    if value["dtype"] == NON_TENSOR_TYPE:
        return inputs[name]
    shape = None if value["shape"] is None else tuple(value["shape"])
    return coerce_input(inputs[name], numpy_type(value["dtype"]), shape, f"input {name!r}")


def numpy_type(name: str) -> np.dtype[Any]:
    """Return numpy's type for ONNX's type name; raise DicompilerError if that needs a package that is missing."""
    if name == STRING_TYPE:
        return np.dtype(object)
    name = _NUMPY_TYPE_NAMES.get(name, name.lower())
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise DicompilerError(f"type {name}: numpy does not have it: install the package ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def state_piece(array: NDArray[Any], state: Mapping[str, Any]) -> NDArray[Any]:
    """Return the piece of a state that a device keeps."""
    return np.asarray(array[tuple(slice(start, stop) for start, stop in state["region"])], order="C")


def to_payload(array: Any, value: Mapping[str, Any]) -> Any:
    """Return the bytes of an input, after rank and dimensions if the manifest does not know the shape.

    Raise DicompilerError for a non-tensor that cannot be encoded.
    """
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
    """Return the output in the bytes that a device sent, the reverse of `to_payload`; raise ValueError if invalid."""
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
            raise ValueError(f"output {value['name']!r}: {len(payload)} bytes do not match their shape")
        shape, start = [int(size) for size in dims[1 : rank + 1]], 8 * (rank + 1)
    array: NDArray[Any] = payload[start:].view(numpy_type(value["dtype"])).reshape(shape)
    return array
