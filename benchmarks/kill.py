"""kill -9 of a random process at random moments of a run: all others must end within 2 s and name the dead device, and
no output file may appear. Prints a line for each; exit code 1 where one was not so.

In: a network, how many moments, a seed. Out: lines on stdout. Run it as README.md says.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from pathlib import Path

import click
from support.killing import COORDINATOR, kill_once
from support.running import LIMIT_S

import dicompiler
from dicompiler import networks


@click.command()
@click.option("--network", default="tiny", show_default=True, help="What runs: its name in dicompiler.networks.")
@click.option("--moments", default=50, show_default=True, help="How many runs are broken.")
@click.option("--longest", default=3.0, show_default=True, help="Seconds of a run in which the moments lie.")
@click.option("--seed", default=0, show_default=True)
def main(network: str, moments: int, longest: float, seed: int) -> None:
    """Kill processes of runs on four devices."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    rng, worst, failures = random.Random(seed), 0.0, 0
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place, "artifact")
        result = dicompiler.compile(networks.build(network), platform="rpi4x4", strategy="modnn", output=directory)
        assert result.program is not None
        names = [device.device for device in result.program.devices]
        for number in range(moments):
            victim, moment_s = rng.choice([*names, COORDINATOR]), rng.uniform(0, longest)
            found = kill_once(directory, victim, moment_s)
            wrong = found.wrong(LIMIT_S)
            worst, failures = max(worst, found.seconds), failures + bool(wrong)
            line = f"{number:3} {victim} after {moment_s:.2f} s: all ended in {found.seconds:.2f} s; {found.message}"
            click.echo(f"{line}  WRONG: {wrong}" if wrong else line)
    click.echo(f"{moments} kills, {failures} not as they must be; the slowest end took {worst:.2f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
