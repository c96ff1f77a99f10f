"""Handshakes of accepted connections: members stay connected, others are refused, and silent ones do not block."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from typing import Any

import pytest

from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.handshake import MAX_GREETINGS, ConnectionAcceptor, RunCredentials
from dicompiler_targets.sockets.runtime.protocol import MessageType, PeerRefused, ProtocolError
from dicompiler_targets.sockets.runtime.transport import Connection


def meet(channel: MessageChannel, _: str, deadline: float) -> MessageChannel:
    if channel.receive_greeting(deadline).get("device") != "pi01":
        raise ProtocolError("who is that?")
    return channel


def arrive(listener: socket.socket, device: str) -> MessageChannel:
    channel = MessageChannel(Connection(socket.create_connection(listener.getsockname())))
    channel.send_greeting(MessageType.HELLO, {"device": device}, time.monotonic() + 5)
    return channel


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_accepted_connection_survives_concurrent_close(listener: socket.socket) -> None:
    entrance = ConnectionAcceptor(listener, None, meet)

    class Closing(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: Any, *_: Any) -> None:
            entrance.close()
            super().put(item)

    entrance._accepted = Closing()
    guest = arrive(listener, "pi01")
    inside = entrance.take(5)
    inside.send_greeting(MessageType.HELLO, {"device": "pi02"}, time.monotonic() + 5)
    assert guest.receive_greeting(time.monotonic() + 5) == {"device": "pi02"}
    guest.close()
    inside.close()


def test_refused_connection_gets_reason(listener: socket.socket) -> None:
    with contextlib.closing(ConnectionAcceptor(listener, None, meet)) as entrance:
        with pytest.raises(PeerRefused, match="who is that"):
            arrive(listener, "pi09").receive_greeting(time.monotonic() + 5)
        assert entrance.take(0.1) is None
        assert entrance.last_refusal == "127.0.0.1: who is that?"


def test_silent_connections_do_not_block_others(listener: socket.socket) -> None:
    with contextlib.closing(ConnectionAcceptor(listener, None, meet)) as entrance:
        crowd = [socket.create_connection(listener.getsockname()) for _ in range(3 * MAX_GREETINGS)]
        begun = time.monotonic()
        guest = arrive(listener, "pi01")
        assert entrance.take(4) is not None
        assert time.monotonic() - begun < 2
        assert len(entrance._greeting) <= MAX_GREETINGS
        guest.close()
        for one in crowd:
            one.close()


def test_proof_names_sender_and_receiver() -> None:
    ours, others = RunCredentials("1", "token"), RunCredentials("1", "another")
    ours.check(ours.make_proof("pi01", "pi02"), "pi01", "pi02")
    for message, sender in (
        (others.make_proof("pi01", "pi02"), "pi01"),
        (ours.make_proof("pi01", "pi03"), "pi01"),
        (ours.make_proof("pi01", "pi02"), "pi03"),
        ({"run": "1"}, "pi01"),
        ({**ours.make_proof("pi01", "pi02"), "run": "2"}, "pi01"),
    ):
        with pytest.raises(ProtocolError):
            ours.check(message, sender, "pi02")
