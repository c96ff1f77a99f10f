"""Quick digests of large files: they are what docs/formats.md says, in the runtime too, and change with any byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dicompiler.target.digests import content_digest, make_file_record
from dicompiler_targets.sockets.runtime import integrity

MIB = 1 << 20
DATA = np.random.default_rng(0).bytes(2 * MIB + 20003)


def defined(data: bytes) -> str:
    """As docs/formats.md has it, word by word."""
    words = np.frombuffer(data + bytes(-len(data) % MIB), "<u4").astype(np.uint64)
    lanes = np.zeros(4096, np.uint64)
    for row in words.reshape(-1, 4096):
        lanes = (lanes * np.uint64(0x9E3779B1) + row) % np.uint64(1 << 32)
    return "lanes:" + hashlib.sha256(lanes.astype("<u4").tobytes() + len(data).to_bytes(8, "little")).hexdigest()


def digest(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    found = content_digest(path, "lanes")
    there = integrity.FileIntegrity(path.parent, {"files": {path.name: {"bytes": len(data), "digest": found}}})
    there.begin_digests()
    there.check()
    return found


@pytest.mark.parametrize("size", [0, 1, 4, 16383, 16384, MIB - 1, MIB, MIB + 1, 2 * MIB, len(DATA)])
def test_digests_are_as_defined(size: int, tmp_path: Path) -> None:
    assert digest(tmp_path / "x", DATA[:size]) == defined(DATA[:size])


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@example(0, 1)
@example(len(DATA) - 1, 128)
def test_any_byte_that_is_another_changes_it(tmp_path_factory: pytest.TempPathFactory, at: int, other: int) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    changed = bytearray(DATA)
    changed[at] ^= other
    right = digest(path, DATA)
    assert digest(path, changed) != right
    there = integrity.FileIntegrity(path.parent, {"files": {path.name: {"bytes": len(DATA), "digest": right}}})
    there.begin_digests()
    with pytest.raises(ValueError, match="file flipped is damaged"):
        there.check()


def test_damage_in_many_places_and_other_lengths_change_it(tmp_path: Path) -> None:
    zeroed = [DATA[:at] + bytes(size) + DATA[at + size :] for at in (0, 5000, MIB) for size in (40, 4096, 16384, MIB)]
    swapped = DATA[16384:32768] + DATA[:16384] + DATA[32768:]
    lengths = [DATA + bytes(count) for count in (1, 3, 16384, MIB)] + [DATA[:-count] for count in (1, 4, 20003, MIB)]
    others = [DATA, *zeroed, swapped, *lengths, b"", bytes(MIB), bytes(2 * MIB)]
    assert len({digest(tmp_path / "x", other) for other in others}) == len(others)


def test_only_large_files_of_numbers_have_it(tmp_path: Path) -> None:
    kinds = {}
    for name, size in (("a.bin", MIB), ("b.bin", MIB - 1), ("c.cc", MIB), ("d.data", MIB), ("e.py", MIB)):
        (tmp_path / name).write_bytes(bytes(size))
        record = make_file_record(tmp_path / name)
        assert record["bytes"] == size
        kinds[name] = record["digest"].split(":")[0]
    assert kinds == {"a.bin": "lanes", "b.bin": "sha256", "c.cc": "sha256", "d.data": "lanes", "e.py": "sha256"}
