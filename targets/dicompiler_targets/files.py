"""What targets for onnxruntime write alike: segments, a file of weights for each device, and JSON that can be compared.

In: segments and weights of a Program. Out: bytes, the same for the same program; weights go straight from their views.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from dicompiler.errors import DicompilerError
from dicompiler.program import Program, Segment, Transfer, Value
from dicompiler.weights import Weight, dtype_name, is_hollow

ARTIFACT = "dicompiler.artifact/1"
WEIGHTS = "weights.bin"
ALIGN = 64
"""Bytes; each weight starts at a multiple of it, so that onnxruntime can use it in the mapped file."""
TYPES = {
    "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64",
    "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
}  # fmt: skip
"""The element types that can be sent, and go into and out of a network."""

Json = dict[str, Any]


def json_text(document: Json) -> str:
    """JSON with one entry of each list per line, so that two artifacts can be compared by eye and by diff."""
    rows = []
    for key, value in sorted(document.items()):
        text = json.dumps(value, sort_keys=True)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry, sort_keys=True) for entry in value) + "]"
        rows.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def artifact_document(program: Program, target: str, digest: str) -> Json:
    """artifact.json, see the schema artifact. DicompilerError for tensors that cannot be exchanged."""
    return {
        "format": ARTIFACT,
        "target": target,
        "digest": digest,
        "devices": [device.device for device in program.devices],
        "inputs": [value_document(value) for value in program.inputs],
        "outputs": [value_document(value) for value in program.outputs],
        "transfers": [transfer_document(transfer) for transfer in program.all_transfers],
    }


def value_document(value: Value) -> Json:
    """A tensor's name, type, shape and bytes. DicompilerError for a type that cannot be exchanged."""
    dtype = dtype_name(value.dtype)
    if dtype not in TYPES:
        raise DicompilerError(
            f"tensor {value.name!r}: values of type {dtype} cannot be sent between devices or into and out of them"
        )
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": dtype, "shape": shape, "bytes": None if shape is None else value.nbytes}


def transfer_document(transfer: Transfer) -> Json:
    """A transfer with what it carries. DicompilerError for a tensor that cannot be sent."""
    if transfer.value.shape is None:
        raise DicompilerError(f"tensor {transfer.value.name!r}: its shape is not static, so it cannot be sent")
    ends = {"index": transfer.index, "sender": transfer.sender, "receiver": transfer.receiver}
    return ends | value_document(transfer.value)


class Contents:
    """What a device's files hold: the weights of all roles, each once (a name stands for the same cut in all of them),
    and the segments by file, equal ones of several roles once. names: the files of each role's segments."""

    def __init__(self, program: Program, index: int) -> None:
        """Of the device at that place."""
        roles = [(role, role.devices[index].segments) for role in program.roles]
        self.weights = {
            tensor.name: role.weights[tensor.name]
            for role, segments in roles
            for segment in segments
            for tensor in segment.model.graph.initializer
            if is_hollow(tensor)
        }
        self.segments: dict[str, Segment] = {}
        self.names: list[list[str]] = []
        found: dict[bytes, str] = {}
        for _, segments in roles:
            self.names.append([])
            for segment in segments:
                key = segment.model.SerializeToString(deterministic=True) if program.others else segment.name.encode()
                file = found.setdefault(key, f"segment{len(found):03}.onnx")
                self.segments.setdefault(file, segment)
                self.names[-1].append(file)

    def write(self, place: Path) -> Iterator[tuple[str, Json]]:
        """Writes the files into `place`; gives the name, size and hash of each."""
        offsets = _offsets(self.weights)
        if self.weights:
            yield WEIGHTS, write_parts(place / WEIGHTS, _content(self.weights, offsets))
        for name, segment in self.segments.items():
            yield name, write_parts(place / name, [_segment(segment, self.weights, offsets)])


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> Json:
    """Writes the parts one after another; gives size and hash of the whole."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _offsets(weights: Mapping[str, Weight]) -> dict[str, int]:
    offsets, end = {}, 0
    for name, weight in weights.items():
        offsets[name] = -(-end // ALIGN) * ALIGN
        end = offsets[name] + weight.nbytes
    return offsets


def _content(weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> Iterator[bytes | memoryview]:
    end = 0
    for name, weight in weights.items():
        yield bytes(offsets[name] - end)
        yield from weight.chunks()
        end = offsets[name] + weight.nbytes


def _segment(segment: Segment, weights: Mapping[str, Weight], offsets: Mapping[str, int]) -> bytes:
    """The segment's file: its large weights are external data in the device's weights file."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for tensor in model.graph.initializer:
        if is_hollow(tensor):
            del tensor.external_data[:]
            length = weights[tensor.name].nbytes
            for key, value in (("location", WEIGHTS), ("offset", offsets[tensor.name]), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    return bytes(model.SerializeToString(deterministic=True))
