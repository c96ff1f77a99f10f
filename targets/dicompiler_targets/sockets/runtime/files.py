"""The device's files against its manifest: what was damaged is found before a number leaves.

In: a manifest.json. Out: what it says; or ValueError that names the file, the cause and the remedy. Digests are taken
in threads of their own, beside the making of the sessions, which reads the same files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

REMEDY = "copy the device's directory again"
_LANES, _ROWS, _FACTOR = 1 << 12, 1 << 6, 0x9E3779B1
_SEAL = re.compile(rb'\n "seal": "([0-9a-f]{64})"')


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in a file, whose seal is whole: the SHA-256 of the file without the seal's digits."""
    data = path.read_bytes()
    match = _SEAL.search(data)
    if match is None or hashlib.sha256(data[: match.start(1)] + data[match.end(1) :]).hexdigest() != match[1].decode():
        raise ValueError(f"{path}: its seal is broken, it is damaged: {REMEDY}")
    document: dict[str, Any] = json.loads(data)
    return document


class Files:
    """The files that a manifest names."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self._directory, self._records = directory, manifest["files"]
        self._digests: dict[str, tuple[str, Future[str]]] = {}

    def begin(self) -> None:
        """Takes their digests from now on: call it where the interpreter is free next, for which threads would wait.
        ValueError for a file that is missing, a link, or of another size, or a digest of another kind."""
        for name, record in self._records.items():
            kind = record["digest"].partition(":")[0]
            if kind not in ("sha256", "lanes"):
                raise ValueError(f"file {name}: this runtime knows no digest of the kind {kind[:20]!r}: {REMEDY}")
            path = self._directory / name
            size = path.stat().st_size if path.is_file() and not path.is_symlink() else None
            if size != record["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {record['bytes']}"
                raise ValueError(f"file {name} {found}: {REMEDY}")
        pool = ThreadPoolExecutor(2)
        for name, record in self._records.items():
            self._digests[name] = record["digest"], pool.submit(_digest, self._directory / name, record["digest"])
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Waits for all digests. ValueError for a file that holds something else than the manifest says."""
        for name, (wanted, digest) in self._digests.items():
            if digest.result() != wanted:
                raise ValueError(f"file {name} is damaged, its content is not what was compiled: {REMEDY}")


def _digest(path: Path, wanted: str) -> str:
    """The file's, of the kind of `wanted`."""
    if not path.is_file():  # a pipe would be waited for
        return ""
    with path.open("rb") as file:
        if wanted.startswith("lanes:"):
            return f"lanes:{_lanes(file)}"
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _lanes(file: BufferedReader) -> str:
    """The quick digest of large files, as `dicompiler.target.digests` takes it, which this runtime does without."""
    powers = np.array([pow(_FACTOR, row, 1 << 32) for row in range(_ROWS, -1, -1)], "<u4")
    lanes, block, size = np.zeros(_LANES, "<u4"), np.zeros((_ROWS, _LANES), "<u4"), 0
    while count := file.readinto(block.data):
        block.reshape(-1).view(np.uint8)[count:] = 0
        lanes = lanes * powers[0] + np.einsum("ij,i->j", block, powers[1:])
        size += count
    return hashlib.sha256(lanes.tobytes() + size.to_bytes(8, "little")).hexdigest()
