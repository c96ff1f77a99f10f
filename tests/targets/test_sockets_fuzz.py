"""Invalid bytes on connections: the receiver rejects them, allocates no more than planned, and ends.

Thousands of streams are tested in memory, and some over real connections to real processes.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fuzz_messages import IN_FLIGHT, RawMessage, Receiver, fuzz, mutate_stream
from support.handmade import halo, partial
from support.running import MEMBER, WAIT_S, by_hand, control, emit, fake, wait_until

from dicompiler.base.schema import load_json
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.protocol import MessageType
from dicompiler_targets.sockets.runtime.transport import Connection
from dicompiler_targets.sockets.target import SocketsTarget


@pytest.mark.parametrize(("make_network", "device"), [(halo, "a"), (halo, "b"), (partial, "a")])
def test_rejects_mutated_messages_within_planned_memory(make_network: Any, device: str, tmp_path: Path) -> None:
    emit(make_network(), tmp_path)
    receiver = Receiver(tmp_path, load_json(tmp_path / device / "manifest.json"))
    for peer, frames in receiver.streams():
        assert receiver.take(b"".join(frame.pack() for frame in frames), peer, 7) == "all taken"
    receiver.outcomes.clear()
    fuzz(receiver, range(3000))
    # Each outcome must occur often; otherwise the fuzzing does not test it.
    assert min(receiver.outcomes[name] for name in ("all taken", "refused", "cut short")) > 50
    assert sum(receiver.outcomes.values()) == 3000


def tell(address: Any, data: bytes) -> None:
    """Connect, send the data and disconnect; the other end may have closed the connection already."""
    with contextlib.suppress(OSError), socket.create_connection(tuple(address)) as stranger:
        stranger.sendall(data)


def greetings(count: int) -> list[bytes]:
    """Yield invalid greetings of a device that does not exist."""
    hello = [RawMessage(MessageType.HELLO, payload=b'{"device": "nobody", "digest": "0", "address": ["127.0.0.1", 1]}')]
    return [mutate_stream(hello, random.Random(seed)) for seed in range(count)]


@pytest.mark.slow
def test_device_survives_hundreds_of_invalid_greetings(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path), "b") as (device, _):
        device.tell_peers()
        for data in greetings(400):
            tell(device.hello["address"], data)
        with socket.create_connection(tuple(device.hello["address"])) as peer:
            channel = MessageChannel(Connection(peer))
            channel.send_greeting(
                MessageType.HELLO, {"device": "a", "digest": device.digest, **MEMBER.make_proof("a", "b")}, device.end
            )
            assert channel.receive_greeting(device.end) == {
                "device": "b",
                "digest": device.digest,
                **MEMBER.make_proof("b", "a"),
            }
            device.heard(MessageType.READY)


@pytest.mark.parametrize("seed", range(8))
def test_device_ends_with_message_after_mutated_tensors(seed: int, tmp_path: Path) -> None:
    emit(partial(), tmp_path)
    receiver = Receiver(tmp_path, load_json(tmp_path / "a" / "manifest.json"))
    (_, frames), rng = receiver.streams()[1], random.Random(seed)
    while receiver.take(data := mutate_stream(frames, rng), "b", 1 << 20) != "refused":
        continue
    with fake(tmp_path) as (device, listener):
        device.in_flight = IN_FLIGHT
        with device.meet(listener, {"device": "b", "digest": device.digest}) as peer:
            device.heard(MessageType.READY)
            peer.sendall(data)
            message = device.heard(MessageType.ERROR)["message"]
        assert message.startswith("from 'b': ")
        assert device.ended().startswith("a: ")


def test_run_survives_hundreds_of_invalid_greetings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network, results = partial(), []  # type: ignore[var-annotated]
    directory = emit(network, tmp_path)
    caplog.set_level("WARNING", "dicompiler")
    run = threading.Thread(
        target=lambda: results.append(
            SocketsTarget().run(directory, [network[2]], RunOptions(timeout_s=60, start_manually=("b",)))
        )
    )
    run.start()
    address = wait_until(lambda: control(directory))
    for data in greetings(400):
        tell(address.split(":"), data)
    process = by_hand(directory, caplog.messages[0])
    run.join(WAIT_S)
    assert np.array_equal(results[0].outputs[0]["out"], run_model(network[1], network[2])["out"])
    assert process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_slow_greeting_times_out(tmp_path: Path) -> None:
    with fake(emit(partial(), tmp_path), "b") as (device, _):
        device.tell_peers()
        begun = time.monotonic()
        with socket.create_connection(tuple(device.hello["address"])) as slow, contextlib.suppress(OSError):
            slow.sendall(b"D")
            slow.settimeout(15)
            assert slow.recv(1) == b""
        assert time.monotonic() - begun < 8
