"""What goes into and comes out of running an artifact: how it is to be run, and what the devices measured."""

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
"""Makes copies, once."""


def no_copies(memory: Mapping[str, NDArray[Any]]) -> tuple[CopyFunction, CopyFunction]:  # noqa: ARG001
    """Copies nothing."""
    return (lambda: None), (lambda: None)


@dataclass(frozen=True)
class SegmentCall:
    """What a runtime does where a segment's turn comes. segment: what the engine computes of it (None: nothing);
    copies: given all tensors that it reads and makes, what makes the copies among them that the runtime makes itself
    before and after that."""

    segment: Segment | None
    make_copies: Callable[[Mapping[str, NDArray[Any]]], tuple[CopyFunction, CopyFunction]] = no_copies


@dataclass(frozen=True)
class TimelineEntry:
    """Something that a device did: `kind` is "run" (a segment: its place in DeviceReport.segments), "send" (a transfer:
    its index) or "wait" (for a transfer: its index; -1: for an input), for a frame. start, end: seconds from the
    beginning of the run's last frame (sockets: from when the device heard of it)."""

    kind: str
    index: int
    frame: int
    start: float
    end: float


@dataclass(frozen=True)
class DeviceReport:
    """What one device measured over all frames of a run.

    compute_s: seconds in segments; wait_s: seconds in which it had no segment whose inputs were there; send_s: seconds
    of sending, beside the computing. sent: payload bytes by index in `Program.all_transfers`. segments: seconds of each
    segment, role by role. memory_peak: largest resident memory of its process, in bytes.
    timeline: what it did from the last frame's beginning on; empty where the target does not tell.
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
        """With all seconds `factor` times as long."""
        return replace(
            self,
            compute_s=factor * self.compute_s,
            wait_s=factor * self.wait_s,
            send_s=factor * self.send_s,
            segments_s=tuple(factor * seconds for seconds in self.segments_s),
            timeline=tuple(replace(one, start=factor * one.start, end=factor * one.end) for one in self.timeline),
        )


@dataclass(frozen=True)
class RunEvent:
    """Something that befell a run that goes on.

    kind: "failure" of a device; "takeover" by a plan for what is left, told with the first frame that it finishes;
    "return" of a device. device: whose loss or return it is (of a take-over: the last one lost). why: in words. away:
    the devices that are away from then on. at_s: seconds since the run began; frames: how many were finished by then.
    replays: frames that are computed again; interruption_s: seconds from the loss to the next finished frame; both of
    take-overs alone.
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
        """It in words, one line."""
        left = f"without {', '.join(map(repr, self.down))}" if self.down else "by the first plan again"
        if self.kind == "failure":
            return f"device {self.device!r} is lost: {self.reason}; frames go on {left}"
        if self.kind == "return":
            return f"device {self.device!r} is back; frames go on {left}"
        return f"frames go on {left} after {self.interruption_s:.2f} s, {self.replayed_frames} of them computed again"


@dataclass(frozen=True)
class RunResult:
    """outputs: by name, for each frame, as the first sink delivered them. reports: in device order.

    delivered: for each frame and each sink device its outputs by name. frames_s: seconds from giving a frame's inputs
    to having all its outputs; waited_s: those of them in which no device had begun to compute it (it stood behind other
    frames, or its inputs travelled), empty where the target does not tell. total_s: seconds from giving the first
    frame's inputs to having the last one's outputs.
    events: losses, take-overs and returns, in order; reports of devices that are away at the end hold zeros, and those
    of devices that came back what they did since.
    apart: whether it joined devices that run on other hosts already, which the options do not say.
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
        """With all seconds `factor` times as long: those of a clock that goes so much faster."""
        return replace(
            self,
            reports=tuple(report.with_scaled_times(factor) for report in self.reports),
            frames_s=tuple(factor * seconds for seconds in self.frames_s),
            queue_wait_s=tuple(factor * seconds for seconds in self.queue_wait_s),
            total_s=factor * self.total_s,
            events=tuple(
                replace(one, at_s=factor * one.at_s, interruption_s=factor * one.interruption_s) for one in self.events
            ),
        )


@dataclass(frozen=True)
class Emulation:
    """A run in which this host plays boards. By device: what lets this thread, and what it starts, be on its network
    (`inside`); its address there; the name of its network namespace; and the seconds that a call of each of its
    segments takes at least, role by role."""

    enter_network: Callable[[str], AbstractContextManager[None]]
    addresses: Mapping[str, str]
    namespaces: Mapping[str, str]
    min_segments_s: Mapping[str, tuple[float, ...]]


IN_FLIGHT_PER_DEVICE = 3
"""Frames on their way for each device, if nothing else is asked for. Where frames pass all devices layer by layer, with
two devices still wait for each other (docs/how-to/stream.md)."""
MAX_IN_FLIGHT = 1024
"""As many at most: none of the targets takes more."""


def default_in_flight(devices: int) -> int:
    """Frames on their way between so many devices, if nothing else is asked for."""
    return min(IN_FLIGHT_PER_DEVICE * devices, MAX_IN_FLIGHT)


@dataclass(frozen=True)
class RunOptions:
    """How an artifact is run.

    in_flight: frames that may be on their way at once (0: see `flying`); a device's memory for what it
    receives is that many times what the plan sends it for one. keep: the outputs of how many frames to keep (None:
    all). heartbeat_s: seconds between two signs of life; who misses three of them is lost. keys: the directory that
    `dicompiler keys` made: connections are in TLS. listen: address at which the devices reach this process (port 0:
    any; by default loopback, and with `hosts` the address by which the first of them is reached). insecure: allow
    other addresses than this host's own without keys. elsewhere: devices that someone else starts. pin: each process
    keeps to its share of this host's processors. hosts: where devices are started over ssh, after `Target.install`;
    logs: where what they write is kept then, by default beside the artifact and only where a run fails. timeout_s:
    seconds that all of a run may take, or an installation; of a session: that starting may, and each frame. without:
    devices that are away when it begins, which are not started and may come. on_event: called with losses, take-overs
    and returns as they are noticed, in the thread that uses the session.
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
        """With that timeout; None: with its own."""
        return self if seconds is None else replace(self, timeout_s=seconds)

    def resolve_in_flight(self, devices: int, limit: int) -> int:
        """How many frames may be on their way between so many devices; UsageError if it is more than `limit`."""
        if not 0 <= self.in_flight <= limit:
            raise UsageError(f"run: frames in flight must be 1 to {limit}, or 0, not {self.in_flight}")
        return self.in_flight or min(limit, default_in_flight(devices))


@dataclass(frozen=True)
class DeviceStatus:
    """How a device does that is kept running (`Service`), at `address`.

    digest: of its artifact. pid: its process there. since: when it was started, and client_since: when `client` came,
    which it serves ('': none), in seconds since 1970. For all clients so far: in how many runs it took part, how many
    frames it finished, how many it began anew (replays), and how many devices were lost. memory, memory_peak: bytes.
    error: how the last run failed, '' if none did; or why the device does not answer: all else is empty then.
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
        """Whether it does."""
        return bool(self.digest)


@dataclass(frozen=True)
class InstalledDevice:
    """What `Target.install` did for a device. host: what ssh connected to. directory: the device's on that host.

    copied: bytes; 0 where all was there already. versions: of the programs that it needs there, by their name.
    """

    device: str
    host: str
    directory: str
    copied_bytes: int
    versions: Mapping[str, str]
