"""--quiet, --log-file, errors with --json, and --allow-worse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.building import environment
from support.distributions import distribution

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.notices import NOTICE_LEVEL
from dicompiler.cli import log_handlers, main
from dicompiler.driver import artifact
from dicompiler.driver.compiler import check_search_is_complete
from dicompiler.ir.plan import Plan
from dicompiler.search.strategy import INTERRUPTED_NOTE

WORSE = "this plan's predicted latency is worse than that of one device"


def run_in_process(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed in a process of its own."""
    command = [sys.executable, "-m", "dicompiler", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment(**env), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


def plan(model: Path, *more: str, strategy: str = "modnn", before: tuple[str, ...] = ()) -> int:
    """Run `plan`. The plan of the default strategy is worse than one device."""
    arguments = ["plan", str(model), "--platform", "rpi4x2", "--strategy", strategy]
    return main([*before, *arguments, "-o", str(model.parent / "plan.json"), *more])


def test_worse_plan_is_a_warning_that_can_be_turned_off(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, is_warned in (((), True), (("--allow-worse",), False), (("--quiet",), False)):
        assert plan(model, *options) == 0
        printed = capsys.readouterr()
        assert (WORSE in printed.err) == is_warned
        assert ("written: " in printed.out) == ("--quiet" not in options)


def test_search_that_its_budget_ended_can_be_an_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, strategy="dp{budget=0.0001}") == 0
    assert "the search ended after its budget of 0.0001 s" in (model.parent / "plan.json").read_text()
    assert plan(model, "--require-complete-search", strategy="dp{budget=0.0001}") == 1
    error = capsys.readouterr().err
    assert "the search ended after its budget of 0.0001 s" in error
    assert ", so that another run may give another plan: use" in error
    assert plan(model, "--require-complete-search", strategy="dp") == 0


def test_larger_budget_is_no_remedy_for_an_interrupted_search() -> None:
    remedy = "let the search end by itself, or omit --require-complete-search$"
    with pytest.raises(DicompilerError, match=rf"the search was interrupted, .* another plan: {remedy}"):
        check_search_is_complete(Plan({}, (), (), note=INTERRUPTED_NOTE))


@pytest.mark.parametrize("is_before", [True, False])
def test_quiet_prints_only_errors(
    is_before: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (plan(model, before=("--quiet",)) if is_before else plan(model, "--quiet")) == 0
    assert capsys.readouterr() == ("", "")
    assert plan(tmp_path / "gone.onnx", "--quiet") == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("dicompiler: error: ") and "gone.onnx" in printed.err and not printed.out
    assert plan(model) == 0
    # The option --quiet of one command must not affect the next command in the same process.
    printed = capsys.readouterr()
    assert WORSE in printed.err and "written: " in printed.out


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("plan {} --platform rpi4x2 --strategy modnn -o plan.json --json", "{"),
        ("plan {} --platform rpi4x2 --strategy modnn -o plan.json --print-outputs", "plan.json"),
        ("compare {} --platform rpi4x2 --strategies modnn --format csv", "model,platform,"),
        ("platform rpi4x2", "format = "),
        ("list passes --help", "Usage: "),
    ],
)
def test_quiet_prints_documents(line: str, start: str, model: Path, tmp_path: Path) -> None:
    done = run_in_process(tmp_path, *line.format(model).split(), "--quiet")
    assert done.stdout.startswith(start) and not done.stderr


@pytest.mark.parametrize("is_before", [True, False])
def test_log_file_has_command_steps_warnings_and_errors(
    is_before: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "my log.txt"
    options = ("--log-file", str(log))
    assert (plan(model, "--quiet", before=options) if is_before else plan(model, "--quiet", *options)) == 0
    assert plan(tmp_path / "gone.onnx", *options) == 1
    plan(tmp_path / "gone.onnx")
    capsys.readouterr()
    lines = [line for line in log.read_text().splitlines() if re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line)]
    texts = [line.partition(f"Z {os.getpid()} ")[2] for line in lines]
    assert [text.startswith("INFO command: dicompiler ") for text in texts].count(True) == 2
    assert f"--log-file '{log}'" in texts[0] and str(model) in texts[0]
    assert "INFO strategy modnn: making the plan" in texts
    assert [WORSE in text for text in texts if text.startswith("WARNING ")] == [True]
    (error,) = [text for text in texts if text.startswith("ERROR ")]
    assert "gone.onnx: cannot read the model" in error
    ends = [re.fullmatch(r"INFO end: exit code (\d) after \d+\.\d s", text) for text in texts]
    assert [match[1] for match in ends if match] == ["0", "1"] and ends[-1]
    # A traceback does not help against a mistake of the user, so the log omits it.
    assert "Traceback" not in log.read_text()
    plan(tmp_path / "gone.onnx", *options, "--debug")
    assert "Traceback (most recent call last):" in log.read_text()


def test_lines_of_parallel_commands_in_one_log_file_can_be_told_apart(tmp_path: Path) -> None:
    names = [f"gone{number}.onnx" for number in range(3)]
    lines = [["plan", name, "--platform", "rpi4x2", "-o", "plan.json", "--log-file", "log"] for name in names]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "dicompiler", *line],
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in lines
    ]
    printed = [process.communicate(timeout=60)[1] for process in processes]
    log = (tmp_path / "log").read_text()
    for name, process, error in zip(names, processes, printed, strict=True):
        own_lines = re.findall(rf"^\S+Z {process.pid} (.*)$", log, re.MULTILINE)
        # Each process writes three lines to the log: its command, its error and its exit code.
        assert [name in line for line in own_lines] == [True, True, False]
        assert error.startswith(f"dicompiler: error: {name}: cannot read the model: ")


def test_options_that_json_would_ignore(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in (
        ("compare m --json --format csv", "compare: --json is --format json: remove --format"),
        ("compile m -o o --json --print-outputs", "compile: --print-outputs prints only paths, and the JSON contains"),
        ("plan m -o o --json --print-outputs", "plan: --print-outputs prints only paths, and the JSON contains"),
        ("opt m -p partition -o o --json --print-outputs", "opt: --print-outputs prints only paths, and the JSON"),
    ):
        assert main([str(model) if word == "m" else word for word in words.split()]) == 2
        assert capsys.readouterr().err.startswith(f"dicompiler: error: {line}")


def test_error_has_the_name_of_the_called_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise UsageError("run: keys: none is missing")

    monkeypatch.setattr(artifact, "open_service", fail)
    for words, line in (
        ("status build", "status: keys: none is missing"),
        # In this message, "run: " is the name of the directory, not the name of the command.
        ("status run", "run: keys: none is missing"),
    ):
        assert main(words.split()) == 2
        assert capsys.readouterr().err == f"dicompiler: error: {line}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan --platfrom p {log}", "plan: unknown option '--platfrom'"),
        ("{log} plan --tolerate-failures", "plan: option '--tolerate-failures' requires an argument"),
        ("run x --frames 0 {log}", "run: invalid value for '--frames'"),
        ("{log} plann", "unknown command 'plann'"),
        ("--quite {log} list passes", "unknown option '--quite'"),
    ],
)
@pytest.mark.parametrize("form", ["--log-file {}", "--log-file={}"])
def test_log_file_has_usage_errors(
    form: str, words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words.format(log=form.format(tmp_path / "log")).split()
    assert main(arguments) == 2
    assert line in capsys.readouterr().err
    texts = [text.partition(f"Z {os.getpid()} ")[2] for text in (tmp_path / "log").read_text().splitlines()]
    assert texts[0] == f"INFO command: dicompiler {' '.join(arguments)}"
    assert [text for text in texts if text.startswith("ERROR ") and line in text]
    assert main(["plann"]) == 2  # The log file of one command is not used by the next command in the same process.
    assert len((tmp_path / "log").read_text().splitlines()) == len(texts)


def test_log_file_that_cannot_be_written(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--log-file", str(tmp_path / "gone" / "log")) == 1
    assert "/gone/log: No such file or directory: give the name of a file that can be written\n" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("plan gone.onnx --platform rpi4x2 -o plan.json --json", 1, "gone.onnx: cannot read the model: No such file"),
        ("plan gone.onnx --platfrom rpi4x2 --json", 2, "plan: unknown option '--platfrom' (did you mean '--platform'"),
        ("complie --json", 2, "unknown command 'complie' (did you mean 'compile'?)"),
    ],
)
def test_errors_are_documents_with_json(line: str, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == code
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["exit_code"] == code
    assert error["message"].startswith(text)
    assert printed.err == f"dicompiler: error: {error['message']}\n"


CHATTY_PLUGIN = """
import os, subprocess
from dicompiler.plugin_api import Strategy, hookimpl
from dicompiler_strategies.single import Single

class Chatty(Single):
    '''Print texts while it makes the plan.'''
    name = "chatty"

    def plan(self, problem):
        print("from print")
        os.write(1, b"from a library\\n")
        subprocess.run(["echo", "from a process"], check=True)
        return super().plan(problem)

@hookimpl
def dicompiler_strategies():
    return [Chatty]
"""
PRINTED = {"from print", "from a library", "from a process"}


def test_json_is_not_mixed_with_prints_of_plugins(model: Path, tmp_path: Path) -> None:
    distribution(tmp_path / "site", "chatty", "1.0", {"chatty": "chatty_plugin"})
    (tmp_path / "site" / "chatty_plugin.py").write_text(CHATTY_PLUGIN)
    lines = [
        ("plan", str(model), "--platform", "rpi4x2", "--strategy", "chatty", "-o", "plan.json"),
        ("compile", str(model), "--platform", "rpi4x2", "--strategy", "chatty", "-o", "out"),
    ]
    path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    for line in lines:
        done = run_in_process(tmp_path, *line, "--json", PYTHONPATH=path)
        assert json.loads(done.stdout)
        assert set(done.stderr.splitlines()) >= PRINTED
    done = run_in_process(tmp_path, *lines[0], PYTHONPATH=path)
    assert set(done.stdout.splitlines()) >= PRINTED
    done = run_in_process(tmp_path, *lines[0], "--quiet", PYTHONPATH=path)
    assert (done.stdout, done.stderr) == ("", "")


def test_notices_about_slow_work_are_printed_without_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    for is_quiet, printed in ((False, "dicompiler: building\n"), (True, "")):
        log_handlers.set_handlers(is_quiet, None)
        log_handlers.log.log(NOTICE_LEVEL, "building")
        assert capsys.readouterr().err == printed
