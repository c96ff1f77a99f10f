"""What the runtimes cost beside the engine and the wire: each figure a ratio of two sides that are measured in turn.

In: which figure, which networks, how often. Out: a line for each on stdout; the exit code is 1 where a goal was missed.
Run it as README.md says, on a host that does nothing else.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from support.boards import Cluster, cluster, enter, shape

import dicompiler
from dicompiler import networks
from dicompiler.ir.devices import Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.plugin_api import Hosts, RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_targets.sockets.target import SocketsTarget

APART_S = 0.05
"""Between two sides that are measured: threads of the one must have stopped to spin before the other begins."""


@dataclass(frozen=True)
class Figure:
    """What was measured: times of one side by the other's, of medians and of the shortest of all rounds."""

    name: str
    median: float
    shortest: float
    goal: float

    def __str__(self) -> str:
        return f"{self.name}: {self.median:.3f} (of the shortest: {self.shortest:.3f}; at most {self.goal:.3f})"


Side = Callable[[], Sequence[float]]
"""Runs frames; the seconds of each."""


def alternately(name: str, base: Side, other: Side, rounds: int, goal: float) -> Figure:
    """The times of `other` by those of `base`, measured in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            time.sleep(APART_S)
            seconds[side].extend((base, other)[side]())
    medians, shortest = [statistics.median(one) for one in seconds], [min(one) for one in seconds]
    click.echo(f"{name}: {1000 * medians[0]:.2f} and {1000 * medians[1]:.2f} ms a frame", err=True)
    return Figure(name, medians[1] / medians[0], shortest[1] / shortest[0], goal)


# -- wire: float16 between four devices, on lines of 100 Mbit/s

FASTER = 1.3
RATE = "100mbit"
CARRIED = 0.955 * 100e6
"""bit/s of a network's own bytes on such a line."""
HOST_RATE = 50e9
"""FLOP/s of each of four devices that share two cores, about."""
FIRST = 2
"""Frames that do not count."""


def wire(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """The same plan with everything as it is and in float16, on four boards with lines of 100 Mbit/s, as predicted and
    as measured. Computing is not stretched: the boards compute as fast as this host lets them. FASTER is asked for
    where waiting for the lines is predicted to be most of a frame; elsewhere it must not be slower."""
    boards = Platform.load("rpi4x4")
    devices = tuple(replace(device, rate=HOST_RATE) for device in boards.devices)
    boards = replace(boards, devices=devices, network=Network("switch", CARRIED))
    figures = []
    for name, strategy in itertools.product(names or ("vgg16", "resnet50"), ("modnn", "stahl")):
        model = networks.build(name, 1)
        with tempfile.TemporaryDirectory() as scratch, cluster(Path(scratch), [h.name for h in boards.hosts]) as made:
            results = [
                dicompiler.compile(model, boards, strategy, wire=kind, output=Path(scratch, f"out-{kind}"))
                for kind in (None, "float16")
            ]
            wide, narrow = (result.metrics for result in results)
            assert wide is not None and narrow is not None and wide.total_bytes == 2 * narrow.total_bytes
            computing = wide.busiest.compute_s / wide.latency_s
            goal = 1 / FASTER if computing < 0.5 else 1.0
            title = f"{name}, {strategy} (computing {100 * computing:.0f} %), float16"
            predicted = narrow.latency_s / wide.latency_s
            figures.append(Figure(f"{title}, predicted", predicted, predicted, goal))
            click.echo(figures[-1])
            base, other = sides(made, [Path(scratch, f"out-{kind}") for kind in (None, "float16")], model, frames)
            figures.append(alternately(f"{title}, measured", base, other, rounds, goal))
            click.echo(figures[-1])
    return figures


def sides(boards: Cluster, artifacts: Sequence[Path], model: object, frames: int) -> list[Side]:
    """Runs of artifacts on boards with shaped lines, from the first board, which is the source."""
    inputs = random_inputs(graph_inputs(Model.load(model)))  # type: ignore[arg-type]
    hosts = Hosts.load(boards.hosts(boards.root / "hosts.toml"))
    options = RunOptions(timeout_s=600, in_flight=1, keep=1, hosts=hosts, insecure=True)
    with boards.inside():
        for artifact in artifacts:
            SocketsTarget().install(artifact, options)
    shape(boards, RATE, "1mb")

    def side(artifact: Path) -> Side:
        def run() -> Sequence[float]:
            first = next(iter(boards.boards.values()))
            with boards.inside(), Path("/run/netns", first.space).open() as space:
                enter(space.fileno())
                return SocketsTarget().run(artifact, [inputs] * (frames + FIRST), options).frames_s[FIRST:]

        return run

    return [side(artifact) for artifact in artifacts]


FIGURES = {"wire": wire}


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
