"""The command line as a user meets it: processes with arguments, what they print, what they write, how they end."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import dicompiler
from dicompiler.base.objectives import OBJECTIVES
from dicompiler.cli.files import read_npz
from dicompiler.cli.group import COMMANDS
from dicompiler.ir.plan import load as load_plan

SPLIT = ("--platform", "rpi4x2", "--strategy", "modnn")
HEAVY = set(
    "jsonschema logging matplotlib numpy onnx onnx_graphsurgeon onnxruntime ortools pluggy pymoo rich scipy".split()
)
TEXT = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 3, 16, 16] x) => (float[N, 4, 16, 16] y) {
      h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
      r = Relu (h)
      s = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w2)
      y = Dropout (s)
    }"""
SHAPE = ("--shape", "x=1x3x16x16")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two convolutions with a dynamic batch."""
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(7)
    for name, shape in (("w1", (8, 3, 3, 3)), ("w2", (4, 8, 3, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


def command(
    *arguments: object, cwd: Path | None = None, stdout: IO[Any] | int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs `dicompiler` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "dicompiler.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def failed(code: int, *arguments: object, **env: str) -> str:
    """The one line that a failing command prints on stderr; nothing may be on stdout."""
    done = command(*arguments, **env)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr.removesuffix("\n")


class TestStart:
    """Help comes at once and says what there is."""

    def test_help_imports_nothing_heavy(self) -> None:
        source = f"""
            import sys
            from dicompiler.cli import main
            assert main(["--help"]) == 0
            loaded = {{name.partition(".")[0] for name in sys.modules}}
            print("heavy:", sorted(loaded & {HEAVY!r}), file=sys.stderr)
            print("commands:", [n for n in {list(COMMANDS)!r} if "dicompiler.cli." + n in sys.modules], file=sys.stderr)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == "heavy: []\ncommands: []\n"
        assert all(name in done.stdout for name in COMMANDS)

    def test_help_of_every_command_imports_nothing_heavy(self) -> None:
        source = f"""
            import sys
            from dicompiler.cli import main
            for name in {list(COMMANDS)!r}:
                assert main([name, "--help"]) == 0
            loaded = {{name.partition(".")[0] for name in sys.modules}}
            print("heavy:", sorted(loaded & {HEAVY - {"logging"}!r}), file=sys.stderr)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == "heavy: []\n"

    @pytest.mark.parametrize("name", COMMANDS)
    def test_the_summaries_are_the_commands_own(self, name: str) -> None:
        own = importlib.import_module(f"dicompiler.cli.{name}").command
        assert own.name == name
        assert own.help.partition("\n")[0] == COMMANDS[name]

    def test_the_objectives_are_those_of_the_metrics(self) -> None:
        done = command("plan", "--help")
        assert f"{', '.join(OBJECTIVES)}, or a sum" in " ".join(done.stdout.split())

    def test_without_arguments_there_is_help_and_a_usage_error(self) -> None:
        done = command()
        assert (done.returncode, done.stdout) == (2, "")
        assert "compile" in done.stderr

    def test_version(self) -> None:
        assert command("--version").stdout == f"dicompiler {dicompiler.__version__}\n"

    def test_the_package_offers_its_names_and_no_others(self) -> None:
        for name in dicompiler.__all__:
            assert getattr(dicompiler, name) is not None
            assert name in dir(dicompiler)
        with pytest.raises(AttributeError, match="has no attribute 'compiel'"):
            dicompiler.compiel  # noqa: B018


class TestUsage:
    """Mistakes in the arguments are one line and exit code 2."""

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["compil"], "unknown command 'compil' (did you mean 'compile'?)"),
            (["--hepl"], "unknown option '--hepl' (did you mean '--help'?)"),
            (
                ["opt", "m.onnx", "--save-plam", "x", "-p", "a", "-o", "o"],
                "opt: unknown option '--save-plam' (did you mean '--save-plan'?)",
            ),
            (["opt", "m.onnx", "-o", "o"], "opt: missing option '-p' / '--pipeline'; see 'dicompiler opt --help'"),
            (["run"], "run: missing argument 'DIR'; see 'dicompiler run --help'"),
            (["list", "pases"], "list: unknown kind 'pases' (did you mean 'passes'?)"),
            (["opt", "m.onnx", "-p", "a b", "-o", "o"], "pipeline 'a b': expected ',' before the next pass"),
            (["opt", "m.onnx", "-p", "fold", "-o", "o"], "unknown pass 'fold'"),
            (["opt", "m.onnx", "-p", "partition", *SHAPE, "-o", "o"], "--shape is an option of pass 'infer-shapes'"),
            (["compile", "m", "--strategy", "a", "--plan", "b", "-o", "o"], "compile: --strategy and --plan exclude"),
        ],
    )
    def test_they_name_the_nearest(self, arguments: list[str], line: str) -> None:
        assert failed(2, *arguments).startswith(f"dicompiler: error: {line}")

    def test_a_value_outside_its_range_or_choices(self) -> None:
        assert "--frames" in failed(2, "run", "d", "--frames", "0")
        assert "throughput" in failed(2, "plan", "m", "--objective", "speed", "-o", "p")


class TestList:
    """`list` shows what is there, for people and for programs."""

    @pytest.mark.parametrize("kind", ["passes", "strategies", "targets", "operators", "cost-models", "platforms"])
    def test_everything_has_a_summary_and_an_origin(self, kind: str) -> None:
        records = json.loads(command("list", kind, "--json").stdout)
        assert records == sorted(records, key=lambda record: record["name"])
        assert records
        for record in records:
            assert [*record] == ["name", "summary", "options", "distribution", "version", "plugin"]
            assert record["summary"]
            assert (record["distribution"], record["version"]) == ("dicompiler", dicompiler.__version__)
            assert all([*option] == ["name", "type", "default", "help"] for option in record["options"])

    def test_options_stand_beside_the_name_as_they_are_written(self) -> None:
        done = command("list", "passes")
        assert re.search(r"^tile-grid\{.*rows=2 columns=2\}  +\S.*  dicompiler \S+$", done.stdout, re.MULTILINE)

    def test_on_a_terminal_the_table_is_drawn(self) -> None:
        ours, theirs = os.openpty()
        with os.fdopen(theirs, "wb") as terminal:
            done = command("list", "targets", stdout=terminal, COLUMNS="200", TERM="xterm")
        drawn = os.read(ours, 1 << 16).decode()
        os.close(ours)
        assert done.returncode == 0
        assert "─" in drawn
        assert "sockets{" in drawn

    def test_the_same_bytes_come_out_whatever_the_hash_seed(self) -> None:
        assert command("list", "operators", PYTHONHASHSEED="1").stdout == (
            command("list", "operators", PYTHONHASHSEED="2").stdout
        )


class TestOpt:
    """`opt` runs passes and writes what they made."""

    PIPELINE = "infer-shapes,form-layers,tile-height{layers=s parts=2}"

    def test_it_normalises_first_and_partitions_last(self, model: Path, tmp_path: Path) -> None:
        out, plan, dumps = tmp_path / "out.onnx", tmp_path / "plan.json", tmp_path / "dumps"
        done = command(
            "opt", model, "-p", self.PIPELINE, *SHAPE, "--save-plan", plan, "--dump-after-all", dumps, "-o", out
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
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

    def test_a_saved_plan_gives_the_same_bytes_again(self, model: Path, tmp_path: Path) -> None:
        first, second, plan = tmp_path / "first.onnx", tmp_path / "second.onnx", tmp_path / "plan.json"
        command("opt", model, "-p", self.PIPELINE, *SHAPE, "--save-plan", plan, "-o", first, PYTHONHASHSEED="1")
        base = ("opt", model, "-p", "infer-shapes,form-layers", *SHAPE, "--plan", plan, "-o", second)
        assert command(*base, PYTHONHASHSEED="2").stderr == ""
        assert first.read_bytes() == second.read_bytes()

    def test_without_annotations_nothing_is_partitioned(self, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.onnx"
        assert command("opt", model, "-p", "infer-shapes", *SHAPE, "-o", out).returncode == 0
        assert len([node for node in onnx.load(out).graph.node if node.op_type == "Conv"]) == 2

    def test_devices_are_those_of_the_platform(self, model: Path, tmp_path: Path) -> None:
        plan, out = tmp_path / "plan.json", tmp_path / "out.onnx"
        command("opt", model, "-p", self.PIPELINE, *SHAPE, "--platform", "rpi4x2", "--save-plan", plan, "-o", out)
        assert [part.device for part in load_plan(plan).layers["s"]] == ["pi01", "pi02"]

    def test_timing_and_graphs_go_to_stderr(self, model: Path, tmp_path: Path) -> None:
        done = command(
            "opt", model, "-p", "infer-shapes", *SHAPE, "--timing", "--print-after", "-o", tmp_path / "o.onnx"
        )
        assert (done.returncode, done.stdout) == (0, "")
        assert re.search(r'^infer-shapes\{shape="x=1x3x16x16"\} +\d+\.\d$', done.stderr, re.MULTILINE)
        assert re.search(r"^total +\d+\.\d$", done.stderr, re.MULTILINE)
        assert "// after pass 2: infer-shapes" in done.stderr

    def test_errors_are_one_line_and_leave_nothing(self, model: Path, tmp_path: Path) -> None:
        out, plan = tmp_path / "out.onnx", tmp_path / "plan.json"
        line = failed(1, "opt", model, "-p", "lop{layers=s parts=2}", "--save-plan", plan, "-o", out)
        assert line == "dicompiler: error: pass 'lop' needs layers: run 'form-layers' before it"
        line = failed(2, "opt", model, "-p", "infer-shapes", *SHAPE, "--save-plan", plan, "-o", out)
        assert line == "dicompiler: error: --save-plan: no pass of the pipeline made a plan"
        line = failed(1, "opt", model, "-p", "infer-shapes", "-o", tmp_path / "no" / "o.onnx")
        assert line.endswith(f"no/o.onnx: there is no directory '{tmp_path / 'no'}'")
        assert "gone.onnx" in failed(1, "opt", tmp_path / "gone.onnx", "-p", "infer-shapes", "-o", out)
        assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


class TestEnds:
    """How a command ends when something breaks: with a plugin whose pass breaks as it is told."""

    SOURCE = """
        import os, signal
        from dataclasses import dataclass
        from dicompiler.plugin.hookspecs import hookimpl
        from dicompiler.plugin.pass_manager import Pass

        @dataclass(frozen=True)
        class Break(Pass):
            name = "break"
            how: str = ""

            def run(self, compilation):
                if self.how == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                if self.how == "full":
                    raise OSError(28, "No space left on device", "/disk/file")
                return {}["missing"]

        @hookimpl
        def dicompiler_passes():
            yield Break
    """

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        """A site that says of itself to be one of dicompiler's own: what a third party breaks is its own fault."""
        info = tmp_path / "site" / "dicompiler-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dicompiler\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text("[dicompiler]\nacme = acme_breaks\n")
        (info.parent / "acme_breaks.py").write_text(textwrap.dedent(self.SOURCE))
        return os.pathsep.join([str(info.parent), *sys.path])

    def test_an_internal_error_is_one_line_that_names_the_pass_and_its_distribution(
        self, model: Path, tmp_path: Path, path: str
    ) -> None:
        line = failed(70, "opt", model, "-p", "break", "-o", tmp_path / "o.onnx", PYTHONPATH=path)
        assert line == (
            "dicompiler: internal error: pass 'break' of dicompiler 2.0: KeyError: 'missing'; "
            "run again with --debug for the traceback"
        )

    @pytest.mark.parametrize("place", [0, -1])
    def test_debug_prints_the_traceback_wherever_it_stands(
        self, model: Path, tmp_path: Path, path: str, place: int
    ) -> None:
        arguments = ["opt", model, "-p", "break", "-o", tmp_path / "o.onnx"]
        arguments.insert(place % (len(arguments) + 1), "--debug")
        done = command(*arguments, PYTHONPATH=path)
        assert done.returncode == 70
        assert "Traceback (most recent call last)" in done.stderr
        assert "acme_breaks.py" in done.stderr

    def test_an_interrupt_is_130(self, model: Path, tmp_path: Path, path: str) -> None:
        done = command("opt", model, "-p", "break{how=interrupt}", "-o", tmp_path / "o.onnx", PYTHONPATH=path)
        assert done.returncode == 130
        assert done.stderr.strip() == "dicompiler: interrupted"

    def test_a_reader_that_goes_away_is_no_traceback(self) -> None:
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as closed:
            done = command("list", "operators", stdout=closed)
        assert (done.returncode, done.stderr) == (1, "")

    def test_a_full_disk_is_one_line(self, tmp_path: Path) -> None:
        with open("/dev/full", "w") as full:
            done = command("list", "operators", stdout=full)
        assert (done.returncode, done.stderr) == (1, "dicompiler: error: No space left on device\n")
        assert [*tmp_path.iterdir()] == []


class TestWholeWay:
    """plan, compile, run and verify on a small network."""

    def test_compile_run_verify(self, model: Path, tmp_path: Path) -> None:
        directory = tmp_path / "build"
        done = command("compile", model, *SHAPE, *SPLIT, "-o", directory, "--json")
        assert done.returncode == 0, done.stderr
        compiled = json.loads(done.stdout)
        assert [record["device"] for record in compiled["devices"]] == ["pi01", "pi02"]
        assert sum(record["sent"] for record in compiled["devices"]) == compiled["metrics"]["total_bytes"] > 0

        x = np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype(np.float32)
        np.savez(tmp_path / "x.npz", x=x)
        outputs = tmp_path / "y.npz"
        done = command("run", directory, "--inputs", tmp_path / "x.npz", "--outputs", outputs, "--frames", 2, "--json")
        assert done.returncode == 0, done.stderr
        ran = json.loads(done.stdout)
        assert sum(sum(r["sent"].values()) for r in ran["devices"]) == 2 * compiled["metrics"]["total_bytes"]
        assert read_npz(outputs)["y"].shape == (1, 4, 16, 16)

        done = command("verify", directory, "--inputs", tmp_path / "x.npz")
        assert done.returncode == 0, done.stderr
        assert [line.split()[1] for line in done.stdout.splitlines()[1:] if not line.startswith("y on")] == ["ok"] * 2
        assert "as predicted" in done.stdout

    def test_a_plan_is_decided_once_and_then_carried_out(self, model: Path, tmp_path: Path) -> None:
        plan = tmp_path / "plan.json"
        done = command("plan", model, *SHAPE, "--platform", "rpi4x2", "--strategy", "pipeline", "-o", plan)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^sent between devices +\d+ bytes +0 bytes$", done.stdout, re.MULTILINE)
        base = ("compile", model, *SHAPE, "--platform", "rpi4x2", "--plan", plan)
        assert command(*base, "-o", tmp_path / "build").returncode == 0
        assert load_plan(tmp_path / "build" / "plan.json") == load_plan(plan)

    def test_wrong_inputs_are_one_line(self, model: Path, tmp_path: Path) -> None:
        directory = tmp_path / "build"
        command("compile", model, *SHAPE, "--platform", "rpi4x2", "--strategy", "single", "-o", directory)
        for arrays, words in (
            ({"X": np.ones(1)}, "no input 'X'"),
            ({"x": np.ones((1, 3, 16, 15), np.float32)}, "shape"),
            ({"x": np.ones((1, 3, 16, 16))}, "float32, not float64"),
            ({}, "input 'x' is missing"),
        ):
            np.savez(tmp_path / "x.npz", **arrays)
            assert words in failed(1, "run", directory, "--inputs", tmp_path / "x.npz")
        assert "no artifact" in failed(1, "verify", tmp_path)
