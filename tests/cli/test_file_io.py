"""The files that commands read and write: whole or not at all, the same bytes again, mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.commands import command, failed

from dicompiler import networks
from dicompiler.base.atomic_output import atomic_file
from dicompiler.base.errors import DicompilerError
from dicompiler.cli.file_io import read_npz, write_npz
from dicompiler.ir.onnx.model import Model


@pytest.mark.slow
def test_commands_do_not_overwrite_their_inputs(tmp_path: Path) -> None:
    net, plan, log = tmp_path / "net.onnx", tmp_path / "plan.json", tmp_path / "run.json"
    Model.load(networks.build("lenet", 0)).save(net)
    before = net.read_bytes()
    asked = (net, "--platform", "rpi4x2", "--strategy", "single")
    for words in (
        ("plan", "-o", net),
        ("simulate", "--trace", net),
        ("compile", "-o", tmp_path / "a", "--depfile", net),
    ):
        line = failed(2, words[0], *asked, *words[1:])
        assert line.endswith("net.onnx: the command also reads or writes this file: give the output another name")
    assert net.read_bytes() == before and not (tmp_path / "a").exists()
    line = failed(2, "run", tmp_path / "a", "--outputs", tmp_path / "y.npz", "--log", tmp_path / "y.npz")
    assert line.endswith("y.npz: the command also reads or writes this file: give the output another name")
    for words in (
        ("plan", *asked, "-o", plan),
        ("compile", *asked, "-o", tmp_path / "a"),
        ("run", tmp_path / "a", "--log", log),
    ):
        for _ in range(2):  # A second call may overwrite the files that the first call wrote.
            assert command(*words).returncode == 0
    assert "a file of the artifact" in failed(1, "report", tmp_path / "a", "-o", tmp_path / "a" / "plan.json")
    assert "the command also reads or writes this file" in failed(2, "report", tmp_path / "a", "--log", log, "-o", log)
    assert command("opt", net, "-p", "normalise", "-o", net).returncode == 0


def test_npz_round_trip_keeps_names_and_gives_the_same_bytes(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3.0, dtype=np.float32), "a/b:0": np.ones((2, 2), np.int64), "s": np.array(True)}
    for name in ("one.npz", "two.npz"):
        write_npz(tmp_path / name, arrays)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    read = read_npz(tmp_path / "one.npz")
    assert [*read] == [*arrays]
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_stores_strings_and_splits_or_rejects_other_types(tmp_path: Path) -> None:
    write_npz(tmp_path / "x.npz", {"t": np.array(["a", "bc"], dtype=object)})
    assert read_npz(tmp_path / "x.npz")["t"].tolist() == ["a", "bc"]
    write_npz(tmp_path / "x.npz", {"s": [np.ones(1), np.zeros(2)], "none": None, "m": {"a": 1.0}})
    read = read_npz(tmp_path / "x.npz")
    assert {name: array.tolist() for name, array in read.items()} == {
        "s_0": [1], "s_1": [0, 0], "m_keys": ["a"], "m_values": [1]
    }  # fmt: skip
    with pytest.raises(DicompilerError, match=r"x\.npz: 'set' is not a tensor"):
        write_npz(tmp_path / "x.npz", {"set": {1}})
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_invalid_npz_is_one_line(tmp_path: Path) -> None:
    for name, content in (("text.npz", b"hello"), ("empty.npz", b""), ("cut.npz", b"PK\x03\x04 and no more")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DicompilerError, match=f"{name}: not an npz file"):
            read_npz(tmp_path / name)
    np.save(tmp_path / "single.npy", np.ones(3))
    with pytest.raises(DicompilerError, match="contains a single array"):
        read_npz(tmp_path / "single.npy")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    with pytest.raises(DicompilerError, match=r"objects\.npz: not an npz file of plain arrays"):
        read_npz(tmp_path / "objects.npz")


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def half() -> None:
        with atomic_file(path) as stage:
            stage.write_text("half")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        half()
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]
