"""Benchmark of the built-in networks on four Raspberry Pi 4: the table of docs/reference/networks.md.

It prints the rows of the table; with --write it replaces them in the document. Each network is compiled in its own
process, whose processor time and memory are printed on stderr. If a search ends at its time limit, the script stops
with an error.
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
    "network", "operators", "layers", "split at 1000", "exact", "× at 100 Mbit/s", "× at 1000 Mbit/s", "compile CPU s",
)  # fmt: skip
ALL_NETWORKS = (*networks.NAMES, *(f"light/{name}" for name in networks.LIGHT_NAMES))


def pi_platform(mbits: float) -> Platform:
    """Return four Raspberry Pi 4 on a switch with a bandwidth in Mbit/s."""
    return replace(Platform.load("rpi4x4"), name=f"rpi4x4-{mbits:g}", network=Network("switch", mbits * 1e6))


def count_exact_layers(model: Model, compiled: CompileResult) -> str:
    """Return the text "N of M": the layers that the exact check verifies for this plan, of all layers.

    The result is "-" if the exact check does not apply to the model.
    """

    def program(variant: Model) -> Program:
        lowered = lower(replace(prepare(variant), platform=compiled.platform, plan=compiled.plan)).program
        assert lowered is not None
        return lowered

    check = check_exact(model, program, rules=registry().operator_rules, layers=compiled.layers)
    assert check.passed, check.detail
    found = re.search(r", (\d+ of \d+) layers", check.detail)
    return found[1] if check.applies and found else "-"


def table_row(name: str) -> str:
    """Compile a network for clusters with 100 and with 1000 Mbit/s, and return its row of the table."""
    proto = networks.build(name)
    faster, seconds, compiled = [], 0.0, None
    for mbits in (100, 1000):
        start = time.process_time()
        compiled = dicompiler.compile(proto, pi_platform(mbits))
        seconds = time.process_time() - start
        assert compiled.metrics is not None and compiled.single_device_metrics is not None and compiled.plan is not None
        if compiled.plan.note:
            raise click.ClickException(f"{name}: {compiled.plan.note}: repeat it on an idle machine")
        faster.append(f"{compiled.metrics.speedup_over(compiled.single_device_metrics, 'latency'):.2f}")
    assert compiled is not None and compiled.layers is not None and compiled.plan is not None
    cut = sum(len({part.device for part in parts}) > 1 for parts in compiled.plan.layers.values())
    counts = (len(proto.graph.node), len(compiled.layers.layers), cut)
    checked = count_exact_layers(compiled.reference or compiled.model, compiled)
    return "| " + " | ".join([name, *map(str, counts), checked, *faster, f"{seconds:.1f}"]) + " |"


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(ALL_NETWORKS))
@click.option("--write", is_flag=True, help="Update docs/reference/networks.md; rows of other networks stay.")
@click.option("--in-process", is_flag=True, hidden=True)
def main(names: Sequence[str], write: bool, in_process: bool) -> None:
    if in_process:
        click.echo(table_row(names[0]))
        return
    rows = {}
    for name in names or ALL_NETWORKS:
        process = subprocess.Popen([sys.executable, __file__, "--in-process", name], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        text = process.stdout.read().strip()
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            sys.exit(f"{name}: exit code {process.returncode}")
        rows[name] = text
        click.echo(text)
        click.echo(f"{used.ru_utime + used.ru_stime:.1f} CPU s, {used.ru_maxrss / 1024:.0f} MiB", err=True)
        if write:  # The document is written after each network, because a run over all networks takes long.
            DOCUMENT.write_text(replace_rows(DOCUMENT.read_text(), rows))


def replace_rows(text: str, rows: dict[str, str]) -> str:
    """Return the document with these rows in its table, in the order of ALL_NETWORKS."""
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
