"""Measurement of the bandwidth and latency of the TCP link between two hosts.

`dicompiler profile` copies this module to boards, so it needs Python only.

The client sends requests to the server: "p" (the server answers at once), "b" (the server receives bytes), "g" (the
server sends bytes) and "q" (the measurement ends).
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
import time
from typing import Any

HEADER = struct.Struct("!cQ")
"""Header of a request: the kind of the request, and the number of bytes to transfer."""
MAGIC = b"dicompiler links 1\n"
MAX_PAYLOAD_BYTES = 1 << 26
TIMEOUT_S, CONNECT_TIMEOUT_S = 30.0, 5.0
HEADERS_SHARE = 0.05
"""Bytes of network headers as a fraction of the transferred bytes, as in RuntimeCosts.header_share."""


MAX_MEASUREMENTS = 3
"""Maximum number of measurements of a link; repeated if a transfer seems to take no time."""


class LinkError(OSError):
    """A link could not be measured; the message is one line."""


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address: "7000" ⇒ ("", 7000), "[::1]:7000" ⇒ ("::1", 7000)."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise LinkError(f"invalid address {text!r}: write PORT, HOST:PORT or [IPV6]:PORT with a port up to 65535")
    return host.strip("[]"), int(port)


def serve_measurement(host: str, port: int, name: str) -> None:
    """Answer the requests of clients until one measurement is complete.

    Args:
        host: Address to listen at; "" for all addresses.
        port: Port to listen at; 0 for any free port.
        name: Name of this host, which the client receives.
    """
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
        raise LinkError("the client is not a link benchmark: connect with profile_run.py --connect")
    encoded = name.encode()[:255]
    connection.sendall(MAGIC + bytes([len(encoded)]) + encoded)
    while (header := HEADER.unpack(receive_exactly(connection, HEADER.size)))[0] != b"q":
        kind, count = header
        if count > MAX_PAYLOAD_BYTES or kind not in (b"p", b"b", b"g"):
            raise LinkError("the client sent an invalid request: use the same version of profile_run.py on both hosts")
        if kind == b"b":
            receive_exactly(connection, count)
        connection.sendall(bytes(count) if kind == b"g" else b"!")


def measure_link(host: str, port: int, name: str, transfers: int, nbytes: int) -> dict[str, Any]:
    """Return the medians of a link's bandwidth (bit/s) and latency (s), as an entry of a profile.

    The bandwidth is the lower one of both directions, and includes headers. The latency is half a round trip.

    Args:
        host: Address of the other host, which runs `serve_measurement`.
        port: Port of the other host.
        name: Name of this host.
        transfers: Number of transfers in each direction.
        nbytes: Bytes of a transfer.
    """
    with _connect(host, port) as connection:
        _configure_socket(connection)
        connection.sendall(MAGIC)
        if receive_exactly(connection, len(MAGIC)) != MAGIC:
            raise LinkError(f"{host}:{port} is not a link benchmark: start profile_run.py --serve there")
        peer = receive_exactly(connection, receive_exactly(connection, 1)[0]).decode(errors="replace")
        for _ in range(MAX_MEASUREMENTS):
            round_trip_s = statistics.median(_time_request(connection, b"p", 0, 1) for _ in range(20 * transfers))
            send_s = statistics.median(_time_request(connection, b"b", nbytes, 1) for _ in range(transfers))
            receive_s = statistics.median(_time_request(connection, b"g", nbytes, nbytes) for _ in range(transfers))
            # Each measured transfer includes a request and an answer, i.e. one round trip.
            transfer_s = max(send_s, receive_s) - round_trip_s
            if transfer_s > 0:
                break
        connection.sendall(HEADER.pack(b"q", 0))
    if transfer_s <= 0:
        raise LinkError(
            f"{nbytes} bytes took no longer than an empty message ({1e3 * round_trip_s:.3g} ms), because a host was "
            "busy: measure again on idle hosts, or with more bytes (--megabytes)"
        )
    bandwidth = 8 * nbytes * (1 + HEADERS_SHARE) / transfer_s
    return {"hosts": [name, peer], "bandwidth": bandwidth, "latency": round_trip_s / 2}


def _connect(host: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise LinkError(
            f"{host}, port {port}: no answer within {CONNECT_TIMEOUT_S:g} s: a firewall may block the port: open the "
            "port there (--serve, or the key address in the hosts file, sets its number)"
        ) from None


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
    """Return exactly `count` bytes; raise LinkError if the other host closes the connection earlier."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if not (received := connection.recv_into(view[done:])):
            raise LinkError("the other host closed the connection: look at the messages of profile_run.py there")
        done += received
    return data
