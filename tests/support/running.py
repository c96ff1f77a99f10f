"""Runs of sockets artifacts in tests: emit them, find their processes, and wait for conditions."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.handmade import Made

from dicompiler.base.schema import load_json
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler_targets.sockets.runtime.channel import EventLoop, MessageChannel
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, TOKEN_VARIABLE, RunCredentials
from dicompiler_targets.sockets.runtime.protocol import MessageHeader, MessageType, decode_json
from dicompiler_targets.sockets.runtime.transport import Connection
from dicompiler_targets.sockets.target import SocketsTarget

LIMIT_S = 5.0
"""Seconds from a failure to the end of all processes."""


def emit(made: Made, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    SocketsTarget().emit(PipelineState(model=made[1], program=made[0]), directory)
    write_digests_and_checksum(directory)
    return directory


def pids(directory: Path) -> dict[str, int]:
    """Return the process ID of each device of an artifact, found by its working directory."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            place = Path(os.readlink(entry / "cwd"))
            if place.parent == directory:
                found[place.name] = int(entry.name)
    return found


WAIT_S = 60.0
"""Seconds for which a test waits for a step that takes milliseconds on an idle host."""


def wait_until(condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("the condition was not met in time")


MEMBER = RunCredentials("12345678", "only members know it")
"""Credentials of the run of a `Fake`."""


class Fake:
    """A real device process; the test plays its coordinator and peers."""

    def __init__(self, directory: Path, listener: socket.socket, device: str, heartbeat_s: float = 60) -> None:
        self.messages: list[tuple[MessageHeader, Any]] = []
        self.device, self.in_flight = device, 1
        self.end = time.monotonic() + WAIT_S
        self.digest = load_json(directory / "artifact.json")["digest"]
        address = "{}:{}".format(*listener.getsockname())
        command = [sys.executable, "-m", "runtime", "--coordinator", address, "--timeout", "20"]
        command += ["--heartbeat", str(heartbeat_s)]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", TOKEN_VARIABLE: MEMBER.token}
        self.process = subprocess.Popen(command, cwd=directory / device, stderr=subprocess.PIPE, env=environment)
        self.socket = listener.accept()[0]
        self.control = MessageChannel(Connection(self.socket))
        self.hello = self.control.receive_greeting(self.end)
        self.loop = EventLoop(heartbeat_s)
        self.control.start(
            self.loop, lambda _: None, lambda header, payload: self.messages.append((header, payload)), lambda _: None
        )

    def meet(self, listener: socket.socket, message: Mapping[str, Any]) -> socket.socket:
        """Let the device connect to `listener` as its peer b, and greet it with `message`."""
        self.tell_peers(b=listener.getsockname())
        peer = listener.accept()[0]
        channel = MessageChannel(Connection(peer))
        hello = {"device": "a", "digest": self.digest, **MEMBER.make_proof("a", "b")}
        assert channel.receive_greeting(self.end) == hello
        channel.send_greeting(MessageType.HELLO, {**MEMBER.make_proof("b", "a"), **message}, self.end)
        return peer

    def tell_peers(self, **addresses: Any) -> None:
        """Send the PEERS message to the device."""
        peers = {
            "addresses": addresses,
            "in_flight": self.in_flight,
            **MEMBER.make_proof(COORDINATOR_NAME, self.device),
        }
        self.control.send_json(MessageType.PEERS, peers)

    def heard(self, kind: MessageType) -> Any:
        """Wait for a message of that type."""
        header, payload = wait_until(lambda: next((m for m in self.messages if m[0].type is kind), None))
        return decode_json(payload) if header.length else None

    def ended(self) -> str:
        """Wait until the process ends by itself with exit code 1; return its output."""
        _, errors = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 1
        return errors.decode()


@contextlib.contextmanager
def fake(directory: Path, device: str = "a", heartbeat_s: float = 60) -> Iterator[tuple[Fake, socket.socket]]:
    """Start a device process, and yield it with a listening socket at which the test plays its peers."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as peers:
        one = Fake(directory, listener, device, heartbeat_s)
        try:
            yield one, peers
        finally:
            one.process.kill()
            one.process.communicate()
            one.control.close()
            one.loop.close()


def control(directory: Path) -> str:
    """Return the coordinator's address, as its devices know it."""
    for pid in pids(directory).values():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "--coordinator" in words:
            return words[words.index("--coordinator") + 1]
    return ""


def by_hand(directory: Path, message: str) -> subprocess.Popen[bytes]:
    """Start a device in its directory as the run's message tells the user."""
    device, words = message.removeprefix("start ").split(" in its directory on its host: ")
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        words.replace("python3", sys.executable), cwd=directory / device, shell=True, env=environment
    )
