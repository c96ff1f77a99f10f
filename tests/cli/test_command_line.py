"""The command line as a whole: quick help, mistakes in one line, exit codes, and how a command ends."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.commands import SHAPE, command, failed

import dicompiler
from dicompiler.base.objectives import OBJECTIVES
from dicompiler.cli import main
from dicompiler.cli.command_line import COMMANDS

HEAVY = set(
    "jsonschema_rs logging matplotlib numpy onnx onnx_graphsurgeon onnxruntime ortools pluggy rich scipy".split()
)


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    """Run the source in a fresh interpreter with the import path of this process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


class TestExitCodes:
    """Code 2: the command must change. Code 1: a file must change."""

    @pytest.mark.parametrize(
        "line",
        [
            "plan MODEL --platform nope",
            "plan MODEL --platform rpi4x2{memory=big}",
            "plan MODEL --platform rpi4x2{bandwidth=1}",
            "plan MODEL --platform rpi4x2 --strategy nope",
            "plan MODEL --platform rpi4x2 --shape x=1x3x16x16 --strategy single{device=nope}",
            "plan MODEL --platform rpi4x2 --shape x=1x3x16x16 --strategy pipeline{devices=pi01,nope}",
            "plan MODEL --platform rpi4x2 --shape x=1x3x16x16 --strategy pipeline{devices=pi01,pi01}",
            "plan MODEL --platform rpi4x2 --shape nope=1x3x16x16",
            "plan MODEL --platform rpi4x2 --shape x=1x3",
            "plan MODEL --platform rpi4x2 --shape x=1x4x16x16",
            "plan MODEL --platform rpi4x2 --depfile OUT",
            "plan MODEL --platform rpi4x2 --depfile MODEL",
            "plan MODEL",
            "opt MODEL -p nope",
            "opt MODEL -p tile-height{parts=2}",
            "opt MODEL -p infer-shapes --save-plan OUT",
            "opt MODEL -p infer-shapes --depfile MODEL",
        ],
    )
    def test_wrong_argument(self, line: str, open_model: Path, tmp_path: Path) -> None:
        assert run_in_process(f"{line} -o OUT", open_model, tmp_path) == 2

    @pytest.mark.parametrize(
        "line",
        [
            "plan nope.onnx --platform rpi4x2",
            "plan MODEL --platform nope.toml",
            "plan MODEL --platform rpi4x2 --strategy manual{file=nope.json}",
            "plan MODEL --platform rpi4x2 --depfile nope/d",
            "compile MODEL --platform rpi4x2 --plan nope.json",
            "compile MODEL --platform rpi4x2 --plan MODEL",
            "opt MODEL -p infer-shapes,quantise{samples=nope.npz} --shape x=1x3x16x16",
            "opt MODEL -p infer-shapes --dump-after-all MODEL",
        ],
    )
    def test_missing_or_invalid_file(self, line: str, open_model: Path, tmp_path: Path) -> None:
        assert run_in_process(f"{line} -o OUT", open_model, tmp_path) == 1


def run_in_process(line: str, model: Path, directory: Path) -> int:
    """Run a command line in which MODEL and OUT stand for paths, check that OUT is missing, and return the code."""
    paths = {"MODEL": str(model), "OUT": str(directory / "out")}
    code = main([paths.get(word, word) for word in line.split()])
    assert not (directory / "out").exists()
    return code


class TestStart:
    """Help is printed at once, and lists the commands."""

    def test_help_imports_nothing_heavy(self) -> None:
        source = f"""
            import sys
            from dicompiler.cli import main
            assert main(["--help"]) == 0
            loaded = {{name.partition(".")[0] for name in sys.modules}}
            print("heavy:", sorted(loaded & {HEAVY!r}), file=sys.stderr)
            print("commands:", [n for n in {list(COMMANDS)!r} if "dicompiler.cli." + n in sys.modules], file=sys.stderr)
        """
        done = run_python(source)
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
        done = run_python(source)
        assert done.stderr == "heavy: []\n"

    @pytest.mark.parametrize("name", COMMANDS)
    def test_summaries_equal_those_of_the_commands(self, name: str) -> None:
        click_command = importlib.import_module(f"dicompiler.cli.{name}").command
        assert click_command.name == name
        assert click_command.help.partition("\n")[0] == COMMANDS[name]

    def test_objectives_are_those_of_the_metrics(self) -> None:
        done = command("plan", "--help")
        assert f"{', '.join(OBJECTIVES)}, or a sum" in " ".join(done.stdout.split())

    def test_without_arguments_there_is_help_and_a_usage_error(self) -> None:
        done = command()
        assert (done.returncode, done.stdout) == (2, "")
        assert "compile" in done.stderr

    def test_version(self) -> None:
        assert command("--version").stdout == f"dicompiler {dicompiler.__version__}\n"

    def test_package_has_only_its_public_names(self) -> None:
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
            (["opt", "m.onnx", "-p", "a b", "-o", "o"], "pipeline 'a b': expected the end, or ',' and another pass"),
            (
                ["compare", __file__, "--platform", "rpi4x2", "--strategies", "single dp"],
                "strategies 'single dp': expected the end, or ',' and another strategy",
            ),
            (["opt", "m.onnx", "-p", "fold", "-o", "o"], "unknown pass 'fold'"),
            (["opt", "m.onnx", "-p", "partition", *SHAPE, "-o", "o"], "opt: shape is an option of pass 'infer-shapes'"),
            (["compile", "m", "--strategy", "a", "--plan", "b", "-o", "o"], "compile: --strategy and --plan exclude"),
        ],
    )
    def test_usage_errors_name_the_nearest_valid_name(self, arguments: list[str], line: str) -> None:
        assert failed(2, *arguments).startswith(f"dicompiler: error: {line}")

    def test_value_outside_its_range_or_choices(self) -> None:
        assert "--frames" in failed(2, "run", "d", "--frames", "0")
        assert "throughput" in failed(2, "plan", "m", "--objective", "speed", "-o", "p")


class TestEnds:
    """Exit code and message of a command whose pass fails. Its plugin's option selects the failure."""

    SOURCE = """
        import os, signal
        from dataclasses import dataclass
        from dicompiler.plugin_api import hookimpl
        from dicompiler.plugin_api import Pass

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
        """Return a directory with a plugin of a distribution named dicompiler, so that its errors are internal."""
        info = tmp_path / "site" / "dicompiler-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dicompiler\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text("[dicompiler]\nacme = acme_breaks\n")
        (info.parent / "acme_breaks.py").write_text(textwrap.dedent(self.SOURCE))
        return os.pathsep.join([str(info.parent), *sys.path])

    def test_internal_error_is_one_line_that_names_the_pass_and_its_distribution(
        self, open_model: Path, tmp_path: Path, path: str
    ) -> None:
        line = failed(70, "opt", open_model, "-p", "break", "-o", tmp_path / "o.onnx", PYTHONPATH=path)
        assert line == (
            "dicompiler: internal error: pass 'break' of dicompiler 2.0: KeyError: 'missing'; "
            "run again with --debug for the traceback"
        )

    @pytest.mark.parametrize("place", [0, -1])
    def test_debug_prints_the_traceback_at_any_position(
        self, open_model: Path, tmp_path: Path, path: str, place: int
    ) -> None:
        arguments = ["opt", open_model, "-p", "break", "-o", tmp_path / "o.onnx"]
        arguments.insert(place % (len(arguments) + 1), "--debug")
        done = command(*arguments, PYTHONPATH=path)
        assert done.returncode == 70
        assert "Traceback (most recent call last)" in done.stderr
        assert "acme_breaks.py" in done.stderr

    def test_interrupt_has_exit_code_130(self, open_model: Path, tmp_path: Path, path: str) -> None:
        done = command("opt", open_model, "-p", "break{how=interrupt}", "-o", tmp_path / "o.onnx", PYTHONPATH=path)
        assert done.returncode == 130
        assert done.stderr.strip() == "dicompiler: interrupted"

    def test_interrupt_while_a_library_is_imported_is_an_interrupt(self) -> None:
        """If an interrupt stops their import, extension modules report that they cannot be loaded."""
        done = run_python(
            """
            import dicompiler.cli.command_line as entry
            def load(*_, **__):
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt as error:
                    raise ImportError("initialization failed") from error
            entry.root.main = load
            assert entry.main(["list"]) == 130
            """
        )
        assert done.stderr.strip() == "dicompiler: interrupted"

    def test_closed_pipe_is_not_a_traceback(self) -> None:
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as closed:
            done = command("list", "operators", stdout=closed)
        assert (done.returncode, done.stderr) == (1, "")

    def test_full_disk_is_one_line(self, tmp_path: Path) -> None:
        with open("/dev/full", "w") as full:
            done = command("list", "operators", stdout=full)
        assert (done.returncode, done.stderr) == (1, "dicompiler: error: No space left on device\n")
        assert [*tmp_path.iterdir()] == []


class TestMemory:
    """A process that runs out of memory ends with one line."""

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            OSError(12, "Cannot allocate memory", "/some/file"),
            RuntimeError("can't start new thread"),
            ImportError("libx.so: failed to map segment from shared object"),
            RuntimeError("std::bad_alloc"),
        ],
        ids=repr,
    )
    def test_failed_allocation_is_no_internal_error(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_args: object, **_options: object) -> None:
            raise KeyError("what the caller made of it") from error

        monkeypatch.setattr("dicompiler.cli.command_line.root.main", fail)
        assert main(["list"]) == 1
        assert capsys.readouterr().err.startswith("dicompiler: error: memory could not be allocated: raise the limit")

    def test_limited_process_reports_one_line(self, tmp_path: Path) -> None:
        source = f"""
            import resource, sys
            import onnx
            from dicompiler.cli import main
            from dicompiler.networks import build
            onnx.save(build("tiny"), {str(tmp_path / "m.onnx")!r})
            with open("/proc/self/statm") as file:
                mapped = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**22,) * 2)
            code = main(["compile", {str(tmp_path / "m.onnx")!r}, "--platform", "rpi4x2", "-o", "build"])
            print(code)
        """
        done = run_python(source)
        assert done.stdout == "1\n"
        assert done.stderr.startswith("dicompiler: error: memory could not be allocated: ")
        assert done.stderr.count("\n") == 1
