"""Rounds: repeating orders in which devices take frames in turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence

MAX_ROUND_FRAMES = 16
"""Largest number of frames in a round, the repeating order in which devices take frames in turn.

A plan has one replica for each frame of a round. More replicas take long to compile and gain little.
"""


def deal_frames(seconds: Sequence[float], lengths: Collection[int]) -> tuple[int, ...]:
    """Return the device of each frame in a repeating round that has the least time between frames.

    Args:
        seconds: Time of a frame on each device.
        lengths: Allowed numbers of frames in a round. The shortest of equally good rounds is returned.
    """
    frame_counts = [0] * len(seconds)
    turns: list[int] = []
    best, length = float("inf"), 0
    for _ in range(max(lengths)):
        turns.append(min(range(len(seconds)), key=lambda d: (frame_counts[d] + 1) * seconds[d]))
        frame_counts[turns[-1]] += 1
        period = max(t * each for t, each in zip(frame_counts, seconds, strict=True)) / len(turns)
        if period < best * (1 - 1e-9) and len(turns) in lengths:
            best, length = period, len(turns)
    return tuple(turns[:length])
