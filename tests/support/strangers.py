"""Strangers: connections of many kinds by somebody who does not belong to a run and wants to disturb it.

In: where a run listens, and what anybody can know of it. Out: connections that stay as long as they can.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.running import pids

from dicompiler_targets.sockets.runtime.frames import HEADER, MAGIC, PROTOCOL, Header, Kind, pack

DRIBBLE_S = 0.2
"""Seconds between two bytes of those who send them one by one: no silence is ever long enough to be noticed."""


AT_ONCE = 32
"""Connections to each port in a row."""


def hello(device: str, digest: str = "0" * 64, **more: Any) -> bytes:
    """A greeting as a device would send it."""
    words = json.dumps({"device": device, "digest": digest, "address": ["127.0.0.1", 9], **more}).encode()
    return pack(Header(Kind.HELLO, 0, 0, len(words))) + words


def client_hello() -> bytes:
    """The first message of TLS."""
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
    """Says it, then stays silent."""
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
    """TLS without a certificate, which the other end notices only when all else is said."""
    connection.settimeout(5)
    with contextlib.suppress(ssl.SSLError):
        _anonymous().wrap_socket(connection, do_handshake_on_connect=True, suppress_ragged_eofs=True)


def _linger(connection: socket.socket) -> None:
    """Wrong at once, then a byte now and then: whoever waits for its end waits long."""
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    _dribbled(bytes(100))(connection)


def kinds(device: str, digest: str) -> list[Callable[[socket.socket], None]]:
    """What strangers do, who have learnt a device's name and the artifact's digest."""
    return [
        _said(b""),
        _said(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        _said(HEADER.pack(MAGIC, PROTOCOL, Kind.HELLO, 0, 0, 0, 1 << 60)),
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
        _said(pack(Header(Kind.HELLO, 0, 0, 9000)) + b"[" * 9000),
    ]


class Strangers:
    """`count` connections, in turn of each kind, to the ports that `ports` lists from time to time, until `stop`."""

    def __init__(self, count: int, acts: list[Callable[[socket.socket], None]], ports: Callable[[], set[int]]) -> None:
        self.left, self.acts, self.ports = count, itertools.cycle(acts), ports
        self.hit: set[int] = set()
        self._open: list[socket.socket] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._come, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes all of them."""
        self._stopped.set()
        self._thread.join()
        for connection in self._open:
            connection.close()

    def _come(self) -> None:
        while self.left and not self._stopped.is_set():
            for port in sorted(self.ports()) * AT_ONCE:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), 1)
                    self._open.append(connection)
                    self.hit.add(port)
                    self.left -= 1
                    threading.Thread(target=self._act, args=(next(self.acts), connection), daemon=True).start()
            time.sleep(0.002)

    @staticmethod
    def _act(act: Callable[[socket.socket], None], connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            act(connection)


def listening(directory: Path) -> set[int]:
    """The ports at which this process and the artifact's devices listen, as any user of this host can read them."""
    sockets = {inode for pid in {os.getpid(), *pids(directory).values()} for inode in _sockets(pid)}
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
