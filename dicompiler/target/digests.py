"""Digests of files' contents: SHA-256, and for large files of numbers a sum that is four times as quick.

In: a file. Out: `sha256:` or `lanes:` and 64 hexadecimal digits. docs/formats.md defines both; the runtimes of the
targets compute the same by themselves. Both find damage; only SHA-256 tells files apart that somebody made to be alike.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dicompiler.target.manifest import Json

DIGEST_KINDS = ("sha256", "lanes")
_NUMBERS, _LARGE = (".bin", ".data", ".onnx"), 1 << 20
"""Endings of files that are no code, and from which size on, in bytes, their digest is the quick one."""
_LANES, _ROWS, _FACTOR = 1 << 12, 1 << 6, 0x9E3779B1


def make_file_record(path: Path) -> Json:
    """What `files` of a manifest says of a file: `bytes` and `digest`, of the kind that it is to have."""
    size = path.stat().st_size
    return {"bytes": size, "digest": content_digest(path, DIGEST_KINDS[path.suffix in _NUMBERS and size >= _LARGE])}


def content_digest(path: Path, kind: str) -> str:
    """The digest of a file's content, of one of KINDS, whose name stands before it."""
    return f"{kind}:{_lanes(path) if kind == 'lanes' else file_digest(path)}"


def file_digest(path: Path) -> str:
    """SHA-256, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lanes(path: Path) -> str:
    """SHA-256, hexadecimal, of 2^12 sums and the file's length, see docs/formats.md: block by block, what 64 times
    lane = factor * lane + word gives.

    A byte that is another is always found: it is part of one word, after which one lane is another number, and stays
    another, because x -> factor * x + word is a bijection modulo 2^32 for an odd factor. So is damage within 16 KB:
    of each lane, it has one word at most."""
    powers = np.array([pow(_FACTOR, row, 1 << 32) for row in range(_ROWS, -1, -1)], "<u4")
    lanes, block, size = np.zeros(_LANES, "<u4"), np.zeros((_ROWS, _LANES), "<u4"), 0
    with path.open("rb") as file:
        while count := file.readinto(block.data):
            block.reshape(-1).view(np.uint8)[count:] = 0
            lanes = lanes * powers[0] + np.einsum("ij,i->j", block, powers[1:])
            size += count
    return hashlib.sha256(lanes.tobytes() + size.to_bytes(8, "little")).hexdigest()
