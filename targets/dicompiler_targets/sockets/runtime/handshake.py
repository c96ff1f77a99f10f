"""Handshakes: accepting connections, proving that both ends belong to one run, and refusing all others."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .channel import MessageChannel
from .protocol import PeerRefused, ProtocolError
from .transport import TlsKeys, open_connection

GREETING_TIMEOUT_S = 5.0
MAX_GREETINGS, MAX_PENDING, MAX_REFUSALS = 64, 256, 16
"""Maximum numbers of concurrent handshakes, of connections that wait for a handshake, and of concurrent refusals.

At the first two limits, a new connection replaces the oldest connection of the host with the most connections. At the
third limit, a refused connection is closed without a message.
"""
UNKNOWN_INTERVAL_S = 0.01
"""Minimum seconds between two handshakes with hosts on which no device of the run is known to be."""
LISTEN_BACKLOG = 1024
"""Maximum number of connections that the kernel queues until this process accepts them."""
MAX_ACCEPTS = 64
"""Maximum number of connections that are accepted before the handshakes of waiting connections are started."""
TOKEN_VARIABLE = "DICOMPILER_TOKEN"
"""Environment variable with the run's secret token, for devices that are started manually."""
COORDINATOR_NAME = ""
"""The coordinator's name in messages; devices have names that are not empty."""


@dataclass(frozen=True)
class RunCredentials:
    """The ID and the secret token of one run, which the coordinator and the devices share.

    Attributes:
        run_id: The public ID of the run; '' if it is not known yet.
        token: A secret that proves membership, never sent over the network; '' if certificates prove it.
    """

    run_id: str = ""
    token: str = ""

    def make_proof(self, sender: str, receiver: str) -> dict[str, str]:
        """Return the fields `run` and `proof`, which prove to `receiver` that `sender` knows the token."""
        return {"run": self.run_id, "proof": self._proof(sender, receiver)}

    def check(self, message: Mapping[str, Any], sender: str, receiver: str) -> None:
        """Raise ProtocolError if `message` does not prove to `receiver` that `sender` is a member of the run.

        The message must have the fields that `make_proof` returns.
        """
        run, proof = str(message.get("run") or ""), str(message.get("proof"))
        if run and self.run_id and run != self.run_id:
            raise ProtocolError("the two ends belong to different runs: start the device again for the present run")
        if self.token and not hmac.compare_digest(proof.encode(), self._proof(sender, receiver).encode()):
            raise ProtocolError(
                f"the other end does not know this run's token: use keys (--keys), or set {TOKEN_VARIABLE} to the "
                "token that the run has printed"
            )

    def _proof(self, sender: str, receiver: str) -> str:
        if not self.token:
            return ""
        text = json.dumps([sender, receiver]).encode()
        return hmac.new(self.token.encode(), text, hashlib.sha256).hexdigest()


def derive_token(token: str, *context: str) -> str:
    """Derive a secret from `token` that is valid only for the handshake or run `context`; '' if `token` is ''."""
    text = json.dumps(context).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest() if token else ""


class ConnectionQueue:
    """A queue of connections that passed their handshakes, in the order of their arrival.

    Attributes:
        last_refusal: Address of the last refused connection and the reason; '' if none was refused.
    """

    def __init__(self) -> None:
        self.last_refusal = ""
        self._accepted: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, accepted: Any) -> None:
        """Add the result of a handshake, or an error that `take` raises."""
        self._accepted.put(accepted)

    def take(self, seconds: float) -> Any:
        """Return the next result of a handshake, or None after `seconds`; raise an error that was passed to `put`."""
        try:
            accepted = self._accepted.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(accepted, Exception):
            raise accepted
        return accepted


GreetConnection = Callable[[MessageChannel, str, float], Any]
"""A function that performs a handshake: (channel, address of the other host, deadline) → result for `take`.

It raises ProtocolError to refuse the connection with a message, and PeerRefused or OSError to close it without a
message. `ConnectionAcceptor.take` raises all its other errors.
"""


@dataclass
class _PendingConnection:
    """An accepted connection whose handshake has not started. `is_ready` is True once its first byte has arrived."""

    socket: socket.socket
    host: str
    deadline: float
    is_ready: bool = False


class ConnectionAcceptor(ConnectionQueue):
    """Accepts connections at a listening socket, and runs each handshake in its own thread.

    A handshake starts only when the first byte has arrived. The number of connections and the time of each handshake
    are limited, and hosts of the run's devices come first, so that other clients cannot delay them.
    """

    def __init__(
        self,
        listener: socket.socket,
        keys: TlsKeys | None,
        greet_connection: GreetConnection,
        is_member_host: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Start to accept connections, and to call `greet_connection` for each of them.

        `is_member_host` returns True for addresses of the run's coordinator and devices; by default, for none.
        """
        super().__init__()
        self._listener, self._keys, self._greet_connection = listener, keys, greet_connection
        self._is_member_host = is_member_host
        self._pending: dict[int, _PendingConnection] = {}  # Accepted connections by file descriptor, the oldest first.
        self._connections_in_handshake: dict[socket.socket, str] = {}
        self._unknown_allowed_at = 0.0
        self._refusals = threading.Semaphore(MAX_REFUSALS)
        self._lock, self._closed = threading.Lock(), False
        self._poll = select.poll()
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        threading.Thread(target=self._accept_all, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._connections_in_handshake:
                _shut_down(connection)
        _shut_down(self._listener)  # This wakes the thread in `_accept_all`, which then ends.
        self._listener.close()

    def _accept_all(self) -> None:
        listener = self._listener.fileno()
        while not self._closed:
            events = self._poll.poll(self._wait_ms())
            if self._closed:
                break
            for number, _ in events:
                if number == listener:
                    self._accept_some()
                elif number in self._pending:
                    self._mark_ready(number)
            self._drop_expired()
            self._start_greetings()
        for number in tuple(self._pending):
            self._pop_pending(number).close()

    def _wait_ms(self) -> float:
        if any(pending.is_ready for pending in self._pending.values()):
            return 1000 * UNKNOWN_INTERVAL_S
        first = next(iter(self._pending.values()), None)
        return 1000 * (GREETING_TIMEOUT_S if first is None else max(0.0, first.deadline - time.monotonic()))

    def _accept_some(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # Either the listener is closed, or no file descriptor is free at the moment.
                time.sleep(0.05)
                return
            if len(self._pending) >= MAX_PENDING:
                hosts = {number: pending.host for number, pending in self._pending.items()}
                self._pop_pending(self._choose_dropped(hosts)).close()
            deadline = time.monotonic() + GREETING_TIMEOUT_S
            self._pending[connection.fileno()] = _PendingConnection(connection, address[0], deadline)
            self._poll.register(connection, select.POLLIN)

    def _mark_ready(self, number: int) -> None:
        """Mark a connection on which a byte has arrived as ready; remove a connection that has ended."""
        pending = self._pending[number]
        try:
            pending.is_ready = bool(pending.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except OSError:
            pending.is_ready = False
        if pending.is_ready:
            self._poll.unregister(number)
        else:
            self._pop_pending(number).close()

    def _pop_pending(self, number: int) -> socket.socket:
        pending = self._pending.pop(number)
        if not pending.is_ready:
            self._poll.unregister(number)
        return pending.socket

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for number in [number for number, pending in self._pending.items() if now > pending.deadline]:
            self._pop_pending(number).close()

    def _start_greetings(self) -> None:
        """Start the handshakes of connections that have sent data.

        Those with hosts of the run's devices start at once; others start at intervals of at least UNKNOWN_INTERVAL_S.
        """
        ready = [(number, pending) for number, pending in self._pending.items() if pending.is_ready]
        for number, pending in ready:
            if self._is_member_host(pending.host):
                self._start_greeting(number, pending)
            elif (now := time.monotonic()) >= self._unknown_allowed_at:
                self._unknown_allowed_at = now + UNKNOWN_INTERVAL_S
                self._start_greeting(number, pending)

    def _start_greeting(self, number: int, pending: _PendingConnection) -> None:
        self._pop_pending(number)
        with self._lock:
            if len(self._connections_in_handshake) >= MAX_GREETINGS:
                dropped = self._choose_dropped(self._connections_in_handshake)
                del self._connections_in_handshake[dropped]
                _shut_down(dropped)  # The connection's handshake then fails, and its thread ends.
            self._connections_in_handshake[pending.socket] = pending.host
        threading.Thread(target=self._greet, args=(pending,), daemon=True).start()

    def _choose_dropped(self, hosts: Mapping[Any, str]) -> Any:
        """Return the connection to drop if there are too many: the oldest one of the host with the most connections.

        `hosts` has the host of each connection. Hosts of the run's devices are chosen only if there are no others.
        """
        counts = Counter(hosts.values())
        dropped_host = max(counts, key=lambda host: (not self._is_member_host(host), counts[host]))
        return next(connection for connection, host in hosts.items() if host == dropped_host)

    def _greet(self, pending: _PendingConnection) -> None:
        channel = accepted = refusal = None
        try:
            channel = MessageChannel(open_connection(pending.socket, self._keys, True, pending.deadline))
            accepted = self._greet_connection(channel, pending.host, pending.deadline)
        except (OSError, ProtocolError, PeerRefused) as error:
            self.last_refusal, refusal = f"{pending.host}: {error}", error
        except Exception as error:
            accepted = error
        # `close` shuts down all connections whose handshakes are not finished. This one must stay open, so it is
        # removed from `_connections_in_handshake` first.
        with self._lock:
            self._connections_in_handshake.pop(pending.socket, None)
        if accepted is not None:
            self.put(accepted)
        elif channel is None:
            pending.socket.close()
        elif refusal is not None:
            self._refuse(channel, refusal, pending.deadline)

    def _refuse(self, channel: MessageChannel, error: Exception, deadline: float) -> None:
        """Close a connection; if the error is a ProtocolError, tell the other end the reason first.

        The reason is omitted while MAX_REFUSALS other connections are being refused.
        """
        if isinstance(error, ProtocolError) and self._refusals.acquire(blocking=False):
            try:
                channel.refuse(str(error), deadline)
            finally:
                self._refusals.release()
        else:
            channel.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # shutdown() fails if the socket is closed already.
        connection.shutdown(socket.SHUT_RDWR)
