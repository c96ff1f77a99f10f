"""Bandwidth and latency of the TCP link between two hosts. A profile package ships this module; it needs Python only.

Requests are "p" (answer at once), "b" (receive bytes), "g" (send bytes) and "q" (end).
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
import time
from typing import Any

HEADER = struct.Struct("!cQ")
"""Header of a request: its kind, and a number of bytes."""
MAGIC = b"dicompiler links 1\n"
MAX_PAYLOAD_BYTES = 1 << 26
TIMEOUT_S = 30.0
HEADERS_SHARE = 0.05
"""Bytes of headers on the network, as a share of the payload: see RuntimeCosts.header_share."""


class LinkError(OSError):
    """A link could not be measured; the message is one line."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port: "7000" ⇒ ("", 7000), "[::1]:7000" ⇒ ("::1", 7000)."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise LinkError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def serve_measurement(host: str, port: int, name: str) -> None:
    """Answer requests until one measurement is complete. Clients that do not speak the protocol are disconnected."""
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
        raise LinkError("it is not a link benchmark")
    encoded = name.encode()[:255]
    connection.sendall(MAGIC + bytes([len(encoded)]) + encoded)
    while (header := HEADER.unpack(receive_exactly(connection, HEADER.size)))[0] != b"q":
        kind, count = header
        if count > MAX_PAYLOAD_BYTES or kind not in (b"p", b"b", b"g"):
            raise LinkError("it sent an invalid request")
        if kind == b"b":
            receive_exactly(connection, count)
        connection.sendall(bytes(count) if kind == b"g" else b"!")


def measure_link(host: str, port: int, name: str, repeat: int, count: int) -> dict[str, Any]:
    """Return the medians of a link's bandwidth and latency, as an entry of a profile.

    The bandwidth in bit/s is the lower one of both directions and includes headers. The latency in seconds is half a
    round trip.

    Args:
        host: The host that serves.
        port: Its port.
        name: The name of this host.
        repeat: Number of transfers in each direction.
        count: Bytes of a transfer.
    """
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        _configure_socket(connection)
        connection.sendall(MAGIC)
        if receive_exactly(connection, len(MAGIC)) != MAGIC:
            raise LinkError(f"{host}:{port} is not a link benchmark: start profile_run.py --serve there")
        peer = receive_exactly(connection, receive_exactly(connection, 1)[0]).decode(errors="replace")
        round_trip_s = statistics.median(_time_request(connection, b"p", 0, 1) for _ in range(20 * repeat))
        send_s = statistics.median(_time_request(connection, b"b", count, 1) for _ in range(repeat))
        receive_s = statistics.median(_time_request(connection, b"g", count, count) for _ in range(repeat))
        connection.sendall(HEADER.pack(b"q", 0))
    # Each transfer also takes a round trip, for its request and its answer.
    transfer_s = max(max(send_s, receive_s) - round_trip_s, 1e-9)
    bandwidth = 8 * count * (1 + HEADERS_SHARE) / transfer_s
    return {"hosts": [name, peer], "bandwidth": bandwidth, "latency": round_trip_s / 2}


def _time_request(connection: socket.socket, kind: bytes, count: int, answer_bytes: int) -> float:
    payload = HEADER.pack(kind, count) + (bytes(count) if kind == b"b" else b"")
    start = time.perf_counter()
    connection.sendall(payload)
    receive_exactly(connection, answer_bytes)
    return time.perf_counter() - start


def _configure_socket(connection: socket.socket) -> None:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive_exactly(connection: socket.socket, count: int) -> bytearray:
    """Return exactly `count` bytes. LinkError if the other end closes the connection before."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if not (received := connection.recv_into(view[done:])):
            raise LinkError("the other end closed the connection")
        done += received
    return data
