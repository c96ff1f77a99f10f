"""artifact.json, which every target writes, and the descriptions of tensors in it and in manifests.

The same program gives the same bytes. artifact.json lists the size and digest of every other file, and has a checksum
of itself. These checks find damaged files, but do not prove the origin of the artifact.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError, describe_wrong_path
from dicompiler.base.schema import check_format, load_json, validate
from dicompiler.base.version import package_version

if TYPE_CHECKING:
    from dicompiler.ir.program import Program, TensorSpec, Transfer


ARTIFACT_FORMAT = "dicompiler.artifact/3"
ARTIFACT_FILE, PLAN_FILE, PLATFORM_FILE, REFERENCE_FILE = (
    "artifact.json", "plan.json", "platform.toml", "reference/model.onnx"
)  # fmt: skip
PROVENANCE_FILE, PROVENANCE_FORMAT = "reference/provenance.json", "dicompiler.provenance/1"
EMPTY_CHECKSUM = "0" * 64
"""The value of the key `checksum` before `write_digests_and_checksum` computes the checksum."""
ARTIFACT_NOUN = "artifact"
"""The word for an artifact in error messages about output directories."""
SENDABLE_TYPES = {
    "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64",
    "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
}  # fmt: skip
"""Element types of tensors that devices can exchange and that can be inputs and outputs of a network."""
STRING_TYPE, NON_TENSOR_TYPE = "STRING", "NESTED"
"""Types that can be inputs and outputs of a network, but cannot be sent between devices.

They are strings, and values that are not tensors (sequences, maps, optional values).
"""

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

    The caller adds the checksum and the files that are not listed after `Target.emit`.

    Args:
        program: The program.
        target: Name of the target.
        digest: SHA-256, as hexadecimal digits, of the contents of all devices, including the weights.

    Returns:
        The document, which matches the schema `artifact` except for its empty `files` and `checksum`.

    Raises:
        DicompilerError: The program sends a tensor of an unsupported type or of unknown size.
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
    # Clients without onnx import this module, so this import is local.
    from dicompiler.ir.onnx.weights import dtype_name

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


_CHECKSUM_PATTERN = re.compile(rb'\n "checksum": "([0-9a-f]{64})"')
_MAX_PATH_CHARS, _MAX_PATH_PART_BYTES = 1000, 200
_PATH_PATTERN = re.compile(r"[^\x00-\x1f\x7f/\\]+(?:/[^\x00-\x1f\x7f/\\]+)*")
_MAX_MANIFEST_BYTES = 1 << 28
_DATA_SUFFIXES, _LARGE_FILE_BYTES = (".bin", ".data", ".onnx"), 1 << 20
"""A data file of at least _LARGE_FILE_BYTES has a CRC-32 as its digest, which is several times faster than SHA-256.

Code always has a SHA-256, because anyone can make a file with a given CRC-32.
"""
_CHUNK_BYTES = 1 << 20


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file.

    Args:
        path: Path of the file.

    Returns:
        The digest as 64 hexadecimal digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_crc32(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


_DIGEST_FUNCTIONS = {"sha256": file_digest, "crc32": _file_crc32}


def make_file_record(path: Path) -> Json:
    """Return the size and digest of a file, in the form in which artifact.json and manifests list files.

    Args:
        path: Path of the file.

    Returns:
        A dictionary with `bytes` (the size) and `digest`: `crc32:` and 8 hexadecimal digits for data files of at least
        1 MiB, otherwise `sha256:` and 64 hexadecimal digits.
    """
    size = path.stat().st_size
    kind = "crc32" if path.suffix in _DATA_SUFFIXES and size >= _LARGE_FILE_BYTES else "sha256"
    return {"bytes": size, "digest": f"{kind}:{_DIGEST_FUNCTIONS[kind](path)}"}


def format_checksummed_json(document: Json) -> str:
    """Format a document as JSON, with a checksum of its text under the key `checksum`.

    Args:
        document: A document without that key.

    Returns:
        The text of `format_json`, with the SHA-256 of all other characters as the value of `checksum`.
    """
    text = format_json(document | {"checksum": EMPTY_CHECKSUM})
    return text.replace(f'\n "checksum": "{EMPTY_CHECKSUM}"', f'\n "checksum": "{_document_digest(text.encode())}"', 1)


def has_valid_checksum(data: bytes) -> bool:
    """Return True if the text in `data` is unchanged since `format_checksummed_json` wrote it."""
    match = _CHECKSUM_PATTERN.search(data)
    return match is not None and match[1].decode() == _document_digest(data)


def _document_digest(data: bytes) -> str:
    match = _CHECKSUM_PATTERN.search(data)
    assert match is not None
    return hashlib.sha256(data[: match.start(1)] + data[match.end(1) :]).hexdigest()


def write_digests_and_checksum(directory: Path, extra: Json | None = None) -> None:
    """Add the size and digest of each file in an artifact's `directory`, and a checksum, to its artifact.json.

    The keys and values of `extra` are added too. Files that the target has already listed are not read again.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / ARTIFACT_FILE)
    names = [path.relative_to(directory).as_posix() for path in paths]
    for name in names:
        check_file_name(name, directory)
    document = json.loads((directory / ARTIFACT_FILE).read_bytes()) | (extra or {})
    records = document.get("files", {}) if document.get("checksum") == EMPTY_CHECKSUM else {}
    with ThreadPoolExecutor() as pool:
        new_records = pool.map(lambda name: records.get(name) or make_file_record(directory / name), names)
        document["files"] = dict(zip(names, new_records, strict=True))
    (directory / ARTIFACT_FILE).write_bytes(format_checksummed_json(document).encode())


def load_artifact(directory: Path) -> Json:
    """Load artifact.json and check that it is valid.

    The listed files are not read: `check_files` does that.

    Args:
        directory: The artifact's directory.

    Returns:
        The content of artifact.json.

    Raises:
        DicompilerError: The directory is not an artifact, its artifact.json has a wrong checksum or does not match the
            schema, or a listed file is not a regular file inside the directory.
    """
    path = directory / ARTIFACT_FILE
    if not os.path.lexists(path):
        remedy = describe_wrong_path(directory) or ": compile a model into it first"
        raise DicompilerError(f"{directory}: not an artifact of dicompiler{remedy}")
    document = read_checksummed_json(require_regular_file(directory, ARTIFACT_FILE), "artifact")
    try:
        for name, record in document["files"].items():
            check_file_name(name, path)
            if not isinstance(record["digest"], str) or not isinstance(record["bytes"], int):
                raise TypeError(f"files: {name}")
            require_regular_file(directory, name)
        for device in document["devices"]:
            check_file_name(device, path)
    # Without jsonschema-rs, keys and types were not checked, and may be wrong.
    except (KeyError, TypeError, AttributeError) as error:
        raise DicompilerError(f"{path}: not an artifact of this version ({error}): compile the model again") from None
    return document


def read_checksummed_json(path: Path, schema: str) -> Json:
    """Read a JSON file that `format_checksummed_json` formatted, and check its checksum.

    Args:
        path: Path of the file.
        schema: Name of the document's schema, which is checked if jsonschema-rs is installed.

    Returns:
        The document.

    Raises:
        DicompilerError: The file cannot be read, has no valid checksum, or does not match the schema.
    """
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_MANIFEST_BYTES else b""
    except OSError as error:
        raise DicompilerError(f"{path}: cannot be read: {error.strerror or error}") from None
    if _CHECKSUM_PATTERN.search(data) is None:
        raise DicompilerError(f"{path}: no checksum: it is damaged, or of an earlier version: compile the model again")
    if not has_valid_checksum(data):
        raise DicompilerError(f"{path}: its checksum is wrong: it was changed or damaged: compile the model again")
    document: Json = load_json(path)
    if find_spec("jsonschema_rs") is not None:
        check_format(document, schema, str(path))
        try:
            validate(document, schema, str(path))
        except DicompilerError as error:
            raise DicompilerError(f"{error}: compile the model again") from None
    return document


def check_file_name(name: object, source: Path) -> None:
    """Raise DicompilerError unless `name`, read from the file `source`, is a relative path inside the artifact.

    Absolute paths, long names, control characters, backslashes, `.` and `..` are not allowed.
    """
    is_path = isinstance(name, str) and len(name) <= _MAX_PATH_CHARS and _PATH_PATTERN.fullmatch(name) is not None
    parts = str(name).split("/")
    if not is_path or any(part in (".", "..") or len(part.encode()) > _MAX_PATH_PART_BYTES for part in parts):
        raise DicompilerError(f"{source}: invalid file name {str(name)[:60]!r}: compile the model again")


def require_regular_file(directory: Path, name: str) -> Path:
    """Return the path of the file `name` of an artifact. The file may be missing.

    Raises:
        DicompilerError: The file or one of its parent directories is a link, or the file is not a regular file.
    """
    path = directory
    parts = name.split("/")
    for index, part in enumerate(parts):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return directory / name
        except OSError as error:
            raise DicompilerError(f"{path}: cannot be read: {error.strerror or error}") from None
        if not (stat.S_ISREG if index == len(parts) - 1 else stat.S_ISDIR)(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise DicompilerError(f"{path}: it is {kind}, which an artifact must not contain: compile the model again")
    return path


def check_files(directory: Path, files: Mapping[str, Json], names: Iterable[str]) -> None:
    """Check the sizes and digests of files of an artifact.

    Args:
        directory: The artifact's directory.
        files: The key `files` of artifact.json: the size and digest of each file, by path relative to the directory.
        names: Relative paths of the files to be checked.

    Raises:
        DicompilerError: A file is missing or its content differs. The message names the first one.
    """
    chosen = list(names)
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _find_file_fault(directory, name, files), chosen)
        for name, fault in zip(chosen, faults, strict=True):
            if fault:
                raise DicompilerError(f"{directory / name}: {fault}: compile the model again, or copy the file again")


def _find_file_fault(directory: Path, name: str, files: Mapping[str, Json]) -> str:
    if name not in files:
        return f"{ARTIFACT_FILE} does not list it"
    path, record = require_regular_file(directory, name), files[name]
    try:
        size = path.stat().st_size
        if size != record["bytes"]:
            return f"it has {size} bytes instead of {record['bytes']}"
        kind, _, digits = record["digest"].partition(":")
        if kind not in _DIGEST_FUNCTIONS:
            return f"its digest is of the unknown type {kind[:20]!r}"
        return "" if _DIGEST_FUNCTIONS[kind](path) == digits else "its content differs from the compiled one"
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
