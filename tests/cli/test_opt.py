"""`dicompiler opt` runs passes and writes their result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
from support.commands import SHAPE, command, failed

from dicompiler.base.units import format_bytes
from dicompiler.ir.plan import load_plan


class TestOpt:
    """`opt` runs passes and writes their result."""

    PIPELINE = "infer-shapes,form-layers,tile-height{layers=s parts=2}"

    def test_it_normalises_first_and_partitions_last(self, open_model: Path, tmp_path: Path) -> None:
        out, plan, dumps = tmp_path / "out.onnx", tmp_path / "plan.json", tmp_path / "dumps"
        done = command(
            "opt", open_model, "-p", self.PIPELINE, *SHAPE, "--save-plan", plan, "--dump-after-all", dumps, "-o", out
        )
        sizes = (format_bytes(path.stat().st_size) for path in (out, open_model))
        line = "written: {} ({}, before: {}), {}\n".format(out, *sizes, plan)
        assert (done.returncode, done.stdout, done.stderr) == (0, line, "")
        assert sorted(path.name for path in dumps.iterdir() if path.suffix == ".onnx") == [
            "001_normalise.onnx",
            "002_infer-shapes.onnx",
            "003_form-layers.onnx",
            "004_tile-height.onnx",
            "005_partition.onnx",
        ]
        assert [part.device for part in load_plan(plan).layers["s"]] == ["d0", "d1"]
        assert len([node for node in onnx.load(out).graph.node if node.op_type == "Conv"]) == 3
        onnx.checker.check_model(onnx.load(out))

    def test_saved_plan_gives_the_same_bytes_again(self, open_model: Path, tmp_path: Path) -> None:
        first, second, plan = tmp_path / "first.onnx", tmp_path / "second.onnx", tmp_path / "plan.json"
        command("opt", open_model, "-p", self.PIPELINE, *SHAPE, "--save-plan", plan, "-o", first, PYTHONHASHSEED="1")
        base = ("opt", open_model, "-p", "infer-shapes,form-layers", *SHAPE, "--plan", plan, "-o", second)
        assert command(*base, PYTHONHASHSEED="2").stderr == ""
        assert first.read_bytes() == second.read_bytes()

    def test_without_annotations_nothing_is_partitioned(self, open_model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.onnx"
        assert command("opt", open_model, "-p", "infer-shapes", *SHAPE, "-o", out).returncode == 0
        assert len([node for node in onnx.load(out).graph.node if node.op_type == "Conv"]) == 2

    def test_devices_are_those_of_the_platform(self, open_model: Path, tmp_path: Path) -> None:
        plan, out = tmp_path / "plan.json", tmp_path / "out.onnx"
        command("opt", open_model, "-p", self.PIPELINE, *SHAPE, "--platform", "rpi4x2", "--save-plan", plan, "-o", out)
        assert [part.device for part in load_plan(plan).layers["s"]] == ["pi01", "pi02"]

    def test_split_model_is_not_split_again(self, open_model: Path, tmp_path: Path) -> None:
        split, plan, out = tmp_path / "split.onnx", tmp_path / "plan.json", tmp_path / "out"
        command("opt", open_model, "-p", self.PIPELINE, *SHAPE, "--save-plan", plan, "-o", split)
        cause = "the model is already split (node 'h' is on device 'd0')"
        remedy = "give the original model, with the plan that 'dicompiler opt --save-plan' writes"
        for line in (
            ("plan", split, "--platform", "rpi4x2"),
            ("plan", split, "--platform", "rpi4x2", "--strategy", "modnn"),
            ("compile", split, "--platform", "rpi4x2", "--strategy", "single"),
            ("opt", split, "-p", "form-layers", "--plan", plan),
        ):
            done = command(*line, "-o", out)
            assert (done.returncode, done.stderr) == (1, f"dicompiler: error: {split}: {cause}: {remedy}\n")
            assert not out.exists()

    def test_reads_stdin_and_writes_stdout(self, open_model: Path, tmp_path: Path) -> None:
        line = ["opt", "-", "-p", "infer-shapes", *SHAPE, "-o", "-"]
        done = subprocess.run(
            [sys.executable, "-m", "dicompiler", *line],
            input=open_model.read_bytes(),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            timeout=120,
        )
        assert done.stderr == b""
        assert command("opt", open_model, "-p", "infer-shapes", *SHAPE, "-o", tmp_path / "o", "--quiet").stdout == ""
        command("opt", open_model, "-p", "infer-shapes", *SHAPE, "-o", tmp_path / "out.onnx")
        assert done.stdout == (tmp_path / "out.onnx").read_bytes()

    def test_stdin_without_a_model(self, tmp_path: Path) -> None:
        line = [sys.executable, "-m", "dicompiler", "opt", "-", "-p", "infer-shapes", "-o", str(tmp_path / "o")]
        leader, terminal = os.openpty()
        for stdin, cause in ((subprocess.DEVNULL, "empty"), (terminal, "a terminal")):
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(line, stdin=stdin, capture_output=True, text=True, env=env, timeout=120)
            assert done.returncode == 2
            text = f"opt: the model '-' is read from stdin, which is {cause}: write a model to it, or name a file"
            assert done.stderr == f"dicompiler: error: {text}\n"
        os.close(leader)
        os.close(terminal)

    def test_options_that_do_not_fit_to_stdin_and_stdout(self, open_model: Path) -> None:
        for more, text in (
            (["--json"], "--output - writes the model to stdout: remove --json and --print-outputs"),
            (["--print-outputs"], "--output - writes the model to stdout: remove --json and --print-outputs"),
            (["--depfile", "d"], "--depfile needs the names of files: give a file instead of '-'"),
        ):
            done = command("opt", open_model, "-p", "infer-shapes", *SHAPE, "-o", "-", *more)
            assert done.returncode == 2
            assert text in done.stderr

    def test_timing_and_graphs_go_to_stderr(self, open_model: Path, tmp_path: Path) -> None:
        done = command(
            "opt", open_model, "-p", "infer-shapes", *SHAPE, "--timing", "--print-after", "-o", tmp_path / "o.onnx"
        )
        assert (done.returncode, done.stdout.count("\n")) == (0, 1)
        assert re.search(r'^infer-shapes\{shape="x=1x3x16x16"\} +\d+\.\d$', done.stderr, re.MULTILINE)
        assert re.search(r"^total +\d+\.\d$", done.stderr, re.MULTILINE)
        assert "// after pass 2: infer-shapes" in done.stderr

    def test_errors_are_one_line_and_leave_nothing(self, open_model: Path, tmp_path: Path) -> None:
        out, plan = tmp_path / "out.onnx", tmp_path / "plan.json"
        line = failed(2, "opt", open_model, "-p", "lop{layers=s parts=2}", "--save-plan", plan, "-o", out)
        assert line == "dicompiler: error: pass 'lop' needs layers: run 'form-layers' before it"
        line = failed(2, "opt", open_model, "-p", "infer-shapes", *SHAPE, "--save-plan", plan, "-o", out)
        assert line == "dicompiler: error: --save-plan: the pipeline has no pass that makes a plan"
        line = failed(1, "opt", open_model, "-p", "infer-shapes", "-o", tmp_path / "no" / "o.onnx")
        assert line.endswith(
            f"no/o.onnx: there is no directory '{tmp_path / 'no'}': create it, or choose another place"
        )
        assert "gone.onnx" in failed(1, "opt", tmp_path / "gone.onnx", "-p", "infer-shapes", "-o", out)
        assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
