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


def greet_device(channel: MessageChannel, _: str, deadline: float) -> MessageChannel:
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
    acceptor = ConnectionAcceptor(listener, None, greet_device)

    class Closing(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: Any, *_: Any) -> None:
            acceptor.close()
            super().put(item)

    acceptor._accepted = Closing()
    client = arrive(listener, "pi01")
    accepted = acceptor.take(5)
    accepted.send_greeting(MessageType.HELLO, {"device": "pi02"}, time.monotonic() + 5)
    assert client.receive_greeting(time.monotonic() + 5) == {"device": "pi02"}
    client.close()
    accepted.close()


def test_refused_connection_gets_reason(listener: socket.socket) -> None:
    with contextlib.closing(ConnectionAcceptor(listener, None, greet_device)) as acceptor:
        with pytest.raises(PeerRefused, match="who is that"):
            arrive(listener, "pi09").receive_greeting(time.monotonic() + 5)
        assert acceptor.take(0.1) is None
        assert acceptor.last_refusal == "127.0.0.1: who is that?"


def test_silent_connections_do_not_block_others(listener: socket.socket) -> None:
    with contextlib.closing(ConnectionAcceptor(listener, None, greet_device)) as acceptor:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3 * MAX_GREETINGS)]
        start = time.monotonic()
        client = arrive(listener, "pi01")
        assert acceptor.take(4) is not None
        assert time.monotonic() - start < 2
        assert len(acceptor._greeting) <= MAX_GREETINGS
        client.close()
        for client in clients:
            client.close()


def test_proof_names_sender_and_receiver() -> None:
    credentials, other_credentials = RunCredentials("1", "token"), RunCredentials("1", "another")
    credentials.check(credentials.make_proof("pi01", "pi02"), "pi01", "pi02")
    for message, sender in (
        (other_credentials.make_proof("pi01", "pi02"), "pi01"),
        (credentials.make_proof("pi01", "pi03"), "pi01"),
        (credentials.make_proof("pi01", "pi02"), "pi03"),
        ({"run": "1"}, "pi01"),
        ({**credentials.make_proof("pi01", "pi02"), "run": "2"}, "pi01"),
    ):
        with pytest.raises(ProtocolError):
            credentials.check(message, sender, "pi02")
