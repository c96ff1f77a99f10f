"""What plans for losses cost while nothing is lost: one plan without and with plans for the loss of each of five
devices, as processes of this host. Both clusters are up at once, and play slices of frames in turn, in random order;
the ratio of two slices that follow each other is a pair. Where processes lie in memory makes some a tenth faster than
others that do the same: both are started anew again and again.

In: a network, for how long, a file of the pairs of earlier calls, to which these are added. Out: lines on stdout: the
median over starts of the median over their pairs, in per cent above 1, and what 95 % of it lie within where starts, and
in each of them pairs, are drawn anew with replacement. Nothing else may run here.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import click
from support.losing import DEVICES, Survivor, named
from support.running import pids

import dicompiler
from dicompiler.target.run_records import RunOptions

DRAWS = 4000
"""So often starts and pairs are drawn anew."""
WARM = 2
"""Pairs of a start that do not count."""


class Slice(NamedTuple):
    """What a frame took, of a slice of them: the median of their seconds; processor seconds of all processes; packets
    and bytes."""

    seconds: float
    processor: float
    packets: float
    bytes: float


Pair = tuple[Slice, Slice]
"""Without plans for losses, and with them."""


def processor_s(processes: Iterable[int]) -> float:
    """Processor seconds of the processes and of this one so far."""
    total = 0
    for task in [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(OSError):  # threads that took part in starting end soon
            total += int((task / "schedstat").read_text().split()[0])
    return time.process_time() + total / 1e9


def loopback() -> tuple[int, int]:
    """Packets and bytes that the loopback has carried so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line)
    size, count = line.split(":")[1].split()[:2]
    return int(count), int(size)


def play(session: dicompiler.Session, processes: Sequence[int], given: object, frames: int) -> Slice:
    """Plays a slice of frames."""
    seconds = []
    worked, (packets, size) = processor_s(processes), loopback()
    for _ in range(frames):
        begun = time.perf_counter()
        session.infer(given)
        seconds.append(time.perf_counter() - begun)
    more, total = loopback()
    spent = processor_s(processes) - worked
    return Slice(statistics.median(seconds), spent / frames, (more - packets) / frames, (total - size) / frames)


def start(made: Mapping[str, Survivor], pairs: int, frames: int, rng: Random) -> list[Pair]:
    """Starts all processes anew; the pairs of them. made: "plain" and "other"."""
    with contextlib.ExitStack() as stack:
        options, given = RunOptions(in_flight=1, pin=True, timeout_s=300), made["plain"].frames(1)[0]
        begun = rng.sample(sorted(made), 2)  # who is started first has other memory
        sessions = {name: stack.enter_context(dicompiler.connect(made[name].directory, options)) for name in begun}
        processes = {name: tuple(pids(one.directory).values()) for name, one in made.items()}
        found = []
        for _ in range(WARM + pairs):
            pair = {n: play(sessions[n], processes[n], given, frames) for n in rng.sample(sorted(made), 2)}
            found.append((pair["plain"], pair["other"]))
    return found[WARM:]


def middle(starts: Sequence[Sequence[float]]) -> float:
    """The median over starts of the median over their pairs."""
    return statistics.median(statistics.median(ratios) for ratios in starts)


def between(starts: Sequence[Sequence[float]], rng: Random) -> tuple[float, float]:
    """What 95 % of the medians lie within, of starts and pairs drawn anew."""
    drawn = sorted(
        middle([rng.choices(ratios, k=len(ratios)) for ratios in rng.choices(starts, k=len(starts))])
        for _ in range(DRAWS)
    )
    return drawn[DRAWS // 40], drawn[-1 - DRAWS // 40]


def tell(starts: Sequence[Sequence[Pair]]) -> None:
    """A line for each of what was measured."""
    rng = Random(0)
    for index, name in enumerate(Slice._fields):
        plain = statistics.median(pair[0][index] for pairs in starts for pair in pairs)
        ratios = [[pair[1][index] / pair[0][index] for pair in pairs] for pairs in starts]
        least, most = between(ratios, rng)
        told, low, high = (100 * (one - 1) for one in (middle(ratios), least, most))
        unit = f"{1000 * plain:.3f} ms" if name in ("seconds", "processor") else f"{plain:.1f}"
        click.echo(f"  {name:10} {unit:>12} a frame; {told:+.2f} % ({low:+.2f} to {high:+.2f})")


@click.command()
@click.option("--network", default="lenet", show_default=True, help="One of dicompiler.networks.")
@click.option("--seconds", default=50.0, show_default=True, help="How long processes are started anew.")
@click.option("--pairs", default=20, show_default=True, help="Of a start.")
@click.option("--frames", default=20, show_default=True, help="Of a slice.")
@click.option("--same", is_flag=True, help="The plan without plans for losses beside itself: what chance alone gives.")
@click.option("--file", default=None, type=click.Path(path_type=Path), help="JSON: pairs that were measured before.")
def main(network: str, seconds: float, pairs: int, frames: int, same: bool, file: Path | None) -> None:
    """Measure what plans for losses cost without a loss."""
    key = f"{network}{', the same again' if same else ''}"
    known = json.loads(file.read_text()) if file is not None and file.exists() else {}
    starts = known.setdefault(key, [])
    losses = {"plain": (), "other": () if same else [(name,) for name in DEVICES]}
    with tempfile.TemporaryDirectory() as place:
        made = {name: named(network, those, Path(place, name)) for name, those in losses.items()}
        until, rng = time.monotonic() + seconds, Random()
        while time.monotonic() < until:
            starts.append(start(made, pairs, frames, rng))
            if file is not None:
                file.write_text(json.dumps(known))
    if starts:
        click.echo(f"{key}: processes were started {len(starts)} times, {sum(map(len, starts))} pairs")
        tell(starts)


if __name__ == "__main__":
    main()
