"""Let devices on emulated boards fail, and return to the cluster, at random times of a stream of frames.

A device is killed or stopped, its cable is cut, or its sshd is killed. Each frame must be delivered once and correct.
The script prints a line per failure: the time until it was noticed, and from then the time until the next frame ends
(the interruption). The interruption is compared with the frame time of the plan that took over, measured in two ways:

- one frame after another in the stream;
- each frame after a pause as long as the one before the failure was noticed, because idle processors and caches make
  any frame slower.

The exit code is 1 if a frame was wrong or late. With `--file`, the results are added to those of earlier calls. How to
run it (as root): see README.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click
from support.boards import Cluster, cluster
from support.failing_devices import DEVICES, named, survivor
from support.running import pids

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunEvent, RunOptions
from dicompiler_targets.sockets.session import ClusterSession
from dicompiler_targets.sockets.target import SocketsTarget

WAYS = ("kill", "stop", "cable", "sshd")
AT_ONCE_S, BEATS = 0.3, 3.75
"""Time limits to notice a failure: seconds if a process has ended, and a number of heartbeats if a device is silent.

A silent device has failed after three missed heartbeats. The limit is larger, because they are counted with a delay.
"""
BACK_S = 60.0
RESTED, PAUSE_S = 5, 0.1
"""Number of frames that are measured after a pause each, and the longest such pause in seconds."""
MAX_EXTRA_TAKEOVER_S = 0.05
"""Seconds that the next frame may take after a failure, in addition to 1.5 times the usual time of a frame."""


@dataclass
class Watch:
    """Observations of a run; times are of time.perf_counter.

    Attributes:
        failures: Times of the noticed failures.
        begun: Start of the run.
        returns: Number of returned devices.
        last: The last event.
        frames: Times of the finished frames.
        failures_caused: For each failure: the failed device, the kind of failure, and True if the failure was noticed
            or its frame finished too late.
    """

    failures: list[float] = field(default_factory=list)
    begun: float = 0.0
    returns: int = 0
    last: RunEvent | None = None
    frames: list[float] = field(default_factory=list)
    failures_caused: list[dict[str, Any]] = field(default_factory=list)

    def hear(self, event: RunEvent) -> None:
        self.last = event
        if event.kind == "failure":
            self.failures.append(self.begun + event.at_s)
        self.returns += event.kind == "return"


def find_process(boards: Cluster, device: str) -> int | None:
    """Return the process id of a device on its board; None if no process of the device runs."""
    home = boards.boards[device].home
    for place in home.glob("**/manifest.json"):
        found = pids(place.parent.parent).get(device)
        if found is not None:
            return found
    return None


def cause_failure(boards: Cluster, device: str, way: str) -> None:
    board = boards.boards[device]
    if way in ("kill", "stop"):
        pid = find_process(boards, device)
        assert pid is not None
        os.kill(pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
    elif way == "cable":
        board.link("down")
    else:
        board.stop()


def repair(boards: Cluster, device: str, way: str, pid: int | None) -> None:
    """Repair a failure: continue the stopped process, plug in the cable, or start sshd again.

    A killed process needs no repair, because the session starts it again.
    """
    board = boards.boards[device]
    if way == "stop" and pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    elif way == "cable":
        board.link("up")
    elif way == "sshd":
        board.start()


def fail_devices(
    boards: Cluster,
    watch: Watch,
    rng: Random,
    moments: int,
    way: str,
    beat_s: float,
    only: str,
    alone: bool,
    end_s: float,
) -> Iterator[None]:
    """Let devices fail one after another during a stream, and print a line for each failure.

    The caller takes one item of the iterator for each frame of the stream. No device fails after the time `end_s`.
    """
    wrong, over, over_rested = 0, list[float](), list[float]()
    for number in range(moments):
        if time.perf_counter() > end_s:
            break
        until = time.perf_counter() + rng.uniform(0.05, 1.0)
        while time.perf_counter() < until:
            yield
        device, how = only or rng.choice(DEVICES), way or rng.choice(WAYS)
        count, pid, at = len(watch.failures), find_process(boards, device), time.perf_counter()
        cause_failure(boards, device, how)
        while len(watch.failures) == count or watch.last is None or watch.last.kind == "failure":
            yield
        noticed, interrupted = watch.failures[count], watch.last.takeover_s
        found, pause_s = noticed - at, noticed - max(end for end in watch.frames if end < noticed)
        for _ in range(12):
            yield
        frame = statistics.median(b - a for a, b in zip(watch.frames[-11:], watch.frames[-10:], strict=False))
        rested = yield from frame_after_pause(pause_s)
        repair(boards, device, how, pid)
        back = time.perf_counter()
        while watch.returns < len(watch.failures):
            assert time.perf_counter() - back < BACK_S, f"{device} does not return"
            yield
        due = AT_ONCE_S if how in ("kill", "sshd") else BEATS * beat_s
        bad = found > due or interrupted > 1.5 * frame + MAX_EXTRA_TAKEOVER_S
        wrong += bad
        watch.failures_caused.append({"device": device, "way": how, "late": bad})
        over.append(interrupted - 1.5 * frame)
        over_rested.append(interrupted - 1.5 * rested)
        click.echo(
            f"{number:3} {device} {how:5}: noticed after {found:.3f} s, then no frame for {1000 * interrupted:.1f} ms, "
            f"{interrupted / frame:.2f} frames of {1000 * frame:.1f} ms ({1000 * rested:.1f} "
            f"each after a pause of {1000 * pause_s:.0f}); back after {time.perf_counter() - back:.1f} s"
            + ("  LATE" if bad else "")
        )
    click.echo(f"{len(over)} failures, {wrong} noticed or taken over late")
    # An interruption is compared with the time of a frame, so only one frame may be in flight: with more, outputs
    # follow each other faster.
    if alone and over:
        print_interruptions(over, over_rested)


def print_interruptions(over: list[float], over_rested: list[float]) -> None:
    """Print how much longer the interruptions were than 1.5 times a frame, with the frame time measured in two ways."""
    for name, values in (("of the stream", over), ("each after the same pause", over_rested)):
        middle, least, most = (1000 * find(values) for find in (statistics.median, min, max))
        held = sum(value <= 0 for value in values)
        click.echo(
            f"difference to 1.5 frames {name}: median {middle:+.2f} ms, {least:+.2f} to {most:+.2f}; {held} not longer"
        )


def add_to_file(file: Path, run: dict[str, Any]) -> None:
    """Add the results of a run to the JSON file, and print the totals of all runs in it."""
    runs = [*(json.loads(file.read_text()) if file.exists() else []), run]
    file.write_text(json.dumps(runs))
    failures = [failure for one in runs for failure in one["moments"]]
    ways = ", ".join(f"{count} {way}" for way, count in sorted(Counter(failure["way"] for failure in failures).items()))
    late, frames = sum(failure["late"] for failure in failures), sum(one["frames"] for one in runs)
    click.echo(
        f"{file}: {len(runs)} runs, {len(failures)} failures ({ways}), {late} of them late; {frames} frames, "
        f"{sum(bool(one['wrong']) for one in runs)} runs wrong"
    )


def frame_after_pause(pause_s: float) -> Generator[None, None, float]:
    """Run some frames, each after a pause, and return their median seconds.

    The caller runs one frame for each item of the generator.
    """
    taken = []
    for _ in range(RESTED):
        time.sleep(min(pause_s, PAUSE_S))
        begun = time.perf_counter()
        yield
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@click.command()
@click.option("--moments", default=50, show_default=True, help="Number of failures.")
@click.option("--seed", default=1, show_default=True, help="Seed of the random network, its plans and the times.")
@click.option("--network", default="", help="A network of dicompiler.networks instead of a random one.")
@click.option("--way", default="", help=f"One of {', '.join(WAYS)}. Default: at random.")
@click.option("--in-flight", default=1, show_default=True)
@click.option(
    "--heartbeat", default=0.4, show_default=True, help="Use a longer one for networks that load this host for long."
)
@click.option("--device", default="", help="The device that fails. Default: at random.")
@click.option("--seconds", default=1e9, help="Time of the last failure after the start. Default: no limit.")
@click.option(
    "--file",
    default=None,
    type=click.Path(path_type=Path),
    help="JSON file with the results of earlier calls, to which these are added.",
)
def main(
    moments: int,
    seed: int,
    network: str,
    way: str,
    in_flight: int,
    heartbeat: float,
    device: str,
    seconds: float,
    file: Path | None,
) -> None:
    """Let devices of five boards fail, one at a time."""
    end_s = time.perf_counter() + seconds
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    rng, watch = Random(seed), Watch()
    covered = [(name,) for name in DEVICES]
    with tempfile.TemporaryDirectory() as place, cluster(Path(place), DEVICES) as boards, boards.inside():
        net = Path(place, "net")
        made = named(network, covered, net) if network else survivor(seed, covered, net)
        hosts = Hosts.load(boards.hosts(Path(place, "hosts.toml")))
        options = RunOptions(
            hosts=hosts, insecure=True, heartbeat_s=heartbeat, in_flight=in_flight, timeout_s=120, on_event=watch.hear
        )
        SocketsTarget().install(net, options)
        try:
            with dicompiler.connect(net, options) as session:
                assert isinstance(session, ClusterSession)
                watch.begun = session.opened_at
                steps = fail_devices(boards, watch, rng, moments, way, heartbeat, device, in_flight == 1, end_s)

                def step() -> Iterator[None]:
                    for _ in steps:
                        watch.frames.append(time.perf_counter())
                        yield

                count, wrong = made.stream(session, step()), ""
                click.echo(
                    f"{count} frames, complete, in order and correct; {len(watch.failures)} failures were noticed"
                )
        except (DicompilerError, AssertionError) as error:
            count, wrong = len(watch.frames), str(error)
            click.echo(f"WRONG: {error}")
        if file is not None:
            add_to_file(
                file, {"network": network or seed, "frames": count, "wrong": wrong, "moments": watch.failures_caused}
            )
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
