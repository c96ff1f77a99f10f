"""Devices of boards in network namespaces, started over ssh, are lost at random moments of a stream of frames and come
back: killed, stopped, their cable cut, their sshd killed. No frame may be lost, twice or wrong. Prints a line for each:
how long until the loss was noticed, and from then on how long no frame was finished, beside the frames of the plan that
took over. Exit code 1 where something was not as it must be.

In: how many moments, a seed, a network. Out: lines on stdout. Run it as README.md says, as root.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click
from support.boards import Cluster, cluster
from support.losing import DEVICES, named, survivor
from support.running import pids

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.target.records import RunEvent, RunOptions
from dicompiler.target.remote.hosts import Hosts
from dicompiler_targets.sockets import SocketsTarget
from dicompiler_targets.sockets.session import Session

WAYS = ("kill", "stop", "cable", "sshd")
AT_ONCE_S, BEATS = 0.3, 3.75
"""Within which a loss must be noticed: an end; and silence, in heartbeats, three and how late they are counted."""
BACK_S = 60.0
LEAST_S = 0.05
"""What the change itself may take where frames are shorter."""


@dataclass
class Watch:
    """When things happened, of time.perf_counter: `losses`, `returns`, and each finished frame."""

    losses: list[float] = field(default_factory=list)
    returns: int = 0
    last: RunEvent | None = None
    frames: list[float] = field(default_factory=list)

    def hear(self, event: RunEvent) -> None:
        self.last = event
        if event.kind == "loss":
            self.losses.append(time.perf_counter())
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


def price(network: str, rounds: int, frames: int) -> None:
    """What plans for losses cost while nothing is lost: the same plan without them twice and with them, block by block
    in turn. Prints the median of what each block takes beside that of the first in the same round."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        options, each = RunOptions(in_flight=1, timeout_s=300), [(name,) for name in DEVICES]
        made = [named(network, losses, Path(place, str(i))) for i, losses in enumerate(([], [], each))]
        given = made[0].frames(1)[0]
        sessions = [stack.enter_context(dicompiler.connect(one.directory, options)) for one in made]
        blocks: list[list[float]] = []
        for number in range(rounds + 1):
            found = [0.0] * len(sessions)
            order = [(i + number) % len(sessions) for i in range(len(sessions))]
            for which in reversed(order) if number % 2 else order:
                seconds = []
                for _ in range(frames):
                    begun = time.perf_counter()
                    sessions[which].infer(given)
                    seconds.append(time.perf_counter() - begun)
                found[which] = statistics.median(seconds)
            blocks += [found] * (number > 0)
    click.echo(f"{network}: {rounds} times {frames} frames each way, of {1000 * min(blocks)[0]:.1f} ms and more")
    for name, which in (("the same again", 1), ("with plans for losses", 2)):
        low, middle, high = statistics.quantiles([100 * (found[which] / found[0] - 1) for found in blocks], n=4)
        click.echo(f"{name}: a frame takes {middle:+.2f} % (quartiles {low:+.1f}, {high:+.1f})")


def plot(
    boards: Cluster, watch: Watch, rng: Random, moments: int, way: str, beat_s: float, only: str
) -> Iterator[None]:
    """Loses a device again and again; prints a line for each."""
    wrong, rests = 0, list[float]()
    for number in range(moments):
        until = time.perf_counter() + rng.uniform(0.05, 1.0)
        while time.perf_counter() < until:
            yield
        device, how = only or rng.choice(DEVICES), way or rng.choice(WAYS)
        count, pid, at = len(watch.losses), there(boards, device), time.perf_counter()
        lose(boards, device, how)
        while len(watch.losses) == count or watch.last is None or watch.last.kind == "loss":
            yield
        found, interrupted = watch.losses[count] - at, watch.last.interruption_s
        for _ in range(12):
            yield
        frame = statistics.median(b - a for a, b in zip(watch.frames[-11:], watch.frames[-10:], strict=False))
        mend(boards, device, how, pid)
        back = time.perf_counter()
        while watch.returns < len(watch.losses):
            assert time.perf_counter() - back < BACK_S, f"{device} does not come back"
            yield
        due = AT_ONCE_S if how in ("kill", "sshd") else BEATS * beat_s
        bad = found > due or interrupted > 1.5 * frame + LEAST_S
        wrong += bad
        rests.append(interrupted - 1.5 * frame)
        click.echo(
            f"{number:3} {device} {how:5}: noticed after {found:.3f} s, then no frame for {1000 * interrupted:.1f} ms, "
            f"{interrupted / frame:.2f} frames of {1000 * frame:.1f} ms; back after {time.perf_counter() - back:.1f} s"
            + ("  LATE" if bad else "")
        )
    rest = statistics.median(rests), max(rests)
    click.echo(f"{moments} losses, {wrong} noticed or taken over late")
    click.echo("above 1.5 frames: {:.1f} ms in the median, {:.1f} ms at most".format(*(1000 * one for one in rest)))


@click.command()
@click.option("--moments", default=50, show_default=True, help="How often a device is lost.")
@click.option("--seed", default=1, show_default=True, help="Of the random network, its plans and the moments.")
@click.option("--network", default="", help="A network of dicompiler.networks in place of a random one.")
@click.option("--way", default="", help=f"One of {', '.join(WAYS)}; by default all of them at random.")
@click.option("--in-flight", default=1, show_default=True)
@click.option("--heartbeat", default=0.4, show_default=True, help="Longer for networks that load this host for long.")
@click.option("--device", default="", help="Always this one; by default any.")
@click.option("--price", "rounds", default=0, help="Measure instead what plans for losses cost: so many blocks.")
def main(
    moments: int, seed: int, network: str, way: str, in_flight: int, heartbeat: float, device: str, rounds: int
) -> None:
    """Lose devices of five boards, any one at a time."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    if rounds:
        price(network or "squeezenet", rounds, 20)
        return
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
                assert isinstance(session, Session)
                steps = plot(boards, watch, rng, moments, way, heartbeat, device)

                def step() -> Iterator[None]:
                    for _ in steps:
                        watch.frames.append(time.perf_counter())
                        yield

                count = made.stream(session, step())
                click.echo(f"{count} frames, all there, in order and right; {len(watch.losses)} losses were noticed")
        except (DicompilerError, AssertionError) as error:
            click.echo(f"WRONG: {error}")
            sys.exit(1)


if __name__ == "__main__":
    main()
