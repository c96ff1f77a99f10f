"""Results of the simulator: times of frames, and periods in which devices and links were busy or waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dicompiler.ir.frame_prediction import FramePrediction


class Span(NamedTuple):
    """A period in which a device or link did one thing in a simulation.

    Attributes:
        kind: "compute": a segment ran on `device`. "handle": the processor of `device` sent a message to `peer`, or
            received one from it. "message": bytes were on the link from `device` to `peer`. "wait": `device` was idle
            because a message from `peer` was missing; if `peer` is empty, because no frame was available.
        device: Name of the device.
        name: Name of the segment or of the tensor in the message.
        frame: Number of the frame.
        start: Start in seconds after the start of the first frame.
        end: End in seconds after the start of the first frame.
        peer: Name of the other device; empty if there is none.
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
        frames: (start, end) of each frame in seconds, from the inputs on the sources (devices that have the inputs) to
            the outputs on all sinks (devices that receive the outputs).
        totals: Seconds by device name, for each pair (kind of `Span`, whether the device is the receiver of a message).
            The kind "occupied" is the time in which a device computes or handles messages, or both at once.
        waits: Seconds that each device waited, by device and then by the peer that sent the missing message.
        spans: All periods in the order of their ends; empty if they were not kept.
        queued_s: Seconds from the start of each frame until the first device began to compute for it.
        link_s: Seconds that each link needs at its full bandwidth for all messages, by its name for users.
        end_s: Time in seconds at which all devices and links have finished. It is later than the end of the last frame
            if states (outputs that are inputs of the next frame) or unused regions are computed after the outputs.
        input_output_s: Additional seconds to bring the inputs of a frame to the sources and its outputs to the caller.
    """

    frames: tuple[tuple[float, float], ...]
    totals: Mapping[tuple[str, bool], Mapping[str, float]] = field(repr=False)
    waits: Mapping[str, Mapping[str, float]] = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    queued_s: tuple[float, ...] = ()
    link_s: Mapping[str, float] = field(default_factory=dict, repr=False)
    end_s: float = 0.0
    input_output_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """Seconds from the start to the end of the first frame.

        If several frames are in flight, later frames can delay the first one, because they use the same devices.
        """
        return self.frames[0][1] - self.frames[0][0]

    @property
    def frame(self) -> FramePrediction:
        """The predicted time of the first frame: its latency, and the time for its inputs and outputs."""
        return FramePrediction(self.latency_s, self.input_output_s)

    @property
    def period_s(self) -> float:
        """Mean seconds between the ends of frames, in the middle half of the stream.

        The start and the end of the stream do not count, because some devices are idle then. If there are fewer than
        four frames, the result is the total time divided by the number of frames.
        """
        ends = sorted(end for _, end in self.frames)
        count = len(ends)
        if count < 4:
            return ends[-1] / count
        first, last = count // 4, 3 * count // 4
        return (ends[last] - ends[first]) / (last - first)

    def total_seconds(self, kind: str, device: str, as_receiver: bool = False) -> float:
        """Return the total seconds of all "compute", "handle", "message" or "occupied" periods of a device.

        With `as_receiver`, messages to the device count; otherwise messages from it.
        """
        return self.totals[kind, as_receiver].get(device, 0.0)
