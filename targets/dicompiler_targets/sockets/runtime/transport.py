"""Plain and TLS connections as byte streams, and TLS keys.

Many boards have no battery for their clock, so their clock may be wrong when a certificate's dates are checked.
`describe_wrong_date` checks them with a tolerance and names clock and dates; OpenSSL does neither, so its own check is
off (`NO_CHECK_TIME`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import ssl
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .addresses import is_loopback
from .protocol import MAGIC, MessageHeader, MessageType, PeerRefused, ProtocolError, pack_header

NO_CHECK_TIME = 0x200000
"""OpenSSL's flag X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""
CLOCK_TOLERANCE_S = 3600.0
"""Seconds by which the clocks of two hosts may differ, when the dates of a certificate are checked."""
RENEW_HINT = "create new ones with 'dicompiler keys'"
CLOCK_HINT = "set the clock, for example with NTP ('timedatectl set-ntp true')"


def describe_wrong_date(certificate: dict[str, Any]) -> str:
    """Return why a certificate is not valid at the present time, and the remedy; '' if it is valid.

    `certificate` is a result of `SSLObject.getpeercert`.
    """
    now = time.time()
    start, end = (float(ssl.cert_time_to_seconds(certificate[key])) for key in ("notBefore", "notAfter"))
    clock = f"the clock of {socket.gethostname()} says {_format_time(now)}"
    if now < start - CLOCK_TOLERANCE_S:
        return f"is not valid yet: it is valid from {_format_time(start)}, and {clock}: {CLOCK_HINT}"
    if now > end + CLOCK_TOLERANCE_S:
        remedy = f"{RENEW_HINT}, or if the clock is wrong, {CLOCK_HINT}"
        return f"has expired: it was valid until {_format_time(end)}, and {clock}: {remedy}"
    return ""


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


KEY_FILES = ("ca.pem", "crl.pem", "cert.pem", "key.pem")
"""Files in a directory of keys: certificate authority, revocation list, this end's certificate and private key."""
EXPIRY_NOTICE_S = 30 * 24 * 3600.0
"""Users are warned when a certificate expires within this number of seconds."""
COORDINATOR_IDENTITY = "dicompiler:coordinator"
DEVICE_IDENTITY = "dicompiler:device:{}"
"""Pattern of a device's identity in its certificate, as a URI among the alternative names of the subject."""
CHUNK_BYTES = 1 << 16
"""Maximum number of bytes that one call encrypts or receives."""
MAX_TLS_RECORD_BYTES = 5 + (1 << 14) + 256
MAX_LOW_WATER_BYTES = 1 << 16
"""Number of bytes of a long message that must have arrived before a thread is woken to read them.

Slow links deliver one packet at a time, and waking a thread takes longer than reading a packet.
"""
MAX_UNSENT_BYTES = 1 << 16
"""Maximum number of unsent bytes of a connection in the kernel; urgent messages can overtake only later bytes."""
MAX_FULL_READS = 16
"""Number of consecutive reads that fill the whole buffer, after which other connections are read first."""
_ZERO_INT = bytes(4)
LINGER_S, MAX_LINGER_READS = 1.0, 64
"""Maximum seconds and reads for which a refused connection stays open, so that the other end can read the reason."""
RENEW_REVOKED_HINT = (
    "to trust the device again, create new ones with 'dicompiler keys DIR --revoke DEVICE --renew', and deploy again"
)
WRONG_CRL = f"crl.pem, the list of revoked certificates, does not belong to this cluster: {RENEW_HINT}"
VERIFICATION_ERRORS = {
    3: WRONG_CRL,
    8: WRONG_CRL,
    23: f"its certificate was revoked: {RENEW_REVOKED_HINT}",
}
"""Error messages by the code with which OpenSSL rejects the other end's certificate."""
CRL_EXPIRED_CODE = 12
"""OpenSSL's code X509_V_ERR_CRL_HAS_EXPIRED."""
WRONG_CLUSTER = f"the other end refused this end's certificate, which belongs to another cluster: {RENEW_HINT}"
ALERTS = {
    "CERTIFICATE_REQUIRED": "the other end requires a certificate: give keys to this end (--keys)",
    "CERTIFICATE_REVOKED": f"the other end refused this end's certificate, which was revoked: {RENEW_REVOKED_HINT}",
    "UNKNOWN_CA": WRONG_CLUSTER,
    "DECRYPT_ERROR": WRONG_CLUSTER,
}
"""Error messages by the TLS alert with which the other end rejects this end's certificate."""


class CertificateError(ProtocolError):
    """Error: this end refuses the other end's certificate. The text ends with the remedy."""


def seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline` (time.monotonic), at least 0.001.

    A socket's timeout of 0 would mean not to block.
    """
    return max(0.001, deadline - time.monotonic())


class Connection:
    """A TCP connection without encryption, as a stream of bytes.

    Until `start` is called, all calls block until they succeed or a deadline passes; afterwards they never block. Use
    it from one thread at a time.

    Attributes:
        identity: The identity in the other end's certificate; None without TLS.
        is_drained: True if the last `receive_into` returned all available bytes. The next call returns None and sets it
            to false; a caller that omits this call must set it to false itself.
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
        """Make all later calls return at once instead of waiting for the network."""
        self._is_blocking = False
        self._socket.setblocking(False)

    def set_deadline(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._socket.settimeout(None if deadline is None else seconds_left(deadline))

    def _apply_deadline(self) -> None:
        """Limit the socket's next call to the time until the deadline; raise TimeoutError if it has passed."""
        if self._deadline is not None:
            if time.monotonic() >= self._deadline:
                raise TimeoutError("timed out")
            self._socket.settimeout(seconds_left(self._deadline))

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send as many of the bytes as possible; return their number, 0 if the kernel's buffer is full."""
        if self._is_blocking:
            self._apply_deadline()
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    @property
    def has_unsent(self) -> bool:
        """True if `send` has accepted bytes that are not passed to the kernel yet; `send(())` passes them."""
        return False

    def unacknowledged_bytes(self) -> int:
        try:
            return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, _ZERO_INT), sys.byteorder)
        except (OSError, ValueError):  # The socket is closed, which the next `send` will report.
            return 0

    def receive_into(self, view: memoryview) -> int | None:
        """Store received bytes in `view`; return their number, 0 after the last byte, None if none are available."""
        if self.is_drained:
            self.is_drained = False
            return None
        count = self._receive(view)
        self.is_drained = self._drained_socket
        return count

    def expect_bytes(self, count: int) -> None:
        """Announce that `count` more bytes will arrive, so that fewer bytes do not wake the event loop."""
        low_water = max(1, min(count, MAX_LOW_WATER_BYTES))
        if low_water != self._low_water:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            if low_water > 1:
                # By default, the kernel delays acknowledgements by 40 ms. The other end limits its unacknowledged
                # bytes, so it might send nothing until then. With TCP_QUICKACK, the kernel acknowledges at once.
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _receive(self, view: memoryview) -> int | None:
        """Read from the socket into `view`, and set `_drained_socket` to true if all available bytes were read.

        Return the number of bytes, 0 after the last byte of the connection, None if none are available.
        """
        if self._is_blocking:
            self._apply_deadline()
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            count = None
        self._full_reads = self._full_reads + 1 if count == len(view) else 0
        # A read that did not fill the buffer has emptied the socket. After MAX_FULL_READS full reads, the socket is
        # treated as empty too, so that the event loop reads from other connections.
        self._drained_socket = bool(count) and not self._is_blocking and self._full_reads % MAX_FULL_READS == 0
        return count

    def linger(self) -> None:
        """Read and discard data for up to LINGER_S, so that the other end can read the error that was just sent.

        If the connection were closed at once, the kernel could discard the error.
        """
        with contextlib.suppress(OSError):  # Errors mean that the other end has disconnected, or keeps sending.
            self._socket.shutdown(socket.SHUT_WR)
            self.set_deadline(time.monotonic() + LINGER_S)
            scratch = memoryview(bytearray(CHUNK_BYTES))
            for _ in range(MAX_LINGER_READS):
                if not self._receive(scratch):
                    break

    def close(self) -> None:
        with contextlib.suppress(OSError):  # shutdown() fails if the other end has closed the connection.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TlsConnection(Connection):
    """A TLS connection, which encrypts and decrypts in memory (`ssl.MemoryBIO`).

    An `ssl.SSLSocket` would have to send the same bytes again if the kernel accepts only some of them.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, is_server: bool, deadline: float) -> None:
        super().__init__(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._encrypted: bytes | memoryview = b""  # Encrypted bytes that the kernel has not accepted yet.
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._may_have_plain = False  # True if some received bytes may not be decrypted yet.
        self.set_deadline(deadline)
        try:
            if is_server and connection.recv(len(MAGIC), socket.MSG_PEEK | socket.MSG_WAITALL) == MAGIC:
                self._refuse_plain()
                self.linger()
                raise ProtocolError("the other end does not use TLS: give keys to both ends (--keys)")
            self._handshake()
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):  # This sends the TLS alert, which has the reason.
                self._flush()
            self.linger()
            raise tls_error(error) from None
        certificate = self._tls.getpeercert() or {}
        if certificate and (cause := describe_wrong_date(certificate)):
            self._refuse(f"the other end refused this end's certificate, which {cause}")
            raise CertificateError(f"its certificate {cause}")
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
        if self._drained_socket:
            self._drained_socket = False
            return None
        count = self._receive(self._chunk)
        if count:
            self._incoming.write(self._chunk[:count])
            self._may_have_plain = True
        return count

    def _refuse_plain(self) -> None:
        """Send an unencrypted error to the other end, which uses the protocol without TLS."""
        self._socket.settimeout(seconds_left(time.monotonic() + LINGER_S))
        with contextlib.suppress(OSError):
            self._socket.sendall(pack_error("this end uses TLS: give keys to the other end too (--keys)"))

    def _refuse(self, reason: str) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):  # No error can be sent if the other end has disconnected.
            self._tls.write(pack_error(reason))
            self._flush()
        self.linger()

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self._encrypted and not self._flush():
            return 0
        if sum(map(len, buffers)) > CHUNK_BYTES:
            buffers = limit_buffers(buffers, CHUNK_BYTES)
        plain = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        count = self._tls.write(plain) if plain else 0
        self._flush()
        return count

    @property
    def has_unsent(self) -> bool:
        return len(self._encrypted) > 0

    def expect_bytes(self, count: int) -> None:
        # Some of the bytes may have arrived already, in an incomplete TLS record. Waiting for all `count` bytes could
        # then take forever.
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
            except ssl.SSLWantReadError:  # The TLS record is incomplete, so read more bytes from the socket.
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


def pack_error(reason: str) -> bytes:
    """Return an ERROR message as bytes, to refuse a connection that has no message channel yet."""
    payload = json.dumps({"message": reason}).encode()
    return pack_header(MessageHeader(MessageType.ERROR, 0, 0, len(payload))) + payload


def limit_buffers(buffers: Sequence[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    """Return the first `size` bytes of the buffers as a list of buffers, without copying."""
    limited: list[bytes | memoryview] = []
    for buffer in buffers:
        if buffer:
            limited.append(buffer[:size])
            size -= len(limited[-1])
            if not size:
                break
    return limited


class TlsKeys:
    """The TLS keys and the certificate of this process, from a directory with the files KEY_FILES.

    Attributes:
        expiry_notice: A warning that the certificate expires soon; '' otherwise.
    """

    def __init__(self, directory: Path) -> None:
        """Load the keys; raise ValueError with the name of a file that is missing or cannot be used."""
        for name in KEY_FILES:
            if not (directory / name).is_file():
                raise ValueError(f"keys: {directory / name} is missing: create keys with 'dicompiler keys'")
        authority, revoked, certificate, key = (str(directory / name) for name in KEY_FILES)
        self._contexts = {}
        for is_server, protocol in ((True, ssl.PROTOCOL_TLS_SERVER), (False, ssl.PROTOCOL_TLS_CLIENT)):
            context = ssl.SSLContext(protocol)
            # Certificates have no host names, because boards change them; `check_identity` checks the device's name.
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_flags |= NO_CHECK_TIME
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
        """Check the keys by a TLS handshake in this process; return the time when the certificate expires.

        Otherwise, only other hosts would notice some errors.
        """
        try:
            certificate = self._handshake_in_memory()
        except ssl.SSLError as error:
            raise ValueError(f"keys: {directory}: {tls_error(error)}") from None
        if cause := describe_wrong_date(certificate):
            raise ValueError(f"keys: {directory}: its certificate {cause}")
        self._check_revocation_date(directory)
        return ssl.cert_time_to_seconds(certificate["notAfter"])

    def _check_revocation_date(self, directory: Path) -> None:
        for context in self._contexts.values():
            context.verify_flags &= ~NO_CHECK_TIME
        try:
            self._handshake_in_memory()
        except ssl.SSLError as error:
            if getattr(error, "verify_code", 0) == CRL_EXPIRED_CODE:
                cause = "crl.pem, the list of revoked certificates, has expired"
                raise ValueError(f"keys: {directory}: {cause}: {RENEW_HINT}") from None
        for context in self._contexts.values():
            context.verify_flags |= NO_CHECK_TIME

    def _handshake_in_memory(self) -> dict[str, Any]:
        """Perform a TLS handshake between the client and server contexts of these keys, as another host would.

        Return the certificate as a dictionary.
        """
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self._contexts[False].wrap_bio(to_client, to_server)
        server = self._contexts[True].wrap_bio(to_server, to_client, server_side=True)
        for end in (client, server) * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        return client.getpeercert() or {}

    def context(self, is_server: bool) -> ssl.SSLContext:
        return self._contexts[is_server]


def tls_error(error: ssl.SSLError) -> Exception:
    """Return the exception for a TLS error: PeerRefused if the other end reported it, else a ProtocolError."""
    code, reason = getattr(error, "verify_code", 0), str(error.reason)
    if isinstance(error, ssl.SSLCertVerificationError):
        unknown = f"its certificate does not belong to this cluster: {RENEW_HINT}"
        return CertificateError(VERIFICATION_ERRORS.get(code, unknown))
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return ProtocolError("the other end sent no certificate: give keys to the other end (--keys)")
    if "ALERT" not in reason:
        return ProtocolError(f"the other end does not use TLS as expected ({reason}): give keys to both ends (--keys)")
    unknown = f"the other end refused the TLS connection ({reason}): {RENEW_HINT}"
    return PeerRefused(next((message for alert, message in ALERTS.items() if alert in reason), unknown))


def open_connection(connection: socket.socket, keys: TlsKeys | None, is_server: bool, deadline: float) -> Connection:
    """Return a connection over the socket, with TLS if `keys` is not None.

    `is_server` is true at the end that accepted the connection. The TLS handshake may take until `deadline`
    (time.monotonic).

    Raises:
        ProtocolError: The other end cannot be trusted.
        PeerRefused: The other end refused this end.
        OSError: The connection failed, or the deadline passed.
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
    """Raise ProtocolError if `identity`, from the other end's certificate, is not the expected one.

    Without TLS, `identity` is None and is not checked. `peer` names the other end in the error.
    """
    if identity is not None and identity != expected:
        raise ProtocolError(f"{peer} has the certificate of {identity!r}: give each device its own keys")


def check_encryption(host: str, keys: TlsKeys | None, is_insecure: bool) -> None:
    """Raise ValueError if tensors would be sent to another host without TLS, but `is_insecure` is false.

    `host` is the IP address of either end; a loopback address means that both are on this host.
    """
    if keys is None and not is_insecure and not is_loopback(host):
        raise ValueError(
            f"{host} is not a loopback address and there are no keys: give those that 'dicompiler keys' created "
            "(--keys), or allow unencrypted connections (--insecure)"
        )
