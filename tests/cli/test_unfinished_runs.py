"""Logs of runs that end before all frames are finished."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.running import pids, wait_until

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.cli.options import StreamOptions
from dicompiler.driver.metrics_server import MetricsServer
from dicompiler.driver.run_log import FrameRecorder, load_log, read_log
from dicompiler.target.manifest import load_artifact
from dicompiler.target.run_records import FrameTimes, RunOptions

FINISHED_FRAMES = 3
FRAME_COUNT = "dicompiler_frame_seconds_count"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "net"
    dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "modnn", output=directory, allow_worse=True)
    return directory


def run_until(artifact: Path, log: Path, end: Callable[[], None]) -> None:
    """Run endless frames, and call `end` after FINISHED_FRAMES of them."""
    finished: list[FrameTimes] = []

    def count(times: FrameTimes) -> None:
        finished.append(times)
        if len(finished) == FINISHED_FRAMES:
            end()

    StreamOptions(frames=10**6, log=log).run(artifact, None, RunOptions(on_frame=count))


def check_log(artifact: Path, log: Path, cause: str) -> dict[str, Any]:
    written = read_log(log)
    assert len(written["frames_s"]) >= FINISHED_FRAMES and cause in written["unfinished"]
    assert 0 < max(written["frames_s"]) <= written["total_s"]
    assert all(device["compute_s"] > 0 for device in written["devices"])
    with pytest.raises(DicompilerError, match=r"run\.json: the run ended early \(.*\), so .*: run .* again with --log"):
        load_log(log, artifact, load_artifact(artifact))
    return written


def test_interrupted_run_logs_the_finished_frames(
    artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="dicompiler")
    with pytest.raises(KeyboardInterrupt):
        run_until(artifact, tmp_path / "run.json", lambda: os.kill(os.getpid(), signal.SIGINT))
    count = len(check_log(artifact, tmp_path / "run.json", "interrupted")["frames_s"])
    assert f"run.json: the log has the {count} finished frames" in caplog.text


def test_terminated_command_logs_the_finished_frames(artifact: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dicompiler", "run", str(artifact), "--frames", "1000000"]
    process = subprocess.Popen(
        [*command, "--log", "run.json", "--metrics", "127.0.0.1:0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    url = process.stderr.readline().removeprefix("metrics: ").strip()

    def count_frames() -> float:
        with urllib.request.urlopen(url) as page:
            (line,) = [line for line in page.read().decode().splitlines() if line.startswith(FRAME_COUNT)]
        return float(line.split()[-1])

    assert wait_until(lambda: count_frames() >= FINISHED_FRAMES)
    process.terminate()
    errors = process.communicate(timeout=60)[1]
    count = len(check_log(artifact, tmp_path / "run.json", "terminated")["frames_s"])
    assert process.returncode == 143 and errors.splitlines() == [
        f"dicompiler: warning: run.json: the log has the {count} finished frames",
        "dicompiler: terminated",
    ]


def test_failed_run_logs_the_finished_frames(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="pi02"):
        run_until(artifact, tmp_path / "run.json", lambda: os.kill(pids(artifact)["pi02"], signal.SIGKILL))
    check_log(artifact, tmp_path / "run.json", "pi02")


def test_log_is_written_next_to_metrics(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, served = MetricsServer.record_frame, list[FrameTimes]()

    def record_and_interrupt(server: MetricsServer, times: FrameTimes) -> None:
        record(server, times)
        served.append(times)
        if len(served) == FINISHED_FRAMES:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MetricsServer, "record_frame", record_and_interrupt)
    stream = StreamOptions(frames=10**6, log=tmp_path / "run.json", metrics="127.0.0.1:0")
    with pytest.raises(KeyboardInterrupt):
        stream.run(artifact, None, RunOptions())
    check_log(artifact, tmp_path / "run.json", "interrupted")


def test_run_without_finished_frames_writes_no_log(
    artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="dicompiler")
    stream = StreamOptions(frames=1, log=tmp_path / "run.json")
    with pytest.raises(DicompilerError):
        stream.run(artifact, {}, RunOptions())
    assert not caplog.text
    # No frame can be finished without the device that is to be started manually.
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        stream.run(artifact, None, RunOptions(start_manually=("pi02",)))
    assert (
        caplog.messages[-1]
        == f"{tmp_path}/run.json: no log is written: target 'sockets' has reported no finished frame"
    )
    assert not list(tmp_path.iterdir())


def test_finished_run_is_not_marked(artifact: Path, tmp_path: Path) -> None:
    stream = StreamOptions(frames=2, log=tmp_path / "run.json")
    directory, result = stream.run(artifact, None, RunOptions())
    stream.write_log(directory, result, RunOptions(), None)
    assert "unfinished" not in json.loads((tmp_path / "run.json").read_text())


def test_run_is_not_shorter_than_its_frames() -> None:
    """Two frames began together, and the second one is recorded at once, although it took ten seconds longer."""
    recorder = FrameRecorder()
    record = recorder.observe(RunOptions()).on_frame
    assert record is not None
    for seconds in (1.0, 11.0):
        record(FrameTimes(seconds, {}))
    assert recorder.make_result([]).total_s >= 11.0
