"""One device of a run: joins the coordinator and its peers, then plays its steps for each frame that is announced.

In: a manifest, inputs and transfers from the connections. Out: transfers to peers, outputs and a report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import Files
from .frames import (
    IN_FLIGHT_LIMIT,
    Gate,
    Header,
    Kind,
    ProtocolError,
    Window,
    check_empty,
    check_message,
    decode,
)
from .greeting import CONTROL, Entrance, Guests, Membership
from .heap import memory_peak
from .line import Keys, cannot_listen, check_open
from .mailbox import DeviceError
from .member import Member
from .play import PATIENCE_S, SPANS, Frame, Player
from .roles import roles
from .values import make_sessions, one_line
from .wire import Channel


class Device(Member):
    """The process's state. `deadline` (of time.monotonic): until when the run must have begun. `listen`: the address
    at which peers reach it (host, port; port 0: any), by default that through which it reaches the coordinator.
    `membership`: what it was told of the run that it belongs to.
    `least`: seconds that a call of each segment takes at least, where this host plays a slower board.
    `stays`: the process goes on when the coordinator is gone. `finished`, `replays`, `losses`: frames that it has done,
    that it dropped as they are given again, and devices that were lost."""

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
        stays: bool = False,
    ) -> None:
        super().__init__(manifest, deadline, keys, insecure, heartbeat_s, membership or Membership())
        self.directory, self.files = directory, Files(directory, manifest)
        self.listen, self.least, self.stays = listen, least, stays
        self.lines.alone &= not least
        self.finished = self.replays = self.losses = 0
        self.farewell = ""
        self.window = Window(1)
        self.announced = self.changed = 0
        self.departed: set[str] = set()
        self._unaware: set[str] = set()  # peers that are told of the last change before anything else
        self._held: dict[str, int] = {}  # the change that a peer had heard of before this device
        self._unanswered: int | None = None  # the change that is in force here, as the coordinator has not heard
        self.inputs, *self.other_inputs = (
            {value["index"]: value for value in (*role["inputs"], *role.get("states", ()))} for role in roles(manifest)
        )
        self.names = {index: v["name"] for own in (self.inputs, *self.other_inputs) for index, v in own.items()}
        self.gate = Gate(self.inputs, self.window, self.other_inputs, self.schedule)

    def run(self, control: socket.socket, threads: int) -> None:
        """The whole run. DeviceError, or what the system raised, when it cannot go on."""
        host, port = self.listen or (control.getsockname()[0], 0)
        self._enter(control)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.create_server((host, port), family=family, backlog=64))
            except OSError as error:
                raise cannot_listen((host, port), error) from None
            check_open(listener.getsockname()[0], self.keys, self.insecure)
            # Open at once: strangers that wait in the listener's queue would keep peers from entering it.
            entrance = stack.enter_context(contextlib.closing(Entrance(listener, self.keys, self._arrive)))
            self._begin(listener.getsockname())
            sessions = checked_sessions(self.files, self.directory, self.manifest, threads)
            self._take_part(entrance, sessions, stack.close)
        self._finish(self._to_play())

    def serve(self, control: Channel, address: Any, guests: Guests, sessions: list[Any]) -> None:
        """As `run`, where the coordinator has called this process, which has made its sessions and lets peers in at
        `address`."""
        self.control = control
        self._begin(address)
        self._take_part(guests, sessions, lambda: None)
        self._finish(self._to_play())

    def leave(self) -> None:
        """Lets go of all connections."""
        for channel in (*self.peers.values(), *([self.control] if self.control else [])):
            channel.close()
        self.lines.end()

    def _arrive(self, channel: Channel, _: str, deadline: float) -> tuple[str, Channel] | None:
        """See greeting.Meet."""
        return self.welcome(channel.greeting(deadline), channel, deadline)

    def _begin(self, address: Any) -> None:
        hello = {**self._hello(CONTROL), "address": list(address[:2])}
        self._to_control().greet(Kind.HELLO, hello, self.deadline)
        self._to_control().start(self.lines, self._admit_control, self._deliver_control, self._lost_control)

    def _take_part(self, entrance: Guests, sessions: list[Any], close: Callable[[], object]) -> None:
        """Meets the peers and plays all frames. close: lets nobody in any more."""
        peers = self.mailbox.take(self.lines, "peers", self.deadline + PATIENCE_S, "the list of devices")
        self.lines.rest(math.inf)
        self._believe(peers)
        with self.lines.turn:  # a loss may be known already
            self.window = Window(max(1, min(IN_FLIGHT_LIMIT, int(peers["in_flight"]))))
            self.window.drop(self.changed)
            self.gate = Gate(self.inputs, self.window, self.other_inputs, self.schedule)
        self._join(entrance, peers)
        own = self.lines, self._post, self.least, self.schedule, self.stays, self._late
        self.player = Player(self.manifest, sessions, self.mailbox, *own)
        if not self.schedule.survives:
            close()  # nobody comes back
        if peers.get("again"):
            self.files.check()  # the others do without it meanwhile, and would end with it
        self._to_control().send(Kind.READY)
        self.files.check()  # what is still missing of it need not hold up the others; nothing is computed before
        self._play(self.player)

    def _to_play(self) -> Player:
        assert self.player is not None
        return self.player

    def fail(self, error: Exception) -> None:
        """Tells the coordinator in words why this device ends, as far as that can still be reached."""
        if self.control is not None:
            self.control.send_json(Kind.ERROR, {"message": one_line(error), "peer": getattr(error, "peer", None)})
            self.control.flush(time.monotonic() + 1)

    def _admit_control(self, header: Header) -> None:
        if header.kind is Kind.INPUT:
            self.gate.admit(header)
        elif header.kind in (Kind.PEERS, Kind.ERROR) or (header.kind is Kind.CHANGE and self.schedule.survives):
            check_message(header)
        elif header.kind in (Kind.RUN, Kind.FINISH) or (header.kind is Kind.ANEW and "states" in self.manifest):
            check_empty(header)
            last = header.kind is Kind.FINISH
            if self.schedule.idle:
                fits = last and header.frame >= self.announced
            else:
                fits = header.frame == self.announced and (last or header.frame < self.window.end)
            if not fits:
                raise ProtocolError(f"{header.kind.name} came for frame {header.frame}, {self.announced} is next")
        else:
            raise ProtocolError(f"{header.kind.name} came from the coordinator")

    def _deliver_control(self, header: Header, payload: Any) -> None:
        if header.kind is Kind.INPUT:
            if header.frame >= self.window.first:
                self.mailbox.put((header.frame, self.names[header.index]), payload)
        elif header.kind is Kind.ANEW:
            self.mailbox.put(("anew", header.frame), bool(header.index))
        elif header.kind is Kind.CHANGE:
            self._change(decode(payload))
        elif header.kind is Kind.PEERS:
            self._hear(told := decode(payload))
            self.mailbox.put("peers", told)
        elif header.kind is Kind.ERROR:
            self.farewell = f"the coordinator refused: {decode(payload).get('message')}"
            self.mailbox.fail(DeviceError(self.farewell))
        elif header.kind is Kind.FINISH:
            self.mailbox.order("finish", True)
        else:
            if self.departed:
                gone = min(self.departed)
                self._fail_early(DeviceError(f"{gone!r} said good-bye before the end of the run", gone))
            self.announced += 1
            times = time.perf_counter(), time.monotonic() + header.index / 1000
            self.mailbox.order(("frame", header.frame), times)

    def _change(self, told: Mapping[str, Any]) -> None:
        """From frame `first` on roles for other losses are in force; with `drop` what was begun before is forgotten:
        then frames can come at once, by the new roles, and from peers that have heard of it sooner than others."""
        self.changed = first = int(told["first"])
        self.losses += len(set(told["away"]) - self.away)
        self.away = set(told["away"])
        for peer in sorted(self.away - self.gone):
            self._part(peer)
        self.schedule.change(told["lost"], first, self.window.oldest)
        if not told["drop"]:
            if self.announced < first:  # it had no part in those between
                self.window.skip(self.announced, first)
                self.mailbox.order(("skip", self.announced), first)
                self.announced = first
            self._to_control().send(Kind.CHANGED, frame=first)
            self._release()
            return
        self.replays += max(0, self.announced - self.window.oldest)
        self.window.drop(first)
        self.announced = first
        if self.player is not None:
            self.player.halt(first)
        self.mailbox.drop(first)
        self._unaware = set(self.peers)
        self.lines.hurry()  # frames come with it
        self._release()

    def _release(self) -> None:
        """Hears those peers again that had changed before, and not more often than this device."""
        for peer, channel in self.peers.items():
            if self._held.get(peer, 0) <= self.changed:
                channel.release()

    def _lost_control(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            # To tell the coordinator may fail, which must not hide the cause.
            self.farewell = f"from the coordinator: {error}: copy this device's directory again"
            self._fail_early(DeviceError(self.farewell))
            return
        # Nobody is left to report to, and the main thread may be deep in a segment.
        words = self.farewell or f"the coordinator is gone: {error}"
        if self.stays:
            self.mailbox.fail(DeviceError(words))
            self._stop_calling()
            if self.player is not None:
                self.player.halt(sys.maxsize)
            return
        print(f"{self.name}: {words}", file=sys.stderr, flush=True)
        os._exit(1)

    def _callbacks(
        self, peer: str
    ) -> tuple[Callable[[Header], None], Callable[[Header, Any], object], Callable[[Exception], None]]:
        """What a peer's channel calls: see Channel.start."""
        ends = (peer, self.name)
        expected, *others = (
            {t["index"]: t for t in role["transfers"] if (t["sender"], t["receiver"]) == ends}
            for role in roles(self.manifest)
        )
        gate = Gate(expected, self.window, others, self.schedule)
        names = {index: t["name"] for own in (expected, *others) for index, t in own.items()}

        words = (Kind.BYE, Kind.CHANGED) if self.schedule.survives else (Kind.BYE,)

        def admit(header: Header) -> None:
            if header.kind is Kind.TENSOR:
                gate.admit(header)
            elif header.length or header.kind not in words:
                raise ProtocolError(f"{header.kind.name} of {header.length} bytes came")

        def deliver(header: Header, payload: Any) -> bool:
            if header.kind is Kind.CHANGED:
                self._held[peer] = header.frame
                return header.frame > self.changed  # what follows fits roles that are not in force here yet
            if header.kind is Kind.BYE:
                if self.window.oldest < self.announced:
                    raise ProtocolError(f"BYE came while frame {self.window.oldest} was on its way")
                self.departed.add(peer)
                self.mailbox.put(("bye", peer), True)
            elif header.frame >= self.window.first:
                self.mailbox.put((header.frame, names[header.index]), payload)
            return False

        def lost(error: Exception) -> None:
            if isinstance(error, ProtocolError):
                self._fail_early(DeviceError(f"from {peer!r}: {error}", peer))
            elif peer not in self.departed:
                words = f"the connection to {peer!r} was lost: {error}"
                if not self.schedule.survives:
                    self._fail_early(DeviceError(words, peer))
                else:
                    self._miss(peer, words)

        return admit, deliver, lost

    def _fail_early(self, error: DeviceError) -> None:
        # The main thread may be in a segment for long: the coordinator learns of it from here already.
        self._to_control().send_json(Kind.ERROR, {"message": one_line(error), "peer": error.peer})
        self.mailbox.fail(error)

    def _post(self, value: Mapping[str, Any], frame: int, payload: Any, keep: Any) -> None:
        """Posts a transfer to its receiver, or an output to the coordinator."""
        if "receiver" in value:
            self._to_peer(value["receiver"]).post(Kind.TENSOR, payload, value["index"], frame, keep)
        else:
            self._to_control().post(Kind.OUTPUT, payload, value["index"], frame, keep)

    def _late(self, frame: int, error: DeviceError) -> None:
        """What a frame needs did not come in time: the end, but where the coordinator may have a loss to handle."""
        if error.peer is None or not self.schedule.survives:
            raise error
        words = json.dumps({"message": one_line(error), "peer": error.peer})
        self._to_control().send(Kind.LATE, words.encode(), frame=frame)

    def _to_peer(self, peer: str) -> Channel:
        """The channel of a peer, which has been told of the last change."""
        channel = self.peers[peer]
        if peer in self._unaware:
            self._unaware.discard(peer)
            channel.post(Kind.CHANGED, frame=self.changed)
        return channel

    def _play(self, player: Player) -> None:
        """All frames, until the coordinator says that there are no more."""
        opened, last, obeyed = 0, False, -1
        while not last or player.frames:
            seen = self.mailbox.changes
            if self.mailbox.orders != obeyed:
                obeyed = self.mailbox.orders
                opened = self._obey(player, opened)
                last = last or self.mailbox.pop("finish") is not None
            self.mailbox.check()
            if not player.advance(self._done) and (player.frames or not last):
                if self._unanswered is not None and not player.frames:
                    self._answer(self._unanswered)
                player.wait(seen)

    def _obey(self, player: Player, opened: int) -> int:
        """Begins the frames that were announced, from `opened` on, or drops what is to be dropped; the frame that is
        next."""
        if (first := self.mailbox.pop("drop")) is not None:
            player.drop()
            opened = self._unanswered = first
        opened = self.mailbox.skipped(opened)
        while (times := self.mailbox.pop(("frame", opened))) is not None:
            player.begin(opened, *times)
            opened = self.mailbox.skipped(opened + 1)
        return opened

    def _answer(self, change: int) -> None:
        """Tells the coordinator that the change is in force here: a message of its own where no frame tells it."""
        self._unanswered = None
        self._to_control().send(Kind.CHANGED, frame=change)

    def _done(self, frame: Frame) -> None:
        with self.lines.turn:  # frames may be dropped at any time
            self.window.finish(frame.number)  # before DONE: more frames' tensors can come at once
        self.finished += 1
        self._unanswered = None
        since = int(1e6 * (time.perf_counter() - frame.begun)) + 1 if frame.begun else 0
        self._to_control().post(Kind.DONE, index=min(since, 2**32 - 1), frame=frame.number)

    def _finish(self, player: Player) -> None:
        """Says good-bye to the peers, hears theirs, and reports."""
        deadline, peers = time.monotonic() + PATIENCE_S, tuple(self.peers)
        for channel in map(self._to_peer, peers):
            channel.send(Kind.BYE)
            channel.flush(deadline)
        self.lines.drive(lambda: all(peer in self.gone or self.mailbox.has(("bye", peer)) for peer in peers), deadline)
        for peer in peers:
            if peer not in self.gone:
                self.mailbox.take(self.lines, ("bye", peer), deadline, f"the good-bye of {peer!r}", peer)
        self._to_control().send_json(Kind.REPORT, reported(player, self.channels))
        self._to_control().flush(deadline)


def checked_sessions(files: Files, directory: Path, manifest: Mapping[str, Any], threads: int) -> list[Any]:
    """As make_sessions; the digests of the files are taken meanwhile. ValueError names a damaged file where one cannot
    be loaded."""
    files.begin()
    try:
        return make_sessions(directory, manifest, threads)
    except ValueError:
        files.check()
        raise


def reported(player: Player, channels: Iterable[Channel] = ()) -> dict[str, Any]:
    """What a device tells at the end of all its frames. Its timeline: what was done from the announcement of the last
    one on, in seconds from then, in order of starts."""
    sent: Counter[int] = Counter()
    spans, send_s = list(player.timeline), 0.0
    for channel in channels:
        sent.update(channel.sent)
        send_s += channel.send_s
        spans += [("send", *span) for span in channel.timeline]
    own = sorted((span for span in spans if span[4] > player.begun), key=lambda span: span[3])[:SPANS]
    return {
        "compute_s": sum(player.segments_s),
        "wait_s": player.wait_s,
        "send_s": send_s,
        "sent": {str(index): sent[index] for index in sorted(sent)},
        "segments": player.segments_s,
        "memory_peak": memory_peak(),
        "timeline": [[*span[:3], *(round(max(0.0, at - player.begun), 7) for at in span[3:])] for span in own],
    }
