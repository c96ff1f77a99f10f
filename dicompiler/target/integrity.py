"""What keeps an artifact what was compiled: artifact.json names every other file of it with size and digest, and has a
digest of itself, its seal. Whoever reads an artifact opens it here, before anything else in it.

In: an artifact's directory. Out: its artifact.json, and files that are plain, inside, and as they were written; or one
line that names the file, the cause and the remedy. A seal finds damage; that nobody else wrote it, it cannot tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from dicompiler.base.errors import DicompilerError, describe_wrong_path
from dicompiler.base.schema import load_json, validate
from dicompiler.target.digests import DIGEST_KINDS, content_digest, make_file_record
from dicompiler.target.manifest import ARTIFACT_FILE, Json, format_json

EMPTY_CHECKSUM = "0" * 64
_CHECKSUM_PATTERN = re.compile(rb'\n "seal": "([0-9a-f]{64})"')
_MAX_PATH_CHARS, _MAX_PATH_PART_BYTES = 1000, 200
"""Characters of a file's path in an artifact, and of a part of it."""
_PATH_PATTERN = re.compile(r"[^\x00-\x1f\x7f/\\]+(?:/[^\x00-\x1f\x7f/\\]+)*")
_MAX_MANIFEST_BYTES = 1 << 28
"""Bytes of an artifact.json, or of another manifest."""


def format_checksummed_json(document: Json) -> str:
    """`json_text` of the document with its key `seal`: the SHA-256 of that text without the seal's digits."""
    text = format_json(document | {"seal": EMPTY_CHECKSUM})
    return text.replace(f'\n "seal": "{EMPTY_CHECKSUM}"', f'\n "seal": "{_document_digest(text.encode())}"', 1)


def has_valid_checksum(data: bytes) -> bool:
    """Whether the bytes are those that `sealed_text` gave: any other byte, a blank too, breaks the seal."""
    match = _CHECKSUM_PATTERN.search(data)
    return match is not None and match[1].decode() == _document_digest(data)


def _document_digest(data: bytes) -> str:
    match = _CHECKSUM_PATTERN.search(data)
    assert match is not None
    return hashlib.sha256(data[: match.start(1)] + data[match.end(1) :]).hexdigest()


def write_integrity(directory: Path, extra: Json | None = None) -> None:
    """Writes into the artifact.json of a directory what all other files in it hold, and the seal. Of files that its
    `files` names already, where it was never sealed, that stands: who wrote them has taken the digests on the way.
    more: keys that come in beside those that are there."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / ARTIFACT_FILE)
    names = [path.relative_to(directory).as_posix() for path in paths]
    for name in names:
        check_file_name(name, directory)
    document = json.loads((directory / ARTIFACT_FILE).read_bytes()) | (extra or {})
    known = document.get("files", {}) if document.get("seal") == EMPTY_CHECKSUM else {}
    with ThreadPoolExecutor() as pool:
        records = pool.map(lambda name: known.get(name) or make_file_record(directory / name), names)
        document["files"] = dict(zip(names, records, strict=True))
    (directory / ARTIFACT_FILE).write_bytes(format_checksummed_json(document).encode())


def load_artifact(directory: Path) -> Json:
    """The artifact.json of an artifact: its seal is whole, it fits the schema (where jsonschema is installed: clients
    do without), and all files that it names are plain ones inside the directory, by paths without links; whether they
    are there, and what they hold, is for `check_files`. DicompilerError where that is not so."""
    path = directory / ARTIFACT_FILE
    if not os.path.lexists(path):
        raise DicompilerError(
            f"{directory}: no artifact of dicompiler{describe_wrong_path(directory) or ': compile a model into it first'}"
        )
    document = read_checksummed_json(require_regular_file(directory, ARTIFACT_FILE), "artifact")
    try:
        for name, record in document["files"].items():
            check_file_name(name, path)
            if not isinstance(record["digest"], str) or not isinstance(record["bytes"], int):
                raise TypeError(f"files: {name}")
            require_regular_file(directory, name)
        for device in document["devices"]:
            check_file_name(device, path)
    except (KeyError, TypeError, AttributeError) as error:  # nobody has looked at the schema
        raise DicompilerError(f"{path}: no artifact of this version ({error}): compile it again") from None
    return document


def read_checksummed_json(path: Path, schema: str) -> Json:
    """The sealed JSON document of a file, see `open_artifact`."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_MANIFEST_BYTES else b""
    except OSError as error:
        raise DicompilerError(f"{path}: cannot be read: {error.strerror or error}") from None
    if _CHECKSUM_PATTERN.search(data) is None:
        raise DicompilerError(f"{path}: it has no seal: it is damaged, or of an earlier version: compile it again")
    if not has_valid_checksum(data):
        raise DicompilerError(f"{path}: its seal is broken: it was changed or damaged: compile it again")
    document: Json = load_json(path)
    if find_spec("jsonschema") is not None:
        try:
            validate(document, schema, str(path))
        except DicompilerError as error:
            raise DicompilerError(f"{error}: compile it again") from None
    return document


def check_file_name(name: object, place: Path) -> None:
    """DicompilerError where `name`, of the file `place`, is no path of a file in a directory: it must be relative,
    without "." and "..", without control characters, and not too long."""
    fits = isinstance(name, str) and len(name) <= _MAX_PATH_CHARS and _PATH_PATTERN.fullmatch(name) is not None
    if not fits or any(
        part in (".", "..") or len(part.encode()) > _MAX_PATH_PART_BYTES for part in str(name).split("/")
    ):
        raise DicompilerError(f"{place}: {str(name)[:60]!r} is no name of a file in an artifact: compile it again")


def require_regular_file(directory: Path, name: str) -> Path:
    """The file `name` of an artifact. DicompilerError where it, or a directory on the way, is a link, or it is no plain
    file; that nothing is there, is no error here."""
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
            kind = "a link" if stat.S_ISLNK(mode) else "no plain file"
            raise DicompilerError(f"{path}: it is {kind}, which an artifact does not hold: compile it again")
    return path


def check_files(directory: Path, files: Mapping[str, Json], names: Iterable[str]) -> None:
    """DicompilerError for the first of `names` that is missing or not as `files`, of the artifact.json, has it."""
    chosen = list(names)
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _find_file_fault(directory, name, files), chosen)
        for name, fault in zip(chosen, faults, strict=True):
            if fault:
                raise DicompilerError(f"{directory / name}: {fault}: compile it again, or copy it again")


def _find_file_fault(directory: Path, name: str, files: Mapping[str, Json]) -> str:
    if name not in files:
        return f"{ARTIFACT_FILE} does not name it"
    path, record = require_regular_file(directory, name), files[name]
    try:
        size = path.stat().st_size
        if size != record["bytes"]:
            return f"it has {size} bytes instead of {record['bytes']}"
        kind = record["digest"].partition(":")[0]
        if kind not in DIGEST_KINDS:
            return f"its digest is of the kind {kind[:20]!r}, which this version does not know"
        return "" if content_digest(path, kind) == record["digest"] else "its content is not what was compiled"
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
