"""Figures on four emulated boards at 100 Mbit/s: narrower types on the wire, and streams. They need root."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

import dicompiler
from dicompiler import networks
from dicompiler.ir.cluster import Network
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.measure.emulation.emulate import emulate
from dicompiler.target.run_records import IN_FLIGHT_PER_DEVICE, RunOptions, RunResult
from overheads.measuring import Figure, Side, alternately

BOARDS = replace(Platform.load("rpi4x4"), network=Network("switch", 100e6))
STREAM_SLOWDOWN, FRAME_SLOWDOWN = 15.0, 2.0
"""How many times slower than a core of this host the emulated boards are: for streams, and for single frames.

In a stream, two cores of this host need four times as long as for computing without messages and with all weights in
caches. At a factor of 6.67, boards waited for each other, and computing ended 40 % late. At 15, it ended 3 % late.
"""
PAYLOAD_SHARE = 0.955
"""Fraction of a link's bandwidth that is left for payload. The rest is used by headers of Ethernet, IP and TCP."""
MIN_FLOAT16_SPEEDUP, MAX_STREAM_RATIO = 1.3, 1.10
"""Limits: the least speed-up by float16, and the largest ratio of a stream's period to the busiest device or link."""
WIRES = (("vgg16", "stahl"), ("resnet50", "modnn"))
STREAMS = (("modnn", "latency"), ("auto", "latency"), ("auto", "throughput"))


def wire(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Compare the time of a frame if tensors are sent in float16 with that in their own types.

    Return two figures for each network: predicted and measured.
    """
    figures = []
    for name, strategy in WIRES if not names else [(name, "modnn") for name in names]:
        with tempfile.TemporaryDirectory() as scratch:
            sides, sent, predicted = [], [], []
            for kind in (None, "float16"):
                artifact = Path(scratch, kind or "wide")
                made = dicompiler.compile(networks.build(name, 1), BOARDS, strategy, wire_dtype=kind, output=artifact)
                assert made.metrics is not None
                sent.append(made.metrics.total_bytes)
                predicted.append(emulate(artifact, frames=1, slower=FRAME_SLOWDOWN).predicted_s)
                sides.append(side(artifact, frames))
            assert sent[0] == 2 * sent[1]
            title, ratio, goal = f"{name}, {strategy}, float16", predicted[1] / predicted[0], 1 / MIN_FLOAT16_SPEEDUP
            figures.append(Figure(f"{title}, predicted", ratio, ratio, goal))
            figures.append(alternately(f"{title}, measured", sides[0], sides[1], rounds, goal))
            click.echo("\n".join(map(str, figures[-2:])))
    return figures


def side(artifact: Path, frames: int) -> Side:
    """Return a function that emulates frames one after another, and returns their seconds without the first frame."""
    return lambda: emulate(artifact, frames=frames + 1, slower=FRAME_SLOWDOWN).result.frames_s[1:]


def stream(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Compare the time between frames of a stream with the busiest device's or link's time per frame."""
    figures = []
    for name in names or ("resnet18",):
        for strategy, objective in STREAMS:
            with tempfile.TemporaryDirectory() as scratch:
                artifact = Path(scratch, "artifact")
                made = dicompiler.compile(networks.build(name), BOARDS, strategy, objective=objective, output=artifact)
                assert made.program is not None
                options = RunOptions(in_flight=IN_FLIGHT_PER_DEVICE * len(BOARDS.devices))
                runs = [
                    emulate(artifact, frames=6 * frames, slower=STREAM_SLOWDOWN, options=options) for _ in range(rounds)
                ]
                times = [period(one.result) / busiest(made.program, one.segments_s) for one in runs]
            figures.append(
                Figure(f"{name}, {strategy} by {objective}", statistics.median(times), min(times), MAX_STREAM_RATIO)
            )
            click.echo(figures[-1])
    return figures


def period(result: RunResult) -> float:
    """Return the mean seconds from the end of one frame to the end of the next.

    The first frame is excluded, because boards wait for its inputs. Other costs of the beginning and the end of a
    stream are included: 5 % in a stream of 40 frames if each frame is computed by one board, and 1 % in a stream of
    160.
    """
    return (result.total_s - result.frames_s[0]) / (len(result.frames_s) - 1)


def busiest(program: Program, computing: Mapping[str, Sequence[float]]) -> float:
    """Return the seconds of a frame on the busiest device, or on the busiest direction of a host's link."""
    lines: dict[tuple[str, str], int] = {}
    for transfer in program.all_transfers:
        for end in (("out", transfer.sender), ("in", transfer.receiver)):
            lines[end] = lines.get(end, 0) + transfer.value.nbytes
    rate = PAYLOAD_SHARE * BOARDS.network.bandwidth / 8
    seconds = [*(count / rate for count in lines.values()), *map(sum, computing.values())]
    return max(seconds) / len(program.roles)
