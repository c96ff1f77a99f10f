"""A device as a member of a run: how it shows who it is, and how it and its peers meet.

In: a connection to the coordinator, its list of devices. Out: a channel to each peer that is there.
"""

from __future__ import annotations

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from .channel import MAX_MISSED_HEARTBEATS, MessageChannel
from .event_loop import EventLoop
from .executor import StepExecutor
from .handshake import COORDINATOR_NAME, ConnectionQueue, RunCredentials
from .mailbox import DeviceError, Mailbox
from .protocol import MessageHeader, MessageType, PeerRefused, ProtocolError
from .role_schedule import RoleSchedule
from .transport import (
    COORDINATOR_IDENTITY,
    DEVICE_IDENTITY,
    TlsKeys,
    check_encryption,
    check_identity,
    open_connection,
    seconds_left,
)

POLL_INTERVAL_S = 0.05
"""Seconds between two looks at whether a peer is still to be waited for."""


class PeerConnections(ABC):
    """What a device knows of the others: `peers` that it is connected to; who is `away`, as the coordinator says; and
    peers that are `gone`, whether others know it or not. See Device."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        deadline: float,
        keys: TlsKeys | None,
        insecure: bool,
        heartbeat_s: float,
        membership: RunCredentials,
    ) -> None:
        self.manifest, self.deadline, self.keys, self.insecure = manifest, deadline, keys, insecure
        self.name: str = manifest["device"]
        self.preceding_peers = {peer["device"] for peer in manifest["peers"] if peer["index"] < manifest["index"]}
        self.credentials, self.schedule = membership, RoleSchedule.from_manifest(manifest)
        self.control: MessageChannel | None = None
        self.loop, self.mailbox = EventLoop(heartbeat_s), Mailbox()
        self._silence_limit_s = MAX_MISSED_HEARTBEATS * heartbeat_s
        self.peers: dict[str, MessageChannel] = {}
        self.channels: list[MessageChannel] = []  # to peers, those to lost ones too
        self.down: set[str] = set()
        self.disconnected: set[str] = set()
        self.executor: StepExecutor | None = None
        self._connecting: tuple[str, socket.socket] | None = None

    @abstractmethod
    def _peer_callbacks(
        self, peer: str
    ) -> tuple[Callable[[MessageHeader], None], Callable[[MessageHeader, Any], object], Callable[[Exception], None]]:
        """What a peer's channel calls: see Channel.start."""

    def _join_coordinator(self, control: socket.socket) -> None:
        try:
            check_encryption(control.getpeername()[0], self.keys, self.insecure)
            channel = MessageChannel(open_connection(control, self.keys, False, self.deadline))
            check_identity(channel.identity, COORDINATOR_IDENTITY, "the coordinator")
        except (ProtocolError, PeerRefused, OSError) as error:
            raise DeviceError(f"the coordinator cannot be joined: {error}") from None
        self.control = channel

    def _get_control(self) -> MessageChannel:
        assert self.control is not None
        return self.control

    def _hello(self, receiver: str) -> dict[str, Any]:
        digest = self.manifest["digest"]
        return {"device": self.name, "digest": digest, **self.credentials.hello(self.name, receiver)}

    def _check_credentials(self, peers: Mapping[str, Any]) -> None:
        """Takes the run's number from the coordinator's first message. DeviceError if it is not of this run."""
        try:
            self.credentials.check(peers, COORDINATOR_NAME, self.name)
        except ProtocolError as error:
            raise DeviceError(f"the coordinator cannot be trusted: {error}") from None
        self.credentials = RunCredentials(str(peers.get("run")), self.credentials.token)

    def _apply_peers_message(self, told: Mapping[str, Any]) -> None:
        """Of the coordinator's first message: who is away, and which roles are in force."""
        self.down = set(told.get("away", ()))
        self.disconnected = set(self.down)
        self.schedule.change(told.get("lost", ()), 0, 0)

    def connect_all(self, entrance: ConnectionQueue, told: Mapping[str, Any]) -> None:
        """Connects to the peers behind it in the order of devices and awaits those before it; who comes back connects
        to all that are there. Who is lost meanwhile is not waited for."""
        awaited_ones = set() if told.get("again") else self.preceding_peers - self.down
        for peer in self.manifest["peers"]:
            if peer["device"] not in awaited_ones | self.down:
                self._connect_if_up(peer["device"], told["addresses"][peer["device"]])
        while awaited := sorted(awaited_ones - set(self.peers) - self.down):
            met = entrance.take(min(POLL_INTERVAL_S, seconds_left(self.deadline)))
            self.mailbox.check()
            if met is not None and self.peers.setdefault(met[0], met[1]) is not met[1]:
                met[1].close()
            if met is None and time.monotonic() >= self.deadline:
                refused = f" (refused meanwhile: {entrance.last_refusal})" if entrance.last_refusal else ""
                raise DeviceError(f"did not connect in time{refused}", awaited[0])
        with self.loop.lock:
            for name in self.disconnected & self.peers.keys():
                self.peers.pop(name).close()
            for name, channel in self.peers.items():
                self._start_channel(name, channel)

    def _start_channel(self, name: str, channel: MessageChannel) -> None:
        self.channels.append(channel)
        channel.start(self.loop, *self._peer_callbacks(name), at_once=False)

    def _connect_if_up(self, peer: str, address: Any) -> None:
        """Without the peer, where others can do without it too."""
        try:
            self._connect(peer, address)
        except DeviceError as error:
            self.mailbox.check()
            if not self.schedule.tolerates_failures:
                raise
            if peer not in self.disconnected:
                self._report_failed_peer(peer, str(error))

    def _connect(self, peer: str, address: Any) -> None:
        wait_s = seconds_left(self.deadline)
        try:
            host, port = address
            survives = self.schedule.tolerates_failures
            connection = socket.create_connection(
                (host, port), min(wait_s, self._silence_limit_s) if survives else wait_s
            )
            self._connecting = peer, connection
            if peer in self.disconnected:
                raise OSError("it was lost meanwhile")
            check_encryption(connection.getpeername()[0], self.keys, self.insecure)
            channel = MessageChannel(open_connection(connection, self.keys, False, self.deadline))
            channel.send_greeting(MessageType.HELLO, self._hello(peer), self.deadline)
            self._check_peer(channel.receive_greeting(self.deadline), channel, {peer}, self.deadline)
        except (OSError, ProtocolError, PeerRefused, ValueError) as error:
            raise DeviceError(f"cannot connect to {peer!r}: {error}", peer) from None
        finally:
            self._connecting = None
        self.peers[peer] = channel

    def accept_peer(
        self, hello: Mapping[str, Any], channel: MessageChannel, deadline: float
    ) -> tuple[str, MessageChannel] | None:
        """A peer that came and said hello, by name. ProtocolError for a stranger, who must not disturb. While frames
        are played nobody but who is away is let in; it need not be taken then."""
        name = self._check_peer(
            hello, channel, self.preceding_peers if self.executor is None else set(self.down), deadline
        )
        channel.send_greeting(MessageType.HELLO, self._hello(name), deadline)
        if self.executor is None:
            return name, channel
        with self.loop.lock:
            if name in self.peers:
                self.peers[name].close()
            self.peers[name] = channel
            self.disconnected.discard(name)
            self._start_channel(name, channel)
        return None

    def _check_peer(
        self, hello: Mapping[str, Any], channel: MessageChannel, expected: set[str], deadline: float
    ) -> str:
        """Who is at the other end, by its greeting: a member of this run, one of `expected`. ProtocolError if it is
        not; DeviceError if it is, but with another artifact, which both are told."""
        name = str(hello.get("device"))
        if name not in expected:
            raise ProtocolError(f"device {name[:100]!r} came, one of {sorted(expected)} was expected")
        check_identity(channel.identity, DEVICE_IDENTITY.format(name), f"device {name!r}")
        self.credentials.check(hello, name, self.name)
        if hello.get("digest") != self.manifest["digest"]:
            words = f"devices {name!r} and {self.name!r} hold different artifacts: copy the same one to both"
            channel.refuse(words, deadline)
            raise DeviceError(words)
        return name

    def _drop_peer(self, peer: str) -> None:
        """Neither hears of a peer any more nor waits for it."""
        self.disconnected.add(peer)
        if peer in self.peers:
            self.peers[peer].close()
        self._cancel_connect(peer)
        self.mailbox.wake()

    def _cancel_connect(self, peer: str = "") -> None:
        """Ends the wait for the greeting of that peer, or of any."""
        calling = self._connecting
        if calling is not None and peer in ("", calling[0]):
            with contextlib.suppress(OSError):  # it is over already
                calling[1].shutdown(socket.SHUT_RDWR)

    def _report_failed_peer(self, peer: str, words: str) -> None:
        """Goes on without a peer, and tells the coordinator, which knows of all."""
        self._drop_peer(peer)
        self._get_control().send_json(MessageType.PEER_FAILED, {"message": words, "peer": peer})
        self.loop.spin_next()  # most times all have noticed it, and a change is on its way
