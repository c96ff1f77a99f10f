"""Failures of the sockets target: the error names the device at fault, and all processes end at once."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.handmade import endless, failing, halo, partial
from support.kill_process import COORDINATOR, kill_once
from support.running import LIMIT_S, WAIT_S, emit, fake, pids, wait_until
from support.tampering import reseal

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets import artifact as sockets_artifact
from dicompiler_targets.sockets import device_connections
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.protocol import (
    HEADER_STRUCT,
    MAGIC,
    PROTOCOL_VERSION,
    FrameWindow,
    MessageHeader,
    MessageType,
    PeerRefused,
    ProtocolError,
    ReceiveFilter,
)
from dicompiler_targets.sockets.runtime.transport import Connection
from dicompiler_targets.sockets.target import SocketsTarget


class Run(threading.Thread):
    """A run in a separate thread; `outcome` is its result or error, `ended` the time of its end."""

    def __init__(self, directory: Path, inputs: Mapping[str, Any], frames: int, timeout: float = 60.0) -> None:
        super().__init__(daemon=True)
        self.arguments = directory, [inputs] * frames, RunOptions(timeout_s=timeout)
        self.outcome: Any = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.outcome = SocketsTarget().run(*self.arguments)
        except DicompilerError as error:
            self.outcome = error
        self.ended = time.monotonic()


def computing(directory: Path, device: str) -> bool:
    """Return True if the device's process has used more processor time than its start takes."""
    fields = Path(f"/proc/{pids(directory)[device]}/stat").read_text().rsplit(")")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 1.0


@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("moment_s", [0.0, 0.2, 0.8])
def test_killed_process_ends_run_and_is_named(victim: str, moment_s: float, tmp_path: Path) -> None:
    made = halo()
    run = Run(emit(made, tmp_path), made[2], 100_000)
    victims = wait_until(lambda: len(found := pids(tmp_path)) == 3 and found)
    time.sleep(moment_s)
    killed = time.monotonic()
    os.kill(victims[victim], signal.SIGKILL)
    run.join(WAIT_S)
    assert pids(tmp_path) == {}
    assert isinstance(run.outcome, RunError)
    assert str(run.outcome).startswith(f"device {victim!r}: its process was ended by signal 9 (SIGKILL); ")
    no_plan = f"the artifact has no plan for the failure of {victim!r}: compile with --tolerate-failures 1"
    assert no_plan in str(run.outcome) and "\n" not in str(run.outcome)
    assert run.ended - killed < LIMIT_S


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that was compiled for four devices, in its own directory."""
    directory = tmp_path_factory.mktemp("kill") / "artifact"
    dicompiler.compile(networks.build("tiny"), platform="rpi4x4", strategy="modnn", output=directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment_s"),
    [("pi01", 0.1), ("pi02", 0.9), ("pi03", 1.5), ("pi04", 0.6), (COORDINATOR, 0.3), (COORDINATOR, 1.2)],
)
def test_kill_leaves_no_process_and_no_output(victim: str, moment_s: float, compiled: Path) -> None:
    found = kill_once(compiled, victim, moment_s)
    if found.seconds > LIMIT_S:  # If the host was busy, a second attempt is allowed.
        found = kill_once(compiled, victim, moment_s)
    assert found.find_fault(LIMIT_S) == ""


def test_failure_ends_device_within_long_segment(tmp_path: Path) -> None:
    made = endless()
    run = Run(emit(made, tmp_path), made[2], 1)
    wait_until(lambda: "b" in pids(tmp_path) and computing(tmp_path, "b"))
    killed = time.monotonic()
    os.kill(pids(tmp_path)["a"], signal.SIGKILL)
    run.join(WAIT_S)
    assert run.ended - killed < LIMIT_S
    assert str(run.outcome).startswith("device 'a': its process was ended by signal 9")
    assert pids(tmp_path) == {}


def test_enforces_timeout(tmp_path: Path) -> None:
    made = endless()
    run = Run(emit(made, tmp_path), made[2], 1, timeout=1.0)
    begun = time.monotonic()
    run.join(WAIT_S)
    assert run.ended - begun < 1.0 + LIMIT_S
    # On a busy host, the devices may need more than this time to start, or a tensor may be late before the frame is.
    message = str(run.outcome)
    assert re.match(r"device '[ab]': .*did not (finish|connect|become ready for frames).* within 1 s", message)
    assert pids(tmp_path) == {}


def test_timeout_before_the_first_result_names_devices_that_have_not_finished(tmp_path: Path) -> None:
    made = halo()
    options = RunOptions(heartbeat_s=60)
    session = dicompiler.connect(emit(made, tmp_path), options, timeout=3)
    os.kill(pids(tmp_path)["b"], signal.SIGSTOP)
    with pytest.raises(RunError) as raised:
        session.infer(made[2])
    reports = r"device 'b': device '.' reports: tensor '.*' did not arrive in time"
    waits = r"('a', )?'b', 'c' did not finish frame 0 within 3 s: allow more time \(--timeout; in Python: timeout\)"
    assert re.fullmatch(f"{reports}; {waits}", str(raised.value)), raised.value
    assert pids(tmp_path) == {}


def test_timeout_before_a_device_has_connected(tmp_path: Path) -> None:
    made = halo()
    with pytest.raises(
        RunError, match=r"^device 'b': did not connect within 2 s: allow more time \(--timeout; in Python: timeout\)$"
    ):
        SocketsTarget().run(emit(made, tmp_path), [made[2]], RunOptions(timeout_s=2, start_manually=("b",)))


def test_timeout_while_devices_connect_names_the_remedy(tmp_path: Path) -> None:
    text = (
        r"did not (connect|finish the start|become ready).* within 0.001 s.*: allow more time \(--timeout; in Python: "
    )
    with pytest.raises(RunError, match=text):
        dicompiler.connect(emit(halo(), tmp_path), timeout=0.001)


def test_timeout_of_a_run_that_makes_progress_states_the_finished_frames(tmp_path: Path) -> None:
    made = halo()
    run = Run(emit(made, tmp_path), made[2], 1_000_000, timeout=2.0)
    run.join(WAIT_S)
    text = r"run: only \d+ of 1000000 frames were finished within 2 s: allow more time \(.*\); then: device '"
    assert isinstance(run.outcome, RunError) and re.match(text, str(run.outcome))
    assert pids(tmp_path) == {}


def test_names_hanging_device_and_not_waiting_ones(tmp_path: Path) -> None:
    made = halo()
    run = Run(emit(made, tmp_path), made[2], 100_000, timeout=2.0)
    wait_until(lambda: len(pids(tmp_path)) == 3)
    time.sleep(0.8)
    os.kill(pids(tmp_path)["a"], signal.SIGSTOP)
    run.join(WAIT_S)
    assert isinstance(run.outcome, RunError)
    assert str(run.outcome).startswith("device 'a': ")
    assert pids(tmp_path) == {}


def test_reports_error_of_segment(tmp_path: Path) -> None:
    made = failing()
    match = r"^device 'b': segment 'b0': onnxruntime cannot run it: .*out of data bounds"
    with pytest.raises(RunError, match=match) as error:
        SocketsTarget().run(emit(made, tmp_path), [made[2], {"x": np.array([9], np.int64)}], RunOptions(timeout_s=60))
    # Tolerating failures would not help, because the segment would fail on any device.
    assert "tolerate" not in str(error.value)
    assert pids(tmp_path) == {}


def test_broken_segment_names_device(tmp_path: Path) -> None:
    path = emit(halo(), tmp_path) / "b" / "segment001.onnx"
    path.write_bytes(bytes(path.stat().st_size))
    reseal(tmp_path)
    with pytest.raises(RunError, match=r"^device 'b': segment 'b1' cannot be loaded: "):
        SocketsTarget().run(tmp_path, [halo()[2]], RunOptions(timeout_s=60))


@pytest.mark.parametrize(("change", "found"), [("cut", "has 100 bytes, expected 800"), ("gone", "is missing")])
def test_damaged_file_names_device(change: str, found: str, tmp_path: Path) -> None:
    path = emit(halo(), tmp_path) / "a" / "weights.bin"
    data = path.read_bytes()
    path.unlink()
    if change == "cut":
        path.write_bytes(data[:100])
    with pytest.raises(RunError, match=rf"^device 'a': file weights.bin {found}: copy the device's directory again$"):
        SocketsTarget().run(tmp_path, [halo()[2]], RunOptions(timeout_s=60))


def test_reports_last_output_of_runtime_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = emit(halo(), tmp_path) / "c" / "runtime" / "segments.py"
    path.write_text("raise ImportError('onnxruntime is too old')\n")
    reseal(tmp_path)
    # The copied runtime in the artifact is started, as a user starts it on a board, and not the installed one.
    monkeypatch.setattr(device_connections, "RUNTIME_COMMAND", ("-m", "runtime"))
    monkeypatch.setattr(sockets_artifact, "check_bundled_sources", lambda *_: None)
    with pytest.raises(RunError, match=r"^device 'c': .* exit code 1: ImportError: onnxruntime is too old$"):
        SocketsTarget().run(tmp_path, [halo()[2]], RunOptions(timeout_s=60))
    assert pids(tmp_path) == {}


def test_rejects_directory_of_another_artifact(tmp_path: Path) -> None:
    emit(halo(), tmp_path / "1")
    emit(halo(channels=5), tmp_path / "2")
    (tmp_path / "1" / "b").rename(tmp_path / "old")
    (tmp_path / "2" / "b").rename(tmp_path / "1" / "b")
    with pytest.raises(
        DicompilerError, match=r"1/b/manifest\.json: .*: compile the model again, or copy the file again$"
    ):
        SocketsTarget().run(tmp_path / "1", [halo()[2]], RunOptions(timeout_s=60))
    assert pids(tmp_path / "1") == {}


SCRIPT = """
import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from support.handmade import endless
from dicompiler.plugin_api import RunOptions
from dicompiler_targets.sockets.target import SocketsTarget
SocketsTarget().run(Path(sys.argv[1]), [endless()[2]], RunOptions(timeout_s=60))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_devices_end_with_coordinator(sign: signal.Signals, tmp_path: Path) -> None:
    emit(endless(), tmp_path)
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *paths]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as coordinator:
        wait_until(lambda: "b" in pids(tmp_path) and computing(tmp_path, "b"))
        coordinator.send_signal(sign)
        sent = time.monotonic()
        wait_until(lambda: pids(tmp_path) == {}, LIMIT_S)
        _, errors = coordinator.communicate(timeout=WAIT_S)
    assert time.monotonic() - sent < LIMIT_S + 1
    assert (b"KeyboardInterrupt" in errors) == (sign is signal.SIGINT)


def test_rejects_wrong_length_before_allocation(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener):
        with one.meet(listener, {"device": "b", "digest": one.digest}) as peer:
            one.heard(MessageType.READY)
            # The test never sends the payload, so only a device that checks the header first can answer.
            peer.sendall(HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 0, 1 << 40))
            message = one.heard(MessageType.ERROR)["message"]
        assert message == "from 'b': TENSOR 2 ('pb') has 1099511627776 bytes, expected 96"
        assert "expected 96" in one.ended()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            (MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 1, 0, 96),
            "received TENSOR 1, which is not in the plan",
        ),
        (
            (MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 7, 96),
            "TENSOR 2 ('pb') is for frame 7, but frames 0 to 0 are in flight",
        ),
        ((MAGIC, PROTOCOL_VERSION, MessageType.BEGIN_FRAME, 0, 0, 0, 0), "received BEGIN_FRAME of 0 bytes"),
        ((MAGIC, PROTOCOL_VERSION, 99, 0, 0, 0, 0), "received a message of unknown type 99 with flags 0"),
        (
            (MAGIC, 9, MessageType.TENSOR, 0, 2, 0, 96),
            f"the other end uses protocol version 9, expected {PROTOCOL_VERSION}: copy one artifact to both",
        ),
        (
            (b"HTTP", PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 0, 96),
            "the other end does not use dicompiler's protocol",
        ),
    ],
)
def test_reports_invalid_message_of_peer(header: Any, message: str, tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener):
        with one.meet(listener, {"device": "b", "digest": one.digest}) as peer:
            one.heard(MessageType.READY)
            peer.sendall(HEADER_STRUCT.pack(*header))
            assert one.heard(MessageType.ERROR)["message"] == f"from 'b': {message}"
        one.ended()


def test_rejects_duplicate_tensor(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener):
        with one.meet(listener, {"device": "b", "digest": one.digest}) as peer:
            one.heard(MessageType.READY)
            peer.sendall((HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 0, 96) + bytes(96)) * 2)
            assert "received TENSOR 2 ('pb') twice" in one.heard(MessageType.ERROR)["message"]
        one.ended()


def test_devices_of_different_artifacts_refuse_each_other(tmp_path: Path) -> None:
    words = "devices 'b' and 'a' have different artifacts: copy the same one to both"
    with fake(emit(partial(), tmp_path)) as (one, listener):
        with one.meet(listener, {"device": "b", "digest": "0" * 64}) as peer:
            assert one.heard(MessageType.ERROR)["message"] == words
            with pytest.raises(PeerRefused, match=words):
                MessageChannel(Connection(peer)).receive_greeting(one.end)
        assert words in one.ended()


def test_names_disconnected_peer(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener):
        with one.meet(listener, {"device": "b", "digest": one.digest}):
            one.heard(MessageType.READY)
        message = one.heard(MessageType.ERROR)
        assert message["peer"] == "b"
        assert message["message"].startswith("the connection to 'b' was lost")
        one.ended()


def test_device_ends_when_coordinator_disconnects(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener), one.meet(listener, {"device": "b", "digest": one.digest}):
        one.heard(MessageType.READY)
        gone = time.monotonic()
        one.control.close()
        assert one.ended() == "a: the connection to the coordinator ended: closed by the other end\n"
        assert time.monotonic() - gone < LIMIT_S


def test_ignores_unrelated_connection(tmp_path: Path) -> None:
    made = halo()
    run = Run(emit(made, tmp_path), made[2], 1)
    port = wait_until(lambda: listening(tmp_path))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        run.join(WAIT_S)
    assert not isinstance(run.outcome, Exception)


def listening(directory: Path) -> int:
    """Return the coordinator's port, as its devices know it."""
    for pid in pids(directory).values():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--coordinator" in words:
            return int(words[words.index(b"--coordinator") + 1].split(b":")[1])
    return 0


def test_checks_tensors_against_plan() -> None:
    expected = {3: {"name": "t", "bytes": 8}, 4: {"name": "u", "bytes": None}}
    window = FrameWindow(2)
    gate = ReceiveFilter([expected], window)
    for frame in range(5):
        window.finish(frame)
    gate.check(MessageHeader(MessageType.TENSOR, 3, 5, 8))
    gate.check(MessageHeader(MessageType.OUTPUT, 4, 6, 1 << 31))
    for header in (
        MessageHeader(MessageType.TENSOR, 3, 6, 9),
        MessageHeader(MessageType.TENSOR, 3, 6, 0),
        MessageHeader(MessageType.TENSOR, 4, 5, (1 << 31) + 1),
        MessageHeader(MessageType.TENSOR, 2, 5, 8),
        MessageHeader(MessageType.TENSOR, 3, 4, 8),
        MessageHeader(MessageType.TENSOR, 3, 7, 8),
        MessageHeader(MessageType.TENSOR, 3, 5, 8),
    ):
        with pytest.raises(ProtocolError):
            gate.check(header)
