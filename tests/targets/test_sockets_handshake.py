"""Handshakes of accepted connections: members stay connected, others are refused, and silent ones do not block."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

import pytest
from support.running import WAIT_S, wait_until

from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.handshake import (
    MAX_GREETINGS,
    MAX_PENDING,
    ConnectionAcceptor,
    RunCredentials,
)
from dicompiler_targets.sockets.runtime.protocol import (
    MessageHeader,
    MessageType,
    PeerRefused,
    ProtocolError,
    pack_header,
)
from dicompiler_targets.sockets.runtime.transport import Connection


def greet_device(channel: MessageChannel, _: str, deadline: float) -> MessageChannel:
    if channel.receive_greeting(deadline).get("device") != "pi01":
        raise ProtocolError("who is that?")
    return channel


def arrive(listener: socket.socket, device: str) -> MessageChannel:
    channel = MessageChannel(Connection(socket.create_connection(listener.getsockname())))
    channel.send_greeting(MessageType.HELLO, {"device": device}, time.monotonic() + WAIT_S)
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
    accepted = acceptor.take(WAIT_S)
    accepted.send_greeting(MessageType.HELLO, {"device": "pi02"}, time.monotonic() + WAIT_S)
    assert client.receive_greeting(time.monotonic() + WAIT_S) == {"device": "pi02"}
    client.close()
    accepted.close()


def test_refused_connection_gets_reason(listener: socket.socket) -> None:
    with contextlib.closing(ConnectionAcceptor(listener, None, greet_device)) as acceptor:
        with pytest.raises(PeerRefused, match="who is that"):
            arrive(listener, "pi09").receive_greeting(time.monotonic() + WAIT_S)
        assert acceptor.take(0.1) is None
        assert acceptor.last_refusal == "127.0.0.1: who is that?"


def test_silent_connections_do_not_block_others(listener: socket.socket) -> None:
    with (
        contextlib.closing(ConnectionAcceptor(listener, None, greet_device)) as acceptor,
        contextlib.ExitStack() as stack,
    ):
        threads = threading.active_count()
        for _ in range(MAX_PENDING + 64):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        client = arrive(listener, "pi01")
        assert acceptor.take(WAIT_S) is not None
        assert len(acceptor._pending) <= MAX_PENDING and len(acceptor._connections_in_handshake) <= MAX_GREETINGS
        # No thread is started for clients that connect and send nothing.
        assert threading.active_count() <= threads + 1
        client.close()


@pytest.mark.parametrize(("host", "data"), [("127.0.0.1", b""), ("127.0.0.2", b"D")], ids=["silent", "sending"])
def test_flood_does_not_drop_slow_member(host: str, data: bytes, listener: socket.socket) -> None:
    """The member's greeting arrives in two parts, and the flood between them. Members are at 127.0.0.1."""
    acceptor = ConnectionAcceptor(listener, None, greet_device, lambda host: host == "127.0.0.1")
    with contextlib.closing(acceptor), contextlib.ExitStack() as stack:
        address, hello = listener.getsockname(), b'{"device": "pi01"}'
        member = stack.enter_context(socket.create_connection(address))
        member.sendall(pack_header(MessageHeader(MessageType.HELLO, 0, 0, len(hello))))
        wait_until(lambda: acceptor._connections_in_handshake)
        for _ in range(2 * MAX_PENDING):
            stranger = stack.enter_context(socket.create_connection(address, 5, (host, 0)))
            with contextlib.suppress(OSError):  # The acceptor may have closed the connection already.
                stranger.sendall(data)
        late = arrive(listener, "pi01")
        member.sendall(hello)
        for _ in range(2):
            assert acceptor.take(WAIT_S) is not None
        assert len(acceptor._pending) <= MAX_PENDING and len(acceptor._connections_in_handshake) <= MAX_GREETINGS
        late.close()


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
