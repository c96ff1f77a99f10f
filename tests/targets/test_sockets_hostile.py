"""A hostile device or owner of one key: it cannot make the run blame another device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.handmade import endless, partial
from support.hostile_device import Hostile, outcome
from support.running import MEMBER, WAIT_S, by_hand, emit, fake, pids

from dicompiler.base.errors import RunError
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.device_connections import read_status
from dicompiler_targets.sockets.runtime.protocol import MessageType, ProtocolError

OPTIONS = RunOptions(timeout_s=20, start_manually=("b",))


@pytest.mark.parametrize(
    "changes",
    [{"digest": "0" * 64, "proof": ""}, {"proof": ""}, {"proof": "0" * 64}, {"run": "0" * 16}, {"proof": None}],
    ids=str,
)
def test_rejects_device_without_token(changes: Any, tmp_path: Path) -> None:
    made = partial()
    directory, words = emit(made, tmp_path), []

    def act(message: str) -> None:
        stranger = Hostile(directory, "b", message)
        stranger.greet(**changes)
        words.append(stranger.heard(MessageType.ERROR)["message"])
        assert by_hand(directory, message).wait(WAIT_S) == 0

    result = outcome(directory, made[2], OPTIONS, act)
    assert np.array_equal(result.outputs[0]["out"], run_model(made[1], made[2])["out"])
    assert "different runs" in words[0] or "does not know this run's token" in words[0]


def test_token_is_not_on_command_line(tmp_path: Path) -> None:
    made = endless()
    directory, lines = emit(made, tmp_path), []

    def act(message: str) -> None:
        token = Hostile(directory, "b", message).credentials.token
        assert len(token) == 32
        lines.extend(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids(directory).values())
        assert not any(token in line for line in lines)

    outcome(directory, made[2], RunOptions(timeout_s=2, start_manually=("b",)), act)
    assert lines


def test_key_of_another_device_does_not_end_run(tmp_path: Path) -> None:
    made = partial()
    directory, keys, words = emit(made, tmp_path / "artifact"), tmp_path / "keys", []
    make_keys("ab", keys)

    def act(message: str) -> None:
        hostile = Hostile(directory, "b", message, keys / "devices" / "a")
        hostile.greet()
        words.append(hostile.heard(MessageType.ERROR)["message"])
        assert by_hand(directory, message.replace("KEYS", str(keys / "devices" / "b"))).wait(WAIT_S) == 0

    result = outcome(directory, made[2], RunOptions(timeout_s=20, start_manually=("b",), keys=keys), act)
    assert np.array_equal(result.outputs[0]["out"], run_model(made[1], made[2])["out"])
    assert words[0].startswith("device 'b' has the certificate of 'dicompiler:device:a'")


@pytest.mark.parametrize("address", [["10.9.8.7", 80], ["127.0.0.2", 80], ["localhost", 80], ["127.0.0.1", 0], [1, 2]])
def test_device_cannot_redirect_peers(address: Any, tmp_path: Path) -> None:
    made = partial()
    directory = emit(made, tmp_path)
    error = outcome(directory, made[2], OPTIONS, lambda words: Hostile(directory, "b", words).greet(address=address))
    assert isinstance(error, RunError)
    assert str(error).startswith(
        "device 'b': the device's greeting"
        if address[0] == 1
        else f"device 'b': the device's address for peers is {address[0]!r}"
    )


def test_reports_early_bye_at_once(tmp_path: Path) -> None:
    made = partial()
    directory = emit(made, tmp_path)

    def act(message: str) -> None:
        hostile = Hostile(directory, "b", message)
        hostile.greet()
        hostile.heard(MessageType.PEERS)
        peer = hostile.welcome("a")
        peer.start(hostile.loop, lambda _: None, lambda *_: None, lambda _: None)
        hostile.control.send(MessageType.READY)
        hostile.heard(MessageType.BEGIN_FRAME)
        peer.send(MessageType.BYE)
        time.sleep(5)

    begun = time.monotonic()
    error = str(outcome(directory, made[2], RunOptions(timeout_s=60, start_manually=("b",)), act))
    assert error.startswith("device 'b': device 'a' reports: ")
    assert "received BYE while frame 0" in error or "sent BYE before the end of the run" in error
    assert time.monotonic() - begun < 15


def test_escapes_and_limits_messages_of_devices(tmp_path: Path) -> None:
    made = partial()
    directory = emit(made, tmp_path)

    def act(message: str) -> None:
        hostile = Hostile(directory, "b", message)
        hostile.greet()
        hostile.control.send_json(
            MessageType.ERROR, {"message": "\x1b[2Jall is well\n\x07" + 200_000 * "x", "peer": None}
        )

    error = str(outcome(directory, made[2], OPTIONS, act))
    assert error.startswith("device 'b': \\x1b[2Jall is well \\x07xxx")
    assert error.isprintable()
    assert len(error) < 1600


REPORT: dict[str, Any] = {
    "compute_s": 1.0, "wait_s": 1.0, "send_s": 1.0, "sent": {"0": 1}, "segments": [1.0], "memory_peak": 1,
    "timeline": [["run", 0, 0, 0.0, 1.0]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_peak": float("inf")}, "field 'memory_peak' of the report is inf: expected a number of 0 or more"),
        ({"compute_s": float("nan")}, "field 'compute_s' of the report is nan: expected"),
        ({"wait_s": -1}, "field 'wait_s' of the report is -1: expected"),
        ({"send_s": "much"}, "field 'send_s' of the report is 'much': expected"),
        ({"sent": {"0": float("inf")}}, "field 'sent[0]' of the report is inf: expected"),
        ({"sent": {"x": 1}}, "field 'sent' of the report has a key that is not the index of a transfer"),
        ({"segments": [1, 10**4000]}, "field 'segments[1]' of the report is a huge integer: expected"),
        ({"segments": None}, "field 'segments' of the report is None"),
        ({"timeline": [["run", 0, 0, 0.0, float("-inf")]]}, "field 'timeline[0]' of the report is -inf: expected"),
        ({"timeline": [["sleep", 0, 0, 0.0, 1.0]]}, "field 'timeline[0]' of the report is ['sleep', 0, 0, 0.0, 1.0]"),
    ],
    ids=str,
)
def test_names_invalid_field_of_report(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    made = partial()
    directory = emit(made, tmp_path)

    def act(message: str) -> None:
        hostile = Hostile(directory, "b", message)
        hostile.take_part("a")
        hostile.control.send_json(MessageType.REPORT, REPORT | change)

    error = outcome(directory, made[2], OPTIONS, act)
    assert isinstance(error, RunError)
    assert str(error).startswith(f"device 'b': sent invalid data: {words}")


def test_reads_valid_status_and_names_invalid_field() -> None:
    status = {"device": "b", "digest": "d", "pid": 7, "since": 1.5, "memory": 10, "unknown": 1}
    found = read_status("h:1", status)
    assert (found.device, found.address, found.pid, found.since, found.memory) == ("b", "h:1", 7, 1.5, 10)
    for name, value in (("pid", float("inf")), ("since", float("nan")), ("client", 7), ("device", None)):
        with pytest.raises(ProtocolError, match=f"field '{name}' of the report is "):
            read_status("h:1", {**status, name: value})


def test_device_rejects_peer_of_another_run(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener):
        with one.meet(listener, {"device": "b", "digest": one.digest, "proof": MEMBER.make_proof("b", "c")["proof"]}):
            message = one.heard(MessageType.ERROR)
        assert message["peer"] == "b"
        assert "the other end does not know this run's token" in message["message"]


def test_device_rejects_coordinator_of_another_run(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path)) as (one, listener):
        one.control.send_json(MessageType.PEERS, {"addresses": {"b": listener.getsockname()}, "in_flight": 1})
        assert "the coordinator cannot be trusted: the other end does not know this run's token" in one.ended()
