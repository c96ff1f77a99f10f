"""What a simulation comes to: when each frame began and ended, what took time, and who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Span(NamedTuple):
    """Something that took time, in seconds from the start of the first frame. compute: a segment on `device`; handle:
    its runtime sends a message to `peer`, or takes one from it; message: bytes on the line from `device` to `peer`;
    wait: `device` had nothing that it could do, for want of a message from `peer` ("": for want of a frame)."""

    kind: Literal["compute", "handle", "message", "wait"]
    device: str
    name: str
    frame: int
    start: float
    end: float
    peer: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class SimulationResult:
    """frames: (start, end) of each, in seconds: from inputs on sources to outputs on all sinks; waited: before a device
    began it. waits: device → device that it waited for → seconds. spans: in order of their ends; none if unwanted."""

    frames: tuple[tuple[float, float], ...]
    totals: Mapping[tuple[str, bool], Mapping[str, float]] = field(repr=False)
    """(kind, whether its peer is meant) → device → seconds."""
    waits: Mapping[str, Mapping[str, float]] = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    queued_s: tuple[float, ...] = ()

    @property
    def latency_s(self) -> float:
        """Seconds of the first frame, which had the devices to itself if no other was on its way."""
        return self.frames[0][1] - self.frames[0][0]

    @property
    def period_s(self) -> float:
        """Mean seconds between the ends of frames in the middle half of the stream: at its start and its end the
        devices are not all at work. Of fewer than four frames: the whole time by their number."""
        ends = sorted(end for _, end in self.frames)
        count = len(ends)
        if count < 4:
            return ends[-1] / count
        first, last = count // 4, 3 * count // 4
        return (ends[last] - ends[first]) / (last - first)

    def total_seconds(self, kind: str, device: str, peer: bool = False) -> float:
        """All seconds of "compute", "handle" or "message" of a device (`peer`: of messages to it, not from it)."""
        return self.totals[kind, peer].get(device, 0.0)
