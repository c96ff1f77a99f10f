"""The devices of a run, as the coordinator sees them: their processes, connections, messages and reports.

`launch_process` starts a device on this host. `RunAcceptor` accepts the connections of devices, and `DeviceMessages`
queues their messages as events. A device may be compromised, so each message is checked before memory for its payload
is allocated, and each field of a report is checked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DeviceReport, DicompilerError, RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import BoardState, DeviceStatus, ReceivedBytes, TimelineEntry
from dicompiler.plugin_api.utilities import CapturedOutput, one_line
from dicompiler_targets.sockets.artifact import MANIFEST, Manifest, RoleIO
from dicompiler_targets.sockets.runtime import __name__ as RUNTIME
from dicompiler_targets.sockets.runtime.addresses import bind_socket, is_loopback, join_address, split_address
from dicompiler_targets.sockets.runtime.board_sensors import UNKNOWN_FLAGS
from dicompiler_targets.sockets.runtime.channel import EventLoop, MessageChannel
from dicompiler_targets.sockets.runtime.handshake import COORDINATOR_NAME, ConnectionAcceptor, RunCredentials
from dicompiler_targets.sockets.runtime.protocol import (
    DONE_FIELDS,
    RECEIVED_TENSORS,
    FrameWindow,
    MessageHeader,
    MessageType,
    ProtocolError,
    ReceiveFilter,
    RoleSchedule,
    check_json_length,
    check_no_payload,
    decode_json,
)
from dicompiler_targets.sockets.runtime.transport import (
    DEVICE_IDENTITY,
    TlsKeys,
    check_encryption,
    check_identity,
)

MAX_NUMBER = 2**53
"""Upper limit of numbers in reports; below it, a float represents each integer exactly."""
TIMELINE_KINDS = ("run", "wait", "send")


def read_report(device: str, report: Mapping[str, Any]) -> DeviceReport:
    """Return a device's measurements of a run from the content of a REPORT message.

    Raise ProtocolError with the name of an invalid field.
    """
    compute_s, wait_s, send_s = (_read_number(report, name) for name in ("compute_s", "wait_s", "send_s"))
    sent, segments, timeline = (
        _read_field(report, name, kind) for name, kind in (("sent", dict), ("segments", list), ("timeline", list))
    )
    if not all(str(index).isdecimal() and len(str(index)) < 10 for index in sent):
        raise ProtocolError("field 'sent' of the report has a key that is not the index of a transfer")
    return DeviceReport(
        device,
        compute_s,
        wait_s,
        send_s,
        {int(index): int(_check_number(f"sent[{index}]", count)) for index, count in sent.items()},
        tuple(_check_number(f"segments[{index}]", value) for index, value in enumerate(segments)),
        int(_read_number(report, "memory_peak")),
        tuple(_read_timeline_entry(f"timeline[{index}]", entry) for index, entry in enumerate(timeline)),
    )


@dataclass(frozen=True)
class DoneReport:
    """The content of a DONE message: a device has finished its work on a frame.

    Attributes:
        compute_s: Seconds for which the device computed the frame.
        received: By (sender, this device), the bytes of tensors that the device received since its last DONE.
        board: The state of the device's board.
    """

    compute_s: float
    received: Mapping[tuple[str, str], ReceivedBytes]
    board: BoardState


def read_done(device: str, payload: Any, names: Sequence[str]) -> DoneReport:
    """Return the content of a DONE message, with which a device reports that it has finished a frame.

    `names` has the names of all devices, by the index that the message uses. Raise ProtocolError if a number is
    invalid.
    """
    raw, received = bytes(payload), dict[tuple[str, str], ReceivedBytes]()
    compute_s, temperature, flags = DONE_FIELDS.unpack_from(raw)
    board = BoardState(temperature if math.isfinite(temperature) else None, None if flags == UNKNOWN_FLAGS else flags)
    for index, nbytes, timed_bytes, timed_s in RECEIVED_TENSORS.iter_unpack(raw[DONE_FIELDS.size :]):
        if index >= len(names) or (names[index], device) in received:
            raise ProtocolError(f"field 'received' of the report has an invalid device index {index}")
        received[names[index], device] = ReceivedBytes(nbytes, timed_bytes, _check_number("timed_s", timed_s))
    return DoneReport(_check_number("compute_s", compute_s), received, board)


def read_status(address: str, status: Mapping[str, Any]) -> DeviceStatus:
    """Return the status in the answer of a resident device (a daemon).

    Raise ProtocolError with the name of an invalid field.
    """
    values: dict[str, Any] = {"address": address}
    for field in fields(DeviceStatus):
        if field.name != "address" and (field.name in status or field.default is MISSING):
            is_text = field.type == "str"
            values[field.name] = _read_field(status, field.name, str) if is_text else _read_number(status, field.name)
            if field.type == "int":
                values[field.name] = int(values[field.name])
    return DeviceStatus(**values)


def _read_field(report: Mapping[str, Any], name: str, kind: type) -> Any:
    value = report.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"field {name!r} of the report is {_quote(value)}: expected a {kind.__name__}")
    return value


def _read_number(report: Mapping[str, Any], name: str) -> float:
    return _check_number(name, report.get(name))


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
        raise ProtocolError(
            f"field {name!r} of the report is {_quote(value)}: expected a number of 0 or more, and less than 2^53"
        )
    return float(value)


def _read_timeline_entry(name: str, entry: Any) -> TimelineEntry:
    if not isinstance(entry, list) or len(entry) != 5 or entry[0] not in TIMELINE_KINDS:
        raise ProtocolError(
            f"field {name!r} of the report is {_quote(entry)}: expected [kind, index, frame, start, end]"
        )
    # The index is -1 if the device waited for an input of the network; else it is that of a transfer or segment.
    index = -1 if entry[1] == -1 else int(_check_number(name, entry[1]))
    frame, start, end = (_check_number(name, value) for value in entry[2:])
    return TimelineEntry(entry[0], index, int(frame), start, end)


def _quote(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= MAX_NUMBER:
        return "a huge integer"  # Python refuses to print integers of many digits, so the number is not shown.
    return one_line(repr(value), 100)


RUNTIME_COMMAND: tuple[str, ...] = ("-P", "-m", RUNTIME)
"""Python's arguments that run the installed runtime, and never a module in the working directory."""


@dataclass
class DeviceProcess:
    """The process of a device.

    Attributes:
        manifest: The device's manifest (its segments, transfers and files).
        popen: The local process; for a device on another host, the ssh process that runs it. None if this coordinator
            does not start the device.
        output: The captured output of the process.
        channel: The connection to the device; None until the handshake is finished.
        address: Host and port at which other devices reach the device.
        report: The report that the device sends at the end of the run; None until it has arrived.
        queued_messages: Number of JSON messages of the device that are queued as events.
        location: Text that follows the device's name in messages, for example " on pi@10.0.0.2".
        allowed_hosts: Hosts that the device may name as its own, in addition to the one from which it connects.
    """

    manifest: Manifest
    popen: subprocess.Popen[bytes] | None = None
    output: CapturedOutput | None = None
    channel: MessageChannel | None = None
    address: Any = None
    report: DeviceReport | None = None
    queued_messages: int = 0
    location: str = ""
    allowed_hosts: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return str(self.manifest["device"])

    @property
    def title(self) -> str:
        return f"device {self.device!r}{self.location}"

    def get_channel(self) -> MessageChannel:
        assert self.channel is not None
        return self.channel

    def send_token(self, token: str) -> None:
        """Write the run's secret token to the process's standard input.

        Other users of the host could read an argument or environment variable, but they cannot read standard input.
        """
        if self.popen is not None and self.popen.stdin is not None:
            # If the pipe is broken, the process has ended, which `exit_failures` will notice.
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.write(f"{token}\n".encode())
                self.popen.stdin.flush()

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs, or if this coordinator has not started it."""
        return None if self.popen is None else self.popen.poll()

    def describe_exit(self) -> str | None:
        """Return a text about the exit code and the last line of output; None if there is no exit code yet."""
        code = self.exit_code()
        if code is None:
            return None
        cause = f"ended with exit code {code}"
        if code < 0:
            cause = f"was ended by signal {-code}"
            with contextlib.suppress(ValueError):  # Some signals have no name, so only their number is shown.
                cause += f" ({signal.Signals(-code).name})"
        line = self.last_line()
        return f"its process {cause}: {line}" if line else f"its process {cause}"

    def close(self) -> None:
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
        if self.channel is not None:
            self.channel.close()

    def last_line(self) -> str:
        tail = b"" if self.output is None else self.output.read()[-4096:]
        lines = tail.decode(errors="replace").strip().splitlines()
        return one_line(lines[-1], 500) if lines else ""


StartDevice = Callable[[Manifest, Sequence[str]], DeviceProcess]
"""A function that starts a device's runtime: (manifest, command-line arguments equal for all devices) → process."""


def local_starter(directory: Path, options: RunOptions, count: int) -> StartDevice:
    """Return a function that starts devices on this host; `count` devices share the host's cores equally."""
    keys, emulation = options.keys, options.emulation
    cores = sorted(os.sched_getaffinity(0))
    # Each emulated device uses one core, because the times of its segments are measured on one core.
    share = max(1, len(cores) // count) if emulation is None else 1

    def start(manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        extra = ["--threads", str(min(share, manifest["threads"]))]
        if keys is not None:
            extra += ["--keys", os.path.abspath(keys / "devices" / manifest["device"])]
        if options.pin:
            first = manifest["index"] * share
            extra += ["--cores", ",".join(str(cores[(first + i) % len(cores)]) for i in range(share))]
        if emulation is None:
            return launch_process(directory, manifest, [*arguments, *extra])
        extra += ["--min-seconds", ",".join(map(repr, emulation.min_segments_s[manifest["device"]]))]
        changes = emulation.speeds.get(manifest["device"], ())
        extra += ["--speeds", ",".join(f"{at!r}:{speed!r}" for at, speed in changes)] if changes else []
        with emulation.enter_network(manifest["device"]):
            return launch_process(directory, manifest, [*arguments, *extra])

    return start


def launch_process(directory: Path, manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
    """Start the installed runtime for a device on this host. No code in the device's directory is run."""
    # The command line has the manifest's full path, so the process list shows which artifact and device a process runs.
    place = (directory / manifest["device"]).absolute()
    try:
        popen = subprocess.Popen(
            [sys.executable, *RUNTIME_COMMAND, "--manifest", str(place / MANIFEST), "--end-with-stdin", *arguments],
            cwd=place,
            env=_child_environment(),
            stdin=subprocess.PIPE,  # When this process ends, its end of the pipe closes. Then the device ends too.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C interrupts only this process, which then ends the devices.
        )
    except OSError as error:
        raise RunError(f"device {manifest['device']!r}: cannot start its process: {error}") from error
    assert popen.stdout is not None
    return DeviceProcess(manifest, popen, CapturedOutput(popen.stdout))


def _child_environment() -> dict[str, str]:
    """Return the environment of a device: this process's, without the PYTHON… variables that change Python."""
    kept = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k in kept}
    # The child has another working directory, so relative paths must become absolute.
    path = [os.path.abspath(entry) for entry in variables.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    # Devices use numpy only to copy tensors. Without this limit, its import starts a thread for each processor.
    variables.setdefault("OPENBLAS_NUM_THREADS", "1")
    return variables | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def end_all(processes: Sequence[DeviceProcess]) -> None:
    """Kill the processes that still run, and wait until all have ended.

    A device that this coordinator has not started ends when its connection is closed.
    """
    for process in processes:
        if process.popen is not None:
            process.popen.kill()
    for process in processes:
        if process.popen is not None:
            process.popen.wait()
        process.close()


def end_process(process: DeviceProcess) -> None:
    if process.popen is not None:
        process.popen.kill()
        # Waiting longer is useless, because a killed process that has not ended is stuck in the kernel.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(1)
    process.close()


JSON_MESSAGE_TYPES = (MessageType.REPORT, MessageType.ERROR, MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE)
SPARE_ENTRIES = 16
"""`OncePerFrame` removes records of finished frames if it has more than 2 n + SPARE_ENTRIES, for n frames in flight."""
MAX_QUEUED_MESSAGES = 64
"""Maximum number of queued JSON messages of one device, so that a faulty device cannot fill the memory.

The queue is emptied only while the user waits for outputs.
"""
ANY_LOOPBACK_PORT = "127.0.0.1:0"

JoinedDevice = tuple[DeviceProcess, MessageChannel, tuple[str, int]]
"""A device's process, its channel, and the host and port at which other devices reach it."""


@dataclass(frozen=True)
class DeviceEvent:
    """A message from a device, or the end of its connection.

    Attributes:
        device: Name of the device.
        header: Header of the message; None for the end of the connection.
        payload: Payload of the message (a DeviceReport, DoneReport, JSON object or bytes, depending on its type), or
            the exception that ended the connection.
        received_at: When the message arrived (time.perf_counter).
    """

    device: str
    header: MessageHeader | None
    payload: Any
    received_at: float = 0.0


def load_coordinator_keys(keys: Path | None) -> TlsKeys | None:
    """Return the coordinator's keys in the directory that 'dicompiler keys' created; None if `keys` is None.

    Raises:
        DicompilerError: A file is missing or cannot be used.
    """
    try:
        return None if keys is None else TlsKeys(keys / "coordinator")
    except ValueError as error:
        raise DicompilerError(f"run: {error}") from None


class RunAcceptor:
    """Accepts connections of the devices of a run.

    For resident devices (running daemons), `daemon_client.DaemonConnector` is used instead.

    Attributes:
        address: HOST:PORT at which devices connect.
        credentials: ID and secret token of the run. Each device must prove that it knows them.
    """

    def __init__(self, listen: str, keys: Path | None, is_insecure: bool) -> None:
        """Listen at HOST:PORT; port 0 means any free port.

        `keys` is the directory that 'dicompiler keys' created; None for no TLS. With `is_insecure`, other hosts may
        connect without TLS. Raise UsageError if the address is invalid, DicompilerError if the keys cannot be used, and
        RunError if the address is in use.
        """
        # Without keys, a token proves that a device belongs to the run. With keys, certificates prove it.
        self.credentials = RunCredentials(secrets.token_hex(8), "" if keys else secrets.token_hex(16))
        self._acceptor: ConnectionAcceptor | None = None
        self._joined_devices: set[str] = set()
        self._lock = threading.Lock()
        try:
            host, port = split_address(listen)
        except ValueError as error:
            raise UsageError(f"run: {error}") from None
        self._keys = load_coordinator_keys(keys)
        try:
            self._listener = bind_socket(host, port)
        except ValueError as error:
            raise RunError(f"{error} (--listen)") from None
        try:
            bound = self._listener.getsockname()
            check_encryption(bound[0], self._keys, is_insecure)
            if ipaddress.ip_address(bound[0]).is_unspecified:
                raise ValueError(
                    f"devices cannot connect to the address {bound[0]}: pass an address of this host (--listen)"
                )
        except ValueError as error:
            self._listener.close()
            raise UsageError(f"run: {error}") from None
        self.address = join_address(*bound[:2])

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()

    def start_accepting(self, processes: Mapping[str, DeviceProcess], digest: str) -> None:
        """Accept the devices in `processes` from now on, if their artifact has the digest `digest`."""
        self._processes, self._digest = processes, digest
        self._acceptor = ConnectionAcceptor(self._listener, self._keys, self._greet_device, self._is_member_host)

    def _is_member_host(self, host: str) -> bool:
        processes = tuple(self._processes.values())
        return is_loopback(host) or any(
            host in process.allowed_hosts or (process.address is not None and host == process.address[0])
            for process in processes
        )

    @property
    def refusal_text(self) -> str:
        """Cause of the last refused connection, as the end of a message; '' if none was refused."""
        reason = one_line(self._acceptor.last_refusal) if self._acceptor else ""
        return f"; last refused connection: {reason}" if reason else ""

    def allow_again(self, device: str) -> None:
        with self._lock:
            self._joined_devices.discard(device)

    def next_process(self, seconds: float) -> DeviceProcess | None:
        """Wait for the next device that connects; return its process, or None after `seconds`.

        Raise RunError if a device of this run was refused.
        """
        assert self._acceptor is not None
        joined: JoinedDevice | None = self._acceptor.take(seconds)
        if joined is None:
            return None
        process, channel, address = joined
        # The device may have failed while its connection waited in the queue. Another process has then replaced the
        # device's process, and the connection is useless.
        if self._processes[process.device] is not process:
            channel.close()
            return None
        process.channel, process.address = channel, address
        return process

    def _greet_device(self, channel: MessageChannel, host: str, deadline: float) -> JoinedDevice:
        """Perform the handshake with a device that connects; return its process, channel and address.

        Raises:
            ProtocolError: The connection is refused.
            RunError: A proven device of this run has another artifact or a wrong address, so the run must end.
        """
        hello = channel.receive_greeting(deadline)
        name = str(hello.get("device"))
        process = self._processes.get(name)
        if process is None:
            raise ProtocolError(f"device {name[:100]!r} is not expected")
        check_identity(channel.identity, DEVICE_IDENTITY.format(name), f"device {name!r}")
        self.credentials.check(hello, name, COORDINATOR_NAME)
        try:
            if hello.get("digest") != self._digest:
                raise ProtocolError("the device's directory belongs to another artifact: copy the artifact again")
            address = _check_address(hello.get("address"), {host, *process.allowed_hosts})
        except ProtocolError as error:
            channel.refuse(str(error), deadline)
            raise RunError(f"{process.title}: {error}") from None
        with self._lock:
            if name in self._joined_devices:
                raise ProtocolError(f"device {name!r} is connected already")
            self._joined_devices.add(name)
        return process, channel, address


def _check_address(value: Any, allowed_hosts: set[str]) -> tuple[str, int]:
    """Check the address at which a device claims to accept its peers, and return it.

    It must be on one of `allowed_hosts`. Otherwise a device could direct its peers to any other host.
    """
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or type(value[1]) is not int:
        raise ProtocolError("the device's greeting has no valid address")
    if 0 < value[1] < 1 << 16 and _without_scope(value[0]) in map(_without_scope, allowed_hosts):
        return value[0], value[1]
    raise ProtocolError(
        f"the device's address for peers is {value[0][:100]!r}, port {value[1]}, but the device connected from "
        f"{min(allowed_hosts)}: let the device listen there (--listen), or set the key address in the hosts file"
    )


def _without_scope(host: str) -> str:
    """Return an IP address without its zone (the interface name after %), and a host name unchanged.

    A zone has a meaning on one host only.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host.partition("%")[0]))
    return host


class OncePerFrame:
    """Checks that a device does not send the same kind of message twice for a frame."""

    def __init__(self, window: FrameWindow) -> None:
        self._window = window
        self._seen: set[tuple[MessageType, int]] = set()

    def admit(self, message_type: MessageType, frame: int = 0) -> None:
        if (message_type, frame) in self._seen:
            suffix = f" for frame {frame}" * (message_type is not MessageType.READY)
            raise ProtocolError(f"received {message_type.name} twice{suffix}")
        if len(self._seen) > 2 * len(self._window) + SPARE_ENTRIES:
            oldest = self._window.oldest
            self._seen = {entry for entry in self._seen if entry[0] is MessageType.READY or entry[1] >= oldest}
        self._seen.add((message_type, frame))


class DeviceMessages:
    """Receives the messages of all devices, checks them, and queues them as events.

    Attributes:
        events: The events in the order of arrival; `ClusterState.events` removes them.
        ready_devices: The devices that have sent READY.
    """

    def __init__(
        self,
        role_ios: Sequence[RoleIO],
        names: Sequence[str],
        window: FrameWindow,
        schedule: RoleSchedule,
        expects_ready: Callable[[str], bool],
    ) -> None:
        """Create an empty queue of messages.

        Args:
            role_ios: The inputs and outputs of each role (the normal plan, a replica or a failure plan).
            names: Names of all devices, by the index that DONE messages use.
            window: The numbers of the frames in flight.
            schedule: Maps each frame number to the index of its role.
            expects_ready: Returns True if the device with the given name may send READY now.
        """
        self.events: deque[DeviceEvent] = deque()
        self.ready_devices: set[str] = set()
        self._role_ios, self._names, self._window, self._schedule = role_ios, names, window, schedule
        self._expects_ready = expects_ready

    def listen(self, process: DeviceProcess, loop: EventLoop) -> None:
        """Begin to receive from a device: queue each message, and the end of its connection, as an event."""
        name = process.device
        outputs_by_role = [role_io.outputs[name] for role_io in self._role_ios]
        output_filter = ReceiveFilter(outputs_by_role, self._window, self._schedule)
        once = OncePerFrame(self._window)
        process.get_channel().start(
            loop,
            lambda header: self._check(process, output_filter, once, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self.events.append(DeviceEvent(name, None, error)),
        )

    def forget(self, name: str) -> None:
        for _ in range(len(self.events)):
            if (event := self.events.popleft()).device != name:
                self.events.append(event)
        self.ready_devices.discard(name)

    def _check(
        self, process: DeviceProcess, output_filter: ReceiveFilter, once: OncePerFrame, header: MessageHeader
    ) -> None:
        message_type, frame = header.type, header.frame
        tolerates_failures = self._schedule.tolerates_failures
        if message_type is MessageType.OUTPUT:
            output_filter.check(header)
        elif message_type is MessageType.DONE:
            count, rest = divmod(header.length - DONE_FIELDS.size, RECEIVED_TENSORS.size)
            if rest or not 0 <= count < len(self._names):
                raise ProtocolError(f"received DONE of {header.length} bytes, which is not the length of a valid one")
            if not self._is_late(header):
                self._window.check(frame, "DONE")
                if process.device not in self._role_ios[self._schedule.role_index(frame)].active_devices:
                    raise ProtocolError(f"received DONE for frame {frame}, in which the device takes no part")
                once.admit(MessageType.DONE, frame)
        elif message_type is MessageType.READY:
            check_no_payload(header)
            if not self._expects_ready(process.device):
                raise ProtocolError("received READY before PEERS was sent")
            once.admit(MessageType.READY)
        elif message_type is MessageType.ROLES_CHANGED and tolerates_failures:
            check_no_payload(header)
            if frame > self._schedule.last_change:
                raise ProtocolError(f"received ROLES_CHANGED for frame {frame}, at which no roles change")
            if not self._is_late(header):
                once.admit(MessageType.ROLES_CHANGED, frame)
        elif message_type in (MessageType.REPORT, MessageType.ERROR) or (
            message_type in JSON_MESSAGE_TYPES and tolerates_failures
        ):
            check_json_length(header)
            process.queued_messages += 1
            if process.queued_messages > MAX_QUEUED_MESSAGES:
                raise ProtocolError(f"received more than {MAX_QUEUED_MESSAGES} messages at once")
        else:
            raise ProtocolError(f"received {message_type.name}, which devices do not send")

    def _is_late(self, header: MessageHeader) -> bool:
        """Return True if a message must be ignored: its frame was dropped, or plans have changed again since then."""
        if header.type is MessageType.ROLES_CHANGED:
            return header.frame < self._schedule.last_change
        return header.type in (MessageType.OUTPUT, MessageType.DONE) and header.frame < self._window.first

    def _deliver(self, name: str, header: MessageHeader, payload: Any) -> None:
        if self._is_late(header):
            return
        if header.type is MessageType.REPORT:
            payload = read_report(name, decode_json(payload))
        elif header.type is MessageType.DONE:
            payload = read_done(name, payload, self._names)
        elif header.type in JSON_MESSAGE_TYPES:
            payload = decode_json(payload)
        self.events.append(DeviceEvent(name, header, payload, time.perf_counter()))
