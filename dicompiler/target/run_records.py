"""Records that go into and come out of a run: its options, results, reports and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dicompiler.base.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.ir.program import Segment
    from dicompiler.target.remote.hosts import Hosts


CopyFunction = Callable[[], object]
"""Makes a fixed set of copies each time it is called."""


def no_copies(memory: Mapping[str, NDArray[Any]]) -> tuple[CopyFunction, CopyFunction]:  # noqa: ARG001
    """Return functions that copy nothing."""
    return (lambda: None), (lambda: None)


@dataclass(frozen=True)
class SegmentCall:
    """The work of a runtime for one segment, as `Target.segment_calls` describes it.

    Attributes:
        segment: The part that the engine computes; None if there is nothing to compute.
        make_copies: Takes all tensors that the segment reads and writes, by name. Returns two functions that make the
            runtime's own copies among them: before the engine's part, and after it.
    """

    segment: Segment | None
    make_copies: Callable[[Mapping[str, NDArray[Any]]], tuple[CopyFunction, CopyFunction]] = no_copies


@dataclass(frozen=True)
class TimelineEntry:
    """One activity of a device.

    Attributes:
        kind: `run` (a segment), `send` (a transfer) or `wait` (for a transfer or an input).
        index: Index of the segment in `DeviceReport.segments_s`, or of the transfer; -1 if it waits for an input.
        frame: Number of the frame.
        start: Seconds since the start of the run's last frame. Target `sockets` counts from the moment when the device
            was notified of that frame.
        end: As `start`.
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
        compute_s: Seconds in segments.
        wait_s: Seconds in which no segment had all its inputs.
        send_s: Seconds of sending, which overlaps with computing.
        sent_bytes: Payload bytes by index in `Program.all_transfers`.
        segments_s: Seconds of each segment, role by role.
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

    def with_scaled_times(self, factor: float) -> DeviceReport:
        """Return the report with all times multiplied by a factor.

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
            timeline=tuple(
                replace(entry, start=factor * entry.start, end=factor * entry.end) for entry in self.timeline
            ),
        )


@dataclass(frozen=True)
class RunEvent:
    """A device failure, or its consequence, that a run has survived.

    Attributes:
        kind: `failure` of a device; `takeover` by a failure plan, reported with the first frame that it finishes;
            `return` of a device.
        device: The device that failed or returned; for a takeover, the one that failed last.
        reason: Why the device failed.
        down: The devices that are down from then on.
        at_s: Seconds since the start of the run.
        finished_frames: Number of frames that were finished by then.
        replayed_frames: Number of frames that are computed again (takeovers only).
        interruption_s: Seconds from the failure to the next finished frame (takeovers only).
    """

    kind: Literal["failure", "takeover", "return"]
    device: str
    reason: str
    down: tuple[str, ...]
    at_s: float
    finished_frames: int
    replayed_frames: int = 0
    interruption_s: float = 0.0

    @property
    def message(self) -> str:
        """A one-line description of the event."""
        plan = f"without {', '.join(map(repr, self.down))}" if self.down else "with the original plan"
        if self.kind == "failure":
            return f"device {self.device!r} has failed: {self.reason}; frames continue {plan}"
        if self.kind == "return":
            return f"device {self.device!r} is up again; frames continue {plan}"
        interruption = f"after {self.interruption_s:.2f} s; {self.replayed_frames} of them are computed again"
        return f"frames continue {plan} {interruption}"


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        outputs: Outputs of each frame by name, as the first sink device delivered them.
        reports: Measurements of the devices, in device order. The report of a device that is down at the end holds
            zeros; that of a device that returned counts from its return.
        outputs_by_device: For each frame and each sink device, the outputs by name.
        frames_s: For each frame, the seconds from giving its inputs to having all its outputs.
        total_s: Seconds from giving the first frame's inputs to having the last frame's outputs.
        events: Failures, takeovers and returns, in order.
        queue_wait_s: For each frame, the part of `frames_s` in which no device had begun to compute it. It was waiting
            for other frames, or its inputs were being sent. Empty if the target does not measure it.
        is_remote: Whether the run joined resident devices on other hosts, which the run's options do not show.
    """

    outputs: tuple[dict[str, NDArray[Any]], ...]
    reports: tuple[DeviceReport, ...]
    outputs_by_device: tuple[Mapping[str, Mapping[str, NDArray[Any]]], ...] = field(default=(), repr=False)
    frames_s: tuple[float, ...] = ()
    total_s: float = 0.0
    events: tuple[RunEvent, ...] = ()
    queue_wait_s: tuple[float, ...] = ()
    is_remote: bool = False

    def with_scaled_times(self, factor: float) -> RunResult:
        """Return the result with all times multiplied by a factor.

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
                replace(event, at_s=factor * event.at_s, interruption_s=factor * event.interruption_s)
                for event in self.events
            ),
        )


@dataclass(frozen=True)
class Emulation:
    """The emulated boards of a run on this host.

    Attributes:
        enter_network: Takes a device's name. Returns a context in which the current thread, and all that it starts,
            use that device's network.
        addresses: Address of each device on the emulated network.
        namespaces: Name of each device's network namespace.
        min_segments_s: For each device, the minimum duration of a call of each of its segments, role by role.
    """

    enter_network: Callable[[str], AbstractContextManager[None]]
    addresses: Mapping[str, str]
    namespaces: Mapping[str, str]
    min_segments_s: Mapping[str, tuple[float, ...]]


IN_FLIGHT_PER_DEVICE = 3
"""Default number of frames in flight per device. With two, devices still wait for each other in networks whose frames
pass all devices layer by layer (docs/use/stream.md)."""
MAX_IN_FLIGHT = 1024
"""Maximum number of frames in flight that targets accept."""


def default_in_flight(devices: int) -> int:
    """Return the default number of frames in flight.

    Args:
        devices: Number of devices.

    Returns:
        The number of frames.
    """
    return min(IN_FLIGHT_PER_DEVICE * devices, MAX_IN_FLIGHT)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        in_flight: Maximum number of frames in flight; 0: the default for the number of devices. A device's receive
            buffers take this many times the bytes that it receives for one frame.
        kept_frames: Number of frames of which the outputs are kept; None: all.
        heartbeat_s: Seconds between two heartbeats. A device that misses three of them has failed.
        keys: Directory made by `dicompiler keys`; connections then use TLS.
        listen: HOST:PORT at which devices reach this process; port 0: any. Default: loopback, or with `hosts` the
            address by which the first host is reached.
        insecure: Whether to allow connections to other hosts without keys.
        start_manually: Devices that you start yourself.
        pin: Whether to pin each process to its share of this host's cores.
        hosts: The hosts on which devices are started over ssh, after `Target.install`.
        logs: Directory for the devices' logs with `hosts`. Default: next to the artifact, and only if a run fails.
        timeout_s: Time allowed for a whole run or an installation; in a session, for the start and for each frame.
        emulation: The emulated boards that the devices run on.
        start_without: Devices that are down at the start. They are not started, but may join later.
        on_event: Called with each failure, takeover and return, in the thread that uses the session.
    """

    in_flight: int = 1
    kept_frames: int | None = None
    heartbeat_s: float = 2.0
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

    def with_timeout(self, seconds: float | None) -> RunOptions:
        """Return the options with another timeout.

        Args:
            seconds: The timeout; None: keep the current one.

        Returns:
            The options.
        """
        return self if seconds is None else replace(self, timeout_s=seconds)

    def resolve_in_flight(self, devices: int, limit: int = MAX_IN_FLIGHT) -> int:
        """Return the number of frames in flight.

        Args:
            devices: Number of devices.
            limit: The largest number that the target accepts.

        Returns:
            `in_flight`, or the default for this number of devices if it is 0.

        Raises:
            UsageError: `in_flight` is out of range.
        """
        if not 0 <= self.in_flight <= limit:
            raise UsageError(f"run: frames in flight must be 1 to {limit}, or 0 for the default, not {self.in_flight}")
        return self.in_flight or min(limit, default_in_flight(devices))


@dataclass(frozen=True)
class DeviceStatus:
    """The status of a resident device (see `Service`).

    Attributes:
        device: Name of the device.
        address: HOST:PORT at which it listens.
        digest: Digest of its artifact; empty if the device does not respond, as all following fields but `error` then.
        pid: Its process ID on its host.
        since: When it was started, in seconds since 1970.
        runs: Number of runs in which it has taken part.
        frames: Number of frames that it has finished.
        replayed_frames: Number of frames that were computed again after failures.
        failures: Number of device failures in its runs.
        memory: Resident memory in bytes.
        memory_peak: Peak resident memory in bytes.
        error: Why the last run failed, or why the device does not respond; otherwise empty.
        client: Address of the client that it serves; empty if there is none.
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
        """Whether the device responds."""
        return bool(self.digest)


@dataclass(frozen=True)
class InstalledDevice:
    """The result of `Target.install` for one device.

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
