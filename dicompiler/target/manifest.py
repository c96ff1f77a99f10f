"""What every target's artifact has: artifact.json, which names the target, the devices and all that they send.

In: a Program. Out: JSON documents and their text, the same bytes for the same program. The schema is `artifact`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.version import package_version

if TYPE_CHECKING:
    from dicompiler.ir.program import Program, TensorSpec, Transfer

ARTIFACT_FORMAT = "dicompiler.artifact/2"
ARTIFACT_FILE, PLAN_FILE, PLATFORM_FILE, REFERENCE_FILE = (
    "artifact.json",
    "plan.json",
    "platform.toml",
    "reference/model.onnx",
)
PROVENANCE_FILE, PROVENANCE_FORMAT = "reference/provenance.json", "dicompiler.provenance/1"
"""Where things lie in an artifact's directory."""
ARTIFACT_NOUN = "artifact"
SENDABLE_TYPES = {
    "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64",
    "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
}  # fmt: skip
"""The element types that can be sent, and go into and out of a network."""
STRING_TYPE, NON_TENSOR_TYPE = "STRING", "NESTED"
"""What goes into and out of a network alone: words, and what is no tensor (a sequence, a map, an optional value)."""

Json = dict[str, Any]


def format_json(document: Json) -> str:
    """JSON with one entry of each list per line, so that two artifacts can be compared by eye and by diff."""
    rows = []
    for key, value in sorted(document.items()):
        text = json.dumps(value, sort_keys=True)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry, sort_keys=True) for entry in value) + "]"
        rows.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def describe_artifact(program: Program, target: str, digest: str) -> Json:
    """artifact.json, see the schema artifact. target: its name. digest: SHA-256 (hexadecimal) over what the devices
    hold, weights included. `files` and `seal` are filled in when all files are there (`target.seal`); a target may
    put into `files` those whose records (`file_record`) it has already. DicompilerError for tensors that cannot be
    exchanged."""
    return {
        "format": ARTIFACT_FORMAT,
        "version": package_version(),
        "target": target,
        "digest": digest,
        "files": {},
        "seal": "0" * 64,
        "devices": [device.device for device in program.devices],
        "inputs": [describe_value(value) for value in program.inputs],
        "outputs": [describe_value(value) for value in program.outputs],
        **({"states": [describe_value(value) for value in program.states]} if program.states else {}),
        "transfers": [describe_transfer(transfer) for transfer in program.all_transfers],
    }


def describe_value(value: TensorSpec) -> Json:
    """A tensor's name, type, shape and bytes (None: not known before the run). DicompilerError for a type that cannot
    be exchanged."""
    from dicompiler.ir.onnx.weights import dtype_name  # clients, which read manifests, do without onnx

    dtype = dtype_name(value.dtype) if value.dtype else NON_TENSOR_TYPE
    if dtype not in (*SENDABLE_TYPES, STRING_TYPE, NON_TENSOR_TYPE):
        raise DicompilerError(
            f"tensor {value.name!r}: values of type {dtype} cannot be sent between devices or into and out of them"
        )
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": dtype, "shape": shape, "bytes": value.nbytes if value.is_fixed_size else None}


def describe_transfer(transfer: Transfer) -> Json:
    """A transfer with what it carries. DicompilerError for a tensor that cannot be sent."""
    if not transfer.value.is_fixed_size:
        raise DicompilerError(
            f"tensor {transfer.value.name!r}: its bytes are not known before the run, so it cannot be sent"
        )
    ends = {"index": transfer.index, "sender": transfer.sender, "receiver": transfer.receiver}
    return ends | describe_value(transfer.value)
