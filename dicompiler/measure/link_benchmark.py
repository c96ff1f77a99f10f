"""Measures the link between two hosts: bandwidth and latency of plain TCP. It lies beside profile_run.py in a package.

"p" is answered at once, "b" brings bytes, "g" asks for bytes, "q" ends. It needs Python alone.
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
import time
from typing import Any

HEADER = struct.Struct("!cQ")
"""A message between hosts: what it is, and the bytes that follow."""
MAGIC = b"dicompiler links 1\n"
MAX_PAYLOAD_BYTES = 1 << 26
"""Bytes of the largest message that is taken from another host."""
TIMEOUT_S = 30.0
HEADERS_SHARE = 0.05
"""What travels beside a message's bytes, as a share of them: see RuntimeCosts.headers."""


class LinkError(OSError):
    """Why a link is not measured, in one line."""


def parse_address(text: str) -> tuple[str, int]:
    """("", 7000) of "7000"; (host, port) of "host:7000" and "[::1]:7000"."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise LinkError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def serve_measurement(host: str, port: int, name: str) -> None:
    """Answers until one measurement has ended well; who does not speak this is sent away."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        print(f"serving at port {listener.getsockname()[1]}", flush=True)
        while True:
            connection, peer = listener.accept()
            try:
                with connection:
                    _answer_client(connection, name)
                return
            except OSError as error:
                print(f"{peer[0]}: {error}", file=sys.stderr)


def _answer_client(connection: socket.socket, name: str) -> None:
    _configure_socket(connection)
    if receive_exactly(connection, len(MAGIC)) != MAGIC:
        raise LinkError("it does not measure links")
    own = name.encode()[:255]
    connection.sendall(MAGIC + bytes([len(own)]) + own)
    while (head := HEADER.unpack(receive_exactly(connection, HEADER.size)))[0] != b"q":
        kind, count = head
        if count > MAX_PAYLOAD_BYTES or kind not in (b"p", b"b", b"g"):
            raise LinkError("it does not measure links as agreed")
        if kind == b"b":
            receive_exactly(connection, count)
        connection.sendall(bytes(count) if kind == b"g" else b"!")


def measure_link(host: str, port: int, name: str, repeat: int, count: int) -> dict[str, Any]:
    """Bandwidth in bit/s, the lower of both directions, headers included, as lines are rated; and latency in seconds,
    half a round trip: medians."""
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        _configure_socket(connection)
        connection.sendall(MAGIC)
        if receive_exactly(connection, len(MAGIC)) != MAGIC:
            raise LinkError(f"{host}:{port} does not measure links: start profile_run.py --serve there")
        other = receive_exactly(connection, receive_exactly(connection, 1)[0]).decode(errors="replace")
        trip = statistics.median(_time_request(connection, b"p", 0, 1) for _ in range(20 * repeat))
        there = statistics.median(_time_request(connection, b"b", count, 1) for _ in range(repeat))
        back = statistics.median(_time_request(connection, b"g", count, count) for _ in range(repeat))
        connection.sendall(HEADER.pack(b"q", 0))
    # Both take a round trip besides: the request there, the answer back.
    rate = 8 * count * (1 + HEADERS_SHARE) / max(max(there, back) - trip, 1e-9)
    return {"hosts": [name, other], "bandwidth": rate, "latency": trip / 2}


def _time_request(connection: socket.socket, kind: bytes, count: int, answer: int) -> float:
    payload = HEADER.pack(kind, count) + (bytes(count) if kind == b"b" else b"")
    start = time.perf_counter()
    connection.sendall(payload)
    receive_exactly(connection, answer)
    return time.perf_counter() - start


def _configure_socket(connection: socket.socket) -> None:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive_exactly(connection: socket.socket, count: int) -> bytearray:
    """Exactly `count` bytes. LinkError if the other end closes before."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if not (got := connection.recv_into(view[done:])):
            raise LinkError("the other end closed the connection")
        done += got
    return data
