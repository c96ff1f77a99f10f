"""What it costs to compare digests when devices start: VGG16's devices are started with and without, taken in turns.

In: a network, a strategy. Out: seconds until all devices are ready, the least of each, and their ratio; exit code 1
where it is over 1.05. See README.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click

import dicompiler
from dicompiler.networks import build
from dicompiler.target.records import RunOptions

LIMIT = 1.05
SKIP = """
import runpy, sys
from dicompiler_targets.sockets.runtime import files
files.Files.__init__ = lambda self, directory, manifest: None
files.Files.check = files.Files.check_sizes = lambda self: None
runpy.run_module("dicompiler_targets.sockets.runtime", run_name="__main__", alter_sys=True)
"""


def start(directory: Path, entry: tuple[str, ...]) -> float:
    """Seconds until all devices are ready."""
    from dicompiler_targets.sockets import processes

    processes.ENTRY = entry
    begin = time.perf_counter()
    with dicompiler.connect(directory, RunOptions()):
        return time.perf_counter() - begin


@click.command(help=__doc__)
@click.option("--network", default="vgg16", show_default=True)
@click.option("--platform", default="rpi4x2", show_default=True)
@click.option("--strategy", default="modnn", show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(network: str, platform: str, strategy: str, rounds: int) -> None:
    from dicompiler_targets.sockets import processes

    entries = {"with": processes.ENTRY, "without": ("-P", "-c", SKIP)}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "net")
        dicompiler.compile(build(network), platform, strategy, output=place)
        size = sum(path.stat().st_size for path in place.glob("*/weights.bin"))
        seconds: dict[str, list[float]] = {name: [] for name in entries}
        for _ in range(rounds):
            for name, entry in entries.items():
                seconds[name].append(start(place, entry))
    least = {name: min(found) for name, found in seconds.items()}
    ratio = least["with"] / least["without"]
    shown = ", ".join(f"{name} {found:.2f} s" for name, found in least.items())
    click.echo(f"{network} {strategy} on {platform}, {size >> 20} MiB of weights: {shown}: {ratio:.3f}")
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()
