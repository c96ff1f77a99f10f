"""The devices of a run: how they join, what they say, who is away, and how one that was lost comes back.

In: an artifact, how devices are started. Out: events of frames, for the session; roles that are in force, and RunError
where a device fails whose loss is not covered.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from dicompiler.plugin_api import RunError, RunOptions
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector
from dicompiler_targets.sockets.device_messages import JSON_MESSAGE_TYPES, DeviceMessages
from dicompiler_targets.sockets.device_process import DeviceProcess, StartDevice, end_process
from dicompiler_targets.sockets.failures import (
    RANK_CAUSE,
    RANK_DISCONNECTED,
    DeviceEvent,
    DeviceFailure,
    exit_failures,
    find_failure,
    format_root_cause,
)
from dicompiler_targets.sockets.leaving import FailedProcesses
from dicompiler_targets.sockets.rendezvous import RunAcceptor
from dicompiler_targets.sockets.returns import ReconnectQueue
from dicompiler_targets.sockets.runtime.event_loop import EventLoop
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, TOKEN_VARIABLE, RunCredentials
from dicompiler_targets.sockets.runtime.protocol import FrameWindow, MessageType

log = logging.getLogger("dicompiler")

POLL_INTERVAL_S, FAILURE_POLL_INTERVAL_S = 0.05, 0.002
"""Seconds between two looks at the processes; while lost ones are ending."""
CAUSE_WAIT_S = 0.3
"""Seconds in which the cause of a failure can show: that a connection was lost is told before the death behind it."""
SUSPICION_WAIT_S = 0.15
"""Seconds in which a device that others have lost can show that it is gone for us too."""


def half_time(deadline: float) -> float:
    """When half of the time that is left is over; of time.monotonic, as `deadline`."""
    return (time.monotonic() + deadline) / 2


class ClusterState:
    """`processes`: of all devices; `away`: those that are not there. `window`: the frames on their way, by numbers that
    each device knows them by; `schedule`: the role of each.

    A loss that the artifact's roles cover makes all frames before `window.end` void: `void` is true until the session
    has given them again. More may follow once `changing` (who has not answered yet) is empty. `lost`: who was lost
    last; `lost_s`: when the first loss was noticed (of time.perf_counter) after which no frame was finished, 0 without
    one, for the session to set back. `told`: called with each loss and return: (kind, device, why); leaving: where the
    reason of a loss shows later. beside: as of Lines.
    """

    def __init__(
        self,
        artifact: SocketsArtifact,
        options: RunOptions,
        in_flight: int,
        start: StartDevice,
        beside: int,
        told: Callable[[Any, str, str], None],
        leaving: FailedProcesses,
    ) -> None:
        self.artifact, self.options, self.on_change = artifact, options, told
        self._in_flight = in_flight
        self.processes: dict[str, DeviceProcess] = {}
        self.window, self.schedule = FrameWindow(None), artifact.make_schedule()
        self.down = set(options.start_without)
        self.awaiting_ack: set[str] = set()
        self.needs_replay, self.last_failed, self.failed_at = False, "", 0.0
        self.loop = EventLoop(options.heartbeat_s, beside)
        self._peers_sent = self._has_joined = self._is_finishing = False
        self._suspicions: list[tuple[DeviceFailure, float]] = []
        self._warned: set[str] = set()
        self._last_change, self._polled_at = 0, 0.0
        self._start_device, self._failed_processes = start, leaving
        self._roles = artifact.roles
        self._messages = DeviceMessages(self._roles, self.window, self.schedule, self._expects_ready)
        self._reconnects: ReconnectQueue | None = None
        self._acceptor: RunAcceptor | DaemonConnector | None = None
        self._credentials = RunCredentials()

    @property
    def up(self) -> list[str]:
        """The devices that take part, in order."""
        return [name for name in self.artifact.devices if name not in self.down]

    # -- starting and ending

    def join(self, door: RunAcceptor | DaemonConnector, deadline: float, check_time: Callable[..., None]) -> None:
        """Starts the devices and waits until every one is connected to all its peers and has made its sessions.
        check_time: (deadline, who is waited for, more words) raises RunError."""
        self._acceptor, self._credentials = door, door.credentials
        common = ["--control", door.address, "--run", self._credentials.run, "--timeout", f"{self.options.timeout_s:g}"]
        common += ["--heartbeat", f"{self.options.heartbeat_s:g}", *["--insecure"] * self.options.insecure]
        door.start_accepting(self.processes, self.artifact.digest)
        if self.schedule.tolerates_failures:
            self._reconnects = ReconnectQueue(
                lambda name: self._start_process(name, common),
                set(filter(self._starts_by_itself, self.artifact.devices)),
            )
        for manifest in self.artifact.manifests:
            name = manifest["device"]
            if name in self.options.start_manually and name not in self.down:
                before = "" if self.options.keys else f"{TOKEN_VARIABLE}={self._credentials.token} "
                after = " --keys KEYS" if self.options.keys else ""
                words = f"{before}python3 -m runtime {' '.join(common)}{after}"
                log.warning("start %s in its directory on its host: %s", name, words)
            self.processes[name] = (
                DeviceProcess(manifest) if self._starts_by_itself(name) else self._start_process(name, common)
            )
        coming = half_time(deadline)
        while waiting := [name for name in self.up if self.processes[name].channel is None]:
            process = door.next_process(POLL_INTERVAL_S)
            if process is not None and process.device in self.down:
                end_process(process)  # nobody awaits it yet: it may come once all others are there
                self.processes[process.device] = DeviceProcess(process.manifest)
                door.allow_again(process.device)
            elif process is not None:
                self._messages.listen(process, self.loop)
            self._handle_joining(lambda: True)
            self._fail_missing([name for name in waiting if self.processes[name].channel is None], coming)
            check_time(deadline, waiting, door.refusal_text)
        lost = self.schedule.find_failed_set(self.down) or frozenset()
        self.schedule.change(lost, 0, 0)
        for name in self.up:
            self._send_peers(name, {"away": sorted(self.down), "lost": sorted(lost)} if self.down else {})
        self._peers_sent, coming = True, half_time(deadline)
        while (
            (waiting := [name for name in self.up if name not in self._messages.ready_devices])
            or self._suspicions
            or self._failed_processes
        ):
            self._handle_joining(lambda: False)
            self._fail_missing([name for name in waiting if name not in self._messages.ready_devices], coming)
            check_time(deadline, waiting or self.up)
        self._has_joined = True

    def _handle_joining(self, ready: Callable[[], object]) -> None:
        """Handles what has come while the devices join, or comes within a tick."""
        for event in self.events(ready):
            self.handle(event)
        self.poll()

    def _fail_missing(self, waiting: Collection[str], coming: float) -> None:
        """Takes those as lost that have not come by `coming`, where that is covered: what is left is for frames."""
        if (
            time.monotonic() > coming
            and self.schedule.tolerates_failures
            and self.schedule.find_failed_set({*self.down, *waiting})
        ):
            for name in waiting:
                self._handle_failure(DeviceFailure(name, "it did not come in time", name, RANK_CAUSE, is_gone=True))

    def _starts_by_itself(self, name: str) -> bool:
        """Whether it is not ours to start."""
        return name in self.options.start_manually or name in self.options.start_without

    def _start_process(self, name: str, common: list[str]) -> DeviceProcess:
        manifest = next(manifest for manifest in self.artifact.manifests if manifest["device"] == name)
        process = self._start_device(manifest, common)
        process.send_token(self._credentials.token)
        return process

    def _send_peers(self, name: str, more: dict[str, Any]) -> None:
        """Tells a device where its peers are."""
        addresses = {other: self.processes[other].address for other in self.up}
        peers = {
            "addresses": addresses,
            "in_flight": self._in_flight,
            **self._credentials.hello(COORDINATOR_NAME, name),
            **more,
        }
        self.processes[name].get_channel().send_json(MessageType.PEERS, peers)

    def finish(self) -> None:
        """Tells the devices that there are no more frames."""
        self._is_finishing = True
        for name in self.up:
            self.processes[name].get_channel().send(MessageType.FINISH, frame=self.window.end)

    def close(self) -> None:
        """Ends all processes and connections."""
        self.loop.close()
        if self._acceptor is not None:
            self._acceptor.close()
        self._failed_processes.end_all(list(self.processes.values()))

    # -- what devices say

    def events(self, ready: Callable[[], object]) -> Iterator[DeviceEvent]:
        """What has come, or comes within a tick; does not wait where something else is `ready`."""
        tick_s = FAILURE_POLL_INTERVAL_S if self._failed_processes and not self.failed_at else POLL_INTERVAL_S
        heard = self._messages.events
        self.loop.run_until(lambda: heard or ready(), time.monotonic() + tick_s)
        while heard:
            yield heard.popleft()

    def handle(self, event: DeviceEvent) -> bool:
        """Whether the event is about a frame, which is the session's to handle. Raises RunError as the class."""
        process, header = self.processes[event.device], event.header
        if header is not None and header.type in JSON_MESSAGE_TYPES:
            process.queued_messages -= 1
        if header is not None and header.type is MessageType.TENSOR_OVERDUE and header.frame < self.window.first:
            return False  # it was given again since
        failure = find_failure(event, self.processes)
        if failure is not None:
            # After its report a device may end its connection.
            if process.report is None:
                self._handle_failure(failure)
        elif header is None:
            return False
        elif header.type is MessageType.READY:
            self._messages.ready_devices.add(event.device)
            if event.device in self.down:
                self._mark_returned(event.device)
        elif header.type is MessageType.REPORT:
            process.report = event.payload
        else:
            if header.frame >= self._last_change:  # CHANGED, or a frame by the roles that are in force now
                self.awaiting_ack.discard(event.device)
            return header.type is not MessageType.ROLES_CHANGED and header.frame >= self.window.first
        return False

    def _expects_ready(self, name: str) -> bool:
        """Whether a device has been told its peers, so that it may be ready."""
        return name not in self.down or (self._reconnects is not None and self._reconnects.connecting == name)

    # -- who is there

    def poll(self) -> None:
        """Looks at processes, doubts and returns, if the last look was a tick ago. Raises RunError as the class."""
        now = time.monotonic()
        if now < self._polled_at + POLL_INTERVAL_S:
            if self._failed_processes and not self.failed_at:
                self._failed_processes.poll()
            return
        self._polled_at = now
        self._failed_processes.poll()
        for failure in exit_failures(tuple(self.processes.values())):
            self._handle_failure(failure)
        if any(now > until for _, until in self._suspicions):
            self._resolve_suspicions()
        if self._reconnects is not None and self._has_joined and not self._is_finishing:
            self._poll_reconnects(self._reconnects)

    def _handle_failure(self, failure: DeviceFailure) -> None:
        """Goes on without the device, if that can be; raises RunError for the failure behind this one if not."""
        if not self.schedule.tolerates_failures:
            self._raise_root_cause([failure])
        for name in (failure.reporter, failure.device):
            if name in self.down:  # an end that was to come, or a return that fails
                if self._reconnects is not None and self._reconnects.is_returning(name):
                    self._give_up_reconnect(name, failure.message)
                return
        if not failure.is_gone:
            self._raise_root_cause([failure])
        elif failure.rank not in (RANK_CAUSE, RANK_DISCONNECTED):
            if all(failure.device != one.device or failure.reporter != one.reporter for one, _ in self._suspicions):
                wait_s = (
                    CAUSE_WAIT_S if failure.reporter == failure.device else SUSPICION_WAIT_S
                )  # its words may be on their way
                self._suspicions.append((failure, time.monotonic() + wait_s))
        elif self.schedule.find_failed_set(self.down | {failure.device}) is None:
            self._raise_root_cause([failure])
        else:
            self._mark_failed(failure)

    def _resolve_suspicions(self) -> None:
        """Of devices that blame each other the one that most do is taken as lost, if that is covered."""
        doubts = [one for one, _ in self._suspicions]
        blamed = Counter(one.device for one in doubts)
        fit = [one for one in doubts if self.schedule.find_failed_set(self.down | {one.device}) is not None]
        if not fit:
            self._raise_root_cause(doubts)
        self._mark_failed(max(fit, key=lambda one: blamed[one.device]))

    def _mark_failed(self, failure: DeviceFailure) -> None:
        """Goes on without the device: all others forget what is on its way and take other roles."""
        self.last_failed = name = failure.device
        self.failed_at = self.failed_at or time.perf_counter()
        self._polled_at = time.monotonic()  # nothing of that now
        assert self._reconnects is not None
        if self._reconnects.connecting:  # which may be on its way to the lost one
            self._give_up_reconnect(self._reconnects.connecting, f"{name!r} was lost meanwhile")
        self.down.add(name)
        self._suspicions = [(one, at) for one, at in self._suspicions if name not in (one.device, one.reporter)]
        process = self._disconnect(name)
        self._change_roles(drop=self._is_needed_in_flight(name))
        self._reconnects.add_failed(name)
        self._failed_processes.add(process, failure)
        self.on_change("loss", name, failure.message)

    def _end_device(self, name: str) -> None:
        """Ends a device's process and connection, and forgets what it said."""
        end_process(self._disconnect(name))

    def _disconnect(self, name: str) -> DeviceProcess:
        """Ends a device's connection and forgets what it said; its process, no longer in use."""
        process = self.processes[name]
        with self.loop.lock:
            if process.channel is not None:
                process.channel.close()
            self._messages.forget(name)
        self.awaiting_ack.discard(name)
        self.processes[name] = DeviceProcess(process.manifest)
        assert self._acceptor is not None
        self._acceptor.allow_again(name)
        return process

    def _is_needed_in_flight(self, name: str) -> bool:
        """Whether the device has a part in a frame that is on its way, or none is: else all of them go on."""
        numbers = [number for number in range(self.window.oldest, self.window.end) if self.window.is_in_flight(number)]
        return not numbers or any(
            name in self._roles[self.schedule.role_index(number)].active_devices for number in numbers
        )

    def _change_roles(self, drop: bool, back: str = "") -> None:
        """Tells everybody, those first that begin, who is away and by which roles all goes from the next frame on, with
        the next push. drop: what is on its way is forgotten and given again; back: the device whose return changes
        that, which has begun nothing. Who was not told its peers hears of it with them."""
        if not self._peers_sent:
            return
        if self.window.end <= self._last_change:  # an answer tells to which change, and so does what peers send
            self.window.finish(self.window.open())
        first = self._last_change = self.window.end
        lost = self.schedule.find_failed_set(self.down)
        assert lost is not None
        self.schedule.change(lost, first, self.window.oldest)
        if drop:
            self.window.drop(first)
            self.needs_replay = True
        self.awaiting_ack = set() if self._is_finishing else set(self.up)
        words = {"away": sorted(self.down), "lost": sorted(lost), "first": first}
        inputs = self._roles[self.schedule.role_index(first)].inputs
        for name in sorted(self.up, key=lambda name: not inputs[name]):
            self.processes[name].get_channel().post_json(
                MessageType.CHANGE_ROLES, {**words, "drop": drop or name == back}
            )

    def _raise_root_cause(self, failures: list[DeviceFailure]) -> None:
        """Raises RunError for the failure that is behind the first ones that were noticed."""
        until = time.monotonic() + CAUSE_WAIT_S
        while all(failure.rank > RANK_CAUSE for failure in failures) and time.monotonic() < until:
            heard = (find_failure(event, self.processes) for event in self.events(lambda: False))
            failures += [failure for failure in heard if failure is not None]
            failures += exit_failures(self.processes[name] for name in self.up)
        raise RunError(format_root_cause(failures, self.processes))

    # -- returns

    def _poll_reconnects(self, returns: ReconnectQueue) -> None:
        """Starts lost devices again, lets in who has come, and tells one after the other where its peers are."""
        assert self._acceptor is not None
        for name in returns.pop_due():
            try:
                self.processes[name] = returns.start_device(name)
            except RunError as error:
                self._give_up_reconnect(name, str(error))
        try:
            process = self._acceptor.next_process(0)
        except RunError as error:  # it holds another artifact
            self._warn_once(str(error))
            process = None
        if process is not None:
            self._messages.listen(process, self.loop)
            returns.add_greeted(process.device)
        if not self.awaiting_ack and not self.needs_replay and (guest := returns.pop_next()):
            self._send_peers(guest, {"away": sorted(self.down - {guest}), "again": True})

    def _give_up_reconnect(self, name: str, why: str) -> None:
        """A device that was coming back does not, for now."""
        assert self._reconnects is not None
        self._warn_once(f"device {name!r} does not come back yet: {why}")
        self._end_device(name)
        self._reconnects.retry_later(name)

    def _warn_once(self, words: str) -> None:
        """Warns of why somebody does not come back: once, as who tries again says the same again and again."""
        log.log(logging.INFO if words in self._warned else logging.WARNING, "%s", words)
        self._warned.add(words)

    def _mark_returned(self, name: str) -> None:
        """From the next frame on a device takes part again."""
        assert self._reconnects is not None
        self._reconnects.mark_returned(name)
        self._warned.clear()
        self.down.discard(name)
        self._change_roles(drop=False, back=name)
        self.on_change("return", name, "")
