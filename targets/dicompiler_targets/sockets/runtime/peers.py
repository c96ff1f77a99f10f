"""A device's connections to its peers (the other devices): connecting, accepting, identity checks and failures."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .addresses import PORT_HINT, connect, join_address
from .channel import MAX_MISSED_HEARTBEATS, CheckHeader, DeliverMessage, HandleEnd, MessageChannel
from .event_loop import EventLoop
from .handshake import COORDINATOR_NAME, ConnectionQueue, RunCredentials
from .mailbox import DeviceError, Mailbox
from .protocol import RECEIVED_TENSORS, MessageType, PeerRefused, ProtocolError
from .role_schedule import RoleSchedule
from .transport import DEVICE_IDENTITY, TlsKeys, check_encryption, check_identity, open_connection, seconds_left

POLL_INTERVAL_S = 0.05
"""Seconds between two checks for peers that failed while the device waits for their connections."""

MAX_HANDSHAKE_S = 15.0
"""Seconds in which a peer must accept a connection and answer the greeting.

The peer answers in a thread for handshakes, so that computing does not delay the answer.
"""

RETRY_S = 0.1
"""Seconds until a device tries again to connect to a peer."""

ChannelCallbacks = tuple[CheckHeader, DeliverMessage, HandleEnd]
"""Three callbacks for `MessageChannel.start`: check a header, deliver a message, handle the connection's end."""


@dataclass(frozen=True)
class ConnectionSettings:
    """Settings of a device's connections to the coordinator and to other devices.

    Attributes:
        deadline: Time (time.monotonic) by which the run must have started.
        keys: TLS keys of this device; None for connections without encryption.
        is_insecure: True if connections without encryption to other hosts are allowed.
        heartbeat_s: Seconds between two heartbeats.
    """

    deadline: float
    keys: TlsKeys | None = None
    is_insecure: bool = False
    heartbeat_s: float = 2.0


class PeerConnections:
    """The channels from a device to its peers (the other devices) in one run.

    DeviceRun creates the object. Each pair of devices has one channel: the earlier device in the manifest's order
    connects to the later one. The event loop passes messages that arrive on a channel to the callbacks of
    `make_callbacks`.

    Attributes:
        credentials: ID and token of the run, with which peers prove their membership.
        channels: The channel to each connected peer, by the peer's name.
        all_channels: All channels of the run so far, including those to peers that failed later.
        down: Names of failed devices, as the coordinator reports them.
        disconnected: Names of disconnected peers, even if the coordinator does not know of the failure yet.
        is_complete: True once all peers were connected and frames are executed. Then, only failed peers may connect.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        settings: ConnectionSettings,
        credentials: RunCredentials,
        loop: EventLoop,
        mailbox: Mailbox,
        schedule: RoleSchedule,
        make_callbacks: Callable[[str], ChannelCallbacks],
        report_failed: Callable[[str, str], None],
    ) -> None:
        """Create the object without connecting.

        `make_callbacks` returns the callbacks for the channel to the peer with that name. `report_failed` is called
        with a peer's name and a message, and tells the coordinator that the peer failed.
        """
        self._manifest, self._settings, self.credentials = manifest, settings, credentials
        self._loop, self._mailbox, self._schedule = loop, mailbox, schedule
        self._make_callbacks, self._report_failed = make_callbacks, report_failed
        self._name: str = manifest["device"]
        self._preceding = {peer["device"] for peer in manifest["peers"] if peer["index"] < manifest["index"]}
        self.channels: dict[str, MessageChannel] = {}
        self.all_channels: list[MessageChannel] = []
        self.down: set[str] = set()
        self.disconnected: set[str] = set()
        self.is_complete = False
        self._connecting: tuple[str, socket.socket] | None = None
        self._member_hosts: set[str] = set()

    # -- identity

    def make_hello(self, receiver: str) -> dict[str, Any]:
        """Return the HELLO message that proves this device's identity.

        `receiver` is the name of a device, or COORDINATOR_NAME for the coordinator.
        """
        proof = self.credentials.make_proof(self._name, receiver)
        return {"device": self._name, "digest": self._manifest["digest"], **proof}

    def adopt_run(self, message: Mapping[str, Any]) -> None:
        """Adopt the run ID of a PEERS message; raise DeviceError if the sender is not the coordinator."""
        try:
            self.credentials.check(message, COORDINATOR_NAME, self._name)
        except ProtocolError as error:
            raise DeviceError(f"the coordinator cannot be trusted: {error}") from None
        self.credentials = RunCredentials(str(message.get("run")), self.credentials.token)
        self._member_hosts = {str(host) for host, _ in message["addresses"].values()}

    def is_member_host(self, host: str) -> bool:
        """Return True if a device of the run has this address."""
        return host in self._member_hosts

    # -- connecting

    def connect_all(self, arriving: ConnectionQueue, message: Mapping[str, Any]) -> None:
        """Connect to peers, and wait for the peers that connect to this device.

        This device connects to the peers that follow it in the manifest's order. The preceding peers connect to it, and
        `arriving` has their connections. A device that rejoins after a failure connects to all peers. Peers that have
        failed, or fail during this call, are left out. `message` is the coordinator's PEERS message. Raise DeviceError
        if a peer cannot be reached or does not connect in time.
        """
        expected = set() if message.get("rejoins") else self._preceding - self.down
        for peer in self._manifest["peers"]:
            if peer["device"] not in expected | self.down:
                self._connect_if_up(peer["device"], message["addresses"][peer["device"]])
        while awaited := sorted(expected - set(self.channels) - self.down):
            accepted = arriving.take(min(POLL_INTERVAL_S, seconds_left(self._settings.deadline)))
            self._mailbox.check()
            if accepted is not None:
                peer, channel = accepted
                if self.channels.setdefault(peer, channel) is not channel:
                    channel.close()
            elif time.monotonic() >= self._settings.deadline:
                refused = f" (last refused connection: {arriving.last_refusal})" if arriving.last_refusal else ""
                raise DeviceError(f"{awaited[0]!r} did not connect in time{refused}", awaited[0])
        with self._loop.lock:
            for peer in self.disconnected & self.channels.keys():
                self.channels.pop(peer).close()
            for peer, channel in self.channels.items():
                self._start_channel(peer, channel)

    def _connect_if_up(self, peer: str, address: Any) -> None:
        """Connect to a peer; if that fails and there are failure plans, report the peer as failed."""
        try:
            self._connect(peer, address)
        except DeviceError as error:
            self._mailbox.check()
            if not self._schedule.tolerates_failures:
                raise
            if peer not in self.disconnected:
                self.report_failure(peer, str(error))

    def _connect(self, peer: str, address: Any) -> None:
        """Connect to a peer. Try again if the peer closes the connection, as it may while many clients connect."""
        timeout_s = seconds_left(min(self._settings.deadline, time.monotonic() + MAX_HANDSHAKE_S))
        if self._schedule.tolerates_failures:
            timeout_s = min(timeout_s, MAX_MISSED_HEARTBEATS * self._settings.heartbeat_s)
        retry_until = time.monotonic() + timeout_s
        host, port = address
        while True:
            try:
                self.channels[peer] = self._open_channel(peer, host, port, timeout_s)
                return
            except (OSError, ProtocolError, PeerRefused, ValueError) as error:
                is_dropped = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
                if not is_dropped or peer in self.disconnected or time.monotonic() > retry_until:
                    place = join_address(host, port)
                    raise DeviceError(f"cannot connect to {peer!r} at {place}: {error}", peer) from None
            self._mailbox.check()
            time.sleep(RETRY_S)

    def _open_channel(self, peer: str, host: str, port: int, timeout_s: float) -> MessageChannel:
        """Return a channel to a peer after the handshake. The peer must accept the connection within `timeout_s`."""
        settings, deadline = self._settings, min(self._settings.deadline, time.monotonic() + MAX_HANDSHAKE_S)
        connection = connect(host, port, timeout_s, PORT_HINT)
        self._connecting = peer, connection
        try:
            if peer in self.disconnected:
                raise OSError("the device failed while the connection was being made")
            check_encryption(connection.getpeername()[0], settings.keys, settings.is_insecure)
            channel = MessageChannel(open_connection(connection, settings.keys, False, deadline))
            channel.send_greeting(MessageType.HELLO, self.make_hello(peer), deadline)
            self._check_peer(channel.receive_greeting(deadline), channel, {peer}, deadline)
        except BaseException:
            connection.close()
            raise
        finally:
            self._connecting = None
        return channel

    def accept(
        self, hello: Mapping[str, Any], channel: MessageChannel, deadline: float
    ) -> tuple[str, MessageChannel] | None:
        """Accept a peer that has connected and sent the HELLO message `hello`.

        Return name and channel of the peer for connect_all. If frames are executed already, start the channel and
        return None. Raise ProtocolError for a peer that is not expected, and DeviceError for one with another artifact.
        """
        peer = self._check_peer(hello, channel, set(self.down) if self.is_complete else self._preceding, deadline)
        if not self.is_complete:
            channel.send_greeting(MessageType.HELLO, self.make_hello(peer), deadline)
            return peer, channel
        # Soon after the peer has received HELLO, the coordinator may order this device to send to the peer. The lock
        # delays such an order until the peer's channel is in `channels`.
        with self._loop.lock:
            channel.send_greeting(MessageType.HELLO, self.make_hello(peer), deadline)
            if peer in self.channels:
                self.channels[peer].close()
            self.channels[peer] = channel
            self.disconnected.discard(peer)
            self._start_channel(peer, channel)
        return None

    def _check_peer(
        self, hello: Mapping[str, Any], channel: MessageChannel, expected: set[str], deadline: float
    ) -> str:
        """Return the name of the peer that sent the HELLO message `hello`.

        Raise ProtocolError if the peer is not one of `expected` or cannot prove its identity. If the peer has another
        artifact than this device, tell the peer and raise DeviceError.
        """
        peer = str(hello.get("device"))
        if peer not in expected:
            raise ProtocolError(f"device {peer[:100]!r} connected, expected one of {sorted(expected)}")
        check_identity(channel.identity, DEVICE_IDENTITY.format(peer), f"device {peer!r}")
        self.credentials.check(hello, peer, self._name)
        if hello.get("digest") != self._manifest["digest"]:
            reason = f"devices {peer!r} and {self._name!r} have different artifacts: copy the same one to both"
            channel.refuse(reason, deadline)
            raise DeviceError(reason, peer)
        return peer

    def _start_channel(self, peer: str, channel: MessageChannel) -> None:
        self.all_channels.append(channel)
        channel.start(self._loop, *self._make_callbacks(peer), at_once=False)

    def take_received(self) -> bytes:
        """Return the part of a DONE message that says how many bytes of tensors each peer has sent.

        It has a RECEIVED_TENSORS struct for each peer that has sent tensors since the last call.
        """
        entries = []
        for peer in self._manifest["peers"]:
            channel = self.channels.get(peer["device"])
            if channel is not None and (received := channel.take_received()) is not None:
                entries.append(RECEIVED_TENSORS.pack(peer["index"], *received))
        return b"".join(entries)

    # -- failures

    def set_down(self, down: set[str]) -> int:
        """Disconnect the failed devices that the coordinator reports; return how many of them are new."""
        count = len(down - self.down)
        self.down = down
        for peer in sorted(down - self.disconnected):
            self._disconnect(peer)
        return count

    def set_initially_down(self, down: set[str]) -> None:
        """Set the failed devices before any peer is connected."""
        self.down, self.disconnected = down, set(down)

    def report_failure(self, peer: str, message: str) -> None:
        """Disconnect a failed peer and tell the coordinator, which decides how the run continues."""
        self._disconnect(peer)
        self._report_failed(peer, message)

    def _disconnect(self, peer: str) -> None:
        self.disconnected.add(peer)
        if peer in self.channels:
            self.channels[peer].close()
        self.cancel_connect(peer)
        self._mailbox.wake()

    def cancel_connect(self, peer: str = "") -> None:
        """Interrupt the attempt to connect to this peer, or to any peer if `peer` is ''."""
        connecting = self._connecting
        if connecting is not None and peer in ("", connecting[0]):
            with contextlib.suppress(OSError):  # The socket may be closed already.
                connecting[1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
