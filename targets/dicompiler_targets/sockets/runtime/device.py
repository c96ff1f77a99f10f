"""One device in one run: joins the coordinator and its peers, then computes its share of each frame.

A frame is one inference request. The coordinator is the process that supplies the frames; peers are the other devices.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .addresses import PORT_HINT, bind_socket, connect, join_address
from .board_sensors import BoardSensors
from .channel import MAX_MISSED_HEARTBEATS, CheckHeader, DeliverMessage, EventLoop, HandleEnd, MessageChannel
from .executor import (
    DEADLINE_GRACE_S,
    FULL_SPEED,
    MAX_TIMELINE_ENTRIES,
    DeviceError,
    EmulatedSpeed,
    FrameExecution,
    Mailbox,
    StepExecutor,
)
from .handshake import COORDINATOR_NAME, ConnectionAcceptor, ConnectionQueue, RunCredentials
from .integrity import FileIntegrity
from .protocol import (
    DONE_FIELDS,
    MAX_FRAMES_IN_FLIGHT,
    RECEIVED_TENSORS,
    FrameWindow,
    MessageHeader,
    MessageType,
    PeerRefused,
    ProtocolError,
    ReceiveFilter,
    RoleSchedule,
    check_json_length,
    check_no_payload,
    decode_json,
    role_manifests,
)
from .segments import make_sessions, one_line, peak_memory_bytes
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
"""Seconds between two checks for failed peers, while the device waits for the connections of peers."""

MAX_HANDSHAKE_S = 15.0
"""Seconds in which a peer (another device) must accept a connection and answer the greeting.

The peer answers in a separate thread, so its computations do not delay the answer.
"""

RETRY_S = 0.1
"""Seconds between two attempts of a device to connect to the same peer (another device)."""

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

    Each pair of devices has one channel: the earlier device in the manifest's order connects to the later one.

    Attributes:
        credentials: ID and token of the run, with which peers prove their membership.
        channels: The channel to each connected peer, by the peer's name.
        all_channels: All channels of the run so far, including those to peers that failed later.
        down: Names of failed devices, as the coordinator reports them.
        disconnected: Names of disconnected peers, even if the coordinator does not know of the failure yet.
        is_complete: True once all peers are connected and frames are executed. From then on, only peers that failed may
            connect, to rejoin the run.
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

        `make_callbacks` returns the callbacks for the channel to the peer (another device) with the given name.
        `report_failed` is called with a failed peer's name and a message for the coordinator.
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

    # -- proofs of identity

    def make_hello(self, receiver: str) -> dict[str, Any]:
        """Return the HELLO message that proves this device's identity to another device or to COORDINATOR_NAME."""
        proof = self.credentials.make_proof(self._name, receiver)
        return {"device": self._name, "digest": self._manifest["digest"], **proof}

    def adopt_run(self, message: Mapping[str, Any]) -> None:
        """Store the run ID and the devices' hosts from `message`, the coordinator's list of all devices.

        Raise DeviceError if the message does not prove that the coordinator has sent it.
        """
        try:
            self.credentials.check(message, COORDINATOR_NAME, self._name)
        except ProtocolError as error:
            raise DeviceError(f"the coordinator cannot be trusted: {error}") from None
        self.credentials = RunCredentials(str(message.get("run")), self.credentials.token)
        self._member_hosts = {str(host) for host, _ in message["addresses"].values()}

    def is_member_host(self, host: str) -> bool:
        return host in self._member_hosts

    # -- connecting to peers

    def connect_all(self, arriving: ConnectionQueue, message: Mapping[str, Any]) -> None:
        """Connect to the later devices in the manifest's order, and wait for the connections of the earlier ones.

        A device that rejoins after a failure connects to all peers. `arriving` is the queue of the peers' connections,
        and `message` is the coordinator's PEERS message with their addresses. Raise DeviceError if a peer does not
        connect in time.
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
        """Connect to a peer; if that fails, report the peer as failed.

        If there are no failure plans, raise DeviceError instead of the report.
        """
        try:
            self._connect(peer, address)
        except DeviceError as error:
            self._mailbox.check()
            if not self._schedule.tolerates_failures:
                raise
            if peer not in self.disconnected:
                self.report_failure(peer, str(error))

    def _connect(self, peer: str, address: Any) -> None:
        """Connect to a peer; try again if the peer closes the connection, as it may while many clients connect."""
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
        """Return a channel to a peer after the handshake; the peer must accept within `timeout_s` seconds."""
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

        Return the peer's name and channel if `connect_all` still waits for peers. Otherwise, start the channel and
        return None.

        Raises:
            ProtocolError: The peer is not expected.
            DeviceError: The peer runs another artifact (compiled program).
        """
        peer = self._check_peer(hello, channel, set(self.down) if self.is_complete else self._preceding, deadline)
        if not self.is_complete:
            channel.send_greeting(MessageType.HELLO, self.make_hello(peer), deadline)
            return peer, channel
        # When the peer has received HELLO, the coordinator may order this device to send to it. The lock delays such an
        # order until the peer's channel is in `channels`.
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
        """Return the name of the peer that sent the HELLO message `hello`, if it is one of `expected`.

        Raises:
            ProtocolError: The peer is not expected or cannot prove its identity.
            DeviceError: The peer has another artifact; this reason was sent to the peer.
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
        """Return the bytes of tensors that each peer has sent since the last call, as structs RECEIVED_TENSORS."""
        entries = []
        for peer in self._manifest["peers"]:
            channel = self.channels.get(peer["device"])
            if channel is not None and (received := channel.take_received()) is not None:
                entries.append(RECEIVED_TENSORS.pack(peer["index"], *received))
        return b"".join(entries)

    # -- failures of peers

    def set_down(self, down: set[str]) -> int:
        """Disconnect the failed devices `down`; return how many of them the coordinator had not reported before."""
        count = len(down - self.down)
        self.down = down
        for peer in sorted(down - self.disconnected):
            self._disconnect(peer)
        return count

    def set_initially_down(self, down: set[str]) -> None:
        self.down, self.disconnected = down, set(down)

    def report_failure(self, peer: str, message: str) -> None:
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
            with contextlib.suppress(OSError):  # shutdown() fails if the socket is closed already.
                connecting[1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


class DeviceRun:
    """One device during one run: connects it, receives its messages, and sends its results.

    A frame (one inference request) is computed in three steps:

    1. The event loop calls `_deliver_control` with the coordinator's BEGIN_FRAME and INPUT messages, and a callback of
       `_make_peer_callbacks` with the peers' TENSOR messages. Both put the content into the mailbox.
    2. `_execute_frames`, in the main thread, begins the frame in the executor, which takes tensors from the mailbox.
    3. The executor calls `_post_value` for each transfer and output, and `_finish_frame` when the frame is finished.

    Attributes:
        peers: Connections to other devices.
        executor: Runs the device's steps; None until all peers are connected.
        finished_frames: Number of frames that this device has finished.
        replayed_frames: Number of frames that this device dropped, because they are sent again after a failure.
        failed_peers: Number of devices that failed so far.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        settings: ConnectionSettings,
        credentials: RunCredentials,
        listen: tuple[str, int] | None = None,
        min_segment_s: Sequence[float] = (),
        emulated_speed: EmulatedSpeed = FULL_SPEED,
        is_resident: bool = False,
    ) -> None:
        """Prepare a run of the device in `directory` without connecting.

        Peers connect at the host and port `listen`; by default, at a free port of the address that reaches the
        coordinator. `min_segment_s` (seconds by segment) and `emulated_speed` emulate a slower board. If `is_resident`,
        this process continues after the coordinator has disconnected.
        """
        self.name: str = manifest["device"]
        self._directory, self._manifest, self._settings = directory, manifest, settings
        self._listen, self._is_resident = listen, is_resident
        self._min_segment_s, self._emulated_speed = min_segment_s, emulated_speed
        self._files = FileIntegrity(directory, manifest)
        self._loop, self._mailbox = EventLoop(settings.heartbeat_s), Mailbox()
        self._sensors = BoardSensors()
        self._loop.can_spin &= not min_segment_s
        self._schedule = RoleSchedule.from_manifest(manifest)
        self._control: MessageChannel | None = None  # The channel to the coordinator.
        self.executor: StepExecutor | None = None
        self.peers = PeerConnections(
            manifest,
            settings,
            credentials,
            self._loop,
            self._mailbox,
            self._schedule,
            self._make_peer_callbacks,
            self._report_failed_peer,
        )
        self.finished_frames = self.replayed_frames = self.failed_peers = 0
        self._end_reason = ""
        # This window is replaced when the PEERS message says how many frames may be in flight.
        self._window = FrameWindow(1)
        self._next_announced = 0
        self._last_change = 0  # Number of the first frame that uses the present roles (plans).
        self._peers_done: set[str] = set()
        # This device must still tell these peers that it has applied the last change of roles (plans).
        self._peers_to_notify: set[str] = set()
        # For each peer that announced a change of roles (plans): the number of the first frame after its latest change.
        self._early_changes: dict[str, int] = {}
        # If this device must still acknowledge a change of roles (plans) to the coordinator: the number of the first
        # frame after the change.
        self._unacknowledged_change: int | None = None
        self._inputs_by_role = [
            {value["index"]: value for value in (*role["inputs"], *role.get("states", ()))}
            for role in role_manifests(manifest)
        ]
        self._input_names = {i: value["name"] for inputs in self._inputs_by_role for i, value in inputs.items()}
        self._input_filter = self._make_input_filter()

    def run(self, coordinator_socket: socket.socket, threads: int) -> None:
        """Take part in the run from beginning to end, over a socket that is connected to the coordinator.

        `threads` is the number of threads that compute a segment. Raise DeviceError if the run fails, and OSError if
        the device cannot listen or connect.
        """
        host, port = self._listen or (coordinator_socket.getsockname()[0], 0)
        self._join_coordinator(coordinator_socket)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(bind_socket(host, port))
            check_encryption(listener.getsockname()[0], self._settings.keys, self._settings.is_insecure)
            # Creating the onnxruntime sessions takes long. Unknown clients could fill the listener's queue meanwhile,
            # and peers could not connect. Therefore, accepting connections begins before the sessions are created.
            acceptor = stack.enter_context(
                contextlib.closing(
                    ConnectionAcceptor(listener, self._settings.keys, self._greet_peer, self.peers.is_member_host)
                )
            )
            self._greet_coordinator(listener.getsockname())
            sessions = make_checked_sessions(self._files, self._directory, self._manifest, threads)
            executor = self._run_frames(acceptor, sessions, stack.close)
        self._finish_run(executor)

    def serve(self, control: MessageChannel, address: Any, arriving: ConnectionQueue, sessions: list[Any]) -> None:
        """Take part in one run in a daemon, which keeps running afterwards.

        Args:
            control: The coordinator's connection, over which it has asked for the run.
            address: Host and port at which the daemon accepts peers.
            arriving: The queue of the peers' connections.
            sessions: The onnxruntime sessions of the segments, which the daemon keeps between runs.
        """
        self._control = control
        self._greet_coordinator(address)
        self._finish_run(self._run_frames(arriving, sessions, lambda: None))

    def close(self) -> None:
        self.peers.close()
        if self._control is not None:
            self._control.close()
        self._loop.close()

    def send_error(self, error: Exception) -> None:
        if self._control is not None:
            content = {"message": one_line(error), "peer": getattr(error, "peer", None)}
            self._control.send_json(MessageType.ERROR, content)
            self._control.flush(time.monotonic() + 1)

    # -- joining the run

    def _join_coordinator(self, coordinator_socket: socket.socket) -> None:
        settings = self._settings
        try:
            check_encryption(coordinator_socket.getpeername()[0], settings.keys, settings.is_insecure)
            deadline = min(settings.deadline, time.monotonic() + MAX_HANDSHAKE_S)
            channel = MessageChannel(open_connection(coordinator_socket, settings.keys, False, deadline))
            check_identity(channel.identity, COORDINATOR_IDENTITY, "the coordinator")
        except (ProtocolError, PeerRefused, OSError) as error:
            raise DeviceError(f"cannot join the coordinator: {error}") from None
        self._control = channel

    def _greet_peer(self, channel: MessageChannel, _: str, deadline: float) -> tuple[str, MessageChannel] | None:
        return self.peers.accept(channel.receive_greeting(deadline), channel, deadline)

    def _greet_coordinator(self, address: Any) -> None:
        hello = {**self.peers.make_hello(COORDINATOR_NAME), "address": list(address[:2])}
        control = self._get_control()
        control.send_greeting(MessageType.HELLO, hello, self._settings.deadline)
        control.start(self._loop, self._check_control, self._deliver_control, self._handle_control_end)

    def _run_frames(
        self, arriving: ConnectionQueue, sessions: list[Any], stop_accepting: Callable[[], object]
    ) -> StepExecutor:
        """Connect to the peers, execute all frames, and return the executor.

        `arriving` is the queue of the peers' connections. `stop_accepting` is called when no more peers can connect.
        """
        rejoins = self._connect_peers(arriving)
        self.executor = executor = StepExecutor(
            self._manifest,
            sessions,
            self._mailbox,
            self._loop,
            self._post_value,
            self._min_segment_s,
            self._emulated_speed,
            self._schedule,
            self._is_resident,
            self._report_overdue,
        )
        self.peers.is_complete = True
        if not self._schedule.tolerates_failures:
            stop_accepting()  # Without failure plans, a failed peer ends the run and cannot rejoin.
        if rejoins:
            # The other devices continue the run while this device rejoins it. The files are checked before READY is
            # sent, because a damaged file that is found later would end the run of all devices.
            self._files.check()
        self._get_control().send(MessageType.READY)
        # The files are checked after READY is sent, so that the other devices need not wait for the check. This device
        # must not compute with damaged files.
        self._files.check()
        self._execute_frames(executor)
        return executor

    def _connect_peers(self, arriving: ConnectionQueue) -> bool:
        """Wait for the coordinator's list of devices, and connect to these devices.

        Return True if this device has failed before and rejoins a run that continued without it.
        """
        deadline = self._settings.deadline + DEADLINE_GRACE_S
        message = self._mailbox.take(self._loop, "peers", deadline, "the list of devices")
        self._loop.let_helper_run(math.inf)
        self.peers.adopt_run(message)
        # Without the lock, the helper thread could apply an order to use other plans between these statements.
        with self._loop.lock:
            self._window = FrameWindow(max(1, min(MAX_FRAMES_IN_FLIGHT, int(message["in_flight"]))))
            self._window.drop(self._last_change)
            self._input_filter = self._make_input_filter()
        self.peers.connect_all(arriving, message)
        return bool(message.get("rejoins"))

    def _make_input_filter(self) -> ReceiveFilter:
        return ReceiveFilter(self._inputs_by_role, self._window, self._schedule)

    def _get_control(self) -> MessageChannel:
        assert self._control is not None
        return self._control

    # -- messages of the coordinator

    def _check_control(self, header: MessageHeader) -> None:
        tolerates_failures = self._schedule.tolerates_failures
        if header.type is MessageType.INPUT:
            self._input_filter.check(header)
        elif header.type in (MessageType.PEERS, MessageType.ERROR) or (
            header.type is MessageType.CHANGE_ROLES and tolerates_failures
        ):
            check_json_length(header)
        elif header.type in (MessageType.BEGIN_FRAME, MessageType.FINISH) or (
            header.type is MessageType.RESET_STATES and "states" in self._manifest
        ):
            check_no_payload(header)
            is_last = header.type is MessageType.FINISH
            if self._schedule.is_idle:
                is_expected = is_last and header.frame >= self._next_announced
            else:
                is_expected = header.frame == self._next_announced and (is_last or header.frame < self._window.end)
            if not is_expected:
                raise ProtocolError(
                    f"received {header.type.name} for frame {header.frame}, expected frame {self._next_announced}"
                )
        else:
            raise ProtocolError(f"received {header.type.name} from the coordinator")

    def _deliver_control(self, header: MessageHeader, payload: Any) -> None:
        if header.type is MessageType.INPUT:
            if header.frame >= self._window.first:
                self._mailbox.put((header.frame, self._input_names[header.index]), payload)
        elif header.type is MessageType.RESET_STATES:
            self._mailbox.put(("reset states", header.frame), bool(header.index))
        elif header.type is MessageType.CHANGE_ROLES:
            self._change_roles(decode_json(payload))
        elif header.type is MessageType.PEERS:
            message = decode_json(payload)
            self.peers.set_initially_down(set(message.get("down", ())))
            self._schedule.change(message.get("failed", ()), first_frame=0, oldest_frame=0)
            self._mailbox.put("peers", message)
        elif header.type is MessageType.ERROR:
            self._end_reason = f"the coordinator refused: {decode_json(payload).get('message')}"
            self._mailbox.fail(DeviceError(self._end_reason))
        elif header.type is MessageType.FINISH:
            self._mailbox.put_order("finish", True)
        elif header.type is MessageType.BEGIN_FRAME:
            # In the header of a BEGIN_FRAME message, `index` is the frame's time limit in milliseconds.
            self._announce_frame(header.frame, header.index / 1000)

    def _announce_frame(self, frame: int, timeout_s: float) -> None:
        """Order the main thread to begin a frame, which must be finished within `timeout_s` seconds."""
        if self._peers_done:
            peer = min(self._peers_done)
            self._fail_early(DeviceError(f"{peer!r} sent BYE before the end of the run", peer))
        self._next_announced += 1
        self._mailbox.put_order(("frame", frame), (time.perf_counter(), time.monotonic() + timeout_s))

    def _change_roles(self, message: Mapping[str, Any]) -> None:
        """Apply a CHANGE_ROLES message: other plans (roles) compute later frames, because a device failed or returned.

        If the message says `drop`, all frames in flight are discarded, because the coordinator sends them again.
        """
        self._last_change = first = int(message["first"])
        self.failed_peers += self.peers.set_down(set(message["down"]))
        self._schedule.change(message["failed"], first_frame=first, oldest_frame=self._window.oldest)
        if not message["drop"]:
            # The coordinator has not announced the frames before `first` in which this device has no work.
            if self._next_announced < first:
                self._window.skip(self._next_announced, first)
                self._mailbox.put_order(("skip", self._next_announced), first)
                self._next_announced = first
            self._get_control().send(MessageType.ROLES_CHANGED, frame=first)
            self._resume_peers()
            return
        self.replayed_frames += max(0, self._next_announced - self._window.oldest)
        self._window.drop(first)
        self._next_announced = first
        if self.executor is not None:
            self.executor.stop_before(first)
        self._mailbox.drop(first)
        self._peers_to_notify = set(self.peers.channels)
        # The coordinator sends the dropped frames again right after CHANGE_ROLES. The loop polls for them without
        # blocking, because waking up from a blocking wait would take longer.
        self._loop.spin_next()
        self._resume_peers()

    def _resume_peers(self) -> None:
        """Resume reading from peers that changed to the new plan before this device, which has now changed too.

        A peer that has already changed to a later plan stays paused.
        """
        for peer, channel in self.peers.channels.items():
            if self._early_changes.get(peer, 0) <= self._last_change:
                channel.release()

    def _handle_control_end(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            # If sending this reason fails, `_handle_control_end` is called again with the error of sending. It then
            # reports the stored reason instead.
            self._end_reason = f"from the coordinator: {error}: copy this device's directory again"
            self._fail_early(DeviceError(self._end_reason))
            return
        reason = self._end_reason or f"the connection to the coordinator ended: {error}"
        if self._is_resident:
            self._mailbox.fail(DeviceError(reason))
            self.peers.cancel_connect()
            if self.executor is not None:
                self.executor.stop_before(sys.maxsize)
            return
        print(f"{self.name}: {reason}", file=sys.stderr, flush=True)
        # The process ends at once. An exception would not interrupt the main thread, which may be computing a long
        # segment.
        os._exit(1)

    # -- messages of peers

    def _make_peer_callbacks(self, peer: str) -> ChannelCallbacks:
        """Return a channel's callbacks for a peer: check a header, deliver a message, react to the end."""
        ends = (peer, self.name)
        transfers_by_role = [
            {t["index"]: t for t in role["transfers"] if (t["sender"], t["receiver"]) == ends}
            for role in role_manifests(self._manifest)
        ]
        tensor_filter = ReceiveFilter(transfers_by_role, self._window, self._schedule)
        names = {index: t["name"] for transfers in transfers_by_role for index, t in transfers.items()}
        allowed = {MessageType.BYE} | ({MessageType.ROLES_CHANGED} if self._schedule.tolerates_failures else set())

        def check(header: MessageHeader) -> None:
            if header.type is MessageType.TENSOR:
                tensor_filter.check(header)
            elif header.length or header.type not in allowed:
                raise ProtocolError(f"received {header.type.name} of {header.length} bytes")

        def deliver(header: MessageHeader, payload: Any) -> bool:
            if header.type is MessageType.ROLES_CHANGED:
                self._early_changes[peer] = header.frame
                # All later tensors of the peer belong to its new plan. If this device has not changed to this plan yet,
                # a true result stops reading from the peer until then.
                return header.frame > self._last_change
            if header.type is MessageType.BYE:
                if self._window.oldest < self._next_announced:
                    raise ProtocolError(f"received BYE while frame {self._window.oldest} is in flight")
                self._peers_done.add(peer)
                self._mailbox.put(("bye", peer), True)
            elif header.frame >= self._window.first:
                self._mailbox.put((header.frame, names[header.index]), payload)
            return False

        def handle_end(error: Exception) -> None:
            if isinstance(error, ProtocolError):
                self._fail_early(DeviceError(f"from {peer!r}: {error}", peer))
            elif peer not in self._peers_done:
                message = f"the connection to {peer!r} was lost: {error}"
                if self._schedule.tolerates_failures:
                    self.peers.report_failure(peer, message)
                else:
                    self._fail_early(DeviceError(message, peer))

        return check, deliver, handle_end

    def _report_failed_peer(self, peer: str, message: str) -> None:
        self._get_control().send_json(MessageType.PEER_FAILED, {"message": message, "peer": peer})
        # The coordinator usually answers soon with an order to use other plans. Polling receives it earlier.
        self._loop.spin_next()

    def _fail_early(self, error: DeviceError) -> None:
        """Send an error to the coordinator now, because the main thread may be computing a long segment.

        The main thread raises the error afterwards.
        """
        content = {"message": one_line(error), "peer": error.peer}
        self._get_control().send_json(MessageType.ERROR, content)
        self._mailbox.fail(error)

    # -- execution of frames

    def _post_value(self, value: Mapping[str, Any], frame: int, payload: Any, keep: Any) -> None:
        """Queue a tensor for sending: a transfer to another device, or an output to the coordinator.

        `value` is its manifest entry. `keep` owns the payload's memory, so it must live until the payload is sent.
        """
        if "receiver" in value:
            channel = self._channel_after_change(value["receiver"])
            channel.post(MessageType.TENSOR, payload, value["index"], frame, keep)
        else:
            self._get_control().post(MessageType.OUTPUT, payload, value["index"], frame, keep)

    def _report_overdue(self, frame: int, error: DeviceError) -> None:
        """Report to the coordinator that a peer's tensor has not arrived in time.

        Raise `error` instead if the coordinator should have sent the tensor, or if there are no failure plans.
        """
        if error.peer is None or not self._schedule.tolerates_failures:
            raise error
        content = json.dumps({"message": one_line(error), "peer": error.peer})
        self._get_control().send(MessageType.TENSOR_OVERDUE, content.encode(), frame=frame)

    def _channel_after_change(self, peer: str) -> MessageChannel:
        """Return the channel to a peer, after telling the peer about the last change to another plan."""
        channel = self.peers.channels[peer]
        if peer in self._peers_to_notify:
            self._peers_to_notify.discard(peer)
            channel.post(MessageType.ROLES_CHANGED, frame=self._last_change)
        return channel

    def _execute_frames(self, executor: StepExecutor) -> None:
        """Execute all frames until the coordinator has sent FINISH and the last frame is finished."""
        next_frame, has_ended, seen_orders = 0, False, -1
        while not has_ended or executor.frames:
            seen = self._mailbox.changes
            if self._mailbox.order_changes != seen_orders:
                seen_orders = self._mailbox.order_changes
                next_frame = self._handle_orders(executor, next_frame)
                has_ended = has_ended or self._mailbox.pop("finish") is not None
            self._mailbox.check()
            if not executor.advance(self._finish_frame) and (executor.frames or not has_ended):
                if self._unacknowledged_change is not None and not executor.frames:
                    # A DONE message would acknowledge the change of roles (plans) to the coordinator, but no frame has
                    # begun since the change. Therefore ROLES_CHANGED acknowledges it.
                    self._get_control().send(MessageType.ROLES_CHANGED, frame=self._unacknowledged_change)
                    self._unacknowledged_change = None
                executor.wait(seen)

    def _handle_orders(self, executor: StepExecutor, next_frame: int) -> int:
        if (first := self._mailbox.pop("drop")) is not None:
            executor.drop_stopped()
            next_frame = self._unacknowledged_change = first
        next_frame = self._mailbox.skip_frames(next_frame)
        while (times := self._mailbox.pop(("frame", next_frame))) is not None:
            executor.begin_frame(next_frame, *times)
            next_frame = self._mailbox.skip_frames(next_frame + 1)
        return next_frame

    def _finish_frame(self, frame: FrameExecution) -> None:
        with self._loop.lock:  # Without the lock, the helper thread could drop frames between these statements.
            # `_window` is updated before DONE is sent. After DONE, the coordinator announces another frame, and
            # `_window` must already admit the tensors of that frame.
            self._window.finish(frame.number)
            received = self.peers.take_received()
        self.finished_frames += 1
        self._unacknowledged_change = None
        duration_us = int(1e6 * (time.perf_counter() - frame.started_at)) + 1 if frame.started_at else 0
        payload = DONE_FIELDS.pack(frame.compute_s, *self._sensors.read()) + received
        self._get_control().post(MessageType.DONE, payload, min(duration_us, 2**32 - 1), frame.number)

    def _finish_run(self, executor: StepExecutor) -> None:
        """Exchange BYE (the last message) with all peers, then send the run's measurements to the coordinator."""
        deadline, disconnected = time.monotonic() + DEADLINE_GRACE_S, self.peers.disconnected
        peers = tuple(self.peers.channels)
        for channel in map(self._channel_after_change, peers):
            channel.send(MessageType.BYE)
            channel.flush(deadline)
        self._loop.run_until(
            lambda: all(peer in disconnected or self._mailbox.has_item(("bye", peer)) for peer in peers), deadline
        )
        for peer in peers:
            if peer not in disconnected:
                self._mailbox.take(self._loop, ("bye", peer), deadline, f"BYE of {peer!r}", peer)
        self._get_control().send_json(MessageType.REPORT, make_report(executor, self.peers.all_channels))
        self._get_control().flush(deadline)


def make_checked_sessions(
    files: FileIntegrity, directory: Path, manifest: Mapping[str, Any], threads: int
) -> list[Any]:
    """Create the sessions of all segments (ONNX submodels), and compute the digests of the device's files meanwhile.

    Call `FileIntegrity.check` afterwards. `threads` is the number of threads that compute a segment. Raise ValueError
    for a missing or damaged file, or a segment that onnxruntime cannot load.
    """
    files.begin_digests()
    try:
        return make_sessions(directory, manifest, threads)
    except ValueError:
        files.check()
        raise


def make_report(executor: StepExecutor, channels: Iterable[MessageChannel] = ()) -> dict[str, Any]:
    """Return a device's measurements: sums over all frames of a run, and a timeline of the last frame.

    The timeline lists segments, waits and sends, sorted by start, in seconds since the last frame was announced.
    """
    sent: Counter[int] = Counter()
    entries, send_s = list(executor.timeline), 0.0
    for channel in channels:
        sent.update(channel.sent)
        send_s += channel.send_s
        entries += [("send", *entry) for entry in channel.timeline]
    announced_at = executor.announced_at
    last_frame = [entry for entry in entries if entry[4] > announced_at]
    timeline = sorted(last_frame, key=lambda entry: entry[3])[:MAX_TIMELINE_ENTRIES]
    return {
        "compute_s": sum(executor.segments_s),
        "wait_s": executor.wait_s,
        "send_s": send_s,
        "sent": {str(index): sent[index] for index in sorted(sent)},
        "segments": executor.segments_s,
        "memory_peak": peak_memory_bytes(),
        "timeline": [[*entry[:3], *(round(max(0.0, at - announced_at), 7) for at in entry[3:])] for entry in timeline],
    }
