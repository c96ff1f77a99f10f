"""Depfiles and lists of outputs: real Make and Ninja read them, and rebuild exactly the outdated files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
from support.building import SPLIT, dicompiler, later, run

from dicompiler import networks
from dicompiler.base.atomic_output import TRACKED_LIST_NAME, tracked_files


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a LeNet that has its weights in a separate file."""
    onnx.save(networks.build("lenet"), tmp_path / "net.onnx", save_as_external_data=True, location="net.data")
    return tmp_path


class TestOutputs:
    """Written files are listed, and have the same bytes each time."""

    def test_print_outputs_are_paths_and_nothing_else(self, place: Path) -> None:
        line = ("compile", "net.onnx", *SPLIT, "-o", "net")
        paths = dicompiler(place, *line, "--print-outputs").splitlines()
        assert paths[0] == "net/artifact.json"
        written = {str(path.relative_to(place)) for path in (place / "net").rglob("*") if path.is_file()}
        assert {*paths, f"net/{TRACKED_LIST_NAME}"} == written and len(paths) == len(written) - 1
        assert paths == [f"net/{name}" for name in tracked_files(place / "net")]
        assert json.loads(dicompiler(place, *line, "--json"))["outputs"] == paths

    @pytest.mark.slow
    def test_model_can_come_from_a_pipe(self, tmp_path: Path) -> None:
        onnx.save(networks.build("tiny"), tmp_path / "net.onnx")
        start = f"cat net.onnx | {sys.executable} -m dicompiler compile /dev/stdin {' '.join(SPLIT)} -o net"
        for _ in range(2):  # The second call checks that the existing output is not an input.
            run(tmp_path, "sh", "-c", start)
        written = {path.name: path.read_bytes() for path in (tmp_path / "net").rglob("plan.json")}
        dicompiler(tmp_path, "compile", "net.onnx", *SPLIT, "-o", "net")
        assert written == {"plan.json": (tmp_path / "net" / "plan.json").read_bytes()}
        errors = run(tmp_path, "sh", "-c", f"{start} --depfile net.d", code=2)
        assert "--depfile needs the names of files: give a file instead of a pipe" in errors

    @pytest.mark.slow
    def test_so_are_those_of_plan_and_opt(self, place: Path) -> None:
        line = ("plan", "net.onnx", *SPLIT, "-o", "plan.json")
        assert dicompiler(place, *line, "--print-outputs") == "plan.json\n"
        assert json.loads(dicompiler(place, *line, "--json"))["outputs"] == ["plan.json"]
        line = (
            "opt",
            "net.onnx",
            "-p",
            "infer-shapes,form-layers,lop{layers=fc3}",
            "-o",
            "o.onnx",
            "--save-plan",
            "p.json",
        )
        assert dicompiler(place, *line, "--print-outputs") == "o.onnx\np.json\n"
        assert json.loads(dicompiler(place, *line, "--json"))["outputs"] == ["o.onnx", "p.json"]
        before = [(place / name).stat().st_mtime_ns for name in ("o.onnx", "p.json", "plan.json")]
        dicompiler(place, *line)
        dicompiler(place, "plan", "net.onnx", *SPLIT, "-o", "plan.json")
        assert [(place / name).stat().st_mtime_ns for name in ("o.onnx", "p.json", "plan.json")] == before

    @pytest.mark.parametrize(
        "line",
        [
            "opt net.onnx -p infer-shapes -o net.data",
            "plan net.onnx --platform rpi4x2 --strategy modnn -o net.data",
            "opt net.onnx -p infer-shapes -o other.onnx --depfile net.onnx",
            "opt net.onnx -p infer-shapes -o net.onnx --depfile net.d",
        ],
    )
    def test_no_output_overwrites_an_input(self, place: Path, line: str) -> None:
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        assert "the command also reads or writes this file: give the output another name" in dicompiler(
            place, *line.split(), code=2
        )
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before

    def test_only_opt_reads_and_writes_streams(self, place: Path) -> None:
        told = dicompiler(place, "plan", "-", *SPLIT, "-o", "p", code=2)
        assert "plan: only 'opt' reads a model from stdin ('-'): name a file" in told
        told = dicompiler(place, "plan", "net.onnx", *SPLIT, "-o", "-", code=2)
        assert "plan: '-' is not the name of an output: name a file, or /dev/stdout" in told

    @pytest.mark.slow
    @pytest.mark.parametrize("target", ["sockets", "mpi", "tflm"])
    def test_two_clean_builds_give_the_same_bytes(self, place: Path, target: str) -> None:
        found = []
        for seed in ("1", "2"):
            directory = place / f"clean {seed}"
            directory.mkdir()
            for name in ("net.onnx", "net.data"):
                (directory / name).write_bytes((place / name).read_bytes())
            line = ("compile", "net.onnx", *SPLIT, "--target", target, "-o", "net", "--depfile", "net.d")
            dicompiler(directory, *line, PYTHONHASHSEED=seed)
            paths = sorted(path for path in directory.rglob("*") if path.is_file())
            found.append({str(p.relative_to(directory)): (p.stat().st_mode, p.read_bytes()) for p in paths})
        assert found[0] == found[1] and len(found[0]) > 10

    @pytest.mark.slow
    def test_recompiled_artifact_keeps_unchanged_files(self, place: Path) -> None:
        line = ("compile", "net.onnx", "--platform", "rpi4x2", "--target", "mpi", "-o", "net", "--strategy")
        dicompiler(place, *line, "modnn")
        (place / "net" / "pi01" / "build").mkdir()
        (place / "net" / "pi01" / "build" / "program").write_text("built")
        before = {path: path.stat().st_mtime_ns for path in (place / "net").rglob("*") if path.is_file()}
        dicompiler(place, *line, "modnn")
        assert {path: path.stat().st_mtime_ns for path in before} == before
        data = bytearray((place / "net.data").read_bytes())
        data[-1] ^= 1
        (place / "net.data").write_bytes(data)
        dicompiler(place, *line, "modnn")
        new = {str(path.relative_to(place / "net")) for path in before if path.stat().st_mtime_ns != before[path]}
        assert {"artifact.json", "reference/model.onnx.data", "pi01/manifest.json"} <= new
        kept = {
            TRACKED_LIST_NAME,
            "reference/model.onnx",
            "plan.json",
            "pi01/main.cc",
            "pi01/runtime/run.cc",
            "pi01/build/program",
        }
        assert kept <= {str(path.relative_to(place / "net")) for path in before} - new
        dicompiler(place, *line, "single")
        assert [path.name for path in (place / "net").rglob("build")] == ["build"]
        assert not (place / "net" / "pi02").exists()


RULES = """
rule compile
  command = {program} compile $in --platform rpi4x2 --strategy modnn -o net --depfile net.d --print-outputs > net.list
  depfile = net.d
  restat = 1
  {deps}
rule use
  command = cp $in $out
build net/artifact.json: compile net.onnx
build used: use net/artifact.json
"""


class TestNinja:
    """Ninja rebuilds files that use an artifact if the artifact has changed."""

    @pytest.mark.slow
    @pytest.mark.parametrize("deps", ["", "deps = gcc"])
    def test_with_restat_nothing_follows_from_an_artifact_that_came_out_the_same(self, place: Path, deps: str) -> None:
        program = f"{sys.executable} -m dicompiler"
        (place / "build.ninja").write_text(RULES.format(program=program, deps=deps))
        assert "[2/2]" in run(place, "ninja")
        assert run(place, "ninja") == "ninja: no work to do.\n"
        later(place / "net.data")
        assert "cp " not in run(place, "ninja", "-v")
        assert run(place, "ninja") == "ninja: no work to do.\n"
        data = bytearray((place / "net.data").read_bytes())
        data[0] ^= 1
        (place / "net.data").write_bytes(data)
        later(place / "net.data")
        assert "cp " in run(place, "ninja", "-v")
        assert run(place, "ninja") == "ninja: no work to do.\n"
