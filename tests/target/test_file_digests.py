"""Digests of files: the kind of digest for each file, and equal digests in the runtime of target sockets."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dicompiler.target.manifest import check_files, make_file_record
from dicompiler_targets.sockets.runtime import integrity

MIB = 1 << 20
DATA = np.random.default_rng(0).bytes(2 * MIB + 20003)


def check_in_runtime(path: Path, record: dict[str, object]) -> None:
    files = integrity.FileIntegrity(path.parent, {"files": {path.name: record}})
    files.begin_digests()
    files.check()


@pytest.mark.parametrize("size", [MIB, MIB + 1, 2 * MIB, len(DATA)])
def test_large_data_files_have_the_crc32_of_zlib(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(DATA[:size])
    record = make_file_record(path)
    assert record == {"bytes": size, "digest": f"crc32:{zlib.crc32(DATA[:size]):08x}"}
    check_in_runtime(path, record)
    check_files(tmp_path, {"x.bin": record}, ["x.bin"])


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@example(0, 1)
@example(len(DATA) - 1, 128)
def test_changing_any_byte_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, change: int) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.bin"
    path.write_bytes(DATA)
    record = make_file_record(path)
    changed = bytearray(DATA)
    changed[position] ^= change
    path.write_bytes(changed)
    assert make_file_record(path) != record
    with pytest.raises(ValueError, match=r"file flipped\.bin is damaged"):
        check_in_runtime(path, record)


def test_damage_in_many_places_and_other_lengths_are_found(tmp_path: Path) -> None:
    zeroed = [DATA[:at] + bytes(size) + DATA[at + size :] for at in (0, 5000, MIB) for size in (40, 4096, 16384, MIB)]
    swapped = DATA[16384:32768] + DATA[:16384] + DATA[32768:]
    lengths = [DATA + bytes(count) for count in (1, 3, 16384, MIB)] + [DATA[:-count] for count in (1, 4, 20003, MIB)]
    contents = [DATA, *zeroed, swapped, *lengths, b"", bytes(MIB), bytes(2 * MIB)]
    digests = set()
    for content in contents:
        (tmp_path / "x.bin").write_bytes(content)
        digests.add(make_file_record(tmp_path / "x.bin")["digest"])
    assert len(digests) == len(contents)


def test_only_large_data_files_have_a_crc32(tmp_path: Path) -> None:
    kinds = {}
    for name, size in (("a.bin", MIB), ("b.bin", MIB - 1), ("c.cc", MIB), ("d.data", MIB), ("e.py", MIB)):
        (tmp_path / name).write_bytes(bytes(size))
        record = make_file_record(tmp_path / name)
        assert record["bytes"] == size
        kinds[name] = record["digest"].split(":")[0]
    assert kinds == {"a.bin": "crc32", "b.bin": "sha256", "c.cc": "sha256", "d.data": "crc32", "e.py": "sha256"}
