"""A compromised device that sends wrong messages: the error names it, and the honest device that reports it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.handmade import Made, partial, segment, steps
from support.hostile_device import Hostile, outcome
from support.running import emit, wait_until

from dicompiler.base.errors import RunError
from dicompiler.ir.onnx.model import Model, Weight
from dicompiler.ir.program import DeviceProgram, Program, TensorSpec, Transfer
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.failures import RANK_EXIT, RANK_SUSPECTED, DeviceFailure, find_root_cause
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.protocol import (
    HEADER_STRUCT,
    MAGIC,
    PROTOCOL_VERSION,
    MessageType,
)

OPTIONS = RunOptions(timeout_s=20, start_manually=("b",))
CASE = Callable[[Hostile, MessageChannel], object]


def chosen() -> Made:
    """Return a program in which device b sends an index to a. The Gather on a fails if the index is above 3."""
    w: dict[str, Weight] = {}
    one = segment("a0", "a", "(int64[1] x) => (float[1] out) <float[4] t = {1, 2, 3, 4}> { out = Gather(t, x) }", w)
    devices = (
        DeviceProgram("a", "a", (one,), steps("receive 0, run 0"), (), {"out": "out"}),
        DeviceProgram("b", "b", (), steps("send 0"), ("x",), {}),
    )
    x, out = (TensorSpec(name, kind, (1,)) for name, kind in (("x", onnx.TensorProto.INT64), ("out", 1)))
    program = Program(devices, (Transfer(0, "b", "a", x),), (x,), (out,), w, ((0, 0),))
    return program, Model(one.model, w), {"x": np.array([1], np.int64)}


def send_raw(*header: Any, payload: bytes = b"") -> CASE:
    """Send a header, completed by zeros, and a payload."""

    def act(_: Hostile, peer: MessageChannel) -> None:
        peer._connection._socket.sendall(HEADER_STRUCT.pack(*(*header, 0, 0, 0, 0, 0)[:7]) + payload)

    return act


def send_twice(_: Hostile, peer: MessageChannel) -> None:
    for _ in range(2):
        peer.send(MessageType.TENSOR, bytes(96), 2)


def close(_: Hostile, peer: MessageChannel) -> None:
    peer._connection._socket.shutdown(socket.SHUT_WR)


WRONG: dict[str, CASE] = {
    "not in the plan": send_raw(MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 1, 0, 96),
    "wrong length": send_raw(MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 0, 1 << 40),
    "wrong frame": send_raw(MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 70, 96),
    "twice": send_twice,
    "unknown type": send_raw(MAGIC, PROTOCOL_VERSION, 99),
    "wrong type": send_raw(MAGIC, PROTOCOL_VERSION, MessageType.BEGIN_FRAME),
    "change of roles": send_raw(MAGIC, PROTOCOL_VERSION, MessageType.ROLES_CHANGED, 0, 0, 1 << 40),
    "heartbeat with payload": send_raw(MAGIC, PROTOCOL_VERSION, MessageType.HEARTBEAT, 0, 0, 0, 7),
    "wrong version": send_raw(MAGIC, 9, MessageType.TENSOR),
    "other protocol": send_raw(b"HTTP", PROTOCOL_VERSION),
    "early end": lambda _, peer: peer.send(MessageType.BYE),
    "closed": close,
    "closed in message": lambda hostile, peer: (
        send_raw(MAGIC, PROTOCOL_VERSION, MessageType.TENSOR, 0, 2, 0, 96)(hostile, peer),
        close(hostile, peer),
    ),
}


def play(directory: Path, message: str, wrong: CASE, accuses_first: bool) -> None:
    """Do something wrong to device a, and report a as a runtime does that loses the connection to it."""
    hostile, ends = Hostile(directory, "b", message), list[Exception]()
    hostile.take_part("")
    peer = hostile.welcome("a")
    peer.start(hostile.loop, lambda _: None, lambda *_: None, ends.append)
    hostile.heard(MessageType.BEGIN_FRAME)
    accusation = {"message": "the connection to 'a' was lost: closed by the other end", "peer": "a"}
    if accuses_first:
        hostile.control.send_json(MessageType.ERROR, accusation)
    wrong(hostile, peer)
    if not accuses_first:
        wait_until(lambda: ends)
        hostile.control.send_json(MessageType.ERROR, accusation)
    wait_until(lambda: not hostile.control._is_reading)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_names_reporter_and_accused(wrong: str, tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path)
    error = outcome(directory, partial()[2], OPTIONS, lambda words: play(directory, words, WRONG[wrong], False))
    assert isinstance(error, RunError)
    assert str(error).startswith("device 'b': device 'a' reports: "), error


@pytest.mark.parametrize("wrong", ["twice", "closed"])
def test_names_both_if_compromised_device_accuses_first(wrong: str, tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path)
    error = outcome(directory, partial()[2], OPTIONS, lambda words: play(directory, words, WRONG[wrong], True))
    assert isinstance(error, RunError)
    assert "'a'" in str(error) and "'b'" in str(error) and " reports: " in str(error), error


def test_names_sender_of_value_that_cannot_be_computed_with(tmp_path: Path) -> None:
    made = chosen()
    directory = emit(made, tmp_path)

    def act(message: str) -> None:
        play(directory, message, lambda _, peer: peer.send(MessageType.TENSOR, b"\x09" + bytes(7)), False)

    error = outcome(directory, made[2], OPTIONS, act)
    assert isinstance(error, RunError)
    assert str(error).startswith("device 'a': segment 'a0': onnxruntime cannot run it: ")
    assert str(error).endswith("; the device computes with tensors from 'b'")


def greet_with_other_artifact(hostile: Hostile) -> None:
    hostile.digest = "0" * 64
    hostile.welcome("a")


def refuse(hostile: Hostile) -> None:
    connection, _ = hostile.listener.accept()
    text = b'{"message": "no"}'
    connection.sendall(HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, MessageType.ERROR, 0, 0, 0, len(text)) + text)


@pytest.mark.parametrize("greet", [greet_with_other_artifact, refuse], ids=["artifact", "refusal"])
def test_names_both_if_greeting_is_wrong(greet: Callable[[Hostile], object], tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path)

    def act(message: str) -> None:
        hostile = Hostile(directory, "b", message)
        hostile.greet()
        hostile.heard(MessageType.PEERS)
        greet(hostile)
        hostile.control.send(MessageType.READY)
        wait_until(lambda: not hostile.control._is_reading)

    error = outcome(directory, partial()[2], OPTIONS, act)
    assert isinstance(error, RunError)
    assert str(error).startswith("device 'b': device 'a' reports: "), error


def test_first_of_two_accusations_counts() -> None:
    def suspicion(reporter: str, device: str) -> DeviceFailure:
        return DeviceFailure(device, f"device {reporter!r} reports: it failed", reporter, RANK_SUSPECTED)

    end = DeviceFailure("a", "its process ended with exit code 1", "a", RANK_EXIT, is_unreachable=True)
    first, second = suspicion("a", "b"), suspicion("b", "a")
    assert find_root_cause([first, second, end]) == first
    assert find_root_cause([second, end, first]) == second
    assert find_root_cause([first, end]) == first
    assert find_root_cause([first, suspicion("b", "c")]) == suspicion("b", "c")
    assert find_root_cause([end]) == end
