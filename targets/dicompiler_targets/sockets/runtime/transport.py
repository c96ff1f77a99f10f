"""Connections as streams of bytes, in the clear or in TLS with certificates on both ends, and their addresses.

In: a connected socket, and the keys of this end where it is to be secure. Out: bytes, and who the other end is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import json
import socket
import ssl
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .protocol import MAGIC, MessageHeader, MessageType, PeerRefused, ProtocolError, pack_header
from .refusals import RENEW_HINT, tls_error

KEY_FILES = ("ca.pem", "crl.pem", "cert.pem", "key.pem")
"""What a directory of keys holds: the cluster's authority and the list of what it revoked, and the certificate and
private key of this end."""
EXPIRY_NOTICE_S = 30 * 24 * 3600.0
"""Seconds before a certificate expires in which that is told."""
COORDINATOR_IDENTITY = "dicompiler:coordinator"
DEVICE_IDENTITY = "dicompiler:device:{}"
"""Names in certificates (URIs among the alternative names of the subject)."""
CHUNK_BYTES = 1 << 16
"""Bytes that are encrypted, or received, in one go."""

MAX_TLS_RECORD_BYTES = 5 + (1 << 14) + 256
"""Bytes of a TLS record at most: of one that is not whole nobody tells how much is there."""
MAX_LOW_WATER_BYTES = 1 << 16
"""Bytes of a long message that are waited for before they are read: slow lines let a packet through at a time, and to
wake a thread for each takes longer than to read them all."""
MAX_UNSENT_BYTES = 1 << 16
"""Bytes that the system may hold beside those that are on their way: what waits here can still be overtaken."""
MAX_FULL_READS = 16
"""Reads from one connection that fill what they are given, after which the others are looked at."""
_FOUR = bytes(4)
LINGER_S, MAX_LINGER_READS = 1.0, 64
"""Seconds that the other end has to read why it is refused, and how often it is heard meanwhile."""


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline` (of time.monotonic), more than 0: for a socket 0 means not to wait at all."""
    return max(0.001, deadline - time.monotonic())


class Connection:
    """A connection in the clear: its calls wait, until a deadline, up to `start`, and none does from then on.

    `identity`: the name in the other end's certificate, None without one. `is_drained`: see frames.Source. Use it from one
    thread at a time.
    """

    identity: str | None = None

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deadline: float | None = None
        self._is_blocking, self.is_drained, self._drained_socket, self._full_reads = True, False, False, 0
        self._low_water = 1
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._socket.fileno()

    def start(self) -> None:
        """From now on no call waits."""
        self._is_blocking = False
        self._socket.setblocking(False)

    def set_deadline(self, deadline: float | None) -> None:
        """All that is sent and received up to `start` must be done by then, in however many pieces."""
        self._deadline = deadline
        self._socket.settimeout(None if deadline is None else seconds_left(deadline))

    def _apply_deadline(self) -> None:
        """Lets the next call wait for no longer than is left. TimeoutError where nothing is."""
        if self._deadline is not None:
            if time.monotonic() >= self._deadline:
                raise TimeoutError("timed out")
            self._socket.settimeout(seconds_left(self._deadline))

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Sends some of the bytes; their number, which is 0 where the system has no room."""
        if self._is_blocking:
            self._apply_deadline()
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    @property
    def has_unsent(self) -> bool:
        """Whether bytes that `send` has counted are still here: it must be called again, if with nothing."""
        return False

    def unacknowledged_bytes(self) -> int:
        """Bytes that the system has taken and the other end has not acknowledged."""
        try:
            return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, _FOUR), sys.byteorder)
        except (OSError, ValueError):  # closed: who sends next is told
            return 0

    def receive_into(self, view: memoryview) -> int | None:
        """Stores at most as many bytes as fit; their number, 0 at the end, None where nothing is there."""
        if self.is_drained:
            self.is_drained = False
            return None
        count = self._receive(view)
        self.is_drained = self._drained_socket
        return count

    def expect_bytes(self, count: int) -> None:
        """So many bytes are still to come, at least: who watches is told once they are there, or TOGETHER of them."""
        awaited = max(1, min(count, MAX_LOW_WATER_BYTES))
        if awaited != self._low_water:
            self._low_water = awaited
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)
            if awaited > 1:  # the other end may wait for the acknowledgement, which the system else delays by 40 ms
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _receive(self, view: memoryview) -> int | None:
        """As receive_into, from the network; `_dry` says that this was all that it had."""
        if self._is_blocking:
            self._apply_deadline()
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            count = None
        self._full_reads = self._full_reads + 1 if count == len(view) else 0
        # Where less came than could, there is no more; nor may it go on for long.
        self._drained_socket = bool(count) and not self._is_blocking and self._full_reads % MAX_FULL_READS == 0
        return count

    def linger(self) -> None:
        """Lets the other end read why it is refused: if we close while it sends, the system throws that away."""
        with contextlib.suppress(OSError):  # the other end may be gone, or not stop sending
            self._socket.shutdown(socket.SHUT_WR)
            self.set_deadline(time.monotonic() + LINGER_S)
            scratch = memoryview(bytearray(CHUNK_BYTES))
            for _ in range(MAX_LINGER_READS):
                if not self._receive(scratch):
                    break

    def close(self) -> None:
        """Ends the connection in both directions."""
        with contextlib.suppress(OSError):  # the other end may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TlsConnection(Connection):
    """A connection in TLS, which works on buffers in memory: a TLS object cannot take back what it has encrypted.

    To decrypt a small message takes no longer than a few calls of functions: there are as few as can be on its way.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server: bool, deadline: float) -> None:
        super().__init__(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._encrypted: bytes | memoryview = b""  # encrypted, and not sent yet
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._may_have_plain = False  # something came that may not be decrypted
        self.set_deadline(deadline)
        try:
            if server and connection.recv(len(MAGIC), socket.MSG_PEEK | socket.MSG_WAITALL) == MAGIC:
                self._refuse_plain()
                self.linger()
                raise ProtocolError("it does not use TLS: give both ends keys (--keys)")
            self._handshake()
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):  # the alert that tells the other end why
                self._flush()
            self.linger()
            raise tls_error(error) from None
        certificate = self._tls.getpeercert() or {}
        names: Sequence[tuple[str, str]] = certificate.get("subjectAltName", ())  # type: ignore[assignment]
        self.identity = next((name for kind, name in names if kind == "URI"), "")

    def _handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._receive_encrypted():
                    raise ConnectionError("closed during the TLS handshake") from None
            else:
                self._flush()
                return

    def _flush(self) -> bool:
        """Sends what is encrypted; whether all of it has left."""
        rest = self._encrypted or self._outgoing.read()
        while rest:
            if self._is_blocking:
                self._apply_deadline()
            try:
                count = self._socket.send(rest)
            except BlockingIOError:
                break
            rest = memoryview(rest)[count:] if count < len(rest) else b""
        self._encrypted = rest
        return not rest

    def _receive_encrypted(self) -> int | None:
        """Takes from the network what is to be decrypted: as receive_into."""
        if self._drained_socket:
            self._drained_socket = False
            return None
        count = self._receive(self._chunk)
        if count:
            self._incoming.write(self._chunk[:count])
            self._may_have_plain = True
        return count

    def _refuse_plain(self) -> None:
        """Says in the clear to who speaks this protocol without TLS that it must not."""
        self._socket.settimeout(seconds_left(time.monotonic() + LINGER_S))
        words = json.dumps({"message": "this end uses TLS: give the other one keys too (--keys)"}).encode()
        with contextlib.suppress(OSError):
            self._socket.sendall(pack_header(MessageHeader(MessageType.ERROR, 0, 0, len(words))) + words)

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self._encrypted and not self._flush():
            return 0
        plain = b"".join(buffers) if sum(map(len, buffers)) <= CHUNK_BYTES else _first_bytes(buffers, CHUNK_BYTES)
        count = self._tls.write(plain) if plain else 0
        self._flush()
        return count

    @property
    def has_unsent(self) -> bool:
        return len(self._encrypted) > 0

    def expect_bytes(self, count: int) -> None:
        super().expect_bytes(
            count - self._incoming.pending - MAX_TLS_RECORD_BYTES
        )  # the TLS object may have a part of one

    def receive_into(self, view: memoryview) -> int | None:
        if self.is_drained or not len(view):
            self.is_drained = False
            return None if len(view) else 0
        size = len(view)
        while True:
            if not self._may_have_plain and not (came := self._receive_encrypted()):
                return came
            try:
                count = int(self._tls.read(size, view))
            except ssl.SSLWantReadError:  # a part of a record came
                self._may_have_plain = False
                continue
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                raise tls_error(error) from None
            self._may_have_plain = self._incoming.pending > 0 or (count == size and self._tls.pending() > 0)
            if self._drained_socket and not self._may_have_plain:
                self._drained_socket, self.is_drained = False, True
            return count


def _first_bytes(buffers: Sequence[bytes | memoryview], size: int) -> bytes | memoryview:
    """The first `size` bytes of what is in the buffers, which is more."""
    parts: list[bytes | memoryview] = []
    for buffer in buffers:
        if buffer and size:
            parts.append(buffer[:size])
            size -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


class TlsKeys:
    """The keys of this end, from a directory with KEY_FILES. ValueError naming a file that cannot be used.

    `notice`: the line that tells that the certificate expires soon, '' if it does not.
    """

    def __init__(self, directory: Path) -> None:
        for name in KEY_FILES:
            if not (directory / name).is_file():
                raise ValueError(f"keys: {directory / name} is missing: make keys with 'dicompiler keys'")
        authority, revoked, certificate, key = (str(directory / name) for name in KEY_FILES)
        self._contexts = {}
        for server, protocol in ((True, ssl.PROTOCOL_TLS_SERVER), (False, ssl.PROTOCOL_TLS_CLIENT)):
            context = ssl.SSLContext(protocol)
            # Boards change their addresses: the certificate names the device, which is compared after its HELLO.
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_verify_locations(authority)
                context.load_verify_locations(revoked)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
                context.load_cert_chain(certificate, key)
            except (ssl.SSLError, OSError) as error:
                raise ValueError(f"keys: {directory}: they cannot be used: {error}: {RENEW_HINT}") from None
            self._contexts[server] = context
        end = self._check(directory)
        soon = end - time.time() < EXPIRY_NOTICE_S
        date = time.strftime("%Y-%m-%d", time.gmtime(end))
        self.expiry_notice = f"{directory}: the certificate expires on {date}: {RENEW_HINT} and --renew" if soon else ""

    def _check(self, directory: Path) -> float:
        """Shakes hands with itself: what others would refuse is told here, where it can be mended. The time when the
        certificate expires."""
        one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self._contexts[False].wrap_bio(one, other)
        server = self._contexts[True].wrap_bio(other, one, server_side=True)
        for end in (client, server) * 2:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise ValueError(f"keys: {directory}: {tls_error(error)}") from None
        certificate: dict[str, Any] = client.getpeercert() or {}
        return ssl.cert_time_to_seconds(certificate["notAfter"])

    def context(self, server: bool) -> ssl.SSLContext:
        """What the end that accepts connections uses, or the one that opens them."""
        return self._contexts[server]


def open_connection(connection: socket.socket, keys: TlsKeys | None, server: bool, deadline: float) -> Connection:
    """The line over a connection: in TLS where this end has keys. ProtocolError, Refused or OSError if that fails;
    the connection is closed then."""
    try:
        line = (
            Connection(connection)
            if keys is None
            else TlsConnection(connection, keys.context(server), server, deadline)
        )
        line.set_deadline(deadline)
        return line
    except (OSError, ProtocolError, PeerRefused):
        connection.close()
        raise


def check_identity(line_identity: str | None, expected: str, who: str) -> None:
    """ProtocolError unless the other end, which says that it is `who`, shows the certificate of that name."""
    if line_identity is not None and line_identity != expected:
        raise ProtocolError(f"{who} shows the certificate of {line_identity!r}: give each device the keys of its own")


def split_address(text: str) -> tuple[str, int]:
    """ "10.0.0.2:7000" or "[fe80::2]:7000" as (host, port). ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: expected HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_error(address: tuple[str, int], error: OSError) -> ValueError:
    """Why nobody can be heard at an address, in words with a remedy."""
    cause, remedy = error.strerror or str(error), "give an address of this host"
    if error.errno == errno.EADDRINUSE:
        cause, remedy = "the port is taken", "end the process that holds it, or choose another port, 0 for any"
    return ValueError(f"{join_address(*address)}: cannot listen there: {cause}: {remedy}")


def is_loopback(host: str) -> bool:
    """Whether what goes to this address (not a name) stays on this host."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_encryption(host: str, keys: TlsKeys | None, insecure: bool) -> None:
    """ValueError if tensors would go in the clear to where others can read and change them."""
    if keys is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"{host} is not on this host, and there are no keys: give the directory that 'dicompiler keys' made "
            "(--keys), or allow connections in the clear (--insecure)"
        )
