"""Tests of the demo on small networks: results, output in a pipe and on a terminal, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dicompiler.cli import main
from dicompiler.driver import artifact as artifacts
from dicompiler.driver.artifact import verify
from dicompiler.driver.compile_result import CompileResult
from dicompiler.measure.emulation import demo
from dicompiler.measure.emulation.demo import EMULATED_FRAMES, DemoSplit, EmulatedTimes, emulate_frames, split_network
from dicompiler.verify.comparison import Check, Verification


def command(*arguments: object, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run `dicompiler demo` in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "dicompiler", "demo", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=120,
        check=False,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
    )


def read_all(terminal: int) -> str:
    """Return the output to a terminal until its other end is closed, which raises OSError on Linux."""
    said = b""
    with suppress(OSError):
        while part := os.read(terminal, 4096):
            said += part
    return said.decode()


@pytest.fixture(scope="module")
def steps() -> list[str]:
    return []


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A platform of two boards that any host can emulate."""
    path = tmp_path_factory.mktemp("boards") / "slow.toml"
    names = ("pi01", "pi02")
    hosts = "".join(f'[[host]]\nname = "{name}"\nmemory = "1 GiB"\n' for name in names)
    devices = "".join(f'[[device]]\nname = "{name}"\nrate = "0.02 GFLOP/s"\n' for name in names)
    path.write_text(f'[network]\nkind = "switch"\nbandwidth = "100 Mbit/s"\n{hosts}{devices}')
    return path


@pytest.fixture(scope="module")
def compiled_and_split(directory: Path, steps: list[str], boards: Path) -> tuple[CompileResult, DemoSplit]:
    return split_network("lenet", str(boards), "modnn", directory, steps.append)


@pytest.fixture(scope="module")
def split(compiled_and_split: tuple[CompileResult, DemoSplit]) -> DemoSplit:
    return compiled_and_split[1]


def test_shares_of_devices_make_up_the_network(split: DemoSplit) -> None:
    assert [share.device for share in split.shares] == ["pi01", "pi02"]
    assert max(share.layers for share in split.shares) <= split.layers
    assert sum(share.layers for share in split.shares) > split.layers
    assert sum(share.flops for share in split.shares) >= split.flops > 0
    assert all(0 < share.weights <= split.weights for share in split.shares)
    assert all(share.compute_s > 0 and share.message_s > 0 and share.wait_s >= 0 for share in split.shares)
    assert "of the time" in split.bottleneck


@pytest.mark.slow
def test_emulated_times_are_at_least_those_of_the_boards(split: DemoSplit, directory: Path) -> None:
    emulated = emulate_frames(split, directory)
    assert isinstance(emulated, EmulatedTimes)
    assert emulated.frames == EMULATED_FRAMES
    # The emulated boards compute 0.02 GFLOP/s, so a frame takes at least this long.
    assert split.flops / 0.02e9 <= emulated.single_device_s
    assert max(share.flops for share in split.shares) / 0.02e9 <= emulated.frame_s


def test_reports_why_nothing_was_emulated_without_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], boards: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["demo", "--network", "lenet", "--platform", str(boards), "--strategy", "modnn"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Not measured on emulated boards: network namespaces and rate limits need root: run it as root." in said
    assert "emulated on this host" not in said
    predicted = r"Predicted to be [\d.]+ times as fast as one board, not 2: "
    assert re.search(predicted + r"in a frame pi0\d computes \d+ ms, handles", said)


def test_all_checks_pass_and_bytes_match_the_plan(compiled_and_split: tuple[CompileResult, DemoSplit]) -> None:
    compiled, split = compiled_and_split
    verification = compiled.verify()
    assert [check.name for check in verification.checks] == ["exact", "output on pi01", "bytes"]
    assert verification.passed
    total = sum(share.sent for share in split.shares)
    assert f" {total} bytes a frame" in verification.checks[-1].detail


def test_writes_complete_artifact(split: DemoSplit, directory: Path, steps: list[str]) -> None:
    assert split.network == "lenet"
    assert verify(directory).passed
    assert [step.split()[0] for step in steps] == ["building", "splitting"]


def test_prints_each_table_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verification and emulation take most of a minute, in which a reader of a pipe has the first table."""
    printed = []

    def fake_verify(*_: object) -> Verification:
        printed.append(capsys.readouterr().out)
        return Verification((Check("bytes", True, "as predicted"),))

    def fake_emulate(*_: object) -> str:
        printed.append(capsys.readouterr().out)
        return "no root"

    monkeypatch.setattr(artifacts, "verify", fake_verify)
    monkeypatch.setattr(demo, "emulate_frames", fake_emulate)
    assert main(["demo", "--network", "lenet", "--platform", "rpi4x1", "--strategy", "single"]) == 0
    table, checks = printed
    assert table.startswith("lenet: 8 layers") and "\npi01 " in table
    assert checks == "\nbytes  ok  as predicted\n"
    assert "Not measured on emulated boards: no root." in capsys.readouterr().out


@pytest.mark.slow
def test_prints_only_a_table_of_80_columns_into_a_pipe(tmp_path: Path) -> None:
    done = command("--network", "lenet", "--platform", "rpi4x1", "--strategy", "single", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The host may be too busy to measure the costs of messages. A warning must then say so.
    assert all("are used instead of measured ones: the host was busy" in line for line in done.stderr.splitlines())
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [
        "lenet: 8 layers, 0.000846 GFLOP per frame, 0.247 MB of weights",
        "split over rpi4x1 by single; predicted ms per frame on the boards:",
    ]
    assert lines[4].split()[:5] == ["pi01", "8", "100.0%", "0.25", "0.0"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_shows_and_erases_progress_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all, ours)
        try:
            done = command("--network", "lenet", "--platform", "rpi4x1", stderr=theirs)
        finally:
            os.close(theirs)
        said = reading.result()
    os.close(ours)
    assert done.returncode == 0
    assert "measuring: " in said
    assert said.endswith("\x1b[2K")  # The last escape code erases the progress line.
    assert "measuring: " not in done.stdout


@pytest.mark.slow
def test_json_is_complete_and_output_keeps_the_artifact(tmp_path: Path) -> None:
    network = ("--network", "lenet", "--platform", "rpi4x2", "--strategy", "modnn")
    done = command(*network, "--json", "-o", "kept", cwd=tmp_path)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert {check["passed"] for check in found["verification"]["checks"]} == {True}
    assert [share["device"] for share in found["shares"]] == ["pi01", "pi02"]
    assert (tmp_path / "kept" / "artifact.json").is_file()


@pytest.mark.slow
def test_failed_check_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = (Check("exact", False, "seed 0: 3 of 10 elements differ"), Check("bytes", True, "as predicted"))
    monkeypatch.setattr(artifacts, "verify", lambda *_: Verification(checks))
    assert main(["demo", "--network", "lenet", "--platform", "rpi4x1"]) == 1
    printed = capsys.readouterr()
    assert "exact  FAILED  seed 0: 3 of 10 elements differ" in printed.out.splitlines()
    *_, line = printed.err.splitlines()  # On a busy host, warnings about measured costs come first.
    assert line == "dicompiler: error: demo: check exact failed: seed 0: 3 of 10 elements differ"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--network", "resnet5"), "unknown network 'resnet5' (did you mean 'resnet50'?)"),
        (("--network", "tiny", "--platform", "rpi4"), "unknown platform 'rpi4'"),
        (("--network", "tiny", "--strategy", "modn"), "unknown strategy 'modn' (did you mean 'modnn'?)"),
    ],
)
def test_reports_unknown_names_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1
