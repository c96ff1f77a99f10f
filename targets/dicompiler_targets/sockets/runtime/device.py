"""One device of a run: joins the coordinator and its peers, then plays its steps for each frame that is announced.

In: a manifest, inputs and transfers from the connections. Out: transfers to peers, outputs and a report.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import Files
from .frames import (
    IN_FLIGHT_LIMIT,
    Gate,
    Header,
    Kind,
    ProtocolError,
    Refused,
    Window,
    check_empty,
    check_message,
    decode,
)
from .greeting import CONTROL, Entrance, Membership
from .line import COORDINATOR, DEVICE, Keys, check_identity, check_open, left, secured
from .lines import Lines
from .play import PATIENCE_S, SPANS, DeviceError, Mailbox, Player
from .roles import roles
from .values import make_sessions, one_line
from .wire import Channel


class Device:
    """The process's state. `deadline` (of time.monotonic): until when the run must have begun. `listen`: the address
    at which peers reach it (host, port; port 0: any), by default that through which it reaches the coordinator.
    `membership`: what it was told of the run that it belongs to.
    `least`: seconds that a call of each segment takes at least, where this host plays a slower board."""

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        deadline: float,
        keys: Keys | None = None,
        listen: tuple[str, int] | None = None,
        insecure: bool = False,
        heartbeat_s: float = 2.0,
        membership: Membership | None = None,
        least: Sequence[float] = (),
    ) -> None:
        self.directory, self.manifest, self.deadline = directory, manifest, deadline
        self.files = Files(directory, manifest)
        self.name: str = manifest["device"]
        self.keys, self.listen, self.insecure = keys, listen, insecure
        self.control: Channel | None = None
        self.lines = Lines(heartbeat_s)
        self.peers: dict[str, Channel] = {}
        self.membership = membership or Membership()
        self.least = least
        self.farewell = ""
        self.mailbox = Mailbox()
        self.window = Window(1)
        self.announced = 0
        self.departed: set[str] = set()
        self.inputs, *self.other_inputs = (
            {value["index"]: value for value in role["inputs"]} for role in roles(manifest)
        )
        self.names = {index: v["name"] for own in (self.inputs, *self.other_inputs) for index, v in own.items()}
        self.gate = Gate(self.inputs, self.window, self.other_inputs)

    def run(self, control: socket.socket, threads: int) -> None:
        """The whole run. DeviceError, or what the system raised, when it cannot go on."""
        host, port = self.listen or (control.getsockname()[0], 0)
        self._enter(control)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((host, port), family=family, backlog=64))
            check_open(listener.getsockname()[0], self.keys, self.insecure)
            before = {peer["device"] for peer in self.manifest["peers"] if peer["index"] < self.manifest["index"]}
            # Open at once: strangers that wait in the listener's queue would keep peers from entering it.
            entrance = stack.enter_context(
                contextlib.closing(Entrance(listener, self.keys, lambda *guest: self._welcome(before, *guest)))
            )
            hello = {**self._hello(CONTROL), "address": list(listener.getsockname()[:2])}
            self._to_control().greet(Kind.HELLO, hello, self.deadline)
            self._to_control().start(self.lines, self._admit_control, self._deliver_control, self._lost_control)
            sessions = self._make_sessions(threads)
            peers = self.mailbox.take(self.lines, "peers", self.deadline + PATIENCE_S, "the list of devices")
            self.lines.rest(math.inf)
            self._believe(peers)
            self.window = Window(max(1, min(IN_FLIGHT_LIMIT, int(peers["in_flight"]))))
            self.gate = Gate(self.inputs, self.window, self.other_inputs)
            self._join(entrance, before, peers["addresses"])
        player = Player(self.manifest, sessions, self.mailbox, self.lines, self._post, self.least)
        self._to_control().send(Kind.READY)
        self.files.check()  # what is still missing of it need not hold up the others; nothing is computed before
        self._play(player)
        self._finish(player)

    def fail(self, error: Exception) -> None:
        """Tells the coordinator in words why this device ends, as far as that can still be reached."""
        if self.control is not None:
            self.control.send_json(Kind.ERROR, {"message": one_line(error), "peer": getattr(error, "peer", None)})
            self.control.flush(time.monotonic() + 1)

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

    def _make_sessions(self, threads: int) -> list[Any]:
        self.files.begin()
        try:
            return make_sessions(self.directory, self.manifest, threads)
        except ValueError:
            self.files.check()  # a damaged file is the cause where one cannot be loaded
            raise

    def _join(self, entrance: Entrance, before: set[str], addresses: Mapping[str, Any]) -> None:
        """Connects to the peers behind it in the order of devices and awaits those before it."""
        for peer in self.manifest["peers"]:
            if peer["device"] not in before:
                self._connect(peer["device"], addresses[peer["device"]])
        while awaited := sorted(before - set(self.peers)):
            met = entrance.take(left(self.deadline))
            if met is None:
                refused = f" (refused meanwhile: {entrance.refused})" if entrance.refused else ""
                raise DeviceError(f"did not connect in time{refused}", awaited[0])
            name, channel = met
            if self.peers.setdefault(name, channel) is not channel:
                channel.close()
        for name, channel in self.peers.items():
            channel.start(self.lines, *self._callbacks(name))

    def _connect(self, peer: str, address: Any) -> None:
        try:
            host, port = address
            connection = socket.create_connection((host, port), left(self.deadline))
            check_open(connection.getpeername()[0], self.keys, self.insecure)
            channel = Channel(secured(connection, self.keys, False, self.deadline))
            channel.greet(Kind.HELLO, self._hello(peer), self.deadline)
            self._meet(channel, {peer}, self.deadline)
        except (OSError, ProtocolError, Refused, ValueError) as error:
            raise DeviceError(f"cannot connect to {peer!r}: {error}", peer) from None
        self.peers[peer] = channel

    def _welcome(self, awaited: set[str], channel: Channel, _: str, deadline: float) -> tuple[str, Channel]:
        """A peer that came, by name: see greeting.Meet. A stranger is sent away and must not disturb."""
        name = self._meet(channel, awaited, deadline)
        channel.greet(Kind.HELLO, self._hello(name), deadline)
        return name, channel

    def _meet(self, channel: Channel, expected: set[str], deadline: float) -> str:
        """Reads who is at the other end: a member of this run, one of `expected`. ProtocolError if it is not;
        DeviceError if it is, but with another artifact, which both are told."""
        hello = channel.greeting(deadline)
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

    def _admit_control(self, header: Header) -> None:
        if header.kind is Kind.INPUT:
            self.gate.admit(header)
        elif header.kind in (Kind.PEERS, Kind.ERROR):
            check_message(header)
        elif header.kind in (Kind.RUN, Kind.FINISH):
            check_empty(header)
            if header.frame != self.announced or header.frame > self.window.end - (header.kind is Kind.RUN):
                raise ProtocolError(f"{header.kind.name} came for frame {header.frame}, {self.announced} is next")
        else:
            raise ProtocolError(f"{header.kind.name} came from the coordinator")

    def _deliver_control(self, header: Header, payload: Any) -> None:
        if header.kind is Kind.INPUT:
            self.mailbox.put((header.frame, self.names[header.index]), payload)
        elif header.kind is Kind.PEERS:
            self.mailbox.put("peers", decode(payload))
        elif header.kind is Kind.ERROR:
            self.farewell = f"the coordinator refused: {decode(payload).get('message')}"
            self.mailbox.fail(DeviceError(self.farewell))
        elif header.kind is Kind.FINISH:
            self.mailbox.put("finish", True)
        else:
            if self.departed:
                gone = min(self.departed)
                self._fail_early(DeviceError(f"{gone!r} said good-bye before the end of the run", gone))
            self.announced += 1
            times = time.perf_counter(), time.monotonic() + header.index / 1000
            self.mailbox.put(("frame", header.frame), times)

    def _lost_control(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            # To tell the coordinator may fail, which must not hide the cause.
            self.farewell = f"from the coordinator: {error}: copy this device's directory again"
            self._fail_early(DeviceError(self.farewell))
            return
        # Nobody is left to report to, and the main thread may be deep in a segment.
        words = self.farewell or f"the coordinator is gone: {error}"
        print(f"{self.name}: {words}", file=sys.stderr, flush=True)
        os._exit(1)

    def _callbacks(
        self, peer: str
    ) -> tuple[Callable[[Header], None], Callable[[Header, Any], None], Callable[[Exception], None]]:
        """What a peer's channel calls: see Channel.start."""
        ends = (peer, self.name)
        expected, *others = (
            {t["index"]: t for t in role["transfers"] if (t["sender"], t["receiver"]) == ends}
            for role in roles(self.manifest)
        )
        gate = Gate(expected, self.window, others)
        names = {index: t["name"] for own in (expected, *others) for index, t in own.items()}

        def admit(header: Header) -> None:
            if header.kind is Kind.TENSOR:
                gate.admit(header)
            elif header.kind is not Kind.BYE or header.length:
                raise ProtocolError(f"{header.kind.name} of {header.length} bytes came")

        def deliver(header: Header, payload: Any) -> None:
            if header.kind is Kind.BYE:
                if self.window.oldest < self.announced:
                    raise ProtocolError(f"BYE came while frame {self.window.oldest} was on its way")
                self.departed.add(peer)
                self.mailbox.put(("bye", peer), True)
            else:
                self.mailbox.put((header.frame, names[header.index]), payload)

        def lost(error: Exception) -> None:
            if isinstance(error, ProtocolError):
                self._fail_early(DeviceError(f"from {peer!r}: {error}", peer))
            elif peer not in self.departed:
                self._fail_early(DeviceError(f"the connection to {peer!r} was lost: {error}", peer))

        return admit, deliver, lost

    def _fail_early(self, error: DeviceError) -> None:
        # The main thread may be in a segment for long: the coordinator learns of it from here already.
        self._to_control().send_json(Kind.ERROR, {"message": one_line(error), "peer": error.peer})
        self.mailbox.fail(error)

    def _post(self, value: Mapping[str, Any], frame: int, payload: Any, keep: Any) -> None:
        """Posts a transfer to its receiver, or an output to the coordinator."""
        if "receiver" in value:
            self.peers[value["receiver"]].post(Kind.TENSOR, payload, value["index"], frame, keep)
        else:
            self._to_control().post(Kind.OUTPUT, payload, value["index"], frame, keep)

    def _play(self, player: Player) -> None:
        """All frames, until the coordinator says that there are no more."""
        opened, last = 0, False
        while not last or player.frames:
            seen = self.mailbox.changes
            while (times := self.mailbox.pop(("frame", opened))) is not None:
                player.begin(opened, *times)
                opened += 1
            last = last or self.mailbox.pop("finish") is not None
            if not player.advance(self._done) and (player.frames or not last):
                player.wait(seen)

    def _done(self, frame: int) -> None:
        self.window.finish(frame)  # before DONE: more frames' tensors can come at once
        self._to_control().post(Kind.DONE, frame=frame)

    def _timeline(self, player: Player) -> list[list[Any]]:
        """What was done from the announcement of the last frame on, in seconds from then, in order of starts."""
        sends = [("send", *span) for channel in self.peers.values() for span in channel.timeline]
        spans = sorted([*player.timeline, *sends], key=lambda span: span[3])
        own = [span for span in spans if span[4] > player.begun][:SPANS]
        return [[*span[:3], *(round(max(0.0, at - player.begun), 7) for at in span[3:])] for span in own]

    def _finish(self, player: Player) -> None:
        """Says good-bye to the peers, hears theirs, and reports."""
        deadline = time.monotonic() + PATIENCE_S
        for channel in self.peers.values():
            channel.send(Kind.BYE)
            channel.flush(deadline)
        for peer in self.peers:
            self.mailbox.take(self.lines, ("bye", peer), deadline, f"the good-bye of {peer!r}", peer)
        sent = {index: count for channel in self.peers.values() for index, count in channel.sent.items()}
        report = {
            "compute_s": sum(player.segments_s),
            "wait_s": player.wait_s,
            "send_s": sum(channel.send_s for channel in self.peers.values()),
            "sent": {str(index): sent[index] for index in sorted(sent)},
            "segments": player.segments_s,
            "memory_peak": memory_peak(),
            "timeline": self._timeline(player),
        }
        self._to_control().send_json(Kind.REPORT, report)
        self._to_control().flush(deadline)


def memory_peak() -> int:
    """The largest resident memory of this process in bytes."""
    try:
        # On Linux getrusage also counts what the parent process had when it started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
