"""Connections of clients that do not belong to a run and try to disturb it.

The ports of a run and public facts about it ⇒ connections that stay open as long as possible.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.running import pids

from dicompiler_targets.sockets.runtime.protocol import (
    HEADER_STRUCT,
    MAGIC,
    PROTOCOL_VERSION,
    MessageHeader,
    MessageType,
    pack_header,
)

DRIBBLE_S = 0.2
"""Seconds between two bytes of clients that send single bytes, too short to count as silence."""


def hello(device: str, digest: str = "0" * 64, **more: Any) -> bytes:
    """Return a greeting as a device sends it."""
    words = json.dumps({"device": device, "digest": digest, "address": ["127.0.0.1", 9], **more}).encode()
    return pack_header(MessageHeader(MessageType.HELLO, 0, 0, len(words))) + words


def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    tls = _anonymous().wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _said(data: bytes) -> Callable[[socket.socket], None]:
    """Return a client that sends the data and then nothing more."""
    return lambda connection: connection.sendall(data)


def _dribbled(data: bytes) -> Callable[[socket.socket], None]:
    def act(connection: socket.socket) -> None:
        for i in range(len(data)):
            connection.sendall(data[i : i + 1])
            time.sleep(DRIBBLE_S)

    return act


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _flood(connection: socket.socket) -> None:
    for _ in range(1000):
        connection.sendall(bytes(1 << 16))


def _shake(connection: socket.socket) -> None:
    """Use TLS without a certificate, which the other end notices only at the end of the handshake."""
    connection.settimeout(5)
    with contextlib.suppress(ssl.SSLError):
        _anonymous().wrap_socket(connection, do_handshake_on_connect=True, suppress_ragged_eofs=True)


def _linger(connection: socket.socket) -> None:
    """Send invalid data, and then single bytes, so that the end of the connection takes long."""
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    _dribbled(bytes(100))(connection)


def kinds(device: str, digest: str) -> list[Callable[[socket.socket], None]]:
    """Return the behaviours of clients that know a device's name and the artifact's digest."""
    return [
        _said(b""),
        _said(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        _said(HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, MessageType.HELLO, 0, 0, 0, 1 << 60)),
        _said(hello("nobody")),
        _said(hello(device)),
        _said(hello(device, digest)),
        _said(hello(device, digest, run="0" * 16, proof="0" * 64)),
        _said(hello("x" * 16_000)),
        _dribbled(hello(device, digest)),
        _dribbled(client_hello()),
        _linger,
        _reset,
        _flood,
        _shake,
        _said(client_hello()),
        _said(pack_header(MessageHeader(MessageType.HELLO, 0, 0, 9000)) + b"[" * 9000),
    ]


class UnknownClients:
    """Connections of unknown clients from a separate process to all ports of a run, until `stop`.

    Attributes:
        hit: The ports.
    """

    def __init__(self, count: int, directory: Path, device: str, digest: str) -> None:
        paths = [os.path.abspath(entry) for entry in sys.path if entry]
        code = "import sys; sys.path[:0] = sys.argv[6:]; from support.unknown_clients import main; main(*sys.argv[1:6])"
        words = [str(count), str(directory), str(os.getpid()), device, digest, *paths]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.hit: list[int] = json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        """Close all connections."""
        self._process.communicate(timeout=30)


def main(count: str, directory: str, pid: str, device: str, digest: str) -> None:
    """Connect as `UnknownClients` describes, print the ports, and wait until standard input ends."""
    kept, acts = [], itertools.cycle(kinds(device, digest))
    ports = sorted(listening(Path(directory), int(pid)))
    for _, port in zip(range(int(count)), itertools.cycle(ports), strict=False):
        kept.append(socket.create_connection(("127.0.0.1", port), 5))
        threading.Thread(target=_act, args=(next(acts), kept[-1]), daemon=True).start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()
    os._exit(0)


class ConnectionFlood:
    """Connections to all ports of a run, `rate` of them in a second, from a separate process, until `stop`.

    The clients only connect. Each keeps its connection until a hundred others have come.
    """

    def __init__(self, rate: float, directory: Path) -> None:
        paths = [os.path.abspath(entry) for entry in sys.path if entry]
        code = (
            "import sys; sys.path[:0] = sys.argv[4:]; from support.unknown_clients import flood; flood(*sys.argv[1:4])"
        )
        words = [str(rate), str(directory), str(os.getpid()), *paths]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "started\n"

    def stop(self) -> int:
        """End the flood; return the number of connections that were made."""
        return int(self._process.communicate(timeout=30)[0])


def flood(rate: str, directory: str, pid: str) -> None:
    """Connect as `ConnectionFlood` describes, until standard input ends. Then print the number of connections."""
    ended, ports = threading.Event(), set[int]()

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    kept, count, start = collections.deque[socket.socket](), 0, time.monotonic()
    while not ended.is_set():
        if count % 100 == 0:
            ports = listening(Path(directory), int(pid)) or ports
        for port in ports:
            kept.append(socket.socket())
            kept[-1].setblocking(False)
            kept[-1].connect_ex(("127.0.0.1", port))
            if len(kept) > 100:
                kept.popleft().close()
            count += 1
        if count and count <= len(ports):
            print("started", flush=True)
        time.sleep(max(0.001, start + count / float(rate) - time.monotonic()))
    print(count, flush=True)
    os._exit(0)


def _act(act: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        act(connection)


def listening(directory: Path, coordinator: int) -> set[int]:
    """Return the ports of a run's coordinator and of the artifact's devices."""
    sockets = {inode for pid in {coordinator, *pids(directory).values()} for inode in _sockets(pid)}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in sockets:
            found.add(int(words[1].split(":")[1], 16))
    return found


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    yield target[8:-1]
