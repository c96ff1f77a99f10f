"""Resident devices with real processes: admission of clients, and the state after clients or devices end."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.failing_devices import DEVICES, kinds, survivor
from support.handmade import Made, halo
from support.printed import column
from support.resident_devices import TOKEN, run_resident, start
from support.running import emit, pids, wait_until
from support.unknown_clients import UnknownClients

import dicompiler
from dicompiler.base.errors import RunError, UsageError
from dicompiler.base.schema import validate
from dicompiler.cli import main
from dicompiler.driver.artifact import open_service
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector, ResidentCluster
from dicompiler_targets.sockets.runtime import STATE_DIRECTORY
from dicompiler_targets.sockets.runtime.daemon import MAX_LOG_BYTES
from dicompiler_targets.sockets.runtime.handshake import TOKEN_VARIABLE
from dicompiler_targets.sockets.runtime.transport import VERIFICATION_ERRORS, CertificateError
from dicompiler_targets.sockets.session import ClusterSession
from dicompiler_targets.sockets.target import SocketsTarget

TGKILL = {"x86_64": 234}.get(platform.machine(), 131)
"""The number of the system call that gives a signal to one thread."""


def idle(directory: Path) -> bool:
    """Return True if no device serves a client."""
    return all(one.is_responding and not one.client for one in open_service(directory, RunOptions()).status())


def open_files(processes: dict[str, int]) -> list[int]:
    """Return the number of open files of each device, when it no longer changes."""

    def count_files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in processes.values()]

    last, since = count_files(), time.monotonic()
    end = since + 20
    while time.monotonic() < min(since + 0.5, end):
        time.sleep(0.02)
        if (now := count_files()) != last:
            last, since = now, time.monotonic()
    return last


@pytest.fixture
def net(tmp_path: Path) -> tuple[Path, Made]:
    made = halo()
    return emit(made, tmp_path / "net"), made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_whichever_thread_gets_signal(net: tuple[Path, Made], number: int) -> None:
    """The kernel can deliver the signal to any thread, as happens to a process that was just continued."""
    directory, _ = net
    with run_resident(directory):
        pid = pids(directory)["a"]
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
        assert ctypes.CDLL(None, use_errno=True).syscall(TGKILL, pid, threads[-1], number) == 0
        wait_until(lambda: "a" not in pids(directory))
        assert "ended by a signal" in (directory / STATE_DIRECTORY / "a.log").read_text()


def test_serves_clients_in_turn_and_rejects_unknown_ones(
    net: tuple[Path, Made], capfd: pytest.CaptureFixture[str]
) -> None:
    """tests/targets/test_deploy.py does the same with TLS."""
    directory, made = net
    right = SocketsTarget().run(directory, [made[2]], RunOptions(timeout_s=60)).outputs[0]
    with run_resident(directory) as cluster:
        before = pids(directory)
        crowds = [UnknownClients(60, directory, name, cluster.digest) for name in "ab"]
        for _ in range(2):
            with dicompiler.connect(directory, timeout=60) as session:
                assert all(np.array_equal(found["out"], right["out"]) for found in session.stream([made[2]] * 20))
            assert [report.device for report in session.reports] == ["a", "b", "c"]
        for crowd in crowds:
            crowd.stop()
        # If a client is killed during a frame, the device drops it at once, and accepts another client.
        session = dicompiler.connect(directory, timeout=60)
        next(iter(session.stream([made[2]] * 3)))
        session.__exit__(RuntimeError, None, None)
        result = SocketsTarget().run(directory, [made[2]] * 2, RunOptions(timeout_s=60))
        assert np.array_equal(result.outputs[1]["out"], right["out"])
        assert pids(directory) == before
        wait_until(lambda: idle(directory))
        capfd.readouterr()
        assert main(["status", str(directory), "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        validate({"status": document}, "results", "status --json")
        for one in document["devices"]:
            assert (one["digest"], one["runs"], one["client"], one["pid"]) == (
                cluster.digest, 4, "", before[one["device"]]
            )  # fmt: skip
            assert one["frames"] >= 42 and one["memory_peak"] >= one["memory"] > 1 << 24
            assert abs(time.time() - one["since"]) < 600
        wait_until(lambda: idle(directory))
        descriptors = open_files(before)
        for _ in range(3):
            with dicompiler.connect(directory, timeout=60) as session:
                session.infer(made[2])
        wait_until(lambda: idle(directory))
        assert open_files(before) == descriptors
        with dicompiler.connect(directory, timeout=60) as session:
            message = r"^device 'a' at 127\.0\.0\.1:\d+: the device serves another client, 127\.0\.0\.1, since .*: wait"
            with pytest.raises(RunError, match=message):
                dicompiler.connect(directory, timeout=60)
            assert np.array_equal(session.infer(made[2])["out"], right["out"])


def test_reports_why_client_is_refused(net: tuple[Path, Made], capfd: pytest.CaptureFixture[str]) -> None:
    directory, made = net
    with run_resident(directory) as cluster:
        ResidentCluster(directory, cluster.digest, cluster.addresses, "a stranger's").save()
        with pytest.raises(RunError, match="does not know this run's token"):
            dicompiler.connect(directory, timeout=60)
        ResidentCluster(directory, "sha256:0", cluster.addresses, TOKEN).save()
        with pytest.raises(RunError, match=r"its resident devices run another artifact: stop them first \('dicompiler"):
            SocketsTarget().run(directory, [made[2]], RunOptions())
        # The device itself refuses another artifact, even if the state file does not show the difference.
        cluster.save()
        options = RunOptions(timeout_s=20)
        other = replace(SocketsArtifact.load(directory), digest="sha256:0")
        connector = DaemonConnector(cluster, options)
        with pytest.raises(RunError, match="the device runs another artifact: stop the device first"):
            ClusterSession(other, options, connector, connector)
        with pytest.raises(UsageError, match="omit --start-manually, or stop them first"):
            dicompiler.connect(directory, RunOptions(start_manually=("a",)))
        done = subprocess.run(
            [sys.executable, "-m", "runtime", "--resident", "--listen", "127.0.0.1:0"],
            cwd=directory / "a", env=os.environ | {TOKEN_VARIABLE: TOKEN}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "the device is running already" in done.stderr
        os.kill(pids(directory)["b"], signal.SIGKILL)
        wait_until(lambda: "b" not in pids(directory))
        # The device was killed, so it could not remove its state file. The test removes the file.
        (directory / STATE_DIRECTORY / "b.json").unlink()
        with pytest.raises(
            RunError,
            match=r"device 'b' at .*: the device cannot be reached: Connection refused: start the device again",
        ):
            dicompiler.connect(directory, timeout=60)
        assert main(["status", str(directory)]) == 1
        printed = capfd.readouterr().out
        assert column(printed, "client")["b"] == "-"
        assert column(printed, "error")["b"].startswith("Connection refused: start")
    with pytest.raises(UsageError, match="no resident devices"):
        open_service(directory, RunOptions()).status()


@pytest.mark.slow
def test_resident_device_fails_and_returns(tmp_path: Path) -> None:
    one = survivor(1, [(name,) for name in DEVICES], tmp_path / "net")
    with run_resident(one.directory) as cluster:
        os.kill(pids(one.directory)["c"], signal.SIGKILL)
        wait_until(lambda: "c" not in pids(one.directory))
        with dicompiler.connect(one.directory, RunOptions(in_flight=4), 60) as session:
            assert isinstance(session, ClusterSession)

            def plot() -> Iterator[None]:
                yield from [None] * 10
                where = f"127.0.0.1:{cluster.addresses['c'][1]}"
                threading.Thread(target=start, args=(one.directory, "c", where)).start()
                end = time.monotonic() + 30
                while len(session.events) < 3 and time.monotonic() < end:
                    yield
                yield from [None] * 10

            one.stream(session, plot())
        assert kinds(session) == [("failure", "c"), ("takeover", "c"), ("return", "c")]
        reported = {status.device: status for status in cluster.status(RunOptions())}
        assert reported["a"].runs == reported["c"].runs == 1 and reported["a"].frames > reported["c"].frames > 0


def test_limits_log_size(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:];"
        "from dicompiler_targets.sockets.runtime.daemon import DaemonLog; import os;"
        "log = DaemonLog(Path(sys.argv[1]));"
        "[(log.write('x' * 10_000), os.write(1, b'native\\n')) for _ in range(300)]"
    )
    path = tmp_path / "logs" / "a.log"
    subprocess.run([sys.executable, "-c", code, str(path), *sys.path], check=True, timeout=60)
    assert sorted(found.name for found in path.parent.iterdir()) == ["a.log", "a.log.1"]
    assert path.stat().st_size <= MAX_LOG_BYTES < Path(f"{path}.1").stat().st_size < MAX_LOG_BYTES + 20_000
    assert path.read_bytes().endswith(b"native\n")


def test_status_is_watched_until_interrupt(tmp_path: Path) -> None:
    directory = emit(halo(), tmp_path / "a")
    command = [sys.executable, "-m", "dicompiler", "status", str(directory)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with run_resident(directory):
        with subprocess.Popen([*command, "--watch", "0.1"], env=env, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            lines: list[str] = []
            while sum(line.startswith("device ") for line in lines) < 3:
                lines.append(watch.stdout.readline())
                assert lines[-1], lines
            watch.send_signal(signal.SIGINT)
            watch.communicate(timeout=60)
        assert watch.returncode == 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", lines[0])
        both = subprocess.run([*command, "--watch", "1", "--json"], env=env, capture_output=True, text=True)
        assert both.returncode == 2 and "--watch shows a table: omit --json" in both.stderr


def test_errors_of_devices_have_one_remedy_with_a_whole_command(tmp_path: Path) -> None:
    cluster = ResidentCluster(tmp_path / "net", "", {})
    refused = cluster.describe_error(CertificateError(VERIFICATION_ERRORS[23]))
    assert refused.count("'dicompiler ") == 1 and "'dicompiler keys DIR --revoke DEVICE --renew'" in refused
    assert cluster.describe_error(ConnectionRefusedError(111, "Connection refused")) == (
        f"Connection refused: start the device again ('dicompiler deploy {tmp_path / 'net'} --hosts HOSTS --resident')"
    )
