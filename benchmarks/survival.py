"""Devices of boards in network namespaces, started over ssh, are lost at random moments of a stream of frames and come
back: killed, stopped, their cable cut, their sshd killed. No frame may be lost, twice or wrong. Prints a line for each:
how long until the loss was noticed, and from then on how long no frame was finished, beside the frames of the plan that
took over, measured in two ways: one after another in the stream; and each after a pause as long as nothing was finished
until the loss was noticed, with nothing lost, since processors and caches that have rested make any frame slower. Exit
code 1 where something was not as it must be.

In: how many moments, a seed, a network; a file of the moments of earlier calls, to which these are added. Out: lines on
stdout, at the end of all that is in the file. Run it as README.md says, as root.
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
from support.losing import DEVICES, named, survivor
from support.running import pids

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunEvent, RunOptions
from dicompiler_targets.sockets import SocketsTarget
from dicompiler_targets.sockets.session import ClusterSession

WAYS = ("kill", "stop", "cable", "sshd")
AT_ONCE_S, BEATS = 0.3, 3.75
"""Within which a loss must be noticed: an end; and silence, in heartbeats, three and how late they are counted."""
BACK_S = 60.0
RESTED, PAUSE_S = 5, 0.1
"""Frames that are measured after a pause each, and how long that is at most."""
LEAST_S = 0.05
"""What the change itself may take where frames are shorter."""


@dataclass
class Watch:
    """When things happened, of time.perf_counter: `losses`, `returns`, and each finished frame. `moments`: what was
    lost, how, and whether it was noticed or taken over late, once it was back."""

    losses: list[float] = field(default_factory=list)
    begun: float = 0.0
    returns: int = 0
    last: RunEvent | None = None
    frames: list[float] = field(default_factory=list)
    moments: list[dict[str, Any]] = field(default_factory=list)

    def hear(self, event: RunEvent) -> None:
        self.last = event
        if event.kind == "failure":
            self.losses.append(self.begun + event.at_s)
        self.returns += event.kind == "return"


def there(boards: Cluster, device: str) -> int | None:
    """The device's process on its board."""
    home = boards.boards[device].home
    for place in home.glob("**/manifest.json"):
        found = pids(place.parent.parent).get(device)
        if found is not None:
            return found
    return None


def lose(boards: Cluster, device: str, way: str) -> None:
    board = boards.boards[device]
    if way in ("kill", "stop"):
        pid = there(boards, device)
        assert pid is not None
        os.kill(pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
    elif way == "cable":
        board.link("down")
    else:
        board.stop()


def mend(boards: Cluster, device: str, way: str, pid: int | None) -> None:
    """What whoever looks after the boards would do."""
    board = boards.boards[device]
    if way == "stop" and pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    elif way == "cable":
        board.link("up")
    elif way == "sshd":
        board.start()


def plot(
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
    """Loses a device again and again, for the last time before `end_s`; prints a line for each."""
    wrong, over, over_rested = 0, list[float](), list[float]()
    for number in range(moments):
        if time.perf_counter() > end_s:
            break
        until = time.perf_counter() + rng.uniform(0.05, 1.0)
        while time.perf_counter() < until:
            yield
        device, how = only or rng.choice(DEVICES), way or rng.choice(WAYS)
        count, pid, at = len(watch.losses), there(boards, device), time.perf_counter()
        lose(boards, device, how)
        while len(watch.losses) == count or watch.last is None or watch.last.kind == "failure":
            yield
        noticed, interrupted = watch.losses[count], watch.last.interruption_s
        found, pause_s = noticed - at, noticed - max(end for end in watch.frames if end < noticed)
        for _ in range(12):
            yield
        frame = statistics.median(b - a for a, b in zip(watch.frames[-11:], watch.frames[-10:], strict=False))
        rested = yield from after(pause_s)
        mend(boards, device, how, pid)
        back = time.perf_counter()
        while watch.returns < len(watch.losses):
            assert time.perf_counter() - back < BACK_S, f"{device} does not come back"
            yield
        due = AT_ONCE_S if how in ("kill", "sshd") else BEATS * beat_s
        bad = found > due or interrupted > 1.5 * frame + LEAST_S
        wrong += bad
        watch.moments.append({"device": device, "way": how, "late": bad})
        over.append(interrupted - 1.5 * frame)
        over_rested.append(interrupted - 1.5 * rested)
        click.echo(
            f"{number:3} {device} {how:5}: noticed after {found:.3f} s, then no frame for {1000 * interrupted:.1f} ms, "
            f"{interrupted / frame:.2f} frames of {1000 * frame:.1f} ms ({1000 * rested:.1f} "
            f"each after a pause of {1000 * pause_s:.0f}); back after {time.perf_counter() - back:.1f} s"
            + ("  LATE" if bad else "")
        )
    click.echo(f"{len(over)} losses, {wrong} noticed or taken over late")
    if alone and over:  # with others on their way, what lies between two frames is not what one takes
        tell(over, over_rested)


def tell(over: list[float], over_rested: list[float]) -> None:
    """How far the interruptions were from 1.5 frames, in both ways."""
    for name, values in (("of the stream", over), ("each after the same pause", over_rested)):
        middle, least, most = (1000 * find(values) for find in (statistics.median, min, max))
        held = sum(value <= 0 for value in values)
        click.echo(
            f"beside 1.5 frames {name}: {middle:+.2f} ms in the median, {least:+.2f} to {most:+.2f}; {held} within them"
        )


def add(file: Path, run: dict[str, Any]) -> None:
    """Adds a run to the file, and tells of all that are in it."""
    runs = [*(json.loads(file.read_text()) if file.exists() else []), run]
    file.write_text(json.dumps(runs))
    moments = [moment for one in runs for moment in one["moments"]]
    ways = ", ".join(f"{count} {way}" for way, count in sorted(Counter(moment["way"] for moment in moments).items()))
    late, frames = sum(moment["late"] for moment in moments), sum(one["frames"] for one in runs)
    click.echo(
        f"{file}: {len(runs)} runs, {len(moments)} moments ({ways}), {late} of them late; {frames} frames, "
        f"{sum(bool(one['wrong']) for one in runs)} runs wrong"
    )


def after(pause_s: float) -> Generator[None, None, float]:
    """Seconds of a frame after a pause , the median."""
    taken = []
    for _ in range(RESTED):
        time.sleep(min(pause_s, PAUSE_S))
        begun = time.perf_counter()
        yield
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@click.command()
@click.option("--moments", default=50, show_default=True, help="How often a device is lost.")
@click.option("--seed", default=1, show_default=True, help="Of the random network, its plans and the moments.")
@click.option("--network", default="", help="A network of dicompiler.networks in place of a random one.")
@click.option("--way", default="", help=f"One of {', '.join(WAYS)}; by default all of them at random.")
@click.option("--in-flight", default=1, show_default=True)
@click.option("--heartbeat", default=0.4, show_default=True, help="Longer for networks that load this host for long.")
@click.option("--device", default="", help="Always this one; by default any.")
@click.option("--seconds", default=1e9, help="So long after the start the last device is lost. Default: no limit.")
@click.option("--file", default=None, type=click.Path(path_type=Path), help="JSON: moments of earlier calls.")
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
    """Lose devices of five boards, any one at a time."""
    end_s = time.perf_counter() + seconds
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    rng, watch = Random(seed), Watch()
    losses = [(name,) for name in DEVICES]
    with tempfile.TemporaryDirectory() as place, cluster(Path(place), DEVICES) as boards, boards.inside():
        net = Path(place, "net")
        made = named(network, losses, net) if network else survivor(seed, losses, net)
        hosts = Hosts.load(boards.hosts(Path(place, "hosts.toml")))
        options = RunOptions(
            hosts=hosts, insecure=True, heartbeat_s=heartbeat, in_flight=in_flight, timeout_s=120, on_event=watch.hear
        )
        SocketsTarget().install(net, options)
        try:
            with dicompiler.connect(net, options) as session:
                assert isinstance(session, ClusterSession)
                watch.begun = session.begun_s
                steps = plot(boards, watch, rng, moments, way, heartbeat, device, in_flight == 1, end_s)

                def step() -> Iterator[None]:
                    for _ in steps:
                        watch.frames.append(time.perf_counter())
                        yield

                count, wrong = made.stream(session, step()), ""
                click.echo(f"{count} frames, all there, in order and right; {len(watch.losses)} losses were noticed")
        except (DicompilerError, AssertionError) as error:
            count, wrong = len(watch.frames), str(error)
            click.echo(f"WRONG: {error}")
        if file is not None:
            add(file, {"network": network or seed, "frames": count, "wrong": wrong, "moments": watch.moments})
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
