"""`dicompiler compile` reports output paths that cannot be written in one line, and keeps existing files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.refusing import COMPILE, Refused, files, fill, network, small_disk

from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.ir.onnx.model import Model

SINGLE = ("--platform", "rpi4x2", "--strategy", "single", "-o")


class TestPlaces:
    """Output paths that cannot or must not be written."""

    def test_rejects_foreign_directories_files_and_missing_parents(
        self, model: Path, tmp_path: Path, refused: Refused
    ) -> None:
        other = tmp_path / "mine"
        other.mkdir()
        (other / "thesis.tex").write_text("years of work")
        line = refused(1, "compile", model, *COMPILE, other)
        remedy = f"give a new directory, such as {other / 'out'}"
        assert line == f"{other}: it exists and is not a directory that dicompiler wrote as artifact: {remedy}"
        remedy = "choose another place or remove it"
        line = refused(1, "compile", model, *COMPILE, model)
        assert line == f"{model}: it exists and is not a directory that dicompiler wrote as artifact: {remedy}"
        line = refused(1, "compile", model, *COMPILE, tmp_path / "none" / "out")
        assert str(tmp_path / "none") in line

    @pytest.mark.parametrize("content", ["nothing", "own files", "an artifact"])
    def test_rejects_current_directory(
        self, content: str, model: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = tmp_path / "place"
        if content == "an artifact":
            assert main(["compile", str(model), *COMPILE, str(place)]) == 0
        else:
            place.mkdir()
        if content == "own files":
            (place / "thesis.tex").write_text("years of work")
        monkeypatch.chdir(place)
        line = refused(1, "compile", model, *COMPILE, ".")
        assert line == ".: the current directory cannot be replaced: give a new directory, such as out"
        line = refused(1, "compile", model, *COMPILE, "..")
        assert line == "..: this directory cannot be replaced: give a new directory, such as ../out"

    @pytest.mark.parametrize("room", ["16k", "48k", "80k"])
    def test_compile_reports_disk_that_becomes_full(
        self, model: Path, tmp_path: Path, room: str, refused: Refused
    ) -> None:
        with small_disk(tmp_path / "disk", room) as disk:
            line = refused(1, "compile", model, *SINGLE, disk / "out")
            assert line == f"{disk / 'out'}: it cannot be written: No space left on device"

    def test_commands_report_full_disk(self, model: Path, artifact: Path, tmp_path: Path, refused: Refused) -> None:
        opt = ("opt", model, "-p", "infer-shapes,form-layers,tile-height{layers=h}")
        with small_disk(tmp_path / "disk", "64k") as disk:
            fill(disk)
            for arguments, file, cause in (
                (("plan", model, *SINGLE, disk / "plan.json"), "plan.json", "it cannot be written"),
                ((*opt, "-o", disk / "y.onnx"), "y.onnx", "cannot write the model"),
                ((*opt, "--save-plan", disk / "p.json", "-o", tmp_path / "y.onnx"), "p.json", "it cannot be written"),
                (("run", artifact, "--outputs", disk / "y.npz"), "y.npz", "it cannot be written"),
                (("keys", artifact, "-o", disk / "keys"), "keys", "it cannot be written"),
            ):
                assert refused(1, *arguments) == f"{disk / file}: {cause}: No space left on device"

    def test_full_disk_keeps_earlier_model_with_external_weights(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "64k") as disk:
            model = Model.load(network())
            model.save(disk / "y.onnx", external=True)
            before = dict(files(disk))
            fill(disk)
            with pytest.raises(DicompilerError, match="No space left on device"):
                model.save(disk / "y.onnx", external=True)
            (disk / "filler").unlink()
            assert dict(files(disk)) == before

    def test_rejects_output_path_that_cannot_be_written(
        self, model: Path, artifact: Path, tmp_path: Path, refused: Refused
    ) -> None:
        (tmp_path / "directory").mkdir()
        for path, cause in (
            (tmp_path / "directory", "it is a directory: give the name of a file"),
            (model / "y", f"there is no directory {str(model)!r}: create it, or choose another place"),
            (
                tmp_path / "none" / "y",
                f"there is no directory {str(tmp_path / 'none')!r}: create it, or choose another place",
            ),
            (tmp_path / ("x" * 300), "it cannot be written: File name too long: choose another place"),
            (Path("/proc/y"), "it cannot be written: No such file or directory: choose another place"),
        ):
            opt = ("opt", model, "-p", "infer-shapes,form-layers,tile-height{layers=h}")
            for arguments in (
                ("plan", model, *COMPILE, path),
                (*opt, "-o", path),
                (*opt, "-o", tmp_path / "y.onnx", "--save-plan", path),
                ("run", artifact, "--outputs", path),
            ):
                assert refused(1, *arguments) == f"{path}: {cause}"

    @pytest.mark.parametrize("name", ["out.txt", "out", "x.npz.old"])
    def test_rejects_outputs_with_another_ending_than_npz(
        self, artifact: Path, tmp_path: Path, refused: Refused, name: str
    ) -> None:
        path = tmp_path / name
        (tmp_path / "hosts.toml").write_text("")
        for command in (("run", artifact), ("deploy", artifact, "--hosts", tmp_path / "hosts.toml")):
            cause = "outputs are written as npz: give a name that ends in .npz, such as"
            assert refused(2, *command, "--outputs", path) == f"{path}: {cause} {path.with_suffix('.npz')}"
            assert not path.exists()

    def test_rejects_read_only_file_system(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        with small_disk(tmp_path / "disk", "64k") as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            for command in ("compile", "plan"):
                line = refused(1, command, model, *COMPILE, disk / "out")
                assert line == f"{disk / 'out'}: it cannot be written: Read-only file system: choose another place"

    def test_rejects_one_path_for_two_outputs(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        opt = ("opt", model, "-p", "infer-shapes,form-layers,tile-height{layers=h}", "-o", tmp_path / "y")
        line = refused(2, *opt, "--save-plan", tmp_path / "y")
        assert line == f"{tmp_path / 'y'}: the command also reads or writes this file: give the output another name"
        line = refused(1, *opt, "--dump-after-all", model)
        assert line == f"{model}: it is a file: give the name of a directory"

    @pytest.mark.parametrize("room", [0, 3000, 9000])
    def test_file_size_limit_leaves_no_file_behind(self, model: Path, tmp_path: Path, room: int) -> None:
        before = dict(files(tmp_path))
        process = subprocess.run(
            [sys.executable, "-m", "dicompiler", "compile", str(model), *SINGLE, str(tmp_path / "out")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (process.returncode, process.stdout) == (1, "")
        assert process.stderr == f"dicompiler: error: {tmp_path / 'out'}: it cannot be written: File too large\n"
        assert dict(files(tmp_path)) == before

    def test_failed_compilation_keeps_earlier_artifact(self, model: Path, tmp_path: Path, refused: Refused) -> None:
        assert main(["compile", str(model), *COMPILE, str(tmp_path / "out")]) == 0
        model.write_bytes(model.read_bytes()[:500])
        refused(1, "compile", model, *COMPILE, tmp_path / "out")
        refused(1, "compile", tmp_path / "none.onnx", *COMPILE, tmp_path / "out")
        assert main(["run", str(tmp_path / "out")]) == 0
