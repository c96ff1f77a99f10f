"""The cost of checking the digests of files when devices start: VGG16 starts with and without the check, in turn.

The script prints the seconds until all devices are ready, and until the first output arrives: least and median of each,
and their ratios. The exit code is 1 if the ratio of the least times until ready is above LIMIT. See README.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click
import numpy as np

import dicompiler
from dicompiler.base.schema import load_json
from dicompiler.networks import build
from dicompiler.target.run_records import RunOptions

LIMIT = 1.05
SKIP = """
import runpy, sys
from dicompiler_targets.sockets.runtime.integrity import FileIntegrity
FileIntegrity.__init__ = lambda self, directory, manifest: None
FileIntegrity.check = FileIntegrity.begin_digests = lambda self: None
runpy.run_module("dicompiler_targets.sockets.runtime", run_name="__main__", alter_sys=True)
"""


def start(directory: Path, entry: tuple[str, ...]) -> tuple[float, float]:
    """Start the devices of an artifact, and return the seconds until they are ready and until the first output.

    `entry` are the arguments of Python that start the runtime of a device.
    """
    from dicompiler_targets.sockets import device_connections

    device_connections.RUNTIME_COMMAND = entry
    shape = load_json(directory / "artifact.json")["inputs"][0]
    inputs = {shape["name"]: np.zeros(shape["shape"], np.float32)}
    begin = time.perf_counter()
    with dicompiler.connect(directory, RunOptions(in_flight=1)) as session:
        ready = time.perf_counter() - begin
        session.infer(inputs)
        return ready, time.perf_counter() - begin


@click.command(help=__doc__)
@click.option("--network", default="vgg16", show_default=True)
@click.option("--platform", default="rpi4-gateway-x2", show_default=True)
@click.option("--strategy", default="modnn", show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(network: str, platform: str, strategy: str, rounds: int) -> None:
    from dicompiler_targets.sockets import device_connections

    entries = {"with": device_connections.RUNTIME_COMMAND, "without": ("-P", "-c", SKIP)}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "net")
        dicompiler.compile(build(network), platform, strategy, output=place)
        size = sum(path.stat().st_size for path in place.glob("*/weights.bin"))
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in entries}
        for _ in range(rounds):
            for name, entry in entries.items():
                seconds[name].append(start(place, entry))
    click.echo(f"{network} {strategy} on {platform}, {size >> 20} MiB of weights")
    ratios = []
    for index, what in enumerate(("ready", "first output")):
        for figure, name in ((min, "least"), (median, "median")):
            checked, unchecked = (figure(times[index] for times in seconds[name]) for name in entries)
            ratios.append(checked / unchecked)
            click.echo(f"{what}, {name}: with {checked:.2f} s, without {unchecked:.2f} s: {ratios[-1]:.3f}")
    sys.exit(ratios[0] > LIMIT)


if __name__ == "__main__":
    main()
