"""A device that a test plays with the keys or token of a real one, and that sends arbitrary messages.

The message of a run that tells how to start the device ⇒ its channel to the coordinator, and the usual messages.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from support.running import WAIT_S, wait_until

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.runtime.addresses import split_address
from dicompiler_targets.sockets.runtime.channel import EventLoop, MessageChannel
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, TOKEN_VARIABLE, RunCredentials
from dicompiler_targets.sockets.runtime.protocol import MessageHeader, MessageType, decode_json
from dicompiler_targets.sockets.runtime.transport import TlsKeys, open_connection
from dicompiler_targets.sockets.target import SocketsTarget


class Hostile:
    """A hostile device. `outcome` closes all of them, because peers would wait for an open listener.

    Attributes:
        there: All hostile devices that are not closed.
    """

    there: ClassVar[list[Hostile]] = []

    def __init__(
        self, directory: Path, name: str, message: str, keys: Path | None = None, heartbeat_s: float = 60
    ) -> None:
        arguments = shlex.split(message.partition("host: ")[2])
        token = next((word.partition("=")[2] for word in arguments if word.startswith(TOKEN_VARIABLE)), "")
        options = dict(itertools.pairwise(arguments))
        self.name, self.credentials = name, RunCredentials(options["--run"], token)
        self.digest = load_json(directory / "artifact.json")["digest"]
        self.end = time.monotonic() + WAIT_S
        self.messages: list[tuple[MessageHeader, Any]] = []
        self.loop = EventLoop(heartbeat_s)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.there.append(self)
        connection = socket.create_connection(split_address(options["--coordinator"]))
        self.control = MessageChannel(
            open_connection(connection, None if keys is None else TlsKeys(keys), False, self.end)
        )
        self.hello = {
            "device": name,
            "digest": self.digest,
            "address": list(self.listener.getsockname()),
            **self.credentials.make_proof(name, COORDINATOR_NAME),
        }

    def greet(self, **changes: Any) -> None:
        """Greet the coordinator as a real device does, except for these changes."""
        self.control.send_greeting(MessageType.HELLO, {**self.hello, **changes}, self.end)
        self.control.start(
            self.loop, lambda _: None, lambda header, payload: self.messages.append((header, payload)), lambda _: None
        )

    def heard(self, message_type: MessageType) -> Any:
        """Wait for a message of that type."""
        header, payload = wait_until(lambda: next((m for m in self.messages if m[0].type is message_type), None))
        return decode_json(payload) if message_type in (MessageType.PEERS, MessageType.ERROR) else header

    def welcome(self, peer: str = "") -> MessageChannel:
        """Accept a peer, by default any, and greet it."""
        channel = MessageChannel(open_connection(self.listener.accept()[0], None, True, self.end))
        name = channel.receive_greeting(self.end)["device"]
        assert peer in ("", name)
        channel.send_greeting(
            MessageType.HELLO,
            {"device": self.name, "digest": self.digest, **self.credentials.make_proof(self.name, name)},
            self.end,
        )
        return channel

    def call(self, peer: str, address: Any) -> MessageChannel:
        """Connect to a peer and greet it."""
        channel = MessageChannel(open_connection(socket.create_connection(tuple(address)), None, False, self.end))
        channel.send_greeting(
            MessageType.HELLO,
            {"device": self.name, "digest": self.digest, **self.credentials.make_proof(self.name, peer)},
            self.end,
        )
        assert channel.receive_greeting(self.end)["device"] == peer
        return channel

    def take_part(self, peers: Iterable[str]) -> None:
        """Greet the coordinator and all peers, set `channels`, and report that the device is ready."""
        self.greet()
        addresses = self.heard(MessageType.PEERS)["addresses"]
        before, after = ([name for name in peers if (name > self.name) == later] for later in (False, True))
        self.channels = [self.welcome() for _ in before] + [self.call(name, addresses[name]) for name in after]
        self.control.send(MessageType.READY)

    def close(self) -> None:
        self.control.close()
        self.loop.close()
        self.listener.close()


def outcome(directory: Path, inputs: Any, options: RunOptions, act: Callable[[str], None], frames: int = 1) -> Any:
    """Return the result or the error of a run in which `act` plays a device.

    Args:
        directory: The artifact.
        inputs: Inputs of each frame.
        options: Options of the run.
        act: Plays the device; gets the message that tells how to start it.
        frames: Number of frames.
    """
    messages: list[str] = []

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log, handler = logging.getLogger("dicompiler"), Messages(logging.WARNING)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    player = threading.Thread(target=lambda: act(wait_until(lambda: messages)[0]), daemon=True)
    player.start()
    try:
        return SocketsTarget().run(directory, [inputs] * frames, options)
    except DicompilerError as error:
        return error
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        player.join(WAIT_S)
        while Hostile.there:
            Hostile.there.pop().close()
