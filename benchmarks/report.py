"""The cost of `dicompiler report` for ResNet-101 on eight devices: CPU time, and size of the HTML page.

The script prints a table; the exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import onnx
from rich.console import Console
from rich.table import Table

import dicompiler
from dicompiler.networks import build

LIMIT_S, LIMIT_BYTES = 3.0, 3_000_000
STRATEGIES = ("modnn", "pipeline", "single")


def seconds(*arguments: object) -> float:
    """Run `dicompiler` with these arguments, and return the CPU seconds (user and system) of the process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "dicompiler", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
@click.option("--network", default="resnet101", show_default=True)
@click.option("--platform", default="rpi4-gateway-x8", show_default=True)
@click.option("--runs", default=3, show_default=True, help="The cheapest counts.")
def main(network: str, platform: str, runs: int) -> None:
    """Measure the report of a network under plans of several strategies, with the log of a run."""
    table = Table("plan", "segments", "transfers", "report CPU s", "of simulate's", "page kB")
    over = False
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as temporary:
        place = Path(temporary)
        model = build(network)
        onnx.save(model, place / "model.onnx")
        for strategy in STRATEGIES:
            artifact, page, log = place / strategy, place / f"{strategy}.html", place / f"{strategy}.json"
            result = dicompiler.compile(model, platform=platform, strategy=strategy, output=artifact)
            assert result.program is not None
            seconds("run", artifact, "--in-flight", 1, "--log", log)
            own = min(seconds("report", artifact, "--log", log, "-o", page) for _ in range(runs))
            plan = ("simulate", place / "model.onnx", "--platform", platform, "--plan", artifact / "plan.json")
            other = min(seconds(*plan) for _ in range(runs))
            size = page.stat().st_size
            segments = sum(len(device.segments) for device in result.program.devices)
            row = (strategy, str(segments), str(len(result.program.transfers)), f"{own:.2f}", f"{own / other:.2f}")
            table.add_row(*row, f"{size / 1000:.0f}")
            over = over or own > LIMIT_S or size > LIMIT_BYTES
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
