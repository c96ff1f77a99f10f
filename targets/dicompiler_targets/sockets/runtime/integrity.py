"""The integrity of a device's files: finds damaged files before the device returns a result.

Digests are computed in the background, while the onnxruntime sessions are created from the same files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

COPY_AGAIN = "copy the device's directory again"
DIGEST_KINDS = ("sha256", "crc32")
_READ_BYTES = 1 << 18
_CHECKSUM = re.compile(rb'\n "checksum": "([0-9a-f]{64})"')


def mark_as_used(directory: Path) -> int | None:
    """Lock the artifact in `directory`, so that `dicompiler compile` warns if it replaces the artifact.

    Return the open descriptor that holds the lock, or None on a board, where the device's directory is not in an
    artifact. The system closes the descriptor when the process ends.
    """
    try:
        descriptor = os.open(directory / "artifact.json", os.O_RDONLY)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # Some file systems have no locks.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest in a file; raise ValueError if the checksum (SHA-256) in the file does not match."""
    data = path.read_bytes()
    match = _CHECKSUM.search(data)
    if match is None or hashlib.sha256(data[: match.start(1)] + data[match.end(1) :]).hexdigest() != match[1].decode():
        raise ValueError(f"{path}: damaged, its checksum does not match: {COPY_AGAIN}")
    document: dict[str, Any] = json.loads(data)
    return document


class FileIntegrity:
    """Compares the files of a device with the digests in its manifest."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self._directory, self._records = directory, manifest["files"]
        self._digests: dict[str, Future[str]] = {}

    def begin_digests(self) -> None:
        """Start to compute the digests of all files in two threads.

        Call this method just before code that releases the interpreter's lock, so that the threads can run.

        Raises:
            ValueError: A file is missing, is a link or has another size than in the manifest, or a digest's kind is
                unknown.
        """
        for name, record in self._records.items():
            kind = record["digest"].partition(":")[0]
            if kind not in DIGEST_KINDS:
                raise ValueError(f"file {name}: this runtime does not know the digest {kind[:20]!r}: {COPY_AGAIN}")
            path = self._directory / name
            size = path.stat().st_size if path.is_file() and not path.is_symlink() else None
            if size != record["bytes"]:
                problem = "is missing" if size is None else f"has {size} bytes, expected {record['bytes']}"
                raise ValueError(f"file {name} {problem}: {COPY_AGAIN}")
        # The threads have normal priority. With a low priority, they could hold the interpreter's lock for so long that
        # heartbeats are not sent in time.
        pool = ThreadPoolExecutor(2)
        for name in self._records:
            self._digests[name] = pool.submit(self._compute_digest, name)
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Wait for the digests that `begin_digests` has started; raise ValueError if one differs from the manifest."""
        for name in tuple(self._digests):
            future = self._digests.pop(name)
            digest = self._compute_digest(name) if future.cancel() else future.result()
            if digest != self._records[name]["digest"]:
                raise ValueError(f"file {name} is damaged, its content is not what was compiled: {COPY_AGAIN}")

    def _compute_digest(self, name: str) -> str:
        path = self._directory / name
        if not path.is_file():  # A file that has been replaced by a pipe is not read, because reading would block.
            return ""
        with path.open("rb") as file:
            if self._records[name]["digest"].startswith("sha256:"):
                return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            crc, buffer = 0, memoryview(bytearray(_READ_BYTES))
            while count := file.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
            return f"crc32:{crc:08x}"
