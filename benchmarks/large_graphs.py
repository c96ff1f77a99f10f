"""Measure the processor time and memory of compiling large graphs; the time per node must not grow with their size.

The script prints a table with one row for each graph and size. Each graph is compiled in its own process. The exit code
is 1 if a node takes more than MAX_MS_PER_NODE.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import onnx
from compile_cost import run_measured
from rich.console import Console
from rich.table import Table
from support.wide_graphs import GRAPHS

MAX_MS_PER_NODE = 1.0
"""Processor time per node in ms, including the start of the process."""


@click.command(help=__doc__)
@click.option("--graph", "names", multiple=True, type=click.Choice(list(GRAPHS)), help="Only these (repeatable).")
@click.option("--nodes", "sizes", multiple=True, type=int, default=(10_000, 100_000), show_default=True)
def main(names: Sequence[str], sizes: Sequence[int]) -> None:
    table, over = Table("graph", "nodes", "CPU s", "ms per node", "peak MB"), False
    for name in names or GRAPHS:
        for size in sizes:
            with tempfile.TemporaryDirectory() as scratch:
                model, output = Path(scratch) / "m.onnx", Path(scratch) / "out"
                onnx.save(GRAPHS[name](size), model)
                command = [
                    sys.executable,
                    "-m",
                    "dicompiler",
                    "compile",
                    str(model),
                    "--platform",
                    "rpi4-gateway-x2",
                ]
                used = run_measured([*command, "--strategy", "single", "-o", str(output)])
            each = 1e3 * used.cpu_s / size
            over = over or each > MAX_MS_PER_NODE
            table.add_row(name, f"{size}", f"{used.cpu_s:.1f}", f"{each:.2f}", f"{used.peak / 1e6:.0f}")
            click.echo(f"{name} {size}: {used.cpu_s:.1f} s, {each:.2f} ms per node", err=True)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(over)


if __name__ == "__main__":
    main()
