"""Ctrl-C at any moment of a command: one line on stderr, exit code 130, no output and no processes that remain."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from support.running import wait_until

from dicompiler import networks

# This program runs the console script and interrupts itself at its n-th audit event (such as an import or the opening
# of a file). The number of events does not depend on the speed of the machine.
SCRIPT = """
import os, signal, sys
moment, sys.argv[:] = int(sys.argv[1]), ["dicompiler", *sys.argv[2:]]
from dicompiler.cli import main
events = 0
def count(event, arguments):
    global events
    if event in ("import", "open", "exec", "compile", "subprocess.Popen"):
        events += 1
        if events == moment:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(count)
code = main()
print("events", events, file=sys.stderr) if not moment else None
sys.exit(code)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import dicompiler

    directory = tmp_path_factory.mktemp("interrupts")
    onnx.save(networks.build("tiny"), directory / "tiny.onnx")
    dicompiler.compile(directory / "tiny.onnx", "rpi4x2", "pipeline", output=directory / "build")
    return directory


def start(moment: int, artifact: Path, *arguments: object, mark: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DICOMPILER_TEST_MARK": mark}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(moment), *map(str, arguments)],
        cwd=artifact,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_interrupted(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (130, "dicompiler: interrupted\n")


COMMANDS: list[tuple[int, list[str]]] = [
    (4, ["--help"]),
    (6, ["list", "strategies"]),
    (10, ["compile", "tiny.onnx", "--platform", "rpi4x2", "--strategy", "single", "-o", "other"]),
    (8, ["run", "build"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "arguments"), COMMANDS, ids=[arguments[0] for _, arguments in COMMANDS])
def test_interrupt_at_any_moment_is_one_line(count: int, arguments: list[str], artifact: Path) -> None:
    errors, names = "", set[str]()
    # In the first run, Python may compile modules, which causes additional events.
    for _ in range(2):
        whole = start(0, artifact, *arguments)
        _, errors = whole.communicate(timeout=600)
        assert whole.returncode == 0
        if "-o" in arguments:
            names = {path.name for path in (artifact / "other").iterdir()}
            shutil.rmtree(artifact / "other")
    events = int(errors.split()[-1])
    for moment in (1, *(events * step // count for step in range(1, count)), events):
        process = start(moment, artifact, *arguments)
        # From the moment at which the output exists, the command ignores the interrupt.
        if names and process.wait(600) == 0:
            assert {path.name for path in (artifact / "other").iterdir()} == names
            shutil.rmtree(artifact / "other")
        else:
            check_interrupted(process)
            assert not (artifact / "other").exists()


# This program runs the console script, and sends itself a signal after a call of the function `sys.argv[2]`.
SIGNALLED = """
import atexit, importlib, os, sys
number, place, sys.argv[:] = int(sys.argv[1]), sys.argv[2], ["dicompiler", *sys.argv[3:]]
from dicompiler.cli import main
if place == "exit":
    atexit.register(os.kill, os.getpid(), number)
else:
    module, _, name = place.rpartition(".")
    module = importlib.import_module(module)
    function = getattr(module, name)
    def signalled(*arguments, **options):
        result = function(*arguments, **options)
        # These functions are also called for other files, such as temporary ones.
        if name not in ("replace", "mkdtemp") or "plan.json" in str(arguments) or ".out." in str(options):
            os.kill(os.getpid(), number)
        return result
    setattr(module, name, signalled)
sys.exit(main())
"""
COMPILE = ["compile", "tiny.onnx", "--platform", "rpi4x2", "--strategy", "modnn", "-o", "out", "--depfile", "out.d"]
PLAN = ["plan", "tiny.onnx", "--platform", "rpi4x2", "--strategy", "single", "-o", "plan.json", "--depfile", "plan.d"]
ATOMIC_OUTPUT = "dicompiler.base.atomic_output"


def run_signalled(number: int, place: str, directory: Path, arguments: list[str]) -> int:
    """Run a command that sends itself the signal `number` at `place`. Return its exit code."""
    onnx.save(networks.build("tiny"), directory / "tiny.onnx")
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(int(number)), place, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=600,
    )
    return done.returncode


@pytest.mark.parametrize(
    ("number", "place"),
    [
        (signal.SIGINT, f"{ATOMIC_OUTPUT}._swap_directories"),
        (signal.SIGTERM, f"{ATOMIC_OUTPUT}._swap_directories"),
        (signal.SIGTERM, "dicompiler.cli.compile_output.show_compilation"),
        (signal.SIGINT, "exit"),
    ],
)
def test_signal_after_the_output_was_replaced_is_ignored(
    number: int, place: str, artifact: Path, tmp_path: Path
) -> None:
    shutil.copytree(artifact / "build", tmp_path / "out")
    assert run_signalled(number, place, tmp_path, COMPILE) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.onnx", "out", "out.d"}
    assert (tmp_path / "out" / "plan.json").read_bytes() != (artifact / "build" / "plan.json").read_bytes()


def test_signal_after_a_plan_was_written_is_ignored(tmp_path: Path) -> None:
    assert run_signalled(signal.SIGTERM, "os.replace", tmp_path, PLAN) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.onnx", "plan.json", "plan.d"}


@pytest.mark.parametrize("function", ["_carry_over", "tempfile.mkdtemp"])
def test_signal_before_the_output_is_replaced_changes_nothing(function: str, artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact / "build", tmp_path / "out")
    before = (tmp_path / "out" / "artifact.json").read_bytes()
    place = function if "." in function else f"{ATOMIC_OUTPUT}.{function}"
    assert run_signalled(signal.SIGTERM, place, tmp_path, COMPILE) == 143
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.onnx", "out"}
    assert (tmp_path / "out" / "artifact.json").read_bytes() == before


def test_a_delayed_interrupt_after_the_end_of_the_command_adds_no_second_line() -> None:
    """An import delays the interrupt, and the command ends before the delay does."""
    code = (
        "import os, signal, sys, time; from dicompiler.cli.interrupts import interrupt_handler as handler;"
        "handler.install(); handler.begin_command(); os.kill(os.getpid(), signal.SIGINT)"
    )
    importing = compile(code, "<frozen importlib._bootstrap>", "exec")
    script = (
        f"import marshal; exec(marshal.loads({marshal.dumps(importing)!r}))\n"
        "try:\n    handler.end_command(is_finished=True)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5); print('one line', file=sys.stderr); sys.exit(130)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (130, "one line\n")


def test_an_interrupt_while_a_document_is_validated_is_no_error_in_the_document() -> None:
    """The validator of JSON schemas takes all exceptions in its callbacks for errors in the document."""
    script = (
        "import json, os, signal, sys, time\n"
        "from dicompiler.base.schema import validate\n"
        "from dicompiler.cli.interrupts import SCHEMA_CALLBACK, interrupt_handler\n"
        "def interrupt(frame, *_):\n"
        "    if frame.f_code.co_qualname == SCHEMA_CALLBACK:\n"
        "        sys.setprofile(None)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "interrupt_handler.install()\n"
        "interrupt_handler.begin_command()\n"
        "sys.setprofile(interrupt)\n"
        "try:\n"
        "    validate(json.loads(sys.argv[1]), 'platform', 'file.toml')\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit('interrupted in the validator')\n"
        "try:\n"
        "    for _ in range(6000):\n"
        "        time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted afterwards')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    platform = {
        "host": [{"name": "pi01", "memory": "1 GiB"}],
        "device": [{"name": "pi01", "rate": "1 GFLOP/s", "cores": 2}],
        "network": {"kind": "switch", "bandwidth": "1 Gbit/s"},
    }
    command = [sys.executable, "-c", script, json.dumps(platform)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == ("interrupted afterwards\n", "")


def marked_commands(mark: str) -> Iterator[str]:
    """Yield the command lines of the running processes with this value of the variable DICOMPILER_TEST_MARK."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if f"DICOMPILER_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                yield (entry / "cmdline").read_text().replace("\0", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "sign"), [("profile_run.py", signal.SIGKILL), ("-m runtime", signal.SIGINT)], ids=["script", "player"]
)
def test_interrupted_profile_leaves_no_processes(program: str, sign: signal.Signals, artifact: Path) -> None:
    mark = uuid.uuid4().hex
    process = start(0, artifact, "profile", "tiny.onnx", "--repeat", "1", "--tiles", "1", "-o", "p.json", mark=mark)
    wait_until(lambda: any(program in line for line in marked_commands(mark)), 600)
    process.send_signal(sign)
    _, errors = process.communicate(timeout=600)
    if sign is signal.SIGINT:
        assert (process.returncode, errors.rpartition("events")[0]) == (130, "dicompiler: interrupted\n")
    wait_until(lambda: not list(marked_commands(mark)))
    assert not (artifact / "p.json").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_termination_cleans_up_and_writes_no_plan(number: int, code: int, tmp_path: Path) -> None:
    """Unlike an interrupt, a termination does not keep the best plan of a search."""
    onnx.save(networks.build("resnet18"), tmp_path / "model.onnx")
    command = [sys.executable, "-m", "dicompiler", "compile", "model.onnx", "--platform", "rpi4x4", "-o", "out"]
    process = subprocess.Popen(
        [*command, "--log-file", "log"],
        # Under nohup, the tests ignore SIGHUP, and the command would inherit that; so the default action is restored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (tmp_path / "log").is_file() and "asks pipeline" in (tmp_path / "log").read_text())
    process.send_signal(number)
    printed, errors = process.communicate(timeout=600)
    assert (process.returncode, printed, errors) == (code, "", "dicompiler: terminated\n")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "log"}
