"""Simulation of a stream of frames during which devices fail and return.

A change is the failure or the return of a device. Between two changes, the stream is an ordinary simulation with the
plan for the devices that are up. Frames that are in flight when a device fails are computed again from their inputs.
Frames that are in flight when a device returns are finished first.

The order and the number of frames are exact. Times are approximate: the simulation ignores that real devices finish
the segments of abandoned frames, and it starts with the first replica again after each change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.units import format_seconds, parse_period
from dicompiler.cost.simulator import SimulationResult, Span, simulate
from dicompiler.cost.workload import Workload
from dicompiler.ir.platform import Platform

log = logging.getLogger("dicompiler")

FAILURE_DETECTION_S = 0.3
"""Largest number of seconds from the end of a device's process until the other devices repeat the frames in flight.

They notice it quickly, because the operating system closes the connections of the process.
"""


@dataclass(frozen=True)
class Outage:
    """A period in which a device is down.

    Attributes:
        device: Name of the device.
        start: Time of the failure in seconds after the start of the first frame.
        end: Time of the return in seconds after the start of the first frame; infinite if the device stays down.
    """

    device: str
    start: float
    end: float = math.inf


@dataclass(frozen=True)
class FailureCase:
    """A set of failed devices and the plan in force while they are down.

    Attributes:
        failed: Devices that the plan does not use. Cases with the same devices are equal.
        workload: The plan's segments (ONNX submodels) with their predicted seconds, and its messages.
        platform: The platform without these devices.
    """

    failed: tuple[str, ...]
    workload: Workload = field(compare=False)
    platform: Platform = field(compare=False)


@dataclass(frozen=True)
class StreamInterval:
    """The frames of a stream between two changes, each of which is the failure or the return of a device.

    Attributes:
        failed: Devices that the plan in force does not use because they failed; () for the normal plan.
        down: Devices that are down at the start of the interval, including those that no plan uses.
        changed_at: Time of the change in seconds.
        resumed_at: Time in seconds at which the first frame after the change started.
        frames: (frame number, start, end) of each frame that ended in the interval; times are in seconds.
        replayed: Numbers of the frames that were in flight when the interval ended, and that are computed again.
        spans: Periods in which devices and links were busy in the interval, or devices waited.
    """

    failed: tuple[str, ...]
    down: tuple[str, ...]
    changed_at: float
    resumed_at: float
    frames: tuple[tuple[int, float, float], ...]
    replayed: tuple[int, ...] = ()
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def period_s(self) -> float | None:
        ends = sorted(end for _, _, end in self.frames)
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None

    @property
    def interruption_s(self) -> float | None:
        """Seconds from the change at the start of the interval to the first end of a frame; None if no frame ended."""
        return min((end for _, _, end in self.frames), default=math.inf) - self.changed_at if self.frames else None


def parse_outage(text: str) -> Outage:
    """Return the outage for a text such as "pi03@2.5s", or "pi03@2.5s-6s" with a return; else raise UsageError."""
    device, _, period_text = text.strip().rpartition("@")
    try:
        period = parse_period(period_text, f"fail {text!r}") if device else None
    except DicompilerError as error:
        raise UsageError(str(error)) from None
    if period is None:
        raise UsageError(
            f"fail {text!r}: give a device and the time of its failure (pi03@2.5s), or of failure and return "
            "(pi03@2.5s-6s)"
        )
    start, end = period
    if end <= start:
        raise UsageError(f"fail {text!r}: the device returns before it fails: give a later return time")
    return Outage(device, start, end)


def simulate_outages(
    find_case: Callable[[tuple[str, ...]], FailureCase],
    outages: Sequence[Outage],
    frames: int,
    in_flight: int,
    keep_spans: bool = False,
) -> tuple[StreamInterval, ...]:
    """Simulate a stream during which devices fail and return, and return the intervals between these changes.

    Args:
        find_case: Function that returns the plan for a tuple of failed devices.
        outages: Periods in which devices are down.
        frames: Number of frames.
        in_flight: Largest number of frames in flight.
        keep_spans: Whether intervals contain the periods in which devices and links were busy.

    Raises:
        DicompilerError: The stream ends before a device fails.
    """
    remaining, changes, index = list(range(frames)), list(_iterate_changes(find_case, outages)), 0
    intervals: list[StreamInterval] = []
    begin = 0.0
    while remaining:
        changed_at, down, case = changes[index]
        for next_index in range(index + 1, len(changes) + 1):
            until, next_down, next_case = changes[next_index] if next_index < len(changes) else (math.inf, (), None)
            has_return = next_case is not None and set(next_down) < set(down)
            interval = _simulate_interval(case, remaining, begin, until, has_return, in_flight, keep_spans)
            ended_at = max([begin, until if has_return else 0.0, *(end for _, _, end in interval.frames)])
            # The interval continues if the plan stays the same after the next change. It also continues if a device
            # returns and fails again before the frames in flight have ended, because no frame uses the plan in between.
            fails_again = has_return and next_index + 1 < len(changes) and changes[next_index + 1][0] <= ended_at
            if next_case != case and not fails_again:
                break
        intervals.append(replace(interval, down=down, changed_at=changed_at))
        finished = {number for number, _, _ in interval.frames}
        remaining = [number for number in remaining if number not in finished]
        begin, index = ended_at if has_return else until + FAILURE_DETECTION_S, next_index
    end = max(end for interval in intervals for _, _, end in interval.frames)
    for outage in outages:
        if outage.start >= end:
            stream = f"stream of {frames} frame{'' if frames == 1 else 's'}"
            raise DicompilerError(
                f"simulate: the {stream} ends after {format_seconds(end)}, before {outage.device} fails at "
                f"{format_seconds(outage.start)}: simulate more frames (--frames)"
            )
        if end <= outage.end < math.inf:
            log.warning(
                "the stream ends after %s, before %s returns at %s: simulate more frames (--frames)",
                format_seconds(end),
                outage.device,
                format_seconds(outage.end),
            )
    return tuple(intervals)


def _iterate_changes(
    find_case: Callable[[tuple[str, ...]], FailureCase], outages: Sequence[Outage]
) -> Iterator[tuple[float, tuple[str, ...], FailureCase]]:
    """Yield (seconds, devices that are down, plan) at the start of the stream and at each change of the plan."""
    last_case = find_case(())
    ends = (outage.end for outage in outages if outage.end < math.inf)
    times = sorted({0.0, *(outage.start for outage in outages), *ends})
    yield 0.0, (), last_case
    for time in times:
        down = tuple(dict.fromkeys(outage.device for outage in outages if outage.start <= time < outage.end))
        case = find_case(down)
        if case != last_case:
            last_case = case
            yield time, down, case


def _simulate_interval(
    case: FailureCase,
    remaining: Sequence[int],
    begin: float,
    until: float,
    has_return: bool,
    in_flight: int,
    keep_spans: bool,
) -> StreamInterval:
    """Simulate frames from the time `begin` to the next failure or return of a device at the time `until`.

    Args:
        case: The plan in force.
        remaining: Numbers of the frames that are not finished yet.
        begin: Start in seconds.
        until: Time of the next change in seconds.
        has_return: Whether a device returns at `until`. Frames that started before are then finished even after
            `until`.
        in_flight: Largest number of frames in flight.
        keep_spans: Whether to keep the periods in which devices and links were busy.
    """

    def simulate_frames(count: int) -> SimulationResult:
        return simulate(case.workload, case.platform, count, in_flight, keep_spans)

    result = simulate_frames(len(remaining))
    if has_return:
        started = sum(begin + start <= until for start, _ in result.frames)
        result, until = simulate_frames(started) if started < len(remaining) else result, math.inf
        remaining = remaining[:started]
    numbered = zip(remaining, result.frames, strict=True)
    times = [(number, begin + start, begin + end) for number, (start, end) in numbered]
    shifted_spans = [
        span._replace(start=begin + span.start, end=min(begin + span.end, until), frame=remaining[span.frame])
        for span in result.spans
        if begin + span.start < until
    ]
    finished = tuple(frame for frame in times if frame[2] <= until)
    replayed = tuple(number for number, start, end in times if start <= until < end)
    return StreamInterval(case.failed, (), 0.0, begin, finished, replayed, tuple(shifted_spans))
