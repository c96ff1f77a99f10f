"""Simulation of a stream of frames during which devices fail and return.

Between two changes the stream is one ordinary simulation with the plan that is in force. Frames that are in flight when
a device fails are computed again from their inputs. Frames that are in flight when a device returns are finished first.
Order and number of frames are exact. Two effects on times are ignored: devices still compute for frames that are given
up, and with replicas each interval starts with the first replica.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.units import TIME, format_seconds, parse_quantity
from dicompiler.cost.simulation_result import SimulationResult, Span
from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import Workload
from dicompiler.ir.platform import Platform

FAILURE_DETECTION_S = 0.3
"""Seconds from a failure until every device knows of it and frames are computed again.

It is the longest time that the runtime takes if a process ends or a connection breaks. Silent devices take longer to be
detected: three heartbeats.
"""


@dataclass(frozen=True)
class Outage:
    """A period in which a device is down.

    Attributes:
        device: Name of the device.
        start: Time of the failure in seconds after the start of the first frame.
        end: Time of the return in seconds, infinite if the device stays down.
    """

    device: str
    start: float
    end: float = math.inf


@dataclass(frozen=True)
class FailureCase:
    """The plan in force while certain devices are down. Cases with the same plan are equal.

    Attributes:
        failed: Devices without which the plan works.
        workload: Workload of the plan.
        platform: Platform without these devices.
    """

    failed: tuple[str, ...]
    workload: Workload = field(compare=False)
    platform: Platform = field(compare=False)


@dataclass(frozen=True)
class StreamInterval:
    """The part of a stream between two changes.

    Attributes:
        failed: Devices without which the plan in force works.
        down: Devices that are down.
        changed_at: Time of the change in seconds.
        resumed_at: Time at which frames went on, in seconds.
        frames: (number, start, end) of the frames that ended in the interval, times in seconds.
        replayed: Numbers of the frames that were in flight at its end and are computed again.
        spans: What took time in the interval.
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
        """Mean seconds between the ends of frames; None for fewer than two frames."""
        ends = sorted(end for _, _, end in self.frames)
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None

    @property
    def interruption_s(self) -> float | None:
        """Seconds from the change to the first end of a frame; None if no frame ended."""
        return min((end for _, _, end in self.frames), default=math.inf) - self.changed_at if self.frames else None


def parse_outage(text: str) -> Outage:
    """Parse "pi03@2.5s", or "pi03@2.5s-6s" for a device that returns.

    Raises:
        UsageError: The text has another form.
    """
    match = re.fullmatch(r"(.+)@(.+?s)(?:-(.+))?", text.strip())
    if match is None:
        raise UsageError(f"lose {text!r}: write a device and when it is lost: pi03@2.5s, or pi03@2.5s-6s")
    try:
        start, end = (math.inf if t is None else parse_quantity(t, TIME, f"lose {text!r}") for t in match.groups()[1:])
    except DicompilerError as error:
        raise UsageError(str(error)) from None
    if end <= start:
        raise UsageError(f"lose {text!r}: it is back before it is lost: give a later time")
    return Outage(match[1], start, end)


def simulate_outages(
    find_case: Callable[[tuple[str, ...]], FailureCase],
    outages: Sequence[Outage],
    frames: int,
    in_flight: int,
    spans: bool = False,
) -> tuple[StreamInterval, ...]:
    """Simulate a stream with outages.

    Args:
        find_case: Returns the case in which the given devices are down.
        outages: The outages.
        frames: Number of frames.
        in_flight: Largest number of frames in flight.
        spans: Whether to keep the spans.

    Returns:
        The intervals between changes.

    Raises:
        DicompilerError: The stream ends before a device fails.
    """
    todo, changes, at = list(range(frames)), list(_iterate_changes(find_case, outages)), 0
    stretches: list[StreamInterval] = []
    begin = 0.0
    while todo:
        since, away, case = changes[at]
        for after in range(at + 1, len(changes) + 1):
            until, others, then = changes[after] if after < len(changes) else (math.inf, (), None)
            back = then is not None and set(others) < set(away)
            found = _simulate_interval(case, todo, begin, until, back, in_flight, spans)
            last = max([begin, until if back else 0.0, *(end for _, _, end in found.frames)])
            # Who is lost again before it was taken in was not there, nor is what changes nothing a change.
            if then != case and not (back and after + 1 < len(changes) and changes[after + 1][0] <= last):
                break
        stretches.append(replace(found, down=away, changed_at=since))
        ended = {number for number, _, _ in found.frames}
        todo = [number for number in todo if number not in ended]
        begin, at = last if back else until + FAILURE_DETECTION_S, after
    end = max(end for one in stretches for _, _, end in one.frames)
    for one in outages:
        if one.start >= end:
            many = f"stream of {frames} frame{'' if frames == 1 else 's'}"
            raise DicompilerError(
                f"simulate: the {many} ends after {format_seconds(end)}, before {one.device} is lost at "
                f"{format_seconds(one.start)}: play more (--frames)"
            )
    return tuple(stretches)


def _iterate_changes(
    cases: Callable[[tuple[str, ...]], FailureCase], aways: Sequence[Outage]
) -> Iterator[tuple[float, tuple[str, ...], FailureCase]]:
    """Yield (time, devices that are down from then on, case) whenever the case changes."""
    last = cases(())
    times = sorted({0.0, *(one.start for one in aways), *(one.end for one in aways if one.end < math.inf)})
    yield 0.0, (), last
    for time in times:
        away = tuple(dict.fromkeys(one.device for one in aways if one.start <= time < one.end))
        case = cases(away)
        if case != last:
            last = case
            yield time, away, case


def _simulate_interval(
    case: FailureCase, todo: Sequence[int], begin: float, until: float, back: bool, in_flight: int, spans: bool
) -> StreamInterval:
    """Simulate the remaining frames from `begin` until the next change.

    If a device returns at that change, all frames that have started by then are finished.
    """

    def played(count: int) -> SimulationResult:
        return simulate(case.workload, case.platform, count, in_flight, spans)

    found = played(len(todo))
    if back:
        begun = sum(begin + start <= until for start, _ in found.frames)
        found, until = played(begun) if begun < len(todo) else found, math.inf
        todo = todo[:begun]
    times = [(number, begin + start, begin + end) for number, (start, end) in zip(todo, found.frames, strict=True)]
    moved = [
        span._replace(start=begin + span.start, end=min(begin + span.end, until), frame=todo[span.frame])
        for span in found.spans
        if begin + span.start < until
    ]
    return StreamInterval(
        case.failed,
        (),
        0.0,
        begin,
        tuple(one for one in times if one[2] <= until),
        tuple(number for number, start, end in times if start <= until < end),
        tuple(moved),
    )
