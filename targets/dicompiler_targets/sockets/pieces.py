"""Finding byte ranges of a new file in old files of a host, so that these ranges need not be sent to it.

A file is cut into pieces at positions that depend only on the bytes near them (content-defined chunking). Equal byte
ranges in two files therefore have the same pieces, even at different offsets.

The source of this module is also sent to hosts, which run `main`. It therefore imports only the standard library and
numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 10, 1 << 14
"""Limits of the size of a piece. The last piece of a file can be smaller."""
CUT_BITS = 10
"""Number of zero bits in a hash at which a file is cut.

Each word of 4 bytes ends a piece with the probability 2 ** -CUT_BITS. A piece thus has 4 to 5 KiB on average.
"""
DIGEST_BYTES = 8
"""Number of bytes of a piece's digest.

If two different pieces have the same short digest, the digest of the whole file shows the error.
"""
SENT_SOURCE = -1
"""Source of a byte range that is sent to the host. All other sources are indices of old files on the host."""
_MULTIPLIER = 0x9E3779B1
_DOUBLINGS = (1, 2, 4, 8)
"""Distances (in words of 4 bytes) between two hashes that are added; after all steps, a hash covers 16 words."""
_WINDOW_WORDS = 2 * _DOUBLINGS[-1]
_BLOCK_BYTES = 1 << 22

Piece = tuple[int, int, bytes]
"""Offset, length and digest of a piece."""
Range = tuple[int, int, int]
"""A range of bytes: its source, its offset there (0 for SENT_SOURCE), and its length."""


def cut_file(path: Path | str) -> list[Piece]:
    """Cut a file into pieces without gaps; return the offset, length and digest of each piece."""
    pieces = []
    with open(path, "rb") as file:
        ends = list(_piece_ends(file, os.fstat(file.fileno()).st_size))
        file.seek(0)
        start = 0
        for end in ends:
            digest = hashlib.blake2b(file.read(end - start), digest_size=DIGEST_BYTES).digest()
            pieces.append((start, end - start, digest))
            start = end
    return pieces


def _piece_ends(file: IO[bytes], size: int) -> Iterator[int]:
    start = 0
    for end in (*_possible_ends(file), size):
        while end - start > MAX_PIECE_BYTES:
            start += MAX_PIECE_BYTES
            yield start
        if end - start >= MIN_PIECE_BYTES or start < end == size:
            start = end
            yield end


def _possible_ends(file: IO[bytes]) -> Iterator[int]:
    """Yield the offsets at which the hash of the preceding 64 bytes begins with CUT_BITS zero bits."""
    before, offset = np.zeros(0, np.uint32), 0
    while block := file.read(_BLOCK_BYTES):
        words = np.concatenate([before, np.frombuffer(block[: len(block) // 4 * 4], "<u4").astype(np.uint32)])
        first_end = offset - before.nbytes + 4 * _WINDOW_WORDS
        if len(words) >= _WINDOW_WORDS:
            is_end = _hash_windows(words) >> np.uint32(32 - CUT_BITS) == 0
            yield from (first_end + 4 * np.flatnonzero(is_end)).tolist()
        before, offset = words[-(_WINDOW_WORDS - 1) :], offset + len(block)


def _hash_windows(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the hash of each sequence of 16 consecutive words of 4 bytes."""
    hashes = (words ^ (words >> np.uint32(15))) * np.uint32(_MULTIPLIER)
    hashes ^= hashes >> np.uint32(13)
    for distance in _DOUBLINGS:
        factor = np.uint32(pow(_MULTIPLIER, distance, 1 << 32))
        hashes = hashes[distance:] + factor * hashes[:-distance]
    return hashes * np.uint32(_MULTIPLIER)


def join_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Join consecutive ranges of a new file that are also adjacent in one source.

    A source is an old file on the host, or the stream of sent bytes (SENT_SOURCE).
    """
    joined: list[Range] = []
    for source, offset, length in ranges:
        previous = joined[-1] if joined else None
        if previous and previous[0] == source and (source == SENT_SOURCE or previous[1] + previous[2] == offset):
            joined[-1] = source, previous[1], previous[2] + length
        else:
            joined.append((source, offset, length))
    return joined


# -- functions that run on the host


def find_pieces(old_files: Sequence[str], wanted: Sequence[Sequence[int]], digests: IO[bytes]) -> list[list[Range]]:
    """Return, for each wanted file, the ranges of old files from which it can be assembled.

    A piece that is in none of the old files becomes a range with the source SENT_SOURCE. Unreadable old files are
    ignored.

    Args:
        old_files: Paths of the old files.
        wanted: For each wanted file, the lengths of its pieces.
        digests: Stream with the digests of the pieces of all wanted files.
    """
    places: dict[bytes, Range] = {}
    for source, path in enumerate(old_files):
        with contextlib.suppress(OSError):
            for offset, length, digest in cut_file(path):
                places.setdefault(digest, (source, offset, length))
    found = []
    for lengths in wanted:
        ranges = []
        for length in lengths:
            place = places.get(digests.read(DIGEST_BYTES))
            ranges.append(place if place and place[2] == length else (SENT_SOURCE, 0, length))
        found.append(join_ranges(ranges))
    return found


def assemble_file(path: Path, digest: str, ranges: Sequence[Range], old_files: Sequence[str], sent: IO[bytes]) -> bool:
    """Write a file from ranges of old files and of the stream `sent`. Return True if its SHA-256 is `digest`."""
    found = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, path.open("wb") as file:
        opened = {SENT_SOURCE: sent}
        for source, offset, length in ranges:
            if source not in opened:
                opened[source] = stack.enter_context(open(old_files[source], "rb"))
            if source != SENT_SOURCE:
                opened[source].seek(offset)
            while length > 0 and (block := opened[source].read(min(length, _BLOCK_BYTES))):
                found.update(block)
                file.write(block)
                length -= len(block)
    return found.hexdigest() == digest


def main(prefix: str) -> None:
    """Read a request (a line of JSON, then bytes) from standard input, and print the JSON answer after `prefix`.

    The request is either to find the pieces of wanted files, or to assemble files in a directory. The answer has the
    ranges of each wanted file, or the names of the assembled files.
    """
    os.umask(0o077)
    os.nice(19)  # This process gets the lowest priority, so that it does not delay devices that run on the host.
    request: Mapping[str, Any] = json.loads(sys.stdin.buffer.readline())
    if "wanted" in request:
        answer: list[Any] = find_pieces(request["old_files"], request["wanted"], sys.stdin.buffer)
    else:
        answer = []
        with contextlib.suppress(OSError):
            for name, digest, ranges in request["files"]:
                path = Path(request["directory"], name)
                if assemble_file(path, digest, ranges, request["old_files"], sys.stdin.buffer):
                    answer.append(name)
    print(prefix + json.dumps(answer))
