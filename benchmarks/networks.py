"""What becomes of each built-in network on four Raspberry Pi 4: the table of docs/reference/networks.md.

In: which networks, or all. Out: rows of the table on stdout; with --write they take the place of those in the document.
Each network is worked on in a process of its own, whose processor time and memory are told on stderr. No row is made of
a search that was cut off.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

import dicompiler
from dicompiler import CompileResult, networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.cluster import Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.partition.lowering import lower
from dicompiler.plugin.registry import registry
from dicompiler.verify.comparison import check_exact

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "networks.md"
BEGIN, END = "<!-- networks -->\n", "<!-- end -->"
COLUMN_HEADINGS = (
    "network", "operators", "layers", "cut at 1000", "exact", "× at 100 Mbit/s", "× at 1000 Mbit/s", "compile CPU s",
)  # fmt: skip
ALL_NETWORKS = (*networks.NAMES, *(f"light/{name}" for name in networks.LIGHT_NAMES))


def pi_platform(mbits: float) -> Platform:
    """Four Raspberry Pi 4 on a switch."""
    return replace(Platform.load("rpi4x4"), name=f"rpi4x4-{mbits:g}", network=Network("switch", mbits * 1e6))


def count_exact_layers(model: Model, compiled: CompileResult) -> str:
    """How many layers' geometry was proved bit-equal for this plan, of all; '-' where the level does not apply."""

    def program(variant: Model) -> Program:
        made = lower(replace(prepare(variant), platform=compiled.platform, plan=compiled.plan)).program
        assert made is not None
        return made

    check = check_exact(model, program, rules=registry().operator_rules, layers=compiled.layers)
    assert check.passed, check.detail
    found = re.search(r", (\d+ of \d+) layers", check.detail)
    return found[1] if check.applies and found else "-"


def table_row(name: str) -> str:
    """The network's row of the table."""
    proto = networks.build(name)
    faster, seconds, compiled = [], 0.0, None
    for mbits in (100, 1000):
        start = time.process_time()
        compiled = dicompiler.compile(proto, pi_platform(mbits))
        seconds = time.process_time() - start
        assert compiled.metrics is not None and compiled.single_device_metrics is not None and compiled.plan is not None
        if compiled.plan.note:
            raise click.ClickException(f"{name}: {compiled.plan.note}: give it an idle machine")
        faster.append(f"{compiled.metrics.speedup_over(compiled.single_device_metrics, 'latency'):.2f}")
    assert compiled is not None and compiled.layers is not None and compiled.plan is not None
    cut = sum(len({part.device for part in parts}) > 1 for parts in compiled.plan.layers.values())
    counts = (len(proto.graph.node), len(compiled.layers.layers), cut)
    checked = count_exact_layers(compiled.reference or compiled.model, compiled)
    return "| " + " | ".join([name, *map(str, counts), checked, *faster, f"{seconds:.1f}"]) + " |"


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(ALL_NETWORKS))
@click.option("--write", is_flag=True, help="Update docs/reference/networks.md; rows of other networks stay.")
@click.option("--here", is_flag=True, hidden=True)
def main(names: Sequence[str], write: bool, here: bool) -> None:
    if here:
        click.echo(table_row(names[0]))
        return
    rows = {}
    for name in names or ALL_NETWORKS:
        process = subprocess.Popen([sys.executable, __file__, "--here", name], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        text = process.stdout.read().strip()
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            sys.exit(f"{name}: exit code {process.returncode}")
        rows[name] = text
        click.echo(text)
        click.echo(f"{used.ru_utime + used.ru_stime:.1f} CPU s, {used.ru_maxrss / 1024:.0f} MiB", err=True)
        if write:  # at once: all of them take long
            DOCUMENT.write_text(replace_rows(DOCUMENT.read_text(), rows))


def replace_rows(text: str, rows: dict[str, str]) -> str:
    """The document with these rows in its table, in the order of ALL."""
    head, rest = text.split(BEGIN)
    table, _, tail = rest.partition(END)
    known = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]} | rows
    lines = [
        "| " + " | ".join(COLUMN_HEADINGS) + " |",
        "|" + "---|" * len(COLUMN_HEADINGS),
        *(known[n] for n in ALL_NETWORKS if n in known),
    ]
    return head + BEGIN + "\n".join(lines) + "\n" + END + tail


if __name__ == "__main__":
    main()
