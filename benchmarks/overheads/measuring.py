"""The method of all figures: two sides are measured in turn, on an idle host."""

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

APART_S = 0.05
"""Between two sides that are measured: threads of the one must have stopped to spin before the other begins."""
FIRST = 3
"""Frames that do not count."""


@dataclass(frozen=True)
class Figure:
    """A measured ratio, and its limit.

    Attributes:
        name: Name of the figure. Unless it says something else, the figure is the time of one side divided by the
        other's.
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
"""Runs frames; the seconds of each."""


def alternately(name: str, base: Side, other: Side, rounds: int, goal: float) -> Figure:
    """Return the time of `other` divided by that of `base`, measured in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            time.sleep(APART_S)
            seconds[side].extend((base, other)[side]())
    medians, shortest = [statistics.median(one) for one in seconds], [min(one) for one in seconds]
    click.echo(f"{name}: {1000 * medians[0]:.2f} and {1000 * medians[1]:.2f} ms a frame", err=True)
    return Figure(name, medians[1] / medians[0], shortest[1] / shortest[0], goal)


def timed(work: Callable[[], object], frames: int) -> Side:
    """Return a side that calls `work` for every frame."""

    def run() -> Sequence[float]:
        seconds = []
        for _ in range(frames + FIRST):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return seconds[FIRST:]

    return run


def inputs_of(artifact: Path) -> dict[str, Any]:
    """Return input arrays for the network of an artifact."""
    values = graph_inputs(Model.load(artifact / "reference" / "model.onnx"))
    return {value.name: np.full(value.shape or (), 0.5, "float32") for value in values}
