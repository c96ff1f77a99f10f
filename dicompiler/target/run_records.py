"""Options of a run, and records of its results, measurements and events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dicompiler.base.errors import ALLOW_MORE_TIME, UsageError
from dicompiler.base.units import format_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.ir.program import Segment
    from dicompiler.target.remote.hosts import Hosts


CopyFunction = Callable[[], object]
"""A function that copies tensors in memory. Each call copies the same tensors."""


def no_copies(memory: Mapping[str, NDArray[Any]]) -> tuple[CopyFunction, CopyFunction]:  # noqa: ARG001
    """Return two functions that copy nothing: `SegmentCall.make_copies` for a runtime that copies no tensors."""
    return (lambda: None), (lambda: None)


@dataclass(frozen=True)
class SegmentCall:
    """The work of a target's runtime for one segment (ONNX submodel), so that this work can be timed without a run.

    Attributes:
        segment: The segment that the engine computes; None if the runtime only copies tensors.
        make_copies: Function that prepares the runtime's own copies, given all tensors that the segment reads and
            writes, by name. It returns two functions, which copy before and after the engine's computation.
    """

    segment: Segment | None
    make_copies: Callable[[Mapping[str, NDArray[Any]]], tuple[CopyFunction, CopyFunction]] = no_copies


@dataclass(frozen=True)
class TimelineEntry:
    """One activity of a device during a run.

    Attributes:
        kind: `run` (a segment), `send` (a transfer) or `wait` (for a transfer or an input).
        index: Index of the segment in `DeviceReport.segments_s`, or of the transfer in `Program.all_transfers`. It is
            -1 if the device waits for an input.
        frame: Number of the frame.
        start: Seconds from the start of the run's last frame to the start of the activity. For the target `sockets`, a
            frame starts on a device when the device is notified of it.
        end: Seconds from the start of the run's last frame to the end of the activity.
    """

    kind: str
    index: int
    frame: int
    start: float
    end: float


@dataclass(frozen=True)
class DeviceReport:
    """Measurements of one device over all frames of a run.

    Attributes:
        device: Name of the device.
        compute_s: Seconds of computing.
        wait_s: Seconds in which the device waited for inputs.
        send_s: Seconds of sending, which overlaps with computing.
        sent_bytes: Payload bytes of each transfer, by index in `Program.all_transfers`.
        segments_s: Seconds of each segment (ONNX submodel): first those of the normal plan, then those of each replica
            or failure plan.
        peak_memory_bytes: Peak resident memory of the device's process.
        timeline: Activities since the start of the last frame; empty if the target does not record them.
    """

    device: str
    compute_s: float
    wait_s: float
    send_s: float
    sent_bytes: Mapping[int, int]
    segments_s: tuple[float, ...]
    peak_memory_bytes: int
    timeline: tuple[TimelineEntry, ...] = ()

    @property
    def is_missing(self) -> bool:
        """True if the device was down at the end of the run, so that all values are 0."""
        return not self.peak_memory_bytes and not self.compute_s

    def with_scaled_times(self, factor: float) -> DeviceReport:
        """Return a copy of the report in which all times are multiplied by a factor.

        Args:
            factor: The factor.

        Returns:
            A new report.
        """
        return replace(
            self,
            compute_s=factor * self.compute_s,
            wait_s=factor * self.wait_s,
            send_s=factor * self.send_s,
            segments_s=tuple(factor * seconds for seconds in self.segments_s),
            timeline=tuple(replace(e, start=factor * e.start, end=factor * e.end) for e in self.timeline),
        )


@dataclass(frozen=True)
class RunEvent:
    """A device failure that did not end the run, its consequence, a swap of artifacts, or a search for a plan.

    Attributes:
        kind: `failure` of a device; `takeover` by a failure plan, reported with the first frame that it finishes;
            `return` of a failed device; `swap` to another artifact; `refusal` of a new artifact; `adaptation`, a search
            for another plan because a device is slower or faster than predicted.
        device: The device that failed, returned or changed its speed. For a takeover, the device that failed last.
            Empty for a swap and a refusal.
        reason: For a failure, its cause. For a swap, the directory of the new artifact. For a refusal, this directory
            and the cause. For an adaptation, the measurement and the result. Empty for the other kinds.
        down: All devices that are down after the event.
        at_s: Seconds from the start of the run to the event.
        finished_frames: Number of frames that were finished before the event. For a swap, the number of the first frame
            that the new artifact computes.
        replayed_frames: Number of frames that are computed again (takeovers only).
        interruption_s: Seconds without a finished frame although frames were in flight: from the last frame before the
            failure to the first one after it (takeovers only).
        takeover_s: The part of `interruption_s` after the failure was noticed.
    """

    kind: Literal["failure", "takeover", "return", "swap", "refusal", "adaptation"]
    device: str
    reason: str
    down: tuple[str, ...]
    at_s: float
    finished_frames: int
    replayed_frames: int = 0
    interruption_s: float = 0.0
    takeover_s: float = 0.0

    @property
    def message(self) -> str:
        """A one-line description of the event."""
        if self.kind == "adaptation":
            return self.reason
        if self.kind == "swap":
            return f"{self.reason} computes all frames from number {self.finished_frames} on"
        if self.kind == "refusal":
            return f"the followed link points to {self.reason}; the session keeps its artifact"
        plan = f"without {', '.join(map(repr, self.down))}" if self.down else "with the original plan"
        if self.kind == "failure":
            return f"device {self.device!r} has failed: {self.reason}; frames continue {plan}"
        if self.kind == "return":
            return f"device {self.device!r} is up again; frames continue {plan}"
        noticed = f"{self.takeover_s:.2f} s after the failure was noticed"
        return (
            f"frames continue {plan} after {self.interruption_s:.2f} s without a finished frame ({noticed}); "
            f"{self.replayed_frames} frames are computed again"
        )


@dataclass(frozen=True)
class RunResult:
    """The outputs, measurements and events of a run.

    Attributes:
        outputs: For each frame, the outputs by name, each from the first device that receives it.
        reports: Measurements of the devices, in device order. The report of a device that is down at the end contains
            zeros. The report of a device that failed and returned starts at its return.
        outputs_by_device: For each frame, the outputs by device and name.
        frames_s: For each frame, the seconds from sending its inputs to having all its outputs.
        total_s: Seconds from sending the first frame's inputs to having the outputs of all frames.
        events: Failures and returns of devices, takeovers by failure plans, and other events, in order.
        queue_wait_s: For each frame, the seconds of `frames_s` before the first device began to compute it. Empty if
            the target does not measure these times.
        is_remote: Whether the run used resident devices on other hosts, which the run's options do not show.
    """

    outputs: tuple[dict[str, NDArray[Any]], ...]
    reports: tuple[DeviceReport, ...]
    outputs_by_device: tuple[Mapping[str, Mapping[str, NDArray[Any]]], ...] = field(default=(), repr=False)
    frames_s: tuple[float, ...] = ()
    total_s: float = 0.0
    events: tuple[RunEvent, ...] = ()
    queue_wait_s: tuple[float, ...] = ()
    is_remote: bool = False

    def __repr__(self) -> str:
        devices = ", ".join(report.device for report in self.reports)
        frames = max(len(self.frames_s), len(self.outputs))
        return f"<RunResult: {frames} frames in {format_seconds(self.total_s)} on {devices}>"

    def with_scaled_times(self, factor: float) -> RunResult:
        """Return a copy of the result in which all times are multiplied by a factor.

        Args:
            factor: The factor.

        Returns:
            A new result.
        """
        return replace(
            self,
            reports=tuple(report.with_scaled_times(factor) for report in self.reports),
            frames_s=tuple(factor * seconds for seconds in self.frames_s),
            queue_wait_s=tuple(factor * seconds for seconds in self.queue_wait_s),
            total_s=factor * self.total_s,
            events=tuple(
                replace(
                    e,
                    at_s=factor * e.at_s,
                    interruption_s=factor * e.interruption_s,
                    takeover_s=factor * e.takeover_s,
                )
                for e in self.events
            ),
        )


@dataclass(frozen=True)
class ReceivedBytes:
    """Tensors that a device received from another device.

    Attributes:
        nbytes: Bytes of the tensors.
        timed_bytes: Number of bytes with a measured time of arrival: all but the first bytes of a tensor (their time
            includes waiting for the sender) and those that arrived while the device computed.
        timed_s: Seconds in which the timed bytes arrived.
    """

    nbytes: int
    timed_bytes: int
    timed_s: float


@dataclass(frozen=True)
class BoardState:
    """The temperature and throttling of a board, read from its kernel.

    Attributes:
        temperature_c: Temperature in °C; None if it is unknown.
        throttled: The flags of `vcgencmd get_throttled` on a Raspberry Pi; None on other boards. If one of bits 0 to 3
            is set, the board computes more slowly now.
    """

    temperature_c: float | None = None
    throttled: int | None = None


@dataclass(frozen=True)
class FrameTimes:
    """Measured times of a finished frame.

    Attributes:
        frame_s: Seconds from sending the frame's inputs to having all its outputs.
        compute_s: For each device that takes part in the frame, the seconds in which it computed.
        role: Index of the plan that computed the frame: first the replicas of the normal plan, then the failure plans.
        received: By (sender, receiver), the tensors that were sent since the receiver's previous frame.
        boards: For each device that takes part in the frame, the state of its board.
    """

    frame_s: float
    compute_s: Mapping[str, float]
    role: int = 0
    received: Mapping[tuple[str, str], ReceivedBytes] = field(default_factory=dict)
    boards: Mapping[str, BoardState] = field(default_factory=dict)

    def divided_by(self, dilation: float) -> FrameTimes:
        """Return the times on boards, given those of an emulation in which everything is slower.

        Args:
            dilation: Factor by which the emulation is slower.

        Returns:
            The divided times.
        """
        if dilation == 1:
            return self
        return replace(
            self,
            frame_s=self.frame_s / dilation,
            compute_s={name: seconds / dilation for name, seconds in self.compute_s.items()},
            received={
                devices: replace(received, timed_s=received.timed_s / dilation)
                for devices, received in self.received.items()
            },
        )


@dataclass(frozen=True)
class Emulation:
    """The emulated boards of a run on this host.

    Attributes:
        enter_network: Function that takes a device's name and returns a context. In the context, the current thread,
            and all processes and threads that it starts, use that device's emulated network.
        addresses: Address of each device on the emulated network.
        namespaces: Name of each device's network namespace.
        min_segments_s: For each device, the seconds that each of its segments (ONNX submodels) must take at least:
            first those of the normal plan, then those of each replica or failure plan.
        speeds: By device, its changes of speed: pairs (time of time.perf_counter, speed from then on as a multiple of
            the original speed).
        scale_links: Function (host, factor) that limits the links of a host to a multiple of their original rates. The
            host `*` means a medium that all hosts share. None if the network is not emulated.
        dilation: Factor by which the network and all segments are slower than on the boards.
    """

    enter_network: Callable[[str], AbstractContextManager[None]]
    addresses: Mapping[str, str]
    namespaces: Mapping[str, str]
    min_segments_s: Mapping[str, tuple[float, ...]]
    speeds: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    scale_links: Callable[[str, float], None] | None = None
    dilation: float = 1.0


IN_FLIGHT_PER_DEVICE = 3
"""Default number of frames in flight per device.

With two per device, devices still wait for each other if every layer is split over all devices (docs/use/stream.md).
"""
MAX_IN_FLIGHT = 1024
"""Maximum number of frames in flight that targets accept."""


MAX_PAUSE_SHARE = 0.25
"""Share of a run's time limit. If a frame was finished in this last part of it, the run is slow, but not stuck."""


def default_in_flight(devices: int) -> int:
    return min(IN_FLIGHT_PER_DEVICE * devices, MAX_IN_FLIGHT)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, an installation or a session.

    Attributes:
        in_flight: Maximum number of frames in flight; 0 means three per device. A device has receive buffers for this
            number of frames.
        kept_frames: Number of frames with outputs in the result; None means all frames.
        heartbeat_s: Seconds between two heartbeats. A device that misses three heartbeats has failed. Default: 0.5 s
            for target `sockets` if the artifact has failure plans, otherwise 2 s.
        keys: Directory made by `dicompiler keys`. If given, connections use TLS.
        listen: HOST or HOST:PORT at which devices connect to this process. Default: any free port of a loopback
            address, or with `hosts` the address of this host on the route to the first device's host.
        insecure: Whether to allow connections to other hosts without keys.
        start_manually: Devices that you start yourself.
        pin: Whether to pin each process to its share of this host's cores.
        hosts: The hosts on which devices are started over ssh, after `Target.install`.
        logs: Directory for the devices' logs with `hosts`. By default, logs are written next to the artifact, and only
            if the run fails.
        timeout_s: Seconds allowed for a whole run or an installation. In a session, seconds for the start and for each
            frame.
        emulation: The emulated boards that the devices run on; None without emulation.
        start_without: Devices that are regarded as down at the start. They are not started, but may join later.
        on_event: Function that is called with each RunEvent, such as the failure or the return of a device, in the
            thread that uses the session.
        on_frame: Function that is called with the times of each finished frame, in the thread that uses the session
            (target `sockets`). It is usually called before the frame's outputs are returned. If a device is late, or a
            stream has more frames, it is called in the next call of a method of the session.
        copy_bytes_per_s: For `Target.install`: largest number of bytes that are sent to all hosts in a second, so that
            the frames of a running artifact are not delayed; 0 means no limit.
        deadline: Time (of `time.monotonic`) by which a session must have ended, in addition to `timeout_s`. It limits a
            run that uses several sessions one after another.

    Raises:
        UsageError: A value has a wrong type or is out of range.
    """

    in_flight: int = 0
    kept_frames: int | None = None
    heartbeat_s: float | None = None
    keys: Path | None = None
    listen: str = ""
    insecure: bool = False
    start_manually: tuple[str, ...] = ()
    pin: bool = False
    hosts: Hosts | None = None
    logs: Path | None = None
    timeout_s: float = 600.0
    emulation: Emulation | None = field(default=None, repr=False)
    start_without: tuple[str, ...] = ()
    on_event: Callable[[RunEvent], None] | None = field(default=None, repr=False)
    on_frame: Callable[[FrameTimes], None] | None = field(default=None, repr=False)
    copy_bytes_per_s: float = 0.0
    deadline: float = math.inf

    def __post_init__(self) -> None:
        for name in ("keys", "logs"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))
        for name in ("start_manually", "start_without"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise UsageError(f"run: {name} is {value!r}: give the names of devices, such as ('pi01',)")
        if isinstance(self.hosts, str | Path):
            raise UsageError(f"run: hosts is the path {str(self.hosts)!r}: give Hosts.load({str(self.hosts)!r})")
        for name in ("on_event", "on_frame"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise UsageError(f"run: {name} is {value!r}: give a function or None")
        for name, is_optional, kind in (
            ("in_flight", False, Integral),
            ("heartbeat_s", True, Real),
            ("timeout_s", False, Real),
            ("copy_bytes_per_s", False, Real),
            ("deadline", False, Real),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (is_optional and value is None):
                raise UsageError(f"run: {name} is {value!r}: give a number")
        if self.timeout_s < 0:
            raise UsageError(f"run: timeout_s must be at least 0, not {self.timeout_s:g}")
        if self.in_flight < 0:
            raise UsageError(f"run: in_flight must be 1 or more, or 0 for the default, not {self.in_flight}")

    def with_timeout(self, seconds: float | None) -> RunOptions:
        """Return a copy of the options with another timeout.

        Args:
            seconds: The timeout in seconds; None keeps the current timeout.

        Returns:
            The options.
        """
        return self if seconds is None else replace(self, timeout_s=seconds)

    def with_heartbeat(self, default_s: float) -> RunOptions:
        """Return the options with `heartbeat_s` set to `default_s` if it is None.

        Args:
            default_s: Seconds between two heartbeats, if the options state none.

        Returns:
            The options.
        """
        return self if self.heartbeat_s is not None else replace(self, heartbeat_s=default_s)

    def deadline_from_now(self) -> float:
        """Return the time by which work that begins now must have ended.

        Returns:
            The earlier one of now + `timeout_s` and `deadline`, as a time of `time.monotonic`.
        """
        return min(time.monotonic() + self.timeout_s, self.deadline)

    def resolve_in_flight(self, devices: int, limit: int = MAX_IN_FLIGHT) -> int:
        """Return the number of frames in flight for a number of devices.

        Args:
            devices: Number of devices.
            limit: The largest number of frames in flight that the target accepts.

        Returns:
            `in_flight` if it is not 0; otherwise the default for this number of devices.

        Raises:
            UsageError: `in_flight` is above the limit.
        """
        if self.in_flight > limit:
            raise UsageError(f"run: frames in flight must be 1 to {limit}, or 0 for the default, not {self.in_flight}")
        return self.in_flight or min(limit, default_in_flight(devices))


def describe_unfinished_run(options: RunOptions, frame_count: int, finished_at: Sequence[float]) -> str:
    """Return how many frames a run has finished if its time was too short, for an error message.

    If a frame was finished shortly before the deadline, no device hangs: the run only needs more time. The error then
    must not blame a device.

    Args:
        options: Options of the run, with its deadline.
        frame_count: Number of frames of the run.
        finished_at: For each finished frame, the time (of `time.perf_counter`) at which it was finished, in ascending
            order.

    Returns:
        The message; empty if the deadline has not passed or no frame was finished shortly before it.
    """
    seconds = options.timeout_s
    late_s = time.monotonic() - options.deadline
    if late_s < 0 or not finished_at or time.perf_counter() - finished_at[-1] > late_s + MAX_PAUSE_SHARE * seconds:
        return ""
    count = len(finished_at)
    return f"run: only {count} of {frame_count} frames were finished within {seconds:g} s: {ALLOW_MORE_TIME}"


@dataclass(frozen=True)
class DeviceStatus:
    """The status of a resident device: a device process that stays up between runs.

    If the device does not respond, only `device`, `address` and `error` are set.

    Attributes:
        device: Name of the device.
        address: HOST:PORT at which the device listens.
        digest: Digest of the device's artifact.
        pid: Process ID on the device's host.
        since: When the device was started, in seconds since 1970.
        runs: Number of runs in which the device has taken part.
        frames: Number of frames that the device has finished.
        replayed_frames: Number of frames that were computed again after failures.
        failures: Number of device failures in the device's runs.
        memory: Resident memory in bytes.
        memory_peak: Peak resident memory in bytes.
        error: Why the last run failed, or why the device does not respond; otherwise empty.
        client: Address of the client that uses the device; empty if there is no client.
        client_since: When the client connected, in seconds since 1970.
    """

    device: str
    address: str
    digest: str = ""
    pid: int = 0
    since: float = 0.0
    runs: int = 0
    frames: int = 0
    replayed_frames: int = 0
    failures: int = 0
    memory: int = 0
    memory_peak: int = 0
    error: str = ""
    client: str = ""
    client_since: float = 0.0

    @property
    def is_responding(self) -> bool:
        """True if the device responds."""
        return bool(self.digest)


@dataclass(frozen=True)
class InstalledDevice:
    """The files of one device that `Target.install` has copied to a host.

    Attributes:
        device: Name of the device.
        host: The destination that ssh connected to.
        directory: The device's directory on that host.
        copied_bytes: Number of bytes that were copied; 0 if the host already had all files.
        versions: Versions of the programs that the device needs on its host, by name.
    """

    device: str
    host: str
    directory: str
    copied_bytes: int
    versions: Mapping[str, str]
