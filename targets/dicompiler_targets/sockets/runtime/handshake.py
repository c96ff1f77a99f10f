"""Handshakes: accepting connections, proving that both ends belong to one run, and refusing all others."""

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
"""Maximum number of concurrent handshakes. If there is one more, the host with the most handshakes loses its oldest."""
TOKEN_VARIABLE = "DICOMPILER_TOKEN"
"""Environment variable with the run's secret token, for devices that are started manually."""
COORDINATOR_NAME = ""
"""The coordinator's name in messages; devices have names that are not empty."""


@dataclass(frozen=True)
class RunCredentials:
    """The ID and the secret token that the members of one run share; each is '' as long as it is unknown.

    Attributes:
        run: The public ID of the run.
        token: A secret that proves membership if there are no certificates. It is passed to devices through standard
            input or the environment, and never sent over the network.
    """

    run: str = ""
    token: str = ""

    def make_proof(self, sender: str, receiver: str) -> dict[str, str]:
        """Return the fields `run` and `proof`, which prove to `receiver` that `sender` knows the token."""
        return {"run": self.run, "proof": self._proof(sender, receiver)}

    def check(self, message: Mapping[str, Any], sender: str, receiver: str) -> None:
        """Raise ProtocolError if the message does not have the fields of `make_proof` for these two ends."""
        run, proof = str(message.get("run") or ""), str(message.get("proof"))
        if run and self.run and run != self.run:
            raise ProtocolError("it belongs to another run: start it again for this run")
        if self.token and not hmac.compare_digest(proof.encode(), self._proof(sender, receiver).encode()):
            raise ProtocolError(
                f"it does not know this run's token: use keys (--keys), or set {TOKEN_VARIABLE} as the run reports"
            )

    def _proof(self, sender: str, receiver: str) -> str:
        if not self.token:
            return ""
        text = json.dumps([sender, receiver]).encode()
        return hmac.new(self.token.encode(), text, hashlib.sha256).hexdigest()


def derive_token(token: str, *context: str) -> str:
    """Derive a secret from `token` that is valid only for the handshake or run that `context` identifies."""
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
        """Return the next result of a handshake, or None after `seconds`; raise an error that was put."""
        try:
            accepted = self._accepted.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(accepted, Exception):
            raise accepted
        return accepted


GreetConnection = Callable[[MessageChannel, str, float], Any]
"""A function that performs a handshake, with arguments (channel, address of the other host, deadline).

Its result is the result of `ConnectionAcceptor.take`. To refuse the connection with a message, it raises ProtocolError;
to drop the connection, PeerRefused or OSError. `take` raises all other errors.
"""


class ConnectionAcceptor(ConnectionQueue):
    """Accepts connections at a listening socket, and runs each handshake in its own thread.

    DeviceRun, the daemon and the coordinator create an acceptor. They `take` the results of the handshakes, and then
    start the message channels. Unknown clients delay nobody: each handshake has GREETING_TIMEOUT_S, and at most
    MAX_GREETINGS run at once.
    """

    def __init__(self, listener: socket.socket, keys: TlsKeys | None, greet_connection: GreetConnection) -> None:
        super().__init__()
        self._listener, self._keys, self._greet_connection = listener, keys, greet_connection
        self._greeting: dict[socket.socket, str] = {}
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept_all, daemon=True).start()

    def close(self) -> None:
        """Close the listening socket, and drop connections with incomplete handshakes."""
        with self._lock:
            self._closed = True
            for connection in self._greeting:
                _shut_down(connection)
        _shut_down(self._listener)  # This wakes the thread in `_accept_all`.
        self._listener.close()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # The listener is closed, or the process has no free descriptor at the moment.
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
            _shut_down(oldest)  # Its handshake fails and its thread ends.

    def _greet(self, connection: socket.socket, host: str) -> None:
        deadline = time.monotonic() + GREETING_TIMEOUT_S
        channel = accepted = None
        try:
            channel = MessageChannel(open_connection(connection, self._keys, True, deadline))
            accepted = self._greet_connection(channel, host, deadline)
        except (OSError, ProtocolError, PeerRefused) as error:
            self.last_refusal = f"{host}: {error}"
            if channel is None:
                connection.close()
            elif isinstance(error, ProtocolError):
                channel.refuse(str(error), deadline)
            else:
                channel.close()
        except Exception as error:
            accepted = error
        # `close` shuts down all connections in `_greeting`, so this one is removed before it is put in the queue.
        with self._lock:
            self._greeting.pop(connection, None)
        if accepted is not None:
            self.put(accepted)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The socket may be closed already.
        connection.shutdown(socket.SHUT_RDWR)
