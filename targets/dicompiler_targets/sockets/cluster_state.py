"""The devices of a run: which of them are up, which plan the next frames use, and how failed devices return.

`ClusterState` raises a RunError if a device fails and no failure plan covers the failure. In this module and in the
protocol, a role is one plan by which frames are computed: the normal plan, a replica of it, or a failure plan.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dicompiler.plugin_api import RunError, RunOptions
from dicompiler.plugin_api.artifacts import describe_missing_plan
from dicompiler.plugin_api.utilities import ALLOW_MORE_TIME
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector
from dicompiler_targets.sockets.device_connections import (
    JSON_MESSAGE_TYPES,
    DeviceEvent,
    DeviceMessages,
    DeviceProcess,
    RunAcceptor,
    StartDevice,
    end_process,
)
from dicompiler_targets.sockets.failures import (
    CAUSE_WAIT_S,
    RANK_CAUSE,
    RANK_DISCONNECTED,
    RANK_EXIT,
    DeviceFailure,
    FailedProcesses,
    Suspicions,
    choose_excluded_devices,
    exit_failures,
    find_failure,
    find_root_cause,
    rank_suspects,
)
from dicompiler_targets.sockets.runtime.channel import EventLoop
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, TOKEN_VARIABLE
from dicompiler_targets.sockets.runtime.protocol import FrameWindow, MessageType

log = logging.getLogger("dicompiler")

POLL_INTERVAL_S, FAILURE_POLL_INTERVAL_S = 0.05, 0.002
"""Seconds between two checks of the device processes: normally, and while processes of failed devices end."""
MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.2, 30.0
"""Smallest and largest delay until a failed device is restarted, in seconds. Each failed restart doubles the delay."""

Acceptor = RunAcceptor | DaemonConnector
"""Accepts the connections of started devices, or connects to resident devices (daemons)."""


class ReconnectQueue:
    """The failed devices of a run. They are restarted after a delay, and return to the run one by one.

    The devices in `started_by_others` are not restarted, because users start them manually.

    Attributes:
        connecting: The one device that now connects to the other devices; '' if there is none.
    """

    def __init__(self, started_by_others: set[str]) -> None:
        self._started_by_others = started_by_others
        self.connecting = ""
        self._greeted: deque[str] = deque()
        self._delays_s: dict[str, float] = {}
        self._restart_at: dict[str, float] = {}
        self._returning: set[str] = set()

    def add_failed(self, name: str) -> None:
        self._delays_s[name] = MIN_RESTART_DELAY_S
        self._schedule_restart(name)

    def retry_later(self, name: str) -> None:
        """Schedule another restart of a device that could not return, after twice the previous delay."""
        self._delays_s[name] = min(2 * self._delays_s.get(name, MIN_RESTART_DELAY_S), MAX_RESTART_DELAY_S)
        self._schedule_restart(name)

    def pop_due(self) -> list[str]:
        """Return the devices that must be restarted now. Each scheduled restart is returned once."""
        due = [name for name, at in self._restart_at.items() if time.monotonic() >= at]
        for name in due:
            del self._restart_at[name]
            self._returning.add(name)
        return due

    def is_returning(self, name: str) -> bool:
        """Return True if the device was restarted or has connected, and has not yet returned to the run."""
        return name in self._returning

    def add_greeted(self, name: str) -> None:
        self._returning.add(name)
        self._greeted.append(name)

    def pop_next(self) -> str:
        """Return the device that may now connect to the others, and set `connecting`; '' if none may.

        Devices connect one at a time, so that each of them also connects to those that returned before.
        """
        if self.connecting or not self._greeted:
            return ""
        self.connecting = self._greeted.popleft()
        return self.connecting

    def remove(self, name: str) -> None:
        self._returning.discard(name)
        self.connecting = "" if self.connecting == name else self.connecting
        if name in self._greeted:
            self._greeted.remove(name)

    def _schedule_restart(self, name: str) -> None:
        self.remove(name)
        if name not in self._started_by_others:
            self._restart_at[name] = time.monotonic() + self._delays_s[name]


NOT_FINISHED = "did not finish"
"""Text of a timeout error about devices that have not finished their work."""
GRACE_S = 1.0
"""Seconds after a frame's deadline in which devices may report which tensor is missing, to find the device at fault."""


class ClusterState:
    """The devices of a run, from their start to their end.

    `ClusterSession` calls `join` once, and then `events`, `handle` and `poll` in turn. If a failed device took part in
    a frame in flight, `needs_replay` is True until the session sends all frames in flight again. The session may send
    further frames when `awaiting_ack` is empty.

    Attributes:
        processes: The process of each device, by name.
        down: Names of the devices that have failed and not returned.
        window: The numbers of the frames in flight.
        schedule: Maps each frame number to its role (plan).
        awaiting_ack: Devices that have not acknowledged the last change of plans, after a failure or a return.
        needs_replay: True while the session must send the frames in flight again.
        loop: The event loop that sends and receives on all connections.
    """

    def __init__(
        self,
        artifact: SocketsArtifact,
        options: RunOptions,
        in_flight: int,
        start: StartDevice,
        acceptor: Acceptor,
        local_processes: int,
        on_change: Callable[[Any, str, str], None],
        on_reason: Callable[[str, str], None],
    ) -> None:
        """Create the state before any device has joined.

        `in_flight` is the maximum number of frames in flight. `local_processes` is the number of device processes on
        this host. `on_change` is called with the kind of event, the device and the reason after each failure and
        return. `on_reason` is called with the device and the final reason of a failure.
        """
        self._artifact, self._options, self._on_change = artifact, options, on_change
        self._in_flight, self._start_device, self._acceptor = in_flight, start, acceptor
        self._role_ios = artifact.role_ios
        self.processes: dict[str, DeviceProcess] = {}
        self.window, self.schedule = FrameWindow(None), artifact.make_schedule()
        self.down = set(options.start_without)
        self.awaiting_ack: set[str] = set()
        self.needs_replay = False
        assert options.heartbeat_s is not None
        self.loop = EventLoop(options.heartbeat_s, local_processes)
        self._peers_sent = self._has_joined = self._is_finishing = False
        self._last_failed, self._failed_at = "", 0.0
        self._awaited: Sequence[str] = ()
        self._deadline = math.inf
        peers = {manifest["device"]: [peer["device"] for peer in manifest["peers"]] for manifest in artifact.manifests}
        self._suspicions = Suspicions(options.heartbeat_s, peers)
        self._warned: set[str] = set()
        self._last_change, self._polled_at = 0, 0.0
        self._failed_processes = FailedProcesses(on_reason)
        self._messages = DeviceMessages(self._role_ios, list(peers), self.window, self.schedule, self._expects_ready)
        self._started_by_others = {*options.start_manually, *options.start_without}
        self._reconnects = ReconnectQueue(self._started_by_others)

    @property
    def up(self) -> list[str]:
        return [name for name in self._artifact.devices if name not in self.down]

    # -- start and end of the run

    def join(self, deadline: float) -> None:
        """Start the devices, and wait until all of them are connected to each other and ready for frames.

        Raise RunError if the run has not started by `deadline` (time.monotonic).
        """
        self._acceptor.start_accepting(self.processes, self._artifact.digest)
        for manifest in self._artifact.manifests:
            name = manifest["device"]
            if name in self._options.start_manually and name not in self.down:
                self._print_start_command(name)
            is_started = name not in self._started_by_others
            self.processes[name] = self._start_process(name) if is_started else DeviceProcess(manifest)
        self._await_connections(deadline)
        failed = self.schedule.find_failed_set(self.down) or frozenset()
        self.schedule.change(failed, first_frame=0, oldest_frame=0)
        for name in self.up:
            self._send_peers(name, {"down": sorted(self.down), "failed": sorted(failed)} if self.down else {})
        self._peers_sent = True
        self._await_ready(deadline)
        self._has_joined = True

    def _runtime_arguments(self) -> list[str]:
        options, acceptor = self._options, self._acceptor
        arguments = ["--coordinator", acceptor.address, "--run", acceptor.credentials.run_id]
        arguments += ["--timeout", f"{options.timeout_s:g}", "--heartbeat", f"{options.heartbeat_s:g}"]
        return arguments + ["--insecure"] * options.insecure

    def _print_start_command(self, name: str) -> None:
        has_keys, arguments = bool(self._options.keys), " ".join(self._runtime_arguments())
        token = "" if has_keys else f"{TOKEN_VARIABLE}={self._acceptor.credentials.token} "
        command = f"{token}python3 -m runtime {arguments}{' --keys KEYS' if has_keys else ''}"
        log.warning("start %s in its directory on its host: %s", name, command)

    def _await_connections(self, deadline: float) -> None:
        late_at = (time.monotonic() + deadline) / 2
        while waiting := [name for name in self.up if self.processes[name].channel is None]:
            process = self._acceptor.next_process(POLL_INTERVAL_S)
            if process is not None and process.device in self.down:
                # The user has excluded this device from the start. It may join only after all others, so its connection
                # is closed and it must try again.
                end_process(process)
                self.processes[process.device] = DeviceProcess(process.manifest)
                self._acceptor.allow_again(process.device)
            elif process is not None:
                self._messages.listen(process, self.loop)
            self.set_awaited(waiting, deadline)
            self._handle_joining(lambda: True)
            self._fail_missing([name for name in waiting if self.processes[name].channel is None], late_at)
            self.check_time(deadline, waiting, "did not connect", self._acceptor.refusal_text)

    def _await_ready(self, deadline: float) -> None:
        """Wait until all devices that are up are ready, and the causes of all failures so far are known."""
        late_at = (time.monotonic() + deadline) / 2
        ready = self._messages.ready_devices
        while (
            (waiting := [name for name in self.up if name not in ready]) or self._suspicions or self._failed_processes
        ):
            self.set_awaited(waiting or self.up, deadline)
            self._handle_joining(lambda: False)
            self._fail_missing([name for name in waiting if name not in ready], late_at)
            self.check_time(deadline, waiting or self.up, "did not become ready for frames")

    def _handle_joining(self, is_ready: Callable[[], object]) -> None:
        """React to messages and failures while the devices join; do not wait if `is_ready` returns a true value."""
        for event in self.events(is_ready):
            self.handle(event)
        self.poll()

    def _fail_missing(self, waiting: Collection[str], late_at: float) -> None:
        """If `late_at` (time.monotonic) has passed and a failure plan allows it, treat the devices `waiting` as failed.

        `late_at` is well before the deadline of the run, so that the other devices have time to compute the frames.
        """
        can_continue = self.schedule.tolerates_failures and self.schedule.find_failed_set({*self.down, *waiting})
        if time.monotonic() > late_at and can_continue:
            for name in waiting:
                self._handle_failure(DeviceFailure(name, "did not join in time", name, RANK_CAUSE, is_unreachable=True))

    def _start_process(self, name: str) -> DeviceProcess:
        manifest = next(manifest for manifest in self._artifact.manifests if manifest["device"] == name)
        process = self._start_device(manifest, self._runtime_arguments())
        process.send_token(self._acceptor.credentials.token)
        return process

    def _send_peers(self, name: str, extra: dict[str, Any]) -> None:
        """Send a device the message PEERS: addresses of all devices that are up, and the JSON fields `extra`."""
        addresses = {other: self.processes[other].address for other in self.up}
        proof = self._acceptor.credentials.make_proof(COORDINATOR_NAME, name)
        content = {"addresses": addresses, "in_flight": self._in_flight, **proof, **extra}
        self.processes[name].get_channel().send_json(MessageType.PEERS, content)

    def finish(self) -> None:
        self._is_finishing = True
        for name in self.up:
            self.processes[name].get_channel().send(MessageType.FINISH, frame=self.window.end)

    def close(self) -> None:
        self.loop.close()
        self._acceptor.close()
        self._failed_processes.end_all(list(self.processes.values()))

    # -- messages of devices and ends of connections

    def events(self, is_ready: Callable[[], object], wait_s: float = POLL_INTERVAL_S) -> Iterator[DeviceEvent]:
        """Yield the messages and failures of devices that have arrived or arrive within `wait_s` seconds.

        Do not wait if `is_ready` returns a true value.
        """
        if self._failed_processes and not self._failed_at:
            wait_s = FAILURE_POLL_INTERVAL_S
        events = self._messages.events
        self.loop.run_until(lambda: events or is_ready(), time.monotonic() + wait_s)
        while events:
            yield events.popleft()

    def handle(self, event: DeviceEvent) -> bool:
        """Update the state of the devices after a message or the end of a connection.

        Return True for an OUTPUT or DONE message (a device has sent an output or finished a frame), because the session
        must then update the frame. Raise RunError for a failure that no failure plan covers.
        """
        process, header = self.processes[event.device], event.header
        if header is not None and header.type in JSON_MESSAGE_TYPES:
            process.queued_messages -= 1
        if header is not None and header.type is MessageType.TENSOR_OVERDUE and header.frame < self.window.first:
            return False  # The overdue tensor is of an old frame, which was sent again meanwhile.
        failure = find_failure(event, self.processes)
        if failure is not None:
            # The end of a connection is not a failure if the device has sent its report of the run before.
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
            # A message about a frame after the last change shows that the device uses the current roles (plans).
            if header.frame >= self._last_change:
                self.awaiting_ack.discard(event.device)
            return header.type is not MessageType.ROLES_CHANGED and header.frame >= self.window.first
        return False

    def _expects_ready(self, name: str) -> bool:
        return name not in self.down or self._reconnects.connecting == name

    def check_time(self, deadline: float, waiting: Sequence[str], cause: str = NOT_FINISHED, suffix: str = "") -> None:
        """Raise RunError if `deadline` (time.monotonic) passed more than GRACE_S seconds ago.

        The error names the devices `waiting`, which have not answered, and what they did not do: `cause`. It ends
        with `suffix`.
        """
        if time.monotonic() > deadline + GRACE_S:
            others = f" (nor did {', '.join(map(repr, waiting[1:]))})" if len(waiting) > 1 else ""
            raise timeout_error(self.processes[waiting[0]].title, self._options, cause, f"{others}{suffix}")

    def set_awaited(self, waiting: Sequence[str], deadline: float) -> None:
        """Set the devices for which the session waits until `deadline` (time.monotonic), for error messages."""
        self._awaited, self._deadline = waiting, deadline

    def _describe_timeout(self) -> str:
        """Return which devices have not finished their work if the deadline has passed; otherwise an empty text."""
        if time.monotonic() < self._deadline:
            return ""
        work = "the run" if self._has_joined else "the start"
        work = f"frame {self.window.oldest}" if len(self.window) else work
        names = ", ".join(map(repr, self._awaited))
        return f"; {names} did not finish {work} within {self._options.timeout_s:g} s: {ALLOW_MORE_TIME}"

    # -- failures of devices

    def poll(self) -> None:
        """React to ended processes, suspected devices and returning devices, at most once every POLL_INTERVAL_S.

        Raise RunError if a device has failed and no failure plan covers the failure.
        """
        now = time.monotonic()
        if now < self._polled_at + POLL_INTERVAL_S:
            if self._failed_processes and not self._failed_at:
                self._failed_processes.poll()
            return
        self._polled_at = now
        self._failed_processes.poll()
        for failure in exit_failures(tuple(self.processes.values())):
            self._handle_failure(failure)
        if self._suspicions and (due := self._suspicions.find_due(self.up)):
            self._resolve_suspicions(due)
        if self.schedule.tolerates_failures and self._has_joined and not self._is_finishing:
            self._poll_reconnects()

    def pop_takeover(self) -> tuple[str, float] | None:
        """Return the device that failed last, and the seconds since the first failure after the previous call.

        The result is None if no device has failed since then.
        """
        if not self._failed_at:
            return None
        seconds, self._failed_at = time.perf_counter() - self._failed_at, 0.0
        return self._last_failed, seconds

    def _handle_failure(self, failure: DeviceFailure) -> None:
        """Continue without the failed device if a failure plan covers the failure; else raise RunError.

        If it is not certain yet which device has failed, wait for further reports first.
        """
        if not self.schedule.tolerates_failures:
            self._raise_root_cause([failure])
        for name in (failure.reporter, failure.device):
            # A device that is down takes part in no frame, so the plan stays. The device may have failed again while it
            # was returning.
            if name in self.down:
                if self._reconnects.is_returning(name):
                    self._give_up_reconnect(name, failure.message)
                return
        if not failure.is_unreachable:
            self._raise_root_cause([failure])
        elif failure.rank not in (RANK_CAUSE, RANK_DISCONNECTED):
            self._suspicions.add(failure)
        elif self.schedule.find_failed_set(self.down | {failure.device}) is None:
            self._raise_root_cause([failure])
        else:
            self._mark_failed(failure)

    def _resolve_suspicions(self, suspicions: list[DeviceFailure]) -> None:
        """Treat some of the suspected devices as failed, so that all other devices can reach each other.

        Raise RunError if no failure plan covers the failure of these devices.
        """
        chosen = choose_excluded_devices(
            suspicions, lambda names: self.schedule.find_failed_set(self.down.union(names)) is not None
        )
        if not chosen and any(suspicion.reporter == suspicion.device for suspicion in suspicions):
            self._raise_root_cause(suspicions)
        if not chosen:
            suspects = rank_suspects(suspicions)
            cause = min(suspicions, key=lambda suspicion: suspects.index(suspicion.device))
            raise self._make_error(cause)
        for name in chosen:
            # The message of the failure is taken from one of the reports. The order of preference is: a report that
            # the device's own process has ended, another device's report about it, its report about another device.
            reports = sorted(suspicions, key=lambda suspicion: (suspicion.device != name, suspicion.reporter != name))
            self._mark_failed(replace(reports[0], device=name))

    def _mark_failed(self, failure: DeviceFailure) -> None:
        """Continue without the failed device: all other devices change to a failure plan.

        If the failed device takes part in a frame in flight, the other devices drop all frames in flight.
        """
        self._last_failed = name = failure.device
        self._failed_at = self._failed_at or time.perf_counter()
        # Setting the time of the last `poll` delays the next one, because sending the frames again is more urgent.
        self._polled_at = time.monotonic()
        # A returning device may be connecting to the failed device, so its return must begin again.
        if self._reconnects.connecting:
            self._give_up_reconnect(self._reconnects.connecting, f"device {name!r} failed in the meantime")
        self.down.add(name)
        self._suspicions.forget(name)
        process = self._disconnect(name)
        self._change_roles(drops_frames=self._is_needed_in_flight(name))
        self._reconnects.add_failed(name)
        self._failed_processes.add(process, failure)
        self._on_change("failure", name, failure.message)

    def _disconnect(self, name: str) -> DeviceProcess:
        """Close a device's connection, discard its messages, and return its DeviceProcess.

        In `processes`, an empty DeviceProcess replaces it until the device is restarted.
        """
        process = self.processes[name]
        with self.loop.lock:
            if process.channel is not None:
                process.channel.close()
            self._messages.forget(name)
        self.awaiting_ack.discard(name)
        self.processes[name] = DeviceProcess(process.manifest)
        self._acceptor.allow_again(name)
        return process

    def _is_needed_in_flight(self, name: str) -> bool:
        """Return True if the device takes part in a frame in flight, or if no frame is in flight.

        In the second case, an order to drop all frames loses no work.
        """
        in_flight = [n for n in range(self.window.oldest, self.window.end) if self.window.is_in_flight(n)]
        return not in_flight or any(
            name in self._role_ios[self.schedule.role_index(number)].active_devices for number in in_flight
        )

    def _change_roles(self, drops_frames: bool, returned: str = "") -> None:
        """Order all devices that are up to use other plans from the next frame on (message CHANGE_ROLES).

        With `drops_frames`, they drop the frames in flight, which the session sends again. `returned` is the device
        whose return causes the change; '' after a failure.
        """
        if not self._peers_sent:
            return  # The later message PEERS names the failed devices itself.
        if self.window.end <= self._last_change:
            # Devices acknowledge a change by the number of the first frame after it. No frame was sent since the last
            # change, so both changes would have the same number. One frame number is skipped to distinguish them.
            self.window.finish(self.window.admit_frame())
        first = self._last_change = self.window.end
        failed = self.schedule.find_failed_set(self.down)
        assert failed is not None
        self.schedule.change(failed, first_frame=first, oldest_frame=self.window.oldest)
        if drops_frames:
            self.window.drop(first)
            self.needs_replay = True
        self.awaiting_ack = set() if self._is_finishing else set(self.up)
        content = {"down": sorted(self.down), "failed": sorted(failed), "first": first}
        # Devices with inputs get the message first, because they can start at once.
        inputs = self._role_ios[self.schedule.role_index(first)].inputs
        for name in sorted(self.up, key=lambda name: not inputs[name]):
            message = {**content, "drop": drops_frames or name == returned}
            self.processes[name].get_channel().post_json(MessageType.CHANGE_ROLES, message)

    def _raise_root_cause(self, failures: list[DeviceFailure]) -> None:
        """Raise RunError for the failure that caused all others in `failures`.

        If the cause is not certain, first wait for further observations, for at most CAUSE_WAIT_S.
        """
        until = time.monotonic() + CAUSE_WAIT_S
        while all(failure.rank > RANK_CAUSE for failure in failures) and time.monotonic() < until:
            observed = (find_failure(event, self.processes) for event in self.events(lambda: False))
            failures += [failure for failure in observed if failure is not None]
            failures += exit_failures(self.processes[name] for name in self.up)
        raise self._make_error(find_root_cause(failures))

    def _make_error(self, cause: DeviceFailure) -> RunError:
        """Return the error for a failure that ends the run; it says why no failure plan is used."""
        message = f"{self.processes[cause.device].title}: {cause.message}"
        if not cause.is_unreachable:
            suffix = "; failure plans are only for unreachable devices" if self.schedule.tolerates_failures else ""
            suffix += self._describe_timeout()
        elif cause.rank == RANK_EXIT and not self._has_joined:
            # The runtime cannot start on this device, so the user must repair it. The error then does not mention
            # failure plans.
            suffix = self._describe_timeout()
        else:
            down = {*self.down, cause.device}
            suffix = f"; {describe_missing_plan(down, self.schedule.covered_failures)}"
        return RunError(message + suffix)

    # -- devices that return after a failure

    def _poll_reconnects(self) -> None:
        """Restart failed devices, accept those that connect, and let each of them connect to the others in turn."""
        for name in self._reconnects.pop_due():
            try:
                self.processes[name] = self._start_process(name)
            except RunError as error:
                self._give_up_reconnect(name, str(error))
        try:
            process = self._acceptor.next_process(0)
        # A device with another artifact was refused, which must not end the run.
        except RunError as error:
            self._warn_once(str(error))
            process = None
        if process is not None:
            self._messages.listen(process, self.loop)
            self._reconnects.add_greeted(process.device)
        if not self.awaiting_ack and not self.needs_replay and (name := self._reconnects.pop_next()):
            self._send_peers(name, {"down": sorted(self.down - {name}), "rejoins": True})

    def _give_up_reconnect(self, name: str, reason: str) -> None:
        self._warn_once(f"device {name!r} does not return yet: {reason}")
        end_process(self._disconnect(name))
        self._reconnects.retry_later(name)

    def _warn_once(self, message: str) -> None:
        """Log a message as a warning the first time, and as information when it is repeated."""
        log.log(logging.INFO if message in self._warned else logging.WARNING, "%s", message)
        self._warned.add(message)

    def _mark_returned(self, name: str) -> None:
        self._reconnects.remove(name)
        self._warned.clear()
        self.down.discard(name)
        self._change_roles(drops_frames=False, returned=name)
        self._on_change("return", name, "")


def timeout_error(title: str, options: RunOptions, cause: str = NOT_FINISHED, suffix: str = "") -> RunError:
    return RunError(f"{title}: {cause} within {options.timeout_s:g} s{suffix}: {ALLOW_MORE_TIME}")
