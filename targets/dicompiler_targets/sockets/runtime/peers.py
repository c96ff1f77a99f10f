"""A device's connections to its peers: identity, connecting, accepting, and dropping failed peers.

The coordinator's PEERS message ⇒ a message channel to each peer that is up.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .channel import MAX_MISSED_HEARTBEATS, CheckHeader, DeliverMessage, HandleEnd, MessageChannel
from .event_loop import EventLoop
from .handshake import COORDINATOR_NAME, ConnectionQueue, RunCredentials
from .mailbox import DeviceError, Mailbox
from .protocol import MessageType, PeerRefused, ProtocolError
from .role_schedule import RoleSchedule
from .transport import DEVICE_IDENTITY, TlsKeys, check_encryption, check_identity, open_connection, seconds_left

POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether a peer is still awaited."""

ChannelCallbacks = tuple[CheckHeader, DeliverMessage, HandleEnd]
"""Callbacks of a peer's channel: see MessageChannel.start."""


@dataclass(frozen=True)
class ConnectionSettings:
    """How a device connects to others.

    Attributes:
        deadline: When the run must have started (time.monotonic).
        keys: TLS keys of this end; None for plain connections.
        is_insecure: Plain connections to other hosts are allowed.
        heartbeat_s: Seconds between two heartbeats.
    """

    deadline: float
    keys: TlsKeys | None = None
    is_insecure: bool = False
    heartbeat_s: float = 2.0


class PeerConnections:
    """The peers of a device in one run.

    Attributes:
        credentials: Credentials of the run.
        channels: Channels by peer.
        all_channels: All channels so far, those to failed peers included.
        down: Devices that are down, as the coordinator says.
        disconnected: Peers that are disconnected, whether the coordinator knows it or not.
        is_complete: Frames are being executed. Only peers that are down may connect from then on.
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
        """Create the collection without connecting.

        Args:
            manifest: The device's manifest.
            settings: How to connect.
            credentials: What this end knows of the run's credentials.
            loop: The event loop.
            mailbox: The device's mailbox.
            schedule: The roles in use.
            make_callbacks: Makes the callbacks of a peer's channel.
            report_failed: Tells the coordinator that a peer failed: (peer, message).
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

    # -- identity

    def make_hello(self, receiver: str) -> dict[str, Any]:
        """Return the HELLO that proves this device's identity to `receiver`."""
        proof = self.credentials.make_proof(self._name, receiver)
        return {"device": self._name, "digest": self._manifest["digest"], **proof}

    def adopt_run(self, message: Mapping[str, Any]) -> None:
        """Take the run's ID from the PEERS message; raise DeviceError if its sender is not the run's coordinator."""
        try:
            self.credentials.check(message, COORDINATOR_NAME, self._name)
        except ProtocolError as error:
            raise DeviceError(f"the coordinator cannot be trusted: {error}") from None
        self.credentials = RunCredentials(str(message.get("run")), self.credentials.token)

    # -- connecting

    def connect_all(self, arriving: ConnectionQueue, message: Mapping[str, Any]) -> None:
        """Connect to the following peers in the order of devices, and wait for the preceding ones to connect.

        A device that rejoins connects to all peers that are up. Peers that fail meanwhile are not waited for.

        Args:
            arriving: Accepted connections of peers.
            message: The PEERS message.

        Raises:
            DeviceError: A peer cannot be reached, or did not connect in time.
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
                raise DeviceError(f"did not connect in time{refused}", awaited[0])
        with self._loop.lock:
            for peer in self.disconnected & self.channels.keys():
                self.channels.pop(peer).close()
            for peer, channel in self.channels.items():
                self._start_channel(peer, channel)

    def _connect_if_up(self, peer: str, address: Any) -> None:
        """Connect to a peer; continue without it if the run tolerates its failure."""
        try:
            self._connect(peer, address)
        except DeviceError as error:
            self._mailbox.check()
            if not self._schedule.tolerates_failures:
                raise
            if peer not in self.disconnected:
                self.report_failure(peer, str(error))

    def _connect(self, peer: str, address: Any) -> None:
        settings = self._settings
        timeout_s = seconds_left(settings.deadline)
        if self._schedule.tolerates_failures:
            timeout_s = min(timeout_s, MAX_MISSED_HEARTBEATS * settings.heartbeat_s)
        try:
            host, port = address
            connection = socket.create_connection((host, port), timeout_s)
            self._connecting = peer, connection
            if peer in self.disconnected:
                raise OSError("it failed in the meantime")
            check_encryption(connection.getpeername()[0], settings.keys, settings.is_insecure)
            channel = MessageChannel(open_connection(connection, settings.keys, False, settings.deadline))
            channel.send_greeting(MessageType.HELLO, self.make_hello(peer), settings.deadline)
            self._check_peer(channel.receive_greeting(settings.deadline), channel, {peer}, settings.deadline)
        except (OSError, ProtocolError, PeerRefused, ValueError) as error:
            raise DeviceError(f"cannot connect to {peer!r}: {error}", peer) from None
        finally:
            self._connecting = None
        self.channels[peer] = channel

    def accept(
        self, hello: Mapping[str, Any], channel: MessageChannel, deadline: float
    ) -> tuple[str, MessageChannel] | None:
        """Accept a peer that connected and sent its HELLO; raise ProtocolError if it is not an expected one.

        Return name and channel for `connect_all`, or None for a peer that rejoins while frames are executed.
        """
        peer = self._check_peer(hello, channel, set(self.down) if self.is_complete else self._preceding, deadline)
        channel.send_greeting(MessageType.HELLO, self.make_hello(peer), deadline)
        if not self.is_complete:
            return peer, channel
        with self._loop.lock:
            if peer in self.channels:
                self.channels[peer].close()
            self.channels[peer] = channel
            self.disconnected.discard(peer)
            self._start_channel(peer, channel)
        return None

    def _check_peer(
        self, hello: Mapping[str, Any], channel: MessageChannel, expected: set[str], deadline: float
    ) -> str:
        """Return the name of the peer that sent a HELLO.

        Raise ProtocolError if it is not one of `expected` or cannot prove it. Raise DeviceError, and tell the peer, if
        it has another artifact.
        """
        peer = str(hello.get("device"))
        if peer not in expected:
            raise ProtocolError(f"device {peer[:100]!r} connected, expected one of {sorted(expected)}")
        check_identity(channel.identity, DEVICE_IDENTITY.format(peer), f"device {peer!r}")
        self.credentials.check(hello, peer, self._name)
        if hello.get("digest") != self._manifest["digest"]:
            reason = f"devices {peer!r} and {self._name!r} have different artifacts: copy the same one to both"
            channel.refuse(reason, deadline)
            raise DeviceError(reason)
        return peer

    def _start_channel(self, peer: str, channel: MessageChannel) -> None:
        self.all_channels.append(channel)
        channel.start(self._loop, *self._make_callbacks(peer), at_once=False)

    # -- failures

    def set_down(self, down: set[str]) -> int:
        """Apply the coordinator's list of devices that are down; return the number of new ones."""
        count = len(down - self.down)
        self.down = down
        for peer in sorted(down - self.disconnected):
            self._disconnect(peer)
        return count

    def set_initially_down(self, down: set[str]) -> None:
        """Set the devices that are down before any peer is connected."""
        self.down, self.disconnected = down, set(down)

    def report_failure(self, peer: str, message: str) -> None:
        """Disconnect a peer and tell the coordinator, which knows the state of all devices."""
        self._disconnect(peer)
        self._report_failed(peer, message)

    def _disconnect(self, peer: str) -> None:
        self.disconnected.add(peer)
        if peer in self.channels:
            self.channels[peer].close()
        self.cancel_connect(peer)
        self._mailbox.wake()

    def cancel_connect(self, peer: str = "") -> None:
        """End the wait for the greeting of that peer, or of any peer."""
        connecting = self._connecting
        if connecting is not None and peer in ("", connecting[0]):
            with contextlib.suppress(OSError):  # It may be closed already.
                connecting[1].shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self.channels))

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
