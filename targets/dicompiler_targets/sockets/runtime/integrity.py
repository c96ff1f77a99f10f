"""The device's files against its manifest: what was damaged is found before a number leaves.

In: a manifest.json. Out: what it says; or ValueError that names the file, the cause and the remedy. Digests are taken
beside the making of the sessions, which reads the same files, piece by piece; what is left of them when they are asked
for is taken at once.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

COPY_AGAIN = "copy the device's directory again"
PIECE_BYTES = 1 << 22
"""Bytes of a large file, whole blocks, whose sums are taken at once: what is begun must not take long."""
_LANES, _ROWS, _FACTOR = 1 << 12, 1 << 6, 0x9E3779B1
_BLOCK = 4 * _LANES * _ROWS
_DigestCall = Callable[[], Any]
_SEAL = re.compile(rb'\n "seal": "([0-9a-f]{64})"')


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in a file, whose seal is whole: the SHA-256 of the file without the seal's digits."""
    data = path.read_bytes()
    match = _SEAL.search(data)
    if match is None or hashlib.sha256(data[: match.start(1)] + data[match.end(1) :]).hexdigest() != match[1].decode():
        raise ValueError(f"{path}: its seal is broken, it is damaged: {COPY_AGAIN}")
    document: dict[str, Any] = json.loads(data)
    return document


class FileIntegrity:
    """The files that a manifest names."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self._directory, self._records = directory, manifest["files"]
        self._digests: dict[str, list[tuple[_DigestCall, Future[Any]]]] = {}

    def begin_digests(self) -> None:
        """Takes their digests from now on: call it where the interpreter is free next, for which threads would wait.
        ValueError for a file that is missing, a link, or of another size, or a digest of another kind."""
        for name, record in self._records.items():
            kind = record["digest"].partition(":")[0]
            if kind not in ("sha256", "lanes"):
                raise ValueError(f"file {name}: this runtime knows no digest of the kind {kind[:20]!r}: {COPY_AGAIN}")
            path = self._directory / name
            size = path.stat().st_size if path.is_file() and not path.is_symlink() else None
            if size != record["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {record['bytes']}"
                raise ValueError(f"file {name} {found}: {COPY_AGAIN}")
        pool = ThreadPoolExecutor(
            2
        )  # of lower priority they could hold the interpreter's lock for long: no sign of life
        for name, record in self._records.items():
            works = _digest_calls(self._directory / name, record)
            self._digests[name] = [(work, pool.submit(work)) for work in works]
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Waits for all digests that were not checked yet. ValueError for a file that holds something else than the
        manifest says."""
        for name in tuple(self._digests):
            works = self._digests.pop(name)
            found = [work() if begun.cancel() else begun.result() for work, begun in works]
            record = self._records[name]
            if record["digest"] != (found[0] if record["digest"].startswith("sha256:") else _lanes(found, record)):
                raise ValueError(f"file {name} is damaged, its content is not what was compiled: {COPY_AGAIN}")


def _digest_calls(path: Path, record: Mapping[str, Any]) -> list[_DigestCall]:
    """What must be called for the digest that the file is to have."""
    if record["digest"].startswith("lanes:"):
        with path.open("rb") as file:
            if not record["bytes"]:  # nothing to map
                return []
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return [partial(_sums, data, at) for at in range(0, len(data), PIECE_BYTES)]
    return [partial(_sha256, path)]


def _sha256(path: Path) -> str:
    if not path.is_file():  # a pipe would be waited for
        return ""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _sums(data: mmap.mmap, at: int) -> tuple[int, Any]:
    """Of the piece that begins at byte `at` the rows, zeros behind its end included, and what its lanes come to."""
    piece = np.frombuffer(data, np.uint8, min(PIECE_BYTES, len(data) - at), at)
    powers = np.array([pow(_FACTOR, row, 1 << 32) for row in range(_ROWS, -1, -1)], "<u4")
    lanes = np.zeros(_LANES, "<u4")
    for start in range(0, len(piece), _BLOCK):
        block = piece[start : start + _BLOCK]
        whole = block if len(block) == _BLOCK else np.pad(block, (0, _BLOCK - len(block)))
        lanes = lanes * powers[0] + np.einsum("ij,i->j", whole.view("<u4").reshape(_ROWS, _LANES), powers[1:])
    data.madvise(mmap.MADV_DONTNEED, at, len(piece))  # else it would count as memory of this process
    return -(-len(piece) // _BLOCK) * _ROWS, lanes


def _lanes(pieces: Sequence[tuple[int, Any]], record: Mapping[str, Any]) -> str:
    """The quick digest of large files, as `dicompiler.target.digests` takes it, which this runtime does without."""
    lanes = np.zeros(_LANES, "<u4")
    for rows, sums in pieces:
        lanes = lanes * np.uint32(pow(_FACTOR, rows, 1 << 32)) + sums
    return f"lanes:{hashlib.sha256(lanes.tobytes() + record['bytes'].to_bytes(8, 'little')).hexdigest()}"
