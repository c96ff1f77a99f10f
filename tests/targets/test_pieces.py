"""Pieces of files: equal byte ranges are found in other files, and are not sent."""

from __future__ import annotations

import hashlib
import io
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dicompiler.target.remote.hosts import DeviceLocation
from dicompiler.target.remote.ssh import RemoteCommands
from dicompiler_targets.sockets.piece_copies import PieceCopier
from dicompiler_targets.sockets.pieces import (
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    SENT_SOURCE,
    Range,
    assemble_file,
    cut_file,
    find_pieces,
)

WEIGHTS = np.random.default_rng(0).standard_normal((64, 1500)).astype(np.float32)


def write(path: Path, *contents: bytes) -> Path:
    path.write_bytes(b"".join(contents))
    return path


def ranges_of(new: Path, *old: Path) -> list[Range]:
    """Return the ranges from which a file is assembled, given the old files."""
    pieces = cut_file(new)
    digests = io.BytesIO(b"".join(digest for *_, digest in pieces))
    return find_pieces([str(path) for path in old], [[length for _, length, _ in pieces]], digests)[0]


def sent_bytes(ranges: list[Range]) -> int:
    return sum(length for source, _, length in ranges if source == SENT_SOURCE)


@pytest.mark.parametrize(
    "content",
    [b"", b"a", bytes(100_001), WEIGHTS.tobytes(), WEIGHTS.tobytes()[:-3], b"same" * 30_000],
    ids=["empty", "one", "zeros", "weights", "odd", "repeated"],
)
def test_pieces_cover_the_file(content: bytes, tmp_path: Path) -> None:
    pieces = cut_file(write(tmp_path / "file", content))
    assert [offset for offset, *_ in pieces] == [0, *np.cumsum([length for _, length, _ in pieces]).tolist()][:-1]
    assert sum(length for _, length, _ in pieces) == len(content)
    assert all(MIN_PIECE_BYTES <= length <= MAX_PIECE_BYTES for _, length, _ in pieces[:-1])


def test_cuts_do_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "file", WEIGHTS.tobytes()[:-3])
    whole = cut_file(path)
    monkeypatch.setattr("dicompiler_targets.sockets.pieces._BLOCK_BYTES", 1 << 12)
    assert cut_file(path) == whole and len(whole) > 50


def test_channels_of_a_weight_are_found_at_any_offset(tmp_path: Path) -> None:
    old = write(tmp_path / "old", bytes(192), WEIGHTS.tobytes(), bytes(64))
    new = write(tmp_path / "new", b"bias" * 500, WEIGHTS[16:48].tobytes())
    assert sent_bytes(ranges_of(new, old)) < 2000 + 2 * MAX_PIECE_BYTES
    assert sent_bytes(ranges_of(new)) == new.stat().st_size
    assert sent_bytes(ranges_of(new, tmp_path / "gone", old)) < 2000 + 2 * MAX_PIECE_BYTES


def test_file_is_assembled_from_old_ranges_and_sent_bytes(tmp_path: Path) -> None:
    old = write(tmp_path / "old", WEIGHTS[:32].tobytes())
    new = write(tmp_path / "new", b"bias" * 500, WEIGHTS[8:40].tobytes())
    content, start, missing = new.read_bytes(), 0, []
    ranges = ranges_of(new, old)
    for source, _, length in ranges:
        missing += [content[start : start + length]] if source == SENT_SOURCE else []
        start += length
    digest = hashlib.sha256(content).hexdigest()

    def assemble() -> bool:
        return assemble_file(tmp_path / "place" / "w", digest, ranges, [str(old)], io.BytesIO(b"".join(missing)))

    assert assemble() and (tmp_path / "place" / "w").read_bytes() == content
    write(old, bytes(old.stat().st_size))
    assert not assemble()


def test_vanished_or_changed_old_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script replaces ssh, and runs the commands for the other host on this host."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    old = write(tmp_path / "old", WEIGHTS[:32].tobytes())
    new = write(tmp_path / "new", WEIGHTS[16:48].tobytes())
    commands, find = RemoteCommands(time.monotonic() + 60, "hosts.toml"), PieceCopier._find
    digests = {"w": hashlib.sha256(new.read_bytes()).hexdigest()}

    def assemble() -> list[str]:
        location = DeviceLocation("a", "pi@board", "nets/a")
        copier = PieceCopier(commands, location, shlex.quote(sys.executable), [str(old)], 0.0)
        return copier.assemble(str(tmp_path / "place"), {"w": new}, digests)

    assert assemble() == ["w"] and (tmp_path / "place" / "w").read_bytes() == new.read_bytes()
    for damage in (lambda: write(old, bytes(old.stat().st_size)), old.unlink):

        def find_and_damage(copier: PieceCopier, *arguments: Any, damage: Any = damage) -> Any:
            found = find(copier, *arguments)
            damage()
            return found

        write(old, WEIGHTS[:32].tobytes())
        monkeypatch.setattr(PieceCopier, "_find", find_and_damage)
        assert assemble() == []
