"""What the runtimes cost beside the engine and the wire: each figure is measured side by side, in turn, in one run.

In: which figure, which networks, how often. Out: a line for each on stdout; the exit code is 1 where a goal was missed.
Run it as README.md says, on a host that does nothing else.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.cli.entry import main as command
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import Program
from dicompiler.target.records import RunOptions
from dicompiler.verify.comparison import graph_inputs
from dicompiler_targets.mpi import MpiTarget

APART_S = 0.05
"""Between two sides that are measured: threads of the one must have stopped to spin before the other begins."""
FIRST = 3
"""Frames that do not count."""


@dataclass(frozen=True)
class Figure:
    """What was measured: of medians, and of the shortest of all rounds; and the most that it may be."""

    name: str
    median: float
    shortest: float
    goal: float

    def __str__(self) -> str:
        return f"{self.name}: {self.median:.3f} (of the shortest: {self.shortest:.3f}; at most {self.goal})"


Side = Callable[[], Sequence[float]]
"""Runs frames; the seconds of each."""


def _inputs(artifact: Path) -> dict[str, Any]:
    values = graph_inputs(Model.load(artifact / "reference" / "model.onnx"))
    return {value.name: np.full(value.shape or (), 0.5, "float32") for value in values}


# -- exchanges: a small network on several devices, frames one after another

EXCHANGES = "lenet"
GOALS = {("sockets", 2): 0.9, ("sockets", 4): 2.5, ("mpi", 2): 0.2, ("mpi", 4): 1.0}
"""Milliseconds of a frame by target and devices, all on this host."""
EXCHANGE, SECURE = 0.15, 1.3
"""Milliseconds of an exchange through sockets; the time with TLS by that without."""


def exchanges(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Milliseconds of a frame and of an exchange on two and four devices, in the clear and with TLS."""
    figures = []
    for name in names or (EXCHANGES,):
        for count in (2, 4):
            with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
                sides, depth = _exchanging(name, count, Path(place), frames, stack)
                seconds: dict[str, list[float]] = {side: [] for side in sides}
                for _ in range(rounds):
                    for side, run in sides.items():
                        time.sleep(APART_S)
                        seconds[side] += run()
            figures += _judged(f"{name} on {count} devices", count, depth, seconds)
    return figures


def _exchanging(name: str, count: int, place: Path, frames: int, stack: ExitStack) -> tuple[dict[str, Side], int]:
    """What is measured in turn, and how many exchanges follow each other in a frame."""
    for target in ("sockets", "mpi"):
        made = dicompiler.compile(
            networks.build(name), platform=f"rpi4x{count}", strategy="modnn", target=target, output=place / target
        )
    assert made.program is not None
    if command(["keys", str(place / "sockets")]):
        sys.exit("no keys could be made")
    inputs = _inputs(place / "sockets")
    alone = ort.InferenceSession(str(place / "sockets" / "reference" / "model.onnx"))
    sides: dict[str, Side] = {"onnxruntime": _timed(lambda: alone.run(None, inputs), frames)}
    for side, keys in (("sockets", None), ("sockets with TLS", place / "sockets.keys")):
        session = stack.enter_context(dicompiler.connect(place / "sockets", RunOptions(in_flight=1, keys=keys)))
        sides[side] = _timed(lambda session=session: session.infer(inputs), frames)  # type: ignore[misc]
    options = RunOptions(in_flight=1, keep=1)
    sides["mpi"] = lambda: MpiTarget().run(place / "mpi", [inputs] * (frames + FIRST), options).frames_s[FIRST:]
    return sides, _depth(made.program)


def _timed(work: Callable[[], object], frames: int) -> Side:
    def run() -> Sequence[float]:
        seconds = []
        for _ in range(frames + FIRST):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return seconds[FIRST:]

    return run


def _depth(program: Program) -> int:
    """The most messages that follow from each other in a frame: transfers, what is given and what is delivered."""
    depth: dict[tuple[str, str], int] = {}
    for _ in program.transfers:
        for device in program.devices:
            for segment in device.segments:
                most = max((depth.get((device.device, name), 0) for name in segment.inputs), default=0)
                depth |= {(device.device, name): most for name in segment.outputs}
        for transfer in program.transfers:
            depth[transfer.receiver, transfer.value.name] = 1 + depth.get((transfer.sender, transfer.value.name), 0)
    return 2 + max(depth.values())


def _judged(where: str, count: int, depth: int, seconds: Mapping[str, Sequence[float]]) -> list[Figure]:
    found = {side: (1000 * statistics.median(own), 1000 * min(own)) for side, own in seconds.items()}
    alone = found["onnxruntime"]
    click.echo(f"{where}, onnxruntime alone: {alone[0]:.3f} ms a frame (shortest {alone[1]:.3f})")
    clear, secure = found["sockets"], found["sockets with TLS"]
    figures = [Figure(f"{where}, {t}, ms a frame", *found[t], goal) for (t, n), goal in GOALS.items() if n == count]
    figures.append(Figure(f"{where}, sockets, TLS by clear", secure[0] / clear[0], secure[1] / clear[1], SECURE))
    each = ((clear[i] - alone[i]) / depth for i in (0, 1))
    figures.append(Figure(f"{where}, sockets, ms an exchange, {depth} in a row", *each, EXCHANGE))
    for figure in figures:
        click.echo(figure)
    return figures


FIGURES = {"exchanges": exchanges}


@click.command(context_settings={"show_default": True})
@click.option("--figure", type=click.Choice(sorted(FIGURES)), required=True, help="What is measured.")
@click.option("--network", "names", multiple=True, help="Networks; default: the figure's own.")
@click.option("--frames", default=20, help="Frames of each round.")
@click.option("--rounds", default=6, help="How often each side is measured.")
def main(figure: str, names: Sequence[str], frames: int, rounds: int) -> None:
    """Measure what the runtimes cost."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    found = FIGURES[figure](names, frames, rounds)
    sys.exit(0 if all(min(one.median, one.shortest) <= one.goal for one in found) else 1)


if __name__ == "__main__":
    main()
