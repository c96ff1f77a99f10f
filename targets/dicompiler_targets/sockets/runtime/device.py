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

from .channel import MessageChannel
from .executor import DEADLINE_GRACE_S, MAX_TIMELINE_ENTRIES, FrameExecution, StepExecutor
from .handshake import COORDINATOR_NAME, ConnectionAcceptor, ConnectionQueue, RunCredentials
from .heap import peak_memory_bytes
from .integrity import FileIntegrity
from .mailbox import DeviceError
from .peers import PeerConnections
from .protocol import (
    MAX_FRAMES_IN_FLIGHT,
    FrameWindow,
    MessageHeader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
    check_json_length,
    check_no_payload,
    decode_json,
)
from .role_schedule import role_manifests
from .transport import TlsKeys, check_encryption, listen_error
from .values import make_sessions, one_line


class DeviceRun(PeerConnections):
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
        keys: TlsKeys | None = None,
        listen: tuple[str, int] | None = None,
        insecure: bool = False,
        heartbeat_s: float = 2.0,
        membership: RunCredentials | None = None,
        least: Sequence[float] = (),
        stays: bool = False,
    ) -> None:
        super().__init__(manifest, deadline, keys, insecure, heartbeat_s, membership or RunCredentials())
        self.directory, self.files = directory, FileIntegrity(directory, manifest)
        self.listen, self.min_segment_s, self.is_resident = listen, least, stays
        self.loop.can_spin &= not least
        self.finished_frames = self.replayed_frames = self.failed_peers = 0
        self.end_reason = ""
        self.window = FrameWindow(1)
        self.next_announced = self.last_change = 0
        self.peers_done: set[str] = set()
        self._peers_to_notify: set[str] = set()  # peers that are told of the last change before anything else
        self._early_changes: dict[str, int] = {}  # the change that a peer had heard of before this device
        self._unacknowledged_change: int | None = (
            None  # the change that is in force here, as the coordinator has not heard
        )
        self.inputs, *self.other_role_inputs = (
            {value["index"]: value for value in (*role["inputs"], *role.get("states", ()))}
            for role in role_manifests(manifest)
        )
        self.input_names = {
            index: v["name"] for own in (self.inputs, *self.other_role_inputs) for index, v in own.items()
        }
        self.input_filter = ReceiveFilter(self.inputs, self.window, self.other_role_inputs, self.schedule)

    def run(self, control: socket.socket, threads: int) -> None:
        """The whole run. DeviceError, or what the system raised, when it cannot go on."""
        host, port = self.listen or (control.getsockname()[0], 0)
        self._join_coordinator(control)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.create_server((host, port), family=family, backlog=64))
            except OSError as error:
                raise listen_error((host, port), error) from None
            check_encryption(listener.getsockname()[0], self.keys, self.insecure)
            # Open at once: strangers that wait in the listener's queue would keep peers from entering it.
            entrance = stack.enter_context(
                contextlib.closing(ConnectionAcceptor(listener, self.keys, self._greet_peer))
            )
            self._greet_coordinator(listener.getsockname())
            sessions = make_checked_sessions(self.files, self.directory, self.manifest, threads)
            self._run_frames(entrance, sessions, stack.close)
        self._finish_run(self._get_executor())

    def serve(self, control: MessageChannel, address: Any, guests: ConnectionQueue, sessions: list[Any]) -> None:
        """As `run`, where the coordinator has called this process, which has made its sessions and lets peers in at
        `address`."""
        self.control = control
        self._greet_coordinator(address)
        self._run_frames(guests, sessions, lambda: None)
        self._finish_run(self._get_executor())

    def close(self) -> None:
        """Lets go of all connections."""
        for channel in (*self.peers.values(), *([self.control] if self.control else [])):
            channel.close()
        self.loop.close()

    def _greet_peer(self, channel: MessageChannel, _: str, deadline: float) -> tuple[str, MessageChannel] | None:
        """See greeting.Meet."""
        return self.accept_peer(channel.receive_greeting(deadline), channel, deadline)

    def _greet_coordinator(self, address: Any) -> None:
        hello = {**self._hello(COORDINATOR_NAME), "address": list(address[:2])}
        self._get_control().send_greeting(MessageType.HELLO, hello, self.deadline)
        self._get_control().start(self.loop, self._check_control, self._deliver_control, self._handle_control_end)

    def _run_frames(self, entrance: ConnectionQueue, sessions: list[Any], close: Callable[[], object]) -> None:
        """Meets the peers and plays all frames. close: lets nobody in any more."""
        peers = self.mailbox.take(self.loop, "peers", self.deadline + DEADLINE_GRACE_S, "the list of devices")
        self.loop.let_helper_run(math.inf)
        self._check_credentials(peers)
        with self.loop.lock:  # a loss may be known already
            self.window = FrameWindow(max(1, min(MAX_FRAMES_IN_FLIGHT, int(peers["in_flight"]))))
            self.window.drop(self.last_change)
            self.input_filter = ReceiveFilter(self.inputs, self.window, self.other_role_inputs, self.schedule)
        self.connect_all(entrance, peers)
        own = self.loop, self._post_value, self.min_segment_s, self.schedule, self.is_resident, self._report_overdue
        self.executor = StepExecutor(self.manifest, sessions, self.mailbox, *own)
        if not self.schedule.tolerates_failures:
            close()  # nobody comes back
        if peers.get("again"):
            self.files.check()  # the others do without it meanwhile, and would end with it
        self._get_control().send(MessageType.READY)
        self.files.check()  # what is still missing of it need not hold up the others; nothing is computed before
        self._execute_frames(self.executor)

    def _get_executor(self) -> StepExecutor:
        assert self.executor is not None
        return self.executor

    def send_error(self, error: Exception) -> None:
        """Tells the coordinator in words why this device ends, as far as that can still be reached."""
        if self.control is not None:
            self.control.send_json(
                MessageType.ERROR, {"message": one_line(error), "peer": getattr(error, "peer", None)}
            )
            self.control.flush(time.monotonic() + 1)

    def _check_control(self, header: MessageHeader) -> None:
        if header.type is MessageType.INPUT:
            self.input_filter.check(header)
        elif header.type in (MessageType.PEERS, MessageType.ERROR) or (
            header.type is MessageType.CHANGE_ROLES and self.schedule.tolerates_failures
        ):
            check_json_length(header)
        elif header.type in (MessageType.BEGIN_FRAME, MessageType.FINISH) or (
            header.type is MessageType.RESET_STATES and "states" in self.manifest
        ):
            check_no_payload(header)
            last = header.type is MessageType.FINISH
            if self.schedule.is_idle:
                fits = last and header.frame >= self.next_announced
            else:
                fits = header.frame == self.next_announced and (last or header.frame < self.window.end)
            if not fits:
                raise ProtocolError(f"{header.type.name} came for frame {header.frame}, {self.next_announced} is next")
        else:
            raise ProtocolError(f"{header.type.name} came from the coordinator")

    def _deliver_control(self, header: MessageHeader, payload: Any) -> None:
        if header.type is MessageType.INPUT:
            if header.frame >= self.window.first:
                self.mailbox.put((header.frame, self.input_names[header.index]), payload)
        elif header.type is MessageType.RESET_STATES:
            self.mailbox.put(("anew", header.frame), bool(header.index))
        elif header.type is MessageType.CHANGE_ROLES:
            self._change_roles(decode_json(payload))
        elif header.type is MessageType.PEERS:
            self._apply_peers_message(told := decode_json(payload))
            self.mailbox.put("peers", told)
        elif header.type is MessageType.ERROR:
            self.end_reason = f"the coordinator refused: {decode_json(payload).get('message')}"
            self.mailbox.fail(DeviceError(self.end_reason))
        elif header.type is MessageType.FINISH:
            self.mailbox.put_order("finish", True)
        else:
            if self.peers_done:
                gone = min(self.peers_done)
                self._fail_early(DeviceError(f"{gone!r} said good-bye before the end of the run", gone))
            self.next_announced += 1
            times = time.perf_counter(), time.monotonic() + header.index / 1000
            self.mailbox.put_order(("frame", header.frame), times)

    def _change_roles(self, told: Mapping[str, Any]) -> None:
        """From frame `first` on roles for other losses are in force; with `drop` what was begun before is forgotten:
        then frames can come at once, by the new roles, and from peers that have heard of it sooner than others."""
        self.last_change = first = int(told["first"])
        self.failed_peers += len(set(told["away"]) - self.down)
        self.down = set(told["away"])
        for peer in sorted(self.down - self.disconnected):
            self._drop_peer(peer)
        self.schedule.change(told["lost"], first, self.window.oldest)
        if not told["drop"]:
            if self.next_announced < first:  # it had no part in those between
                self.window.skip(self.next_announced, first)
                self.mailbox.put_order(("skip", self.next_announced), first)
                self.next_announced = first
            self._get_control().send(MessageType.ROLES_CHANGED, frame=first)
            self._resume_peers()
            return
        self.replayed_frames += max(0, self.next_announced - self.window.oldest)
        self.window.drop(first)
        self.next_announced = first
        if self.executor is not None:
            self.executor.stop_before(first)
        self.mailbox.drop(first)
        self._peers_to_notify = set(self.peers)
        self.loop.spin_next()  # frames come with it
        self._resume_peers()

    def _resume_peers(self) -> None:
        """Hears those peers again that had changed before, and not more often than this device."""
        for peer, channel in self.peers.items():
            if self._early_changes.get(peer, 0) <= self.last_change:
                channel.release()

    def _handle_control_end(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            # To tell the coordinator may fail, which must not hide the cause.
            self.end_reason = f"from the coordinator: {error}: copy this device's directory again"
            self._fail_early(DeviceError(self.end_reason))
            return
        # Nobody is left to report to, and the main thread may be deep in a segment.
        words = self.end_reason or f"the coordinator is gone: {error}"
        if self.is_resident:
            self.mailbox.fail(DeviceError(words))
            self._cancel_connect()
            if self.executor is not None:
                self.executor.stop_before(sys.maxsize)
            return
        print(f"{self.name}: {words}", file=sys.stderr, flush=True)
        os._exit(1)

    def _peer_callbacks(
        self, peer: str
    ) -> tuple[Callable[[MessageHeader], None], Callable[[MessageHeader, Any], object], Callable[[Exception], None]]:
        """What a peer's channel calls: see Channel.start."""
        ends = (peer, self.name)
        expected, *others = (
            {t["index"]: t for t in role["transfers"] if (t["sender"], t["receiver"]) == ends}
            for role in role_manifests(self.manifest)
        )
        gate = ReceiveFilter(expected, self.window, others, self.schedule)
        names = {index: t["name"] for own in (expected, *others) for index, t in own.items()}

        words = (MessageType.BYE, MessageType.ROLES_CHANGED) if self.schedule.tolerates_failures else (MessageType.BYE,)

        def admit(header: MessageHeader) -> None:
            if header.type is MessageType.TENSOR:
                gate.check(header)
            elif header.length or header.type not in words:
                raise ProtocolError(f"{header.type.name} of {header.length} bytes came")

        def deliver(header: MessageHeader, payload: Any) -> bool:
            if header.type is MessageType.ROLES_CHANGED:
                self._early_changes[peer] = header.frame
                return header.frame > self.last_change  # what follows fits roles that are not in force here yet
            if header.type is MessageType.BYE:
                if self.window.oldest < self.next_announced:
                    raise ProtocolError(f"BYE came while frame {self.window.oldest} was on its way")
                self.peers_done.add(peer)
                self.mailbox.put(("bye", peer), True)
            elif header.frame >= self.window.first:
                self.mailbox.put((header.frame, names[header.index]), payload)
            return False

        def lost(error: Exception) -> None:
            if isinstance(error, ProtocolError):
                self._fail_early(DeviceError(f"from {peer!r}: {error}", peer))
            elif peer not in self.peers_done:
                words = f"the connection to {peer!r} was lost: {error}"
                if not self.schedule.tolerates_failures:
                    self._fail_early(DeviceError(words, peer))
                else:
                    self._report_failed_peer(peer, words)

        return admit, deliver, lost

    def _fail_early(self, error: DeviceError) -> None:
        # The main thread may be in a segment for long: the coordinator learns of it from here already.
        self._get_control().send_json(MessageType.ERROR, {"message": one_line(error), "peer": error.peer})
        self.mailbox.fail(error)

    def _post_value(self, value: Mapping[str, Any], frame: int, payload: Any, keep: Any) -> None:
        """Posts a transfer to its receiver, or an output to the coordinator."""
        if "receiver" in value:
            self._peer_channel(value["receiver"]).post(MessageType.TENSOR, payload, value["index"], frame, keep)
        else:
            self._get_control().post(MessageType.OUTPUT, payload, value["index"], frame, keep)

    def _report_overdue(self, frame: int, error: DeviceError) -> None:
        """What a frame needs did not come in time: the end, but where the coordinator may have a loss to handle."""
        if error.peer is None or not self.schedule.tolerates_failures:
            raise error
        words = json.dumps({"message": one_line(error), "peer": error.peer})
        self._get_control().send(MessageType.TENSOR_OVERDUE, words.encode(), frame=frame)

    def _peer_channel(self, peer: str) -> MessageChannel:
        """The channel of a peer, which has been told of the last change."""
        channel = self.peers[peer]
        if peer in self._peers_to_notify:
            self._peers_to_notify.discard(peer)
            channel.post(MessageType.ROLES_CHANGED, frame=self.last_change)
        return channel

    def _execute_frames(self, player: StepExecutor) -> None:
        """All frames, until the coordinator says that there are no more."""
        opened, last, obeyed = 0, False, -1
        while not last or player.frames:
            seen = self.mailbox.changes
            if self.mailbox.order_changes != obeyed:
                obeyed = self.mailbox.order_changes
                opened = self._handle_orders(player, opened)
                last = last or self.mailbox.pop("finish") is not None
            self.mailbox.check()
            if not player.advance(self._finish_frame) and (player.frames or not last):
                if self._unacknowledged_change is not None and not player.frames:
                    self._acknowledge_change(self._unacknowledged_change)
                player.wait(seen)

    def _handle_orders(self, player: StepExecutor, opened: int) -> int:
        """Begins the frames that were announced, from `opened` on, or drops what is to be dropped; the frame that is
        next."""
        if (first := self.mailbox.pop("drop")) is not None:
            player.drop_stopped()
            opened = self._unacknowledged_change = first
        opened = self.mailbox.skip_frames(opened)
        while (times := self.mailbox.pop(("frame", opened))) is not None:
            player.begin_frame(opened, *times)
            opened = self.mailbox.skip_frames(opened + 1)
        return opened

    def _acknowledge_change(self, change: int) -> None:
        """Tells the coordinator that the change is in force here: a message of its own where no frame tells it."""
        self._unacknowledged_change = None
        self._get_control().send(MessageType.ROLES_CHANGED, frame=change)

    def _finish_frame(self, frame: FrameExecution) -> None:
        with self.loop.lock:  # frames may be dropped at any time
            self.window.finish(frame.number)  # before DONE: more frames' tensors can come at once
        self.finished_frames += 1
        self._unacknowledged_change = None
        since = int(1e6 * (time.perf_counter() - frame.started_at)) + 1 if frame.started_at else 0
        self._get_control().post(MessageType.DONE, index=min(since, 2**32 - 1), frame=frame.number)

    def _finish_run(self, player: StepExecutor) -> None:
        """Says good-bye to the peers, hears theirs, and reports."""
        deadline, peers = time.monotonic() + DEADLINE_GRACE_S, tuple(self.peers)
        for channel in map(self._peer_channel, peers):
            channel.send(MessageType.BYE)
            channel.flush(deadline)
        self.loop.run_until(
            lambda: all(peer in self.disconnected or self.mailbox.has(("bye", peer)) for peer in peers), deadline
        )
        for peer in peers:
            if peer not in self.disconnected:
                self.mailbox.take(self.loop, ("bye", peer), deadline, f"the good-bye of {peer!r}", peer)
        self._get_control().send_json(MessageType.REPORT, make_report(player, self.channels))
        self._get_control().flush(deadline)


def make_checked_sessions(
    files: FileIntegrity, directory: Path, manifest: Mapping[str, Any], threads: int
) -> list[Any]:
    """As make_sessions; the digests of the files are taken meanwhile. ValueError names a damaged file where one cannot
    be loaded."""
    files.begin_digests()
    try:
        return make_sessions(directory, manifest, threads)
    except ValueError:
        files.check()
        raise


def make_report(player: StepExecutor, channels: Iterable[MessageChannel] = ()) -> dict[str, Any]:
    """What a device tells at the end of all its frames. Its timeline: what was done from the announcement of the last
    one on, in seconds from then, in order of starts."""
    sent: Counter[int] = Counter()
    spans, send_s = list(player.timeline), 0.0
    for channel in channels:
        sent.update(channel.sent)
        send_s += channel.send_s
        spans += [("send", *span) for span in channel.timeline]
    own = sorted((span for span in spans if span[4] > player.announced_at), key=lambda span: span[3])[
        :MAX_TIMELINE_ENTRIES
    ]
    return {
        "compute_s": sum(player.segments_s),
        "wait_s": player.wait_s,
        "send_s": send_s,
        "sent": {str(index): sent[index] for index in sorted(sent)},
        "segments": player.segments_s,
        "memory_peak": peak_memory_bytes(),
        "timeline": [[*span[:3], *(round(max(0.0, at - player.announced_at), 7) for at in span[3:])] for span in own],
    }
