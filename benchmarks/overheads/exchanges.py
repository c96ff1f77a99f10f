"""The figure `exchanges` of overhead.py: a small network on several devices, frames one after another."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.cli.command_line import main as command
from dicompiler.ir.program import Program
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.mpi import MpiTarget
from overheads.measuring import PAUSE_S, WARM_UP_FRAMES, Figure, Side, inputs_of, timed

EXCHANGES = "lenet"
GOALS = {("sockets", 2): 0.9, ("sockets", 4): 2.5, ("mpi", 2): 0.2, ("mpi", 4): 1.0}
"""Largest allowed milliseconds of a frame, by target and number of devices, which are all processes of this host."""
EXCHANGE, TLS = 0.15, 1.3
"""Limits: milliseconds of an exchange (message) through sockets, and the time of a frame with TLS by that without."""
CLEAR, SECURE = "sockets", "sockets with TLS"
SLICES = 40
"""Number of slices (short sequences of frames) that are measured in a round, with TLS and without TLS each."""


def exchanges(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Measure frames on two and four devices, with and without TLS.

    Return the figures: milliseconds of a frame and of an exchange, and the ratio with TLS to without.
    """
    figures = []
    for name in names or (EXCHANGES,):
        for count in (2, 4):
            with tempfile.TemporaryDirectory() as scratch:
                place = Path(scratch)
                others, depth = _made(name, count, place, frames)
                seconds: dict[str, list[float]] = {side: [] for side in (*others, CLEAR, SECURE)}
                ratios: list[list[float]] = []
                for _ in range(rounds):
                    for side, run in others.items():
                        time.sleep(PAUSE_S)
                        seconds[side] += run()
                    pairs = _drawn(place, frames)
                    for side, slices in zip((CLEAR, SECURE), zip(*pairs, strict=True), strict=True):
                        seconds[side] += [one for own in slices for one in own]
                    ratios.append([statistics.median(secure) / statistics.median(clear) for clear, secure in pairs])
            figures += _judged(f"{name} on {count} devices", count, depth, seconds, ratios)
    return figures


def _made(name: str, count: int, place: Path, frames: int) -> tuple[dict[str, Side], int]:
    """Compile a network for `sockets` and `mpi`, and write the keys of the `sockets` artifact next to it.

    Return the functions that measure onnxruntime alone and `mpi`, by name, and the largest number of exchanges in a row
    in a frame.
    """
    for target in ("sockets", "mpi"):
        made = dicompiler.compile(
            networks.build(name),
            platform=f"rpi4-gateway-x{count}",
            strategy="modnn",
            target=target,
            output=place / target,
        )
    assert made.program is not None
    if command(["keys", str(place / "sockets")]):
        sys.exit("no keys could be made")
    inputs, options = inputs_of(place / "sockets"), RunOptions(in_flight=1, kept_frames=1)
    alone = ort.InferenceSession(str(place / "sockets" / "reference" / "model.onnx"))
    return {
        "onnxruntime": timed(lambda: alone.run(None, inputs), frames),
        "mpi": lambda: (
            MpiTarget().run(place / "mpi", [inputs] * (frames + WARM_UP_FRAMES), options).frames_s[WARM_UP_FRAMES:]
        ),
    }, _depth(made.program)


def _drawn(place: Path, frames: int) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return pairs of slices (the seconds of some consecutive frames), without and with TLS, measured in turn.

    All devices are started again first, because the memory layout of a process differs from start to start and makes
    some processes a tenth slower than others. Other load on this host affects both slices of a pair.
    """
    inputs, found = inputs_of(place / "sockets"), list[tuple[Sequence[float], Sequence[float]]]()
    with ExitStack() as stack:
        sides = []
        for keys in (None, place / "sockets.keys"):
            session = stack.enter_context(dicompiler.connect(place / "sockets", RunOptions(in_flight=1, keys=keys)))
            sides.append(timed(partial(session.infer, inputs), frames))
        for number in range(-1, SLICES):  # The first pair of slices, number -1, warms up and is not counted.
            first = sides[number % 2]()
            second = sides[1 - number % 2]()
            if number >= 0:
                found.append((second, first) if number % 2 else (first, second))
    return found


def _depth(program: Program) -> int:
    """Return the largest number of a frame's messages that are sent one after another, with inputs and outputs."""
    depth: dict[tuple[str, str], int] = {}
    for _ in program.transfers:
        for device in program.devices:
            for segment in device.segments:
                most = max((depth.get((device.device, name), 0) for name in segment.inputs), default=0)
                depth |= {(device.device, name): most for name in segment.outputs}
        for transfer in program.transfers:
            depth[transfer.receiver, transfer.value.name] = 1 + depth.get((transfer.sender, transfer.value.name), 0)
    return 2 + max(depth.values())


def _judged(
    where: str, count: int, depth: int, seconds: Mapping[str, Sequence[float]], ratios: Sequence[Sequence[float]]
) -> list[Figure]:
    found = {side: (1000 * statistics.median(own), 1000 * min(own)) for side, own in seconds.items()}
    alone, clear, secure = found["onnxruntime"], found[CLEAR], found[SECURE]
    click.echo(f"{where}, onnxruntime alone: {alone[0]:.3f} ms a frame (shortest {alone[1]:.3f})")
    figures = [
        Figure(f"{where}, {target}, ms a frame", found[target][0], found[target][1], goal)
        for (target, devices), goal in GOALS.items()
        if devices == count
    ]
    starts, slices = sorted(map(statistics.median, ratios)), sorted(one for own in ratios for one in own)
    tenth = len(slices) // 10
    spread = f"starts {starts[0]:.2f} to {starts[-1]:.2f}, slices {slices[tenth]:.2f} to {slices[-1 - tenth]:.2f}"
    figures.append(
        Figure(f"{where}, sockets, TLS by clear", statistics.median(starts), secure[1] / clear[1], TLS, spread)
    )
    median, shortest = ((clear[i] - alone[i]) / depth for i in (0, 1))
    figures.append(Figure(f"{where}, sockets, ms an exchange, {depth} in a row", median, shortest, EXCHANGE))
    for figure in figures:
        click.echo(figure)
    return figures
