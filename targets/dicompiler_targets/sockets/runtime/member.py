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

from .frames import Header, Kind, ProtocolError, Refused
from .greeting import CONTROL, Guests, Membership
from .line import COORDINATOR, DEVICE, Keys, check_identity, check_open, left, secured
from .lines import Lines
from .mailbox import DeviceError, Mailbox
from .play import Player
from .roles import Schedule
from .wire import PATIENCE, Channel

TICK_S = 0.05
"""Seconds between two looks at whether a peer is still to be waited for."""


class Member(ABC):
    """What a device knows of the others: `peers` that it is connected to; who is `away`, as the coordinator says; and
    peers that are `gone`, whether others know it or not. See Device."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        deadline: float,
        keys: Keys | None,
        insecure: bool,
        heartbeat_s: float,
        membership: Membership,
    ) -> None:
        self.manifest, self.deadline, self.keys, self.insecure = manifest, deadline, keys, insecure
        self.name: str = manifest["device"]
        self.before = {peer["device"] for peer in manifest["peers"] if peer["index"] < manifest["index"]}
        self.membership, self.schedule = membership, Schedule.of(manifest)
        self.control: Channel | None = None
        self.lines, self.mailbox = Lines(heartbeat_s), Mailbox()
        self._patience_s = PATIENCE * heartbeat_s
        self.peers: dict[str, Channel] = {}
        self.channels: list[Channel] = []  # to peers, those to lost ones too
        self.away: set[str] = set()
        self.gone: set[str] = set()
        self.player: Player | None = None
        self._calling: tuple[str, socket.socket] | None = None

    @abstractmethod
    def _callbacks(
        self, peer: str
    ) -> tuple[Callable[[Header], None], Callable[[Header, Any], object], Callable[[Exception], None]]:
        """What a peer's channel calls: see Channel.start."""

    def _enter(self, control: socket.socket) -> None:
        try:
            check_open(control.getpeername()[0], self.keys, self.insecure)
            channel = Channel(secured(control, self.keys, False, self.deadline))
            check_identity(channel.identity, COORDINATOR, "the coordinator")
        except (ProtocolError, Refused, OSError) as error:
            raise DeviceError(f"the coordinator cannot be joined: {error}") from None
        self.control = channel

    def _to_control(self) -> Channel:
        assert self.control is not None
        return self.control

    def _hello(self, receiver: str) -> dict[str, Any]:
        digest = self.manifest["digest"]
        return {"device": self.name, "digest": digest, **self.membership.hello(self.name, receiver)}

    def _believe(self, peers: Mapping[str, Any]) -> None:
        """Takes the run's number from the coordinator's first message. DeviceError if it is not of this run."""
        try:
            self.membership.check(peers, CONTROL, self.name)
        except ProtocolError as error:
            raise DeviceError(f"the coordinator cannot be trusted: {error}") from None
        self.membership = Membership(str(peers.get("run")), self.membership.token)

    def _hear(self, told: Mapping[str, Any]) -> None:
        """Of the coordinator's first message: who is away, and which roles are in force."""
        self.away = set(told.get("away", ()))
        self.gone = set(self.away)
        self.schedule.change(told.get("lost", ()), 0, 0)

    def _join(self, entrance: Guests, told: Mapping[str, Any]) -> None:
        """Connects to the peers behind it in the order of devices and awaits those before it; who comes back connects
        to all that are there. Who is lost meanwhile is not waited for."""
        awaited_ones = set() if told.get("again") else self.before - self.away
        for peer in self.manifest["peers"]:
            if peer["device"] not in awaited_ones | self.away:
                self._connect_or_go_on(peer["device"], told["addresses"][peer["device"]])
        while awaited := sorted(awaited_ones - set(self.peers) - self.away):
            met = entrance.take(min(TICK_S, left(self.deadline)))
            self.mailbox.check()
            if met is not None and self.peers.setdefault(met[0], met[1]) is not met[1]:
                met[1].close()
            if met is None and time.monotonic() >= self.deadline:
                refused = f" (refused meanwhile: {entrance.refused})" if entrance.refused else ""
                raise DeviceError(f"did not connect in time{refused}", awaited[0])
        with self.lines.turn:
            for name in self.gone & self.peers.keys():
                self.peers.pop(name).close()
            for name, channel in self.peers.items():
                self._start(name, channel)

    def _start(self, name: str, channel: Channel) -> None:
        self.channels.append(channel)
        channel.start(self.lines, *self._callbacks(name), at_once=False)

    def _connect_or_go_on(self, peer: str, address: Any) -> None:
        """Without the peer, where others can do without it too."""
        try:
            self._connect(peer, address)
        except DeviceError as error:
            self.mailbox.check()
            if not self.schedule.survives:
                raise
            if peer not in self.gone:
                self._miss(peer, str(error))

    def _connect(self, peer: str, address: Any) -> None:
        wait_s = left(self.deadline)
        try:
            host, port = address
            survives = self.schedule.survives
            connection = socket.create_connection((host, port), min(wait_s, self._patience_s) if survives else wait_s)
            self._calling = peer, connection
            if peer in self.gone:
                raise OSError("it was lost meanwhile")
            check_open(connection.getpeername()[0], self.keys, self.insecure)
            channel = Channel(secured(connection, self.keys, False, self.deadline))
            channel.greet(Kind.HELLO, self._hello(peer), self.deadline)
            self._meet(channel.greeting(self.deadline), channel, {peer}, self.deadline)
        except (OSError, ProtocolError, Refused, ValueError) as error:
            raise DeviceError(f"cannot connect to {peer!r}: {error}", peer) from None
        finally:
            self._calling = None
        self.peers[peer] = channel

    def welcome(self, hello: Mapping[str, Any], channel: Channel, deadline: float) -> tuple[str, Channel] | None:
        """A peer that came and said hello, by name. ProtocolError for a stranger, who must not disturb. While frames
        are played nobody but who is away is let in; it need not be taken then."""
        name = self._meet(hello, channel, self.before if self.player is None else set(self.away), deadline)
        channel.greet(Kind.HELLO, self._hello(name), deadline)
        if self.player is None:
            return name, channel
        with self.lines.turn:
            if name in self.peers:
                self.peers[name].close()
            self.peers[name] = channel
            self.gone.discard(name)
            self._start(name, channel)
        return None

    def _meet(self, hello: Mapping[str, Any], channel: Channel, expected: set[str], deadline: float) -> str:
        """Who is at the other end, by its greeting: a member of this run, one of `expected`. ProtocolError if it is
        not; DeviceError if it is, but with another artifact, which both are told."""
        name = str(hello.get("device"))
        if name not in expected:
            raise ProtocolError(f"device {name[:100]!r} came, one of {sorted(expected)} was expected")
        check_identity(channel.identity, DEVICE.format(name), f"device {name!r}")
        self.membership.check(hello, name, self.name)
        if hello.get("digest") != self.manifest["digest"]:
            words = f"devices {name!r} and {self.name!r} hold different artifacts: copy the same one to both"
            channel.refuse(words, deadline)
            raise DeviceError(words)
        return name

    def _part(self, peer: str) -> None:
        """Neither hears of a peer any more nor waits for it."""
        self.gone.add(peer)
        if peer in self.peers:
            self.peers[peer].close()
        self._stop_calling(peer)
        self.mailbox.wake()

    def _stop_calling(self, peer: str = "") -> None:
        """Ends the wait for the greeting of that peer, or of any."""
        calling = self._calling
        if calling is not None and peer in ("", calling[0]):
            with contextlib.suppress(OSError):  # it is over already
                calling[1].shutdown(socket.SHUT_RDWR)

    def _miss(self, peer: str, words: str) -> None:
        """Goes on without a peer, and tells the coordinator, which knows of all."""
        self._part(peer)
        self._to_control().send_json(Kind.LOST, {"message": words, "peer": peer})
        self.lines.hurry()  # most times all have noticed it, and a change is on its way
