"""Handshakes: accepting connections, proving membership of a run, and refusing all others.

A listening socket and the credentials of a run ⇒ message channels of its members. Handshakes run concurrently, each
with its own deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
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
MAX_GREETINGS = 64
"""Concurrent handshakes. Beyond, the oldest one of the host with most of them is dropped."""
TOKEN_VARIABLE = "DICOMPILER_TOKEN"
"""Environment variable with the run's token, for devices that are started manually."""
COORDINATOR_NAME = ""
"""Stands for the coordinator in the place of a device's name."""


@dataclass(frozen=True)
class RunCredentials:
    """Credentials that the members of one run share; '' for those that this end does not know.

    Attributes:
        run: The public ID of the run.
        token: A secret that proves membership if there are no certificates. It is passed to devices through standard
            input or the environment and never sent over the network.
    """

    run: str = ""
    token: str = ""

    def make_proof(self, sender: str, receiver: str) -> dict[str, str]:
        """Return the fields of a message that prove to `receiver` that `sender` is a member of the run."""
        return {"run": self.run, "proof": self._proof(sender, receiver)}

    def check(self, message: Mapping[str, Any], sender: str, receiver: str) -> None:
        """Raise ProtocolError if the message lacks the fields of `make_proof`."""
        run, proof = str(message.get("run") or ""), str(message.get("proof"))
        if run and self.run and run != self.run:
            raise ProtocolError("it belongs to another run: start it again for this one")
        if self.token and not hmac.compare_digest(proof.encode(), self._proof(sender, receiver).encode()):
            raise ProtocolError(
                f"it does not know this run's token: use keys (--keys), or set {TOKEN_VARIABLE} as the run reports"
            )

    def _proof(self, sender: str, receiver: str) -> str:
        if not self.token:
            return ""
        text = json.dumps([sender, receiver]).encode()
        return hmac.new(self.token.encode(), text, hashlib.sha256).hexdigest()


def derive_token(token: str, *words: str) -> str:
    """Return a token for one handshake or run that only an owner of `token` can derive; '' without a token."""
    text = json.dumps(words).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest() if token else ""


class ConnectionQueue:
    """Connections that passed the handshake.

    Attributes:
        last_refusal: Why the last other connection was refused; '' if none was.
    """

    def __init__(self) -> None:
        self.last_refusal = ""
        self._accepted: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, accepted: Any) -> None:
        """Add a connection, or an error that `take` raises."""
        self._accepted.put(accepted)

    def take(self, seconds: float) -> Any:
        """Return the next connection, or None if none arrives in time; raise an error that was put."""
        try:
            accepted = self._accepted.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(accepted, Exception):
            raise accepted
        return accepted


GreetConnection = Callable[[MessageChannel, str, float], Any]
"""Identifies the other end of a channel: (channel, host, deadline) → the result of `ConnectionAcceptor.take`.

It raises ProtocolError to refuse the connection with a message, PeerRefused or OSError to drop it, and any other error
to let `take` raise it.
"""


class ConnectionAcceptor(ConnectionQueue):
    """Accepts connections and runs each handshake in its own thread.

    Unknown clients delay nobody: each handshake has GREETING_TIMEOUT_S, and at most MAX_GREETINGS run at once. The
    acceptor closes its listening socket.
    """

    def __init__(self, listener: socket.socket, keys: TlsKeys | None, greet_connection: GreetConnection) -> None:
        super().__init__()
        self._listener, self._keys, self._greet_connection = listener, keys, greet_connection
        self._greeting: dict[socket.socket, str] = {}
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept_all, daemon=True).start()

    def close(self) -> None:
        """Stop accepting, and drop connections with incomplete handshakes."""
        with self._lock:
            self._closed = True
            for connection in self._greeting:
                _shut_down(connection)
        _shut_down(self._listener)  # Wakes the accepting thread.
        self._listener.close()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # The socket is closed, or the process has no free descriptors for a moment.
                time.sleep(0.05)
                continue
            with self._lock:
                self._drop_oldest()
                self._greeting[connection] = address[0]
            threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()

    def _drop_oldest(self) -> None:
        if len(self._greeting) >= MAX_GREETINGS:
            busiest_host = Counter(self._greeting.values()).most_common(1)[0][0]
            oldest = next(connection for connection, host in self._greeting.items() if host == busiest_host)
            del self._greeting[oldest]
            _shut_down(oldest)  # Its thread notices.

    def _greet(self, connection: socket.socket, host: str) -> None:
        accepted = self._accept_or_refuse(connection, host)
        with self._lock:  # Before it can be taken, because `close` drops all connections in this dictionary.
            self._greeting.pop(connection, None)
        if accepted is not None:
            self.put(accepted)

    def _accept_or_refuse(self, connection: socket.socket, host: str) -> Any:
        """Return the result of `greet_connection` or an error for `take`; None for a refused connection."""
        deadline = time.monotonic() + GREETING_TIMEOUT_S
        channel = None
        try:
            channel = MessageChannel(open_connection(connection, self._keys, True, deadline))
            return self._greet_connection(channel, host, deadline)
        except (OSError, ProtocolError, PeerRefused) as error:
            self.last_refusal = f"{host}: {error}"
            if channel is None:
                connection.close()
            elif isinstance(error, ProtocolError):
                channel.refuse(str(error), deadline)
            else:
                channel.close()
            return None
        except Exception as error:
            return error


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It may be closed already.
        connection.shutdown(socket.SHUT_RDWR)
