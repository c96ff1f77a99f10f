"""Greetings: who connects says who it is, side by side with all others, each until a deadline of its own.

In: a listening socket, and who belongs to the run. Out: channels of those who do, and why the last other was refused.
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
"""Seconds in which a connection must say who it is."""
MAX_GREETINGS = 64
"""Connections that are greeted at once; beyond, the host with most of them loses its oldest one."""
TOKEN_VARIABLE = "DICOMPILER_TOKEN"
"""The environment variable with the run's token, for a device that is started by hand."""
COORDINATOR_NAME = ""
"""What stands for the coordinator where a device's name would."""


@dataclass(frozen=True)
class RunCredentials:
    """What the members of one run know: its number, which others may know, and a token that they may not.

    The token shows who belongs to the run where certificates do not; it goes to devices by inheritance and is never
    sent. '' for what this end was not told.
    """

    run: str = ""
    token: str = ""

    def hello(self, sender: str, receiver: str) -> dict[str, str]:
        """What shows `receiver` that `sender` belongs to the run."""
        return {"run": self.run, "proof": self._proof(sender, receiver)}

    def check(self, message: Mapping[str, Any], sender: str, receiver: str) -> None:
        """ProtocolError unless the message has what `hello` gives."""
        run, proof = str(message.get("run") or ""), str(message.get("proof"))
        if run and self.run and run != self.run:
            raise ProtocolError("it belongs to another run: start it again for this one")
        if self.token and not hmac.compare_digest(proof.encode(), self._proof(sender, receiver).encode()):
            raise ProtocolError(
                f"it does not know this run's token: use keys (--keys), or set {TOKEN_VARIABLE} as the run says"
            )

    def _proof(self, sender: str, receiver: str) -> str:
        if not self.token:
            return ""
        words = json.dumps([sender, receiver]).encode()
        return hmac.new(self.token.encode(), words, hashlib.sha256).hexdigest()


def derive_token(token: str, *words: str) -> str:
    """A token that who knows `token` can make, and nobody else: for one greeting, or one run. '' without one."""
    text = json.dumps(words).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest() if token else ""


class ConnectionQueue:
    """Those who were let in, one after another. `refused`: why the last other was not."""

    def __init__(self) -> None:
        self.last_refusal = ""
        self._accepted: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, met: Any) -> None:
        """Somebody was let in; or an error, for `take` to raise."""
        self._accepted.put(met)

    def take(self, seconds: float) -> Any:
        """The next one; None if nobody came. Raises an error that was put."""
        try:
            met = self._accepted.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(met, Exception):
            raise met
        return met


GreetConnection = Callable[[MessageChannel, str, float], Any]
"""Reads who is at the other end of a channel: (channel, host, deadline) → what `Entrance.take` returns. It raises
ProtocolError to refuse it in words, Refused or OSError to let it go, and any other error for `take` to raise."""


class ConnectionAcceptor(ConnectionQueue):
    """Accepts connections at `listener`, which it closes in the end, and lets `meet` greet each in its own thread.

    A stranger delays nobody: each has GREETING_S, and at most GUESTS are inside. `take` gives what `meet` returned for
    who belongs here, or raises what it raised.
    """

    def __init__(self, listener: socket.socket, keys: TlsKeys | None, meet: GreetConnection) -> None:
        super().__init__()
        self._listener, self._keys, self._greet_connection = listener, keys, meet
        self._greeting: dict[socket.socket, str] = {}
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept_all, daemon=True).start()

    def close(self) -> None:
        """Nobody is let in any more, and who has not been greeted is sent away."""
        with self._lock:
            self._closed = True
            for guest in self._greeting:
                _shut_down(guest)
        _shut_down(self._listener)  # wakes the thread that accepts
        self._listener.close()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed, or out of descriptors for a moment
                time.sleep(0.05)
                continue
            with self._lock:
                self._drop_oldest()
                self._greeting[connection] = address[0]
            threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()

    def _drop_oldest(self) -> None:
        if len(self._greeting) >= MAX_GREETINGS:
            crowd = Counter(self._greeting.values()).most_common(1)[0][0]
            oldest = next(guest for guest, host in self._greeting.items() if host == crowd)
            del self._greeting[oldest]
            _shut_down(oldest)  # its thread notices

    def _greet(self, connection: socket.socket, host: str) -> None:
        met = self._accept_or_refuse(connection, host)
        with self._lock:  # before it can be taken: `close` sends away who is still inside
            self._greeting.pop(connection, None)
        if met is not None:
            self.put(met)

    def _accept_or_refuse(self, connection: socket.socket, host: str) -> Any:
        """What `meet` returns, or raises for `take`; None for who is sent away."""
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
    with contextlib.suppress(OSError):  # it may be gone already
        connection.shutdown(socket.SHUT_RDWR)
