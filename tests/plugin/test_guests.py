"""Third parties' plugins in their place: what they print, end, change and leave running, seen from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from support.distributions import command, distribution
from support.running import wait_until

from dicompiler import networks

HEAD = """
import atexit, ctypes, os, signal, subprocess, sys, threading, time, warnings
from dataclasses import dataclass
from dicompiler.plugin_api import hookimpl, Part, Strategy

class Odd(BaseException):
    pass
"""
HOOK = """
@dataclass(frozen=True)
class Whole(Strategy):
    name = "acme-whole"

    def plan(self, problem):
        {plan}
        return problem.plan({{layer.name: (Part("pi01"),) for layer in problem.layers.layers}})

@hookimpl
def dicompiler_strategies():
    {hook}
    yield Whole
"""
WHO = "plugin 'acme' of acme-guest 1.5"
PRINTS = "print('one'); os.write(1, b'two\\n'); subprocess.run(['echo', 'three']); ctypes.CDLL(None).puts(b'four')"


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Compiles a network, or runs another command line, with a plugin that does these things there."""

    def run(
        at_import: str = "", hook: str = "", plan: str = "", line: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        distribution(site, "acme-guest", "1.5", {"acme": "acme_guest"})
        (site / "acme_guest.py").write_text(HEAD + at_import + HOOK.format(hook=hook or "pass", plan=plan or "pass"))
        onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")
        words = (
            line or f"compile {tmp_path}/lenet.onnx --platform rpi4x2 --strategy acme-whole -o {tmp_path}/out --json"
        )
        return command(site, *words.split(), **env)

    return run


PLACES = pytest.mark.parametrize("place", ["at_import", "hook", "plan"])


@PLACES
def test_what_a_plugin_prints_goes_to_stderr(place: str, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    late = "; atexit.register(print, 'late'); atexit.register(lambda: os.write(1, b'later\\n'))"
    done = run(**{place: PRINTS + "; import click; click.echo('five')" + late})
    assert done.returncode == 0
    assert isinstance(json.loads(done.stdout), dict)
    assert {"one", "two", "three", "four", "five", "late", "later"} <= {*done.stderr.splitlines()}


@pytest.mark.parametrize(
    ("place", "ends", "how"),
    [
        ("at_import", "os._exit(0)", "with exit code 0"),
        ("hook", "os._exit(0)", "with exit code 0"),
        ("plan", "ctypes.CDLL(None)._exit(0)", "with exit code 0"),
        ("plan", "os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL"),
        ("at_import", "ctypes.string_at(0)", "by SIGSEGV"),
    ],
)
def test_a_plugin_that_ends_the_process_is_named(
    place: str, ends: str, how: str, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run(**{place: ends})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"dicompiler: error: {WHO}: its code has ended the process {how}\n"
    assert not (tmp_path / "out").exists()


def test_who_ends_the_process_from_a_thread_is_one_of_those_that_are_there(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run("threading.Thread(target=lambda: (time.sleep(0.02), os._exit(0)), daemon=True).start()")
    assert done.returncode == 1
    assert "has ended" in done.stderr and WHO in done.stderr


@pytest.mark.parametrize(
    "raised", ["SystemExit(0)", "KeyboardInterrupt()", "GeneratorExit()", "Odd('x')", "EOFError()"]
)
@PLACES
def test_whatever_a_plugin_raises_is_one_line_that_names_it(
    place: str, raised: str, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run(**{place: f"raise {raised}"})
    *warnings, error = done.stderr.splitlines()
    assert (done.returncode, len(warnings)) == (1, 0 if place == "plan" else 1)
    assert error.startswith("dicompiler: error: ") and "acme-guest 1.5" in error and raised.split("(")[0] in error


@pytest.mark.parametrize(
    ("place", "never"),
    [
        ("at_import", "time.sleep(1000)"),
        ("at_import", "while True:\n    try:\n        time.sleep(1000)\n    except Exception:\n        pass"),
        ("hook", "yield from (type('W', (Whole,), {'name': f'w{i}'}) for i in iter(int, 1))"),
        ("hook", "i = 0\n    while True:\n        i += 1\n        yield type('W', (Whole,), {'name': f'w{i}'})"),
    ],
)
def test_loading_that_never_ends_leaves_the_plugin_out(
    place: str, never: str, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run(**{place: never}, line="list strategies --json", DICOMPILER_PLUGIN_TIMEOUT="0.5")
    assert done.returncode == 0
    cause = (
        "it provides strategy 'w0' twice"
        if "iter(int" in never
        else ("loading it takes longer than 0.5 s (allow more with DICOMPILER_PLUGIN_TIMEOUT)")
    )
    assert done.stderr == f"dicompiler: warning: {WHO} is left out: {cause}\n"
    assert "modnn" in {one["name"] for one in json.loads(done.stdout)}


def test_loading_that_cannot_be_woken_ends_the_command(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    sleeps = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(1000)"
    done = run(sleeps, line="list strategies", DICOMPILER_PLUGIN_TIMEOUT="0.5")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"dicompiler: error: {WHO}: loading it does not end: leave it out (DICOMPILER_PLUGINS"
    )


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_told(text: str, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(line="list strategies", DICOMPILER_PLUGIN_TIMEOUT=text)
    assert done.returncode == 2
    assert done.stderr == f"dicompiler: error: DICOMPILER_PLUGIN_TIMEOUT is '{text}': give seconds, more than 0\n"


def test_a_thread_that_does_not_end_is_stopped_and_named(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(plan="threading.Thread(target=time.sleep, args=[1000], name='spin').start()")
    assert done.returncode == 0 and isinstance(json.loads(done.stdout), dict)
    assert done.stderr == f"dicompiler: warning: {WHO}: its thread 'spin' still runs 5 s after the end: stopped\n"


def test_what_a_plugin_changes_of_the_process_is_put_back(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    changes = "os.chdir('/'); os.environ['ACME'] = '1'; signal.signal(signal.SIGTERM, print); sys.stdout = sys.stderr"
    told = "the working directory, the environment (ACME), sys.stdout, the handler of SIGTERM"
    for place in ("at_import", "hook", "plan"):
        done = run(**{place: changes + "; os.environ.pop('HOME', None)"})
        assert done.returncode == 0 and isinstance(json.loads(done.stdout), dict)
        expected = told.replace("ACME", "ACME, HOME")
        assert done.stderr == f"dicompiler: warning: {WHO} changed {expected}: put back\n"
        subprocess.run(["rm", "-r", tmp_path / "out", tmp_path / "site"], check=True)
        (tmp_path / "site").mkdir()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("warnings.simplefilter('ignore')", "the filters of warnings"),
        ("warnings.resetwarnings()", "the filters of warnings"),
        (
            "import dicompiler.cost.simulator as s, dicompiler.ir.plan as p; s.simulate = p.Plan.__eq__ = print",
            "the code of dicompiler (Plan.__eq__, dicompiler.cost.simulator.simulate)",
        ),
        ("warnings.filterwarnings('ignore', 'mine', module='acme')", ""),
    ],
)
def test_filters_and_code_of_ours_are_put_back(
    change: str, told: str, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run("import dicompiler.cost.simulator\n" + change)
    assert done.returncode == 0
    assert done.stderr == (f"dicompiler: warning: {WHO} changed {told}: put back\n" if told else "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_command(
    number: int, run: Callable[..., subprocess.CompletedProcess[str]], site: Path, tmp_path: Path
) -> None:
    place = tmp_path / "there"
    plan = f"open({str(place)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    assert run(plan=plan, line="keys").returncode == 2
    line = f"compile {tmp_path}/lenet.onnx --platform rpi4x2 --strategy acme-whole -o {tmp_path}/out"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dicompiler.cli", *line.split()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
    )
    child = int(wait_until(lambda: place.exists() and place.read_text().endswith("\n") and place.read_text()))
    process.send_signal(number)
    said = process.communicate(timeout=30)[1].lstrip()
    assert (process.returncode, said) == ((130, "dicompiler: interrupted\n") if number == 2 else (-number, ""))
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    assert not (tmp_path / "out").exists()


def test_a_closed_stdout_is_no_traceback(run: Callable[..., subprocess.CompletedProcess[str]], site: Path) -> None:
    assert run(line="keys").returncode == 2
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    words = f"exec {sys.executable} -P -m dicompiler.cli list operators >&-"
    done = subprocess.run(["sh", "-c", words], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_differ_only_by_case_or_dashes_are_refused(site: Path) -> None:
    for name in ("MOD_NN", "ModNN"):
        distribution(site, "acme-guest", "1.5", {"acme": "acme_guest"})
        (site / "acme_guest.py").write_text((HEAD + HOOK).format(hook="pass", plan="pass").replace("acme-whole", name))
        done = command(site, "list", "strategies")
        if name == "ModNN":
            assert done.returncode == 1
            assert (
                "strategy 'modnn' of dicompiler 0.1.0 (plugin 'strategies') and 'ModNN' of acme-guest 1.5"
                in done.stderr
            )
            assert " differ only by case, '-', '_' or '.'; uninstall one or " in done.stderr
        else:
            assert done.returncode == 0
        subprocess.run(["rm", "-r", site], check=True)
        site.mkdir()
