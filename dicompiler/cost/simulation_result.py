"""Results of the simulator: times of frames, and spans of devices and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Span(NamedTuple):
    """A period of a simulation.

    Attributes:
        kind: "compute": a segment runs on `device`. "handle": the device's runtime sends a message to `peer` or takes
            one from it. "message": bytes are on the link from `device` to `peer`. "wait": the device is idle for lack
            of a message from `peer` ("": for lack of a frame).
        device: Name of the device.
        name: Name of the segment or tensor.
        frame: Number of the frame.
        start: Start in seconds after the start of the first frame.
        end: End in seconds.
        peer: The other device, '' for none.
    """

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
    """The result of a simulation.

    Attributes:
        frames: (start, end) of each frame in seconds: from inputs on the sources to outputs on all sinks.
        totals: Seconds by device for each (kind, whether the device is the receiver).
        waits: Seconds that each device waited, by device and the peer that it waited for.
        spans: All periods in the order of their ends; empty if not requested.
        queued_s: Seconds before a device began each frame.
    """

    frames: tuple[tuple[float, float], ...]
    totals: Mapping[tuple[str, bool], Mapping[str, float]] = field(repr=False)
    waits: Mapping[str, Mapping[str, float]] = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    queued_s: tuple[float, ...] = ()

    @property
    def latency_s(self) -> float:
        """Seconds of the first frame, which has the devices to itself if one frame is in flight."""
        return self.frames[0][1] - self.frames[0][0]

    @property
    def period_s(self) -> float:
        """Mean seconds between the ends of frames in the middle half of the stream.

        At its start and end some devices are idle. For fewer than four frames it is the total time divided by their
        number.
        """
        ends = sorted(end for _, end in self.frames)
        count = len(ends)
        if count < 4:
            return ends[-1] / count
        first, last = count // 4, 3 * count // 4
        return (ends[last] - ends[first]) / (last - first)

    def total_seconds(self, kind: str, device: str, peer: bool = False) -> float:
        """Return all seconds of "compute", "handle" or "message" of a device.

        With `peer` they are those of messages to the device, not from it.
        """
        return self.totals[kind, peer].get(device, 0.0)
