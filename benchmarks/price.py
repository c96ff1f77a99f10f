"""What plans for losses cost while nothing is lost: one plan twice without and once with plans for the loss of each of
five devices, as processes of this host, in short blocks in turn. Where processes lie in memory makes some a tenth
faster than others that do the same: they are started anew again and again. Beside those without stand the same again
and those with plans: the median of all and its 95 % interval, for the time of a frame, the processor time of all
processes for it, and the packets and bytes that go over the loopback, which should be equal.

In: a network, for how long. Out: lines on stdout. Nothing else may run here.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from support.losing import DEVICES, named
from support.running import pids

import dicompiler
from dicompiler.target.records import RunOptions


class Block(NamedTuple):
    """What a frame took, of a block of them: the median of their seconds; processor seconds of all processes; packets
    and bytes."""

    seconds: float
    processor: float
    packets: float
    bytes: float


def processor_s(processes: Iterable[int]) -> float:
    """Processor seconds of the processes and of this one so far."""
    tasks = [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]
    return time.process_time() + sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def loopback() -> tuple[int, int]:
    """Packets and bytes that the loopback has carried so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line)
    size, count = line.split(":")[1].split()[:2]
    return int(count), int(size)


def play(session: dicompiler.Session, processes: Sequence[int], given: object, frames: int) -> Block:
    """Plays a block of frames."""
    seconds = []
    worked, (packets, size) = processor_s(processes), loopback()
    for _ in range(frames):
        begun = time.perf_counter()
        session.infer(given)
        seconds.append(time.perf_counter() - begun)
    more, total = loopback()
    spent = processor_s(processes) - worked
    return Block(statistics.median(seconds), spent / frames, (more - packets) / frames, (total - size) / frames)


def between(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median in per cent above 1, and the 95 % interval of it, from the order of the values alone."""
    ordered, half = sorted(100 * (one - 1) for one in ratios), 0.98 * len(ratios) ** 0.5
    low, high = max(0, int(len(ordered) / 2 - half)), min(len(ordered) - 1, int(len(ordered) / 2 + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def draw(network: str, rounds: int, frames: int) -> list[Block]:
    """Starts all processes anew; for each of the three ways the medians of its blocks."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        options, each = RunOptions(in_flight=1, pin=True, timeout_s=300), [(name,) for name in DEVICES]
        made = [named(network, losses, Path(place, str(i))) for i, losses in enumerate(([], [], each))]
        given = made[0].frames(1)[0]
        sessions = [stack.enter_context(dicompiler.connect(one.directory, options)) for one in made]
        processes = [tuple(pids(one.directory).values()) for one in made]
        blocks: list[list[Block]] = [[] for _ in sessions]
        for number in range(-1, rounds):
            order = [(i + number) % len(sessions) for i in range(len(sessions))]
            for i in reversed(order) if number % 2 else order:
                block = play(sessions[i], processes[i], given, frames)
                blocks[i] += [block] * (number >= 0)
    return [Block(*(statistics.median(values) for values in zip(*own, strict=True))) for own in blocks]


@click.command()
@click.option("--network", default="lenet", show_default=True, help="One of dicompiler.networks.")
@click.option("--seconds", default=80.0, show_default=True, help="How long processes are started anew.")
@click.option("--rounds", default=30, show_default=True, help="Blocks of each way in a draw.")
@click.option("--frames", default=20, show_default=True, help="Of a block.")
def main(network: str, seconds: float, rounds: int, frames: int) -> None:
    """Measure what plans for losses cost without a loss."""
    until, draws = time.monotonic() + seconds, list[list[Block]]()
    while time.monotonic() < until:
        draws.append(draw(network, rounds, frames))
    click.echo(f"{network}: {len(draws)} times processes were started, {rounds} rounds of {frames} frames each way")
    for field in Block._fields:
        values = [[getattr(block, field) for block in blocks] for blocks in draws]
        plain = statistics.median(row[0] for row in values)
        unit = f"{1000 * plain:.3f} ms" if field in ("seconds", "processor") else f"{plain:.1f}"
        parts = []
        for name, which in (("the same again", 1), ("with plans for losses", 2)):
            middle, low, high = between([row[which] / row[0] for row in values])
            parts.append(f"{name} {middle:+.2f} % ({low:+.2f} to {high:+.2f})")
        click.echo(f"  {field:10} {unit:>12} a frame; {'; '.join(parts)}")


if __name__ == "__main__":
    main()
