"""`compile` warns if it replaces an artifact that processes on this host use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import pids, wait_until
from support.swapping import compile_times, factor_of, frame

import dicompiler
from dicompiler.target.artifact_lock import is_used
from dicompiler_targets.sockets.target import SocketsTarget

WARNING = "build: a run, a session or a device on this host still uses the artifact that was replaced"


def warnings_of_compile(caplog: pytest.LogCaptureFixture, factor: int, directory: Path, strategy: str) -> list[str]:
    """Compile into a directory, and return the warnings about processes that use the replaced artifact."""
    caplog.clear()
    with caplog.at_level("WARNING", "dicompiler"):
        compile_times(factor, directory, strategy=strategy)
    return [message for message in caplog.messages if "still uses" in message]


@pytest.mark.parametrize("strategy", ["modnn", "single"])
def test_warns_if_a_session_uses_the_artifact(tmp_path: Path, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """With strategy `single`, the device is in the process of the session."""
    build = compile_times(3, tmp_path / "build", strategy=strategy)
    files = sorted(build.rglob("*"))
    with dicompiler.connect(build) as session:
        assert is_used(build) and sorted(build.rglob("*")) == files
        # The bytes are the same, so nothing was replaced.
        assert warnings_of_compile(caplog, 3, build, strategy) == []
        (warning,) = warnings_of_compile(caplog, 5, build, strategy)
        assert WARNING in warning
        assert factor_of(session.infer(frame(1)), 1) == 3
    assert warnings_of_compile(caplog, 3, build, strategy) == [] and not is_used(build)


def test_killed_devices_and_copies_do_not_use_the_artifact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = compile_times(3, tmp_path / "build")
    copy = tmp_path / "board" / "pi01"
    shutil.copytree(build / "pi01", copy)
    session = f"import dicompiler, signal\nwith dicompiler.connect({str(build)!r}):\n    signal.pause()"
    command = [sys.executable, "-m", "runtime", "--resident", "--insecure", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    client = subprocess.Popen([sys.executable, "-c", session], env=environment)
    board = subprocess.Popen(command, cwd=copy, env={**environment, "DICOMPILER_TOKEN": "a secret of the test"})
    try:
        wait_until(lambda: len(pids(build)) == 4 and is_used(build))
        for process in pids(build).values():
            # The other devices end by themselves when they have lost the first one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        client.kill()
        client.wait()
        wait_until(lambda: not is_used(build))
        assert warnings_of_compile(caplog, 5, build, "modnn") == [] and board.poll() is None
    finally:
        for process in (client, board):
            process.kill()
            process.wait()


def test_runs_of_all_targets_use_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, found = compile_times(3, tmp_path / "build", strategy="single"), list[bool]()
    monkeypatch.setattr(SocketsTarget, "run", lambda _target, directory, *_: found.append(is_used(directory)))
    dicompiler.run(build)
    assert found == [True] and not is_used(build)


def test_without_locks_no_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = compile_times(3, tmp_path / "build", strategy="single")

    def refuse(*_: object) -> None:
        raise OSError("the file system has no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with dicompiler.connect(build) as session:
        assert not is_used(build)
        assert factor_of(session.infer(frame(1)), 1) == 3
