"""Kill random processes of runs with SIGKILL, at random times.

All other processes must end within 2 s and name the killed device, and no output file may be written. The script prints
a line per run; the exit code is 1 if a run violated this. How to run it: see README.md.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from pathlib import Path

import click
from support.kill_process import COORDINATOR, kill_once
from support.running import LIMIT_S

import dicompiler
from dicompiler import networks


@click.command()
@click.option("--network", default="tiny", show_default=True, help="The network's name in dicompiler.networks.")
@click.option("--moments", default=50, show_default=True, help="Number of runs.")
@click.option("--longest", default=3.0, show_default=True, help="Latest kill, in seconds after the start.")
@click.option("--seed", default=0, show_default=True)
def main(network: str, moments: int, longest: float, seed: int) -> None:
    """Kill processes of runs on four devices."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    rng, worst, failures = random.Random(seed), 0.0, 0
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place, "artifact")
        result = dicompiler.compile(
            networks.build(network), platform="rpi4-gateway-x4", strategy="modnn", output=directory
        )
        assert result.program is not None
        names = [device.device for device in result.program.devices]
        for number in range(moments):
            victim, moment_s = rng.choice([*names, COORDINATOR]), rng.uniform(0, longest)
            outcome = kill_once(directory, victim, moment_s)
            fault = outcome.find_fault(LIMIT_S)
            worst, failures = max(worst, outcome.seconds), failures + bool(fault)
            line = (
                f"{number:3} {victim} after {moment_s:.2f} s: all ended in {outcome.seconds:.2f} s; {outcome.message}"
            )
            click.echo(f"{line}  WRONG: {fault}" if fault else line)
    click.echo(f"{moments} kills, {failures} faults; the slowest end took {worst:.2f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
