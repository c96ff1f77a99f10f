"""The documents in an artifact: artifact.json, which all targets write, and the descriptions of tensors in manifests.

The same program gives the same bytes. The schema of artifact.json is `artifact`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.version import package_version

if TYPE_CHECKING:
    from dicompiler.ir.program import Program, TensorSpec, Transfer

ARTIFACT_FORMAT = "dicompiler.artifact/3"
ARTIFACT_FILE, PLAN_FILE, PLATFORM_FILE, REFERENCE_FILE = (
    "artifact.json", "plan.json", "platform.toml", "reference/model.onnx"
)  # fmt: skip
PROVENANCE_FILE, PROVENANCE_FORMAT = "reference/provenance.json", "dicompiler.provenance/1"
EMPTY_CHECKSUM = "0" * 64
"""The value of the key `checksum` before `write_integrity` computes the checksum."""
ARTIFACT_NOUN = "artifact"
"""The word for an artifact in error messages about output directories."""
SENDABLE_TYPES = {
    "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64",
    "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
}  # fmt: skip
"""Element types of tensors that devices can exchange and that can be inputs and outputs of a network."""
STRING_TYPE, NON_TENSOR_TYPE = "STRING", "NESTED"
"""Types of values that can be inputs and outputs of a network, but cannot be sent between devices: strings, and values
that are not tensors (sequences, maps, optional values)."""

Json = dict[str, Any]


def format_json(document: Json) -> str:
    """Format a document as JSON with one line for each key and each list entry, so that diffs are readable.

    Args:
        document: The document.

    Returns:
        The text, with sorted keys.
    """
    rows = []
    for key, value in sorted(document.items()):
        text = json.dumps(value, sort_keys=True)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry, sort_keys=True) for entry in value) + "]"
        rows.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def describe_artifact(program: Program, target: str, digest: str) -> Json:
    """Return the content of artifact.json for a program.

    If a target has already computed the digests of some files, it may list these files under the key `files`. The
    function `write_integrity`, which is called after `Target.emit`, adds all other files and the checksum.

    Args:
        program: The program.
        target: Name of the target.
        digest: SHA-256, as hexadecimal digits, of the contents of all devices, including the weights.

    Returns:
        The document, which matches the schema `artifact` except for its empty `files` and `checksum`.

    Raises:
        DicompilerError: The program sends a tensor whose type cannot be sent, or whose size is unknown.
    """
    return {
        "format": ARTIFACT_FORMAT,
        "version": package_version(),
        "target": target,
        "digest": digest,
        "files": {},
        "checksum": EMPTY_CHECKSUM,
        "devices": [device.device for device in program.devices],
        "inputs": [describe_value(value) for value in program.inputs],
        "outputs": [describe_value(value) for value in program.outputs],
        **({"states": [describe_value(value) for value in program.states]} if program.states else {}),
        "transfers": [describe_transfer(transfer) for transfer in program.all_transfers],
    }


def describe_value(value: TensorSpec) -> Json:
    """Return the description of a tensor for artifact.json and manifests.

    Args:
        value: The tensor.

    Returns:
        The tensor's name, type, shape and bytes. Shape and bytes are None if they are not known before the run.

    Raises:
        DicompilerError: Tensors of this type cannot be sent, and cannot be inputs or outputs of the network.
    """
    from dicompiler.ir.onnx.weights import dtype_name  # Imported here, because clients without onnx import this module.

    dtype = dtype_name(value.dtype) if value.dtype else NON_TENSOR_TYPE
    if dtype not in (*SENDABLE_TYPES, STRING_TYPE, NON_TENSOR_TYPE):
        raise DicompilerError(
            f"tensor {value.name!r}: values of type {dtype} cannot be sent between devices or be inputs and outputs"
        )
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": dtype, "shape": shape, "bytes": value.nbytes if value.is_fixed_size else None}


def describe_transfer(transfer: Transfer) -> Json:
    """Return the description of a transfer for artifact.json and manifests.

    Args:
        transfer: The transfer.

    Returns:
        The transfer's index, sender and receiver, and the description of its tensor.

    Raises:
        DicompilerError: The tensor cannot be sent.
    """
    if not transfer.value.is_fixed_size:
        raise DicompilerError(
            f"tensor {transfer.value.name!r}: its size is not known before the run, so it cannot be sent"
        )
    ends = {"index": transfer.index, "sender": transfer.sender, "receiver": transfer.receiver}
    return ends | describe_value(transfer.value)
