"""Plain and TLS connections as byte streams, TLS keys, and addresses.

A connected socket and, for TLS, the keys of this end ⇒ a byte stream and the identity of the other end.
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

KEY_FILES = ("ca.pem", "crl.pem", "cert.pem", "key.pem")
"""Files in a directory of keys: the cluster's authority and revocation list, this end's certificate and private key."""
EXPIRY_NOTICE_S = 30 * 24 * 3600.0
"""Users are warned when a certificate expires within this time."""
COORDINATOR_IDENTITY = "dicompiler:coordinator"
DEVICE_IDENTITY = "dicompiler:device:{}"
"""Identities in certificates: URIs among the subject's alternative names."""
CHUNK_BYTES = 1 << 16
"""Bytes that are encrypted or received at once."""
MAX_TLS_RECORD_BYTES = 5 + (1 << 14) + 256
MAX_LOW_WATER_BYTES = 1 << 16
"""Bytes of a long message to wait for before reading.

Slow links deliver one packet at a time, and waking a thread for each takes longer than reading all of them.
"""
MAX_UNSENT_BYTES = 1 << 16
"""Bytes that the kernel may buffer in addition to those in flight. Later messages can still overtake all others."""
MAX_FULL_READS = 16
"""After this many reads that filled the whole buffer, other connections are served."""
_ZERO_INT = bytes(4)
LINGER_S, MAX_LINGER_READS = 1.0, 64
"""Seconds that the other end has to read why it is refused, and reads from it meanwhile."""
RENEW_HINT = "create new ones with 'dicompiler keys'"
RENEW_REVOKED_HINT = "to trust the device again, create new ones with 'dicompiler keys --revoke --renew'"


def seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline` (time.monotonic), more than 0, because 0 makes a socket non-blocking."""
    return max(0.001, deadline - time.monotonic())


class Connection:
    """A plain connection. Its calls block until a deadline before `start`, and never afterwards.

    Use it from one thread at a time.

    Attributes:
        identity: The identity in the other end's certificate; None without TLS.
        is_drained: See protocol.ByteSource.
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
        return self._socket.fileno()

    def start(self) -> None:
        """Make the connection non-blocking."""
        self._is_blocking = False
        self._socket.setblocking(False)

    def set_deadline(self, deadline: float | None) -> None:
        """Set the time (time.monotonic) by which all calls before `start` must return."""
        self._deadline = deadline
        self._socket.settimeout(None if deadline is None else seconds_left(deadline))

    def _apply_deadline(self) -> None:
        """Limit the next call to the remaining time; raise TimeoutError if there is none."""
        if self._deadline is not None:
            if time.monotonic() >= self._deadline:
                raise TimeoutError("timed out")
            self._socket.settimeout(seconds_left(self._deadline))

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send some of the bytes; return their number, 0 if the kernel's buffer is full."""
        if self._is_blocking:
            self._apply_deadline()
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    @property
    def has_unsent(self) -> bool:
        """True if bytes that `send` counted are still buffered here; call `send(())` to send them."""
        return False

    def unacknowledged_bytes(self) -> int:
        """Return the bytes that the kernel has accepted and the other end has not acknowledged."""
        try:
            return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, _ZERO_INT), sys.byteorder)
        except (OSError, ValueError):  # The socket is closed; the next send reports it.
            return 0

    def receive_into(self, view: memoryview) -> int | None:
        """Store received bytes in `view`; return their number, 0 at the end, None if none are available."""
        if self.is_drained:
            self.is_drained = False
            return None
        count = self._receive(view)
        self.is_drained = self._drained_socket
        return count

    def expect_bytes(self, count: int) -> None:
        """Let poll() report data once `count` bytes, or MAX_LOW_WATER_BYTES, are available."""
        low_water = max(1, min(count, MAX_LOW_WATER_BYTES))
        if low_water != self._low_water:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            if low_water > 1:  # The other end may wait for an acknowledgement, which the kernel delays by 40 ms.
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _receive(self, view: memoryview) -> int | None:
        """Read from the socket as receive_into does; set `_drained_socket` if no more data is available."""
        if self._is_blocking:
            self._apply_deadline()
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            count = None
        self._full_reads = self._full_reads + 1 if count == len(view) else 0
        # A read that did not fill the buffer took everything. After several full reads, other connections are served.
        self._drained_socket = bool(count) and not self._is_blocking and self._full_reads % MAX_FULL_READS == 0
        return count

    def linger(self) -> None:
        """Give the other end time to read why it is refused: closing while it sends would discard the message."""
        with contextlib.suppress(OSError):  # The other end may be gone or keep sending.
            self._socket.shutdown(socket.SHUT_WR)
            self.set_deadline(time.monotonic() + LINGER_S)
            scratch = memoryview(bytearray(CHUNK_BYTES))
            for _ in range(MAX_LINGER_READS):
                if not self._receive(scratch):
                    break

    def close(self) -> None:
        with contextlib.suppress(OSError):  # The other end may have closed it already.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TlsConnection(Connection):
    """A TLS connection that encrypts and decrypts in memory buffers.

    A TLS socket could not take back data that it has encrypted but not sent. Decrypting a small message takes no longer
    than a few Python calls, so the receive path makes as few as possible.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, is_server: bool, deadline: float) -> None:
        super().__init__(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._encrypted: bytes | memoryview = b""  # Encrypted bytes that were not sent yet.
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._may_have_plain = False  # Received bytes may not be decrypted yet.
        self.set_deadline(deadline)
        try:
            if is_server and connection.recv(len(MAGIC), socket.MSG_PEEK | socket.MSG_WAITALL) == MAGIC:
                self._refuse_plain()
                self.linger()
                raise ProtocolError("it does not use TLS: give keys to both ends (--keys)")
            self._handshake()
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):  # Send the alert that tells the other end the reason.
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
        """Send encrypted bytes; return True if all of them were sent."""
        unsent = self._encrypted or self._outgoing.read()
        while unsent:
            if self._is_blocking:
                self._apply_deadline()
            try:
                count = self._socket.send(unsent)
            except BlockingIOError:
                break
            unsent = memoryview(unsent)[count:] if count < len(unsent) else b""
        self._encrypted = unsent
        return not unsent

    def _receive_encrypted(self) -> int | None:
        """Read encrypted bytes from the socket; return as receive_into does."""
        if self._drained_socket:
            self._drained_socket = False
            return None
        count = self._receive(self._chunk)
        if count:
            self._incoming.write(self._chunk[:count])
            self._may_have_plain = True
        return count

    def _refuse_plain(self) -> None:
        """Send an unencrypted error to an end that uses this protocol without TLS."""
        self._socket.settimeout(seconds_left(time.monotonic() + LINGER_S))
        message = json.dumps({"message": "this end uses TLS: give keys to the other end too (--keys)"}).encode()
        with contextlib.suppress(OSError):
            self._socket.sendall(pack_header(MessageHeader(MessageType.ERROR, 0, 0, len(message))) + message)

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
        # The TLS object may hold part of the data, in a record that is not complete.
        super().expect_bytes(count - self._incoming.pending - MAX_TLS_RECORD_BYTES)

    def receive_into(self, view: memoryview) -> int | None:
        if self.is_drained or not len(view):
            self.is_drained = False
            return None if len(view) else 0
        size = len(view)
        while True:
            if not self._may_have_plain and not (received := self._receive_encrypted()):
                return received
            try:
                count = int(self._tls.read(size, view))
            except ssl.SSLWantReadError:  # Only part of a record arrived.
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
    """Return the first `size` bytes of the buffers, which hold more."""
    parts: list[bytes | memoryview] = []
    for buffer in buffers:
        if buffer and size:
            parts.append(buffer[:size])
            size -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


class TlsKeys:
    """The certificate and keys of this end, from a directory with KEY_FILES.

    Attributes:
        expiry_notice: A warning that the certificate expires soon; '' otherwise.
    """

    def __init__(self, directory: Path) -> None:
        """Load the keys; raise ValueError that names a file that cannot be used."""
        for name in KEY_FILES:
            if not (directory / name).is_file():
                raise ValueError(f"keys: {directory / name} is missing: create keys with 'dicompiler keys'")
        authority, revoked, certificate, key = (str(directory / name) for name in KEY_FILES)
        self._contexts = {}
        for is_server, protocol in ((True, ssl.PROTOCOL_TLS_SERVER), (False, ssl.PROTOCOL_TLS_CLIENT)):
            context = ssl.SSLContext(protocol)
            # Boards change their addresses. The certificate names the device, and is compared after its HELLO.
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_verify_locations(authority)
                context.load_verify_locations(revoked)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
                context.load_cert_chain(certificate, key)
            except (ssl.SSLError, OSError) as error:
                raise ValueError(f"keys: {directory}: cannot be used: {error}: {RENEW_HINT}") from None
            self._contexts[is_server] = context
        expires_at = self._check(directory)
        expires_soon = expires_at - time.time() < EXPIRY_NOTICE_S
        date = time.strftime("%Y-%m-%d", time.gmtime(expires_at))
        notice = f"{directory}: the certificate expires on {date}: {RENEW_HINT} and --renew"
        self.expiry_notice = notice if expires_soon else ""

    def _check(self, directory: Path) -> float:
        """Check the keys by a handshake with themselves; return the time when the certificate expires.

        So errors that other ends would report are found at the end that can correct them.
        """
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self._contexts[False].wrap_bio(to_client, to_server)
        server = self._contexts[True].wrap_bio(to_server, to_client, server_side=True)
        for end in (client, server) * 2:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise ValueError(f"keys: {directory}: {tls_error(error)}") from None
        certificate: dict[str, Any] = client.getpeercert() or {}
        return ssl.cert_time_to_seconds(certificate["notAfter"])

    def context(self, is_server: bool) -> ssl.SSLContext:
        """Return the context of the end that accepts connections, or of the end that opens them."""
        return self._contexts[is_server]


def tls_error(error: ssl.SSLError) -> Exception:
    """Return an exception with the cause and a remedy: PeerRefused if the other end sent the error as an alert."""
    code, reason = getattr(error, "verify_code", 0), str(error.reason)
    if isinstance(error, ssl.SSLCertVerificationError):
        if code == 10:
            return ProtocolError(f"its certificate has expired: {RENEW_HINT}")
        if code == 9:
            return ProtocolError("its certificate is not valid yet: compare the clocks of both hosts")
        if code == 23:
            return ProtocolError(f"its certificate was revoked: {RENEW_REVOKED_HINT}")
        if code in (3, 8, 11, 12):
            problem = "has expired" if code == 12 else "does not belong to this cluster"
            return ProtocolError(f"crl.pem, the list of revoked certificates, {problem}: {RENEW_HINT}")
        return ProtocolError(f"its certificate does not belong to this cluster: {RENEW_HINT}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return ProtocolError("it sent no certificate: give it keys (--keys)")
    if "ALERT" not in reason:
        return ProtocolError(f"it does not use TLS as expected ({reason}): give keys to both ends (--keys)")
    if "CERTIFICATE_REQUIRED" in reason:
        return PeerRefused("it requires a certificate: give keys to this end (--keys)")
    if "CERTIFICATE_EXPIRED" in reason:
        return PeerRefused(f"it refused this end's certificate, which has expired: {RENEW_HINT}")
    if "CERTIFICATE_REVOKED" in reason:
        return PeerRefused(f"it refused this end's certificate, which was revoked: {RENEW_REVOKED_HINT}")
    if "UNKNOWN_CA" in reason or "DECRYPT_ERROR" in reason:
        return PeerRefused(f"it refused this end's certificate, which does not belong to its cluster: {RENEW_HINT}")
    return PeerRefused(f"it refused the TLS connection ({reason}): {RENEW_HINT}")


def open_connection(connection: socket.socket, keys: TlsKeys | None, is_server: bool, deadline: float) -> Connection:
    """Return a connection over the socket, with TLS if this end has keys.

    Raise ProtocolError if the other end cannot be trusted, PeerRefused if it refused this one, and OSError if the
    connection failed or the deadline passed.
    """
    try:
        if keys is None:
            opened = Connection(connection)
        else:
            opened = TlsConnection(connection, keys.context(is_server), is_server, deadline)
        opened.set_deadline(deadline)
        return opened
    except (OSError, ProtocolError, PeerRefused):
        connection.close()
        raise


def check_identity(identity: str | None, expected: str, peer: str) -> None:
    """Raise ProtocolError if `peer` (as it calls itself) has a certificate with another identity than `expected`."""
    if identity is not None and identity != expected:
        raise ProtocolError(f"{peer} has the certificate of {identity!r}: give each device its own keys")


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of "10.0.0.2:7000" or "[fe80::2]:7000"; raise ValueError for other strings."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address: expected HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return the string that `split_address` accepts."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_error(address: tuple[str, int], error: OSError) -> ValueError:
    """Return an error with the reason why this host cannot listen at the address, and a remedy."""
    cause, remedy = error.strerror or str(error), "give an address of this host"
    if error.errno == errno.EADDRINUSE:
        cause, remedy = "the port is in use", "end the process that uses it, or choose another port (0: any)"
    return ValueError(f"{join_address(*address)}: cannot listen there: {cause}: {remedy}")


def is_loopback(host: str) -> bool:
    """Return True if packets to this address (not a name) stay on this host."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_encryption(host: str, keys: TlsKeys | None, is_insecure: bool) -> None:
    """Raise ValueError if tensors would be sent to another host without encryption and that is not allowed."""
    if keys is None and not is_insecure and not is_loopback(host):
        raise ValueError(
            f"{host} is not a loopback address and there are no keys: give those that 'dicompiler keys' created "
            "(--keys), or allow unencrypted connections (--insecure)"
        )
