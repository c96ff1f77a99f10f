"""Measure the cost of failure plans while no device has failed.

One plan is run without and with a failure plan for each of five devices, as processes of this host. Both clusters are
up at the same time and run slices (short sequences) of frames in turn, in random order. Two consecutive slices are a
pair. The memory layout makes some processes a tenth faster than identical ones, so that both clusters are restarted
again and again.

The script prints by how many percent failure plans increase each cost of a frame: the median over starts of the median
over their pairs, with a 95 % interval by resampling starts and pairs. With --file, pairs are added to those of earlier
calls. Nothing else may run on this host.
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
from typing import Any, NamedTuple

import click
from support.failing_devices import DEVICES, Survivor, named
from support.running import pids

import dicompiler
from dicompiler.target.run_records import RunOptions

RESAMPLES = 4000
"""Number of times that starts and pairs are resampled for the 95 % interval."""
WARM_UP_PAIRS = 2
"""Number of pairs of slices (short sequences of frames) after each start that are not counted."""


class Slice(NamedTuple):
    """Costs of a frame, measured in a slice (short sequence) of frames.

    Attributes:
        seconds: Median time of a frame in seconds.
        processor_s: Processor seconds of all processes per frame.
        packets: Packets that are sent per frame.
        nbytes: Bytes that are sent per frame.
    """

    seconds: float
    processor_s: float
    packets: float
    nbytes: float


Pair = tuple[Slice, Slice]
"""Two consecutive slices of frames: without and with failure plans."""


def processor_s(processes: Iterable[int]) -> float:
    """Return the processor seconds of the processes and of this one so far."""
    total = 0
    for task in [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(OSError):  # The file of a thread is missing if the thread has ended in the meantime.
            total += int((task / "schedstat").read_text().split()[0])
    return time.process_time() + total / 1e9


def loopback() -> tuple[int, int]:
    """Return the packets and bytes that the loopback interface has carried so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line)
    size, count = line.split(":")[1].split()[:2]
    return int(count), int(size)


def run_slice(session: dicompiler.Session, processes: Sequence[int], inputs: Mapping[str, Any], frames: int) -> Slice:
    """Run a slice of `frames` frames, one after another, and return the costs of a frame."""
    seconds = []
    processor_before, (packets_before, bytes_before) = processor_s(processes), loopback()
    for _ in range(frames):
        started = time.perf_counter()
        session.infer(inputs)
        seconds.append(time.perf_counter() - started)
    packets_after, bytes_after = loopback()
    processor_used = processor_s(processes) - processor_before
    return Slice(
        statistics.median(seconds),
        processor_used / frames,
        (packets_after - packets_before) / frames,
        (bytes_after - bytes_before) / frames,
    )


def start(clusters: Mapping[str, Survivor], pairs: int, frames: int, rng: Random) -> list[Pair]:
    """Start the devices of both clusters again, and return `pairs` pairs of slices (costs of some frames).

    A pair has a slice without and a slice with failure plans.
    """
    with contextlib.ExitStack() as stack:
        options, inputs = RunOptions(in_flight=1, pin=True, timeout_s=300), clusters["plain"].frames(1)[0]
        start_order = rng.sample(
            sorted(clusters), 2
        )  # Sessions start in random order, because the order influences the memory layout.
        sessions = {
            name: stack.enter_context(dicompiler.connect(clusters[name].directory, options)) for name in start_order
        }
        processes = {name: tuple(pids(cluster.directory).values()) for name, cluster in clusters.items()}
        measured = []
        for _ in range(WARM_UP_PAIRS + pairs):
            pair = {n: run_slice(sessions[n], processes[n], inputs, frames) for n in rng.sample(sorted(clusters), 2)}
            measured.append((pair["plain"], pair["other"]))
    return measured[WARM_UP_PAIRS:]


def nested_median(starts: Sequence[Sequence[float]]) -> float:
    """Return the median over starts of the median of each start's ratios, which are one for each pair of slices."""
    return statistics.median(statistics.median(ratios) for ratios in starts)


def confidence_interval(starts: Sequence[Sequence[float]], rng: Random) -> tuple[float, float]:
    """Return the 95 % interval of the result of `nested_median`, by resampling starts and pairs of slices."""
    medians = sorted(
        nested_median([rng.choices(ratios, k=len(ratios)) for ratios in rng.choices(starts, k=len(starts))])
        for _ in range(RESAMPLES)
    )
    return medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]


def print_costs(starts: Sequence[Sequence[Pair]]) -> None:
    """Print a line for each cost of a frame (field of Slice): its value, and its increase by failure plans."""
    rng = Random(0)
    for index, name in enumerate(Slice._fields):
        plain = statistics.median(pair[0][index] for pairs in starts for pair in pairs)
        ratios = [[pair[1][index] / pair[0][index] for pair in pairs] for pairs in starts]
        least, most = confidence_interval(ratios, rng)
        median, low, high = (100 * (ratio - 1) for ratio in (nested_median(ratios), least, most))
        unit = f"{1000 * plain:.3f} ms" if name in ("seconds", "processor_s") else f"{plain:.1f}"
        click.echo(f"  {name:10} {unit:>12} per frame; {median:+.2f} % ({low:+.2f} to {high:+.2f})")


@click.command()
@click.option("--network", default="lenet", show_default=True, help="One of dicompiler.networks.")
@click.option("--seconds", default=50.0, show_default=True, help="Seconds for all starts.")
@click.option("--pairs", default=20, show_default=True, help="Pairs of each start.")
@click.option("--frames", default=20, show_default=True, help="Frames of each slice.")
@click.option("--same", is_flag=True, help="Compare the plan with itself, to see the noise.")
@click.option("--file", default=None, type=click.Path(path_type=Path), help="JSON file with pairs of earlier calls.")
def main(network: str, seconds: float, pairs: int, frames: int, same: bool, file: Path | None) -> None:
    """Measure the cost of failure plans without a failure."""
    key = f"{network}{', the same again' if same else ''}"
    known = json.loads(file.read_text()) if file is not None and file.exists() else {}
    starts = known.setdefault(key, [])
    failures = {"plain": (), "other": () if same else [(name,) for name in DEVICES]}
    with tempfile.TemporaryDirectory() as directory:
        clusters = {name: named(network, sets, Path(directory, name)) for name, sets in failures.items()}
        until, rng = time.monotonic() + seconds, Random()
        while time.monotonic() < until:
            starts.append(start(clusters, pairs, frames, rng))
            if file is not None:
                file.write_text(json.dumps(known))
    if starts:
        click.echo(f"{key}: processes were started {len(starts)} times, {sum(map(len, starts))} pairs")
        print_costs(starts)


if __name__ == "__main__":
    main()
