"""The method of overhead.py for all figures: two sides (ways to compute frames) are measured in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.comparison import graph_inputs

PAUSE_S = 0.05
"""Seconds of pause between two measurements, so that threads of the first one no longer busy-wait in the second one."""
WARM_UP_FRAMES = 3
"""Number of frames at the start of each measurement that are not counted."""


@dataclass(frozen=True)
class Figure:
    """A measured ratio of the times of two ways to compute frames, and its limit.

    Attributes:
        name: Name of the figure. It says what is measured if it is not such a ratio.
        median: Ratio of the medians of all rounds.
        shortest: Ratio of the shortest times of all rounds.
        goal: Largest allowed value.
        spread: Text about the range of single measurements.
    """

    name: str
    median: float
    shortest: float
    goal: float
    spread: str = ""

    def __str__(self) -> str:
        spread = self.spread and f"; {self.spread}"
        return f"{self.name}: {self.median:.3f} (of the shortest: {self.shortest:.3f}; at most {self.goal:.3f}{spread})"


Side = Callable[[], Sequence[float]]
"""A function that runs frames and returns the seconds of each."""


def alternately(name: str, base: Side, other: Side, rounds: int, goal: float) -> Figure:
    """Measure two ways to compute frames in turn, and return the time of `other` divided by that of `base`."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            time.sleep(PAUSE_S)
            seconds[side].extend((base, other)[side]())
    medians, shortest = [statistics.median(one) for one in seconds], [min(one) for one in seconds]
    click.echo(f"{name}: {1000 * medians[0]:.2f} and {1000 * medians[1]:.2f} ms a frame", err=True)
    return Figure(name, medians[1] / medians[0], shortest[1] / shortest[0], goal)


def timed(work: Callable[[], object], frames: int) -> Side:
    """Return a side (function that returns the seconds of frames) that calls `work` for every frame."""

    def run() -> Sequence[float]:
        seconds = []
        for _ in range(frames + WARM_UP_FRAMES):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return seconds[WARM_UP_FRAMES:]

    return run


def inputs_of(artifact: Path) -> dict[str, Any]:
    """Return input arrays for the network of an artifact, filled with 0.5."""
    values = graph_inputs(Model.load(artifact / "reference" / "model.onnx"))
    return {value.name: np.full(value.shape or (), 0.5, "float32") for value in values}
