"""Loading an artifact of the target `sockets`, and converting between arrays and the bytes of messages.

    directory of an artifact, written by `emit` ⇒ `SocketsArtifact`: manifests, and descriptions of inputs and outputs

The module imports neither onnx nor onnxruntime, so that sessions start fast.
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
from dicompiler.plugin_api.utilities import check_type, did_you_mean, parse_release
from dicompiler_targets.bundled_runtime import (
    WEIGHTS_FILE,
    check_bundled_sources,
    hash_sources,
    read_runtime_sources,
)
from dicompiler_targets.frame_outputs import merge_outputs
from dicompiler_targets.sockets.runtime.protocol import RoleSchedule, active_roles, role_manifests
from dicompiler_targets.sockets.runtime.value_codec import (
    NON_TENSOR_TYPE,
    STRING_TYPE,
    UNSIZED_TYPES,
    decode_value,
    encode_value,
)

Manifest = Mapping[str, Any]
MANIFEST = "manifest.json"
RUNTIME_PACKAGES = {"numpy": (1, 26), "onnxruntime": (1, 21)}
"""The oldest supported versions of the packages that the runtime on a device needs, by package name."""

_NUMPY_TYPE_NAMES = {
    "FLOAT": "float32", "DOUBLE": "float64", "BFLOAT16": "bfloat16", "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz", "FLOAT8E5M2": "float8_e5m2", "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""numpy's name of each ONNX type whose two names differ by more than lower case."""


@dataclass(frozen=True)
class RoleIO:
    """The tensors that the session exchanges with each device in frames that use the same plan.

    All descriptions of tensors are entries of the devices' manifests.

    Attributes:
        inputs: By device, the descriptions of the inputs that the session sends to it.
        outputs: By device, the descriptions of the outputs that it sends to the session, by index of the output.
        states: By device, the descriptions of its pieces of states (tensors that are kept for the next frame).
        active_devices: The devices that take part in these frames.
    """

    inputs: Mapping[str, Sequence[Mapping[str, Any]]]
    outputs: Mapping[str, Mapping[int, Mapping[str, Any]]]
    states: Mapping[str, Sequence[Mapping[str, Any]]]
    active_devices: frozenset[str]


@dataclass(frozen=True)
class SocketsArtifact:
    """A loaded artifact: the content of artifact.json and of the devices' manifests.

    Attributes:
        directory: The artifact's directory.
        digest: Digest of the artifact's whole content.
        manifests: The manifest of each device, in device order.
        inputs: Descriptions of the network's inputs, as in artifact.json.
        outputs: Descriptions of the network's outputs, as in artifact.json.
        files: Size and digest of each file, as in artifact.json.
        states: Descriptions of the states (outputs that become inputs of the next frame), as in artifact.json.
        table_indices: By name of an input that selects rows of lookup tables (embeddings), descriptions of the tables.
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
        """Load an artifact and check its JSON files; raise DicompilerError if they are damaged or inconsistent.

        The artifact's copies of the runtime must be identical to the installed runtime. Devices check all other files.
        """
        document = load_artifact(directory)
        try:
            names = [f"{device}/{MANIFEST}" for device in document["devices"]]
            check_files(directory, document["files"], names)
            manifests = [read_checksummed_json(directory / name, "manifest") for name in names]
            for device, manifest in zip(document["devices"], manifests, strict=True):
                _check_manifest(directory, document, device, manifest)
            failed_sets = {tuple(tuple(role.get("failed", ())) for role in role_manifests(m)) for m in manifests}
            if len(failed_sets) > 1:
                raise KeyError("the manifests of two devices have failure plans for different failures")
            return cls(
                directory,
                document["digest"],
                tuple(manifests),
                tuple(document["inputs"]),
                tuple(document["outputs"]),
                document["files"],
                tuple(document.get("states", ())),
                document.get("lookup_tables", {}),
            )
        except (KeyError, TypeError) as error:
            cause = f"not an artifact of this version ({error})"
            raise DicompilerError(f"{directory}: {cause}: compile the model again") from None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(manifest["device"] for manifest in self.manifests)

    def device_files(self, device: str) -> list[str]:
        prefix = f"{device}/"
        return [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]

    def required_packages(self, device: str) -> dict[str, tuple[int, ...]]:
        """Return the oldest supported version of each Python package that a device needs, by package name."""
        manifest = self.manifests[self.devices.index(device)]
        packages = {package["name"]: parse_release(package["min_version"]) for package in manifest.get("packages", ())}
        return RUNTIME_PACKAGES | packages

    def required_onnx(self, device: str) -> tuple[int, int] | None:
        """Return the IR version and opset that a device's onnxruntime must support; None for devices without it."""
        versions = self.manifests[self.devices.index(device)].get("onnx")
        return versions and (int(versions["ir_version"]), int(versions["opset"]))

    def make_schedule(self) -> RoleSchedule:
        """Return a new schedule, which maps each frame number to the index of its plan in `role_ios`."""
        return RoleSchedule.from_manifest(self.manifests[0])

    @property
    def role_ios(self) -> tuple[RoleIO, ...]:
        """The inputs and outputs of the normal plan, the replicas and the failure plans, in the manifests' order."""
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
        """Check the user's inputs; return tensors as contiguous arrays, and other values unchanged.

        If at least one state (a tensor that is kept for the next frame) is given, all missing states become zeros.

        Raises:
            DicompilerError: An input is missing, unknown or of another type or shape, or a row index is too large.
        """
        check_type(inputs, (Mapping,), "the inputs", "arrays by name, as {'x': array}")
        states = [value for value in self.states if any(state["name"] in inputs for state in self.states)]
        missing = [value for value in states if value["name"] not in inputs]
        zeros = {v["name"]: np.zeros(v["shape"], numpy_type(v["dtype"])) for v in missing}
        names = [value["name"] for value in (*self.inputs, *self.states)]
        for name in inputs:
            if name not in names:
                raise DicompilerError(f"the network has no input {name!r}{did_you_mean(name, names)}")
        checked = {value["name"]: _check_input(value, {**zeros, **inputs}) for value in (*self.inputs, *states)}
        for name, tables in self.table_indices.items():
            check_index_range(checked.get(name), tables, f"input {name!r}")
        return checked

    def copy_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: deepcopy(array) for name, array in self.check_inputs(inputs).items()}

    def merge_outputs(self, outputs_by_device: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return each output by name; if several devices have sent an output, use that of the first device."""
        return merge_outputs((value["name"] for value in self.outputs), outputs_by_device)


def _check_manifest(directory: Path, document: Manifest, device: str, manifest: Manifest) -> None:
    """Check that a device's manifest belongs to the artifact and lists exactly the device's files.

    `document` is the content of artifact.json.

    Raises:
        KeyError: The manifest is inconsistent.
        DicompilerError: The copied runtime differs from the installed one.
    """
    if (manifest["device"], manifest["digest"]) != (device, document["digest"]):
        raise KeyError(f"the manifest of device {device} belongs to another artifact")
    files = manifest["files"]
    listed = {name: record for name, record in document["files"].items() if name.startswith(f"{device}/")}
    del listed[f"{device}/{MANIFEST}"]
    if {f"{device}/{name}": record for name, record in files.items()} != listed:
        raise KeyError(f"the manifest of device {device} and artifact.json list different files")
    transfers = [transfer for role in role_manifests(manifest) for transfer in role["transfers"]]
    for peer in {transfer[end] for transfer in transfers for end in ("sender", "receiver")}:
        if peer not in document["devices"]:
            raise KeyError(f"device {device} exchanges tensors with {peer}, which is missing")
    digests = {name: record["digest"] for name, record in files.items()}
    segments = [segment for role in role_manifests(manifest) for segment in role["segments"]]
    segment_files = {s["file"]: digests[s["file"]] for s in segments if "file" in s}
    segment_files |= {file: digests[file] for s in segments if "engine" in s for file in [s["engine"]["weights"]]}
    for name in segment_files:
        if not re.fullmatch(r"segment\d{3,}\.(onnx|net|bin)", name):
            raise KeyError(f"device {device} has a segment in the file {name!r} instead of segmentNNN.onnx or .net")
    code = {name: digest for name, digest in digests.items() if name != WEIGHTS_FILE and name not in segment_files}
    sources = {f"runtime/{name}": content for name, content in read_runtime_sources("sockets", (".py",)).items()}
    check_bundled_sources(directory / device, document, code, hash_sources(sources))


def _check_input(value: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    name = value["name"]
    if name not in inputs:
        raise DicompilerError(f"input {name!r} is missing: pass all inputs of the network")
    if value["dtype"] == NON_TENSOR_TYPE:
        return inputs[name]
    shape = None if value["shape"] is None else tuple(value["shape"])
    return coerce_input(inputs[name], numpy_type(value["dtype"]), shape, f"input {name!r}")


def numpy_type(name: str) -> np.dtype[Any]:
    """Return numpy's type for the name of an ONNX type; raise DicompilerError if the package ml_dtypes is missing."""
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
    """Return a device's piece of a whole state (a tensor that is kept for the next frame).

    `state` is the manifest's description of the piece.
    """
    return np.asarray(array[tuple(slice(start, stop) for start, stop in state["region"])], order="C")


def to_payload(array: Any, value: Mapping[str, Any]) -> Any:
    """Return an input's bytes, as a message to a device contains them.

    `value` is the manifest's description of the input. If it has no shape, the bytes begin with the rank and the
    dimensions.
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
    """Convert the bytes of an output to an array; raise ValueError if they do not match the description `value`."""
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
            raise ValueError(
                f"output {value['name']!r}: the message of {len(payload)} bytes does not begin with the output's shape"
            )
        shape, start = [int(size) for size in dims[1 : rank + 1]], 8 * (rank + 1)
    array: NDArray[Any] = payload[start:].view(numpy_type(value["dtype"])).reshape(shape)
    return array
