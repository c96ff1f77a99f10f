"""How fast the simulator is: 100 frames of 1 000 layers on 1 000 devices, which are to take less than 60 s.

In: nothing, or sizes. Out: a table on stdout, a row for each way of sharing the layers and for one frame at a time or
all at once: planning (routing, program, workload), simulating, events a second. Exit code 1 where one took longer.

What "1 000 devices × 1 000 layers × 100 frames" means depends on how many devices share a layer. Layers go to the
devices in turn, `parts` to each: all devices work, and all that a layer makes travels on. A frame of 1 000 layers has
1 000 × parts segments and a few times as many messages, so 100 frames come to 10^5 segments with a device for each
layer, and to 10^8, each with its messages, with every layer on all devices: no player of single events does that in a
minute, and such a case is only of use with fewer frames (`--parts 1000 --frames 1`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from scale import network
from dicompiler.cost.simulator import simulate
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Plan
from dicompiler.plugin_api import tile
from dicompiler.search.problem import Problem

LIMIT_S = 60.0


def in_turn(problem: Problem, parts: int) -> Plan:
    """Layer i in height slices on `parts` devices from number i × parts on, counted round and round."""
    names = [device.name for device in problem.platform.devices]
    shared = {}
    for i, layer in enumerate(problem.layers.layers):
        own = [names[(i * parts + k) % len(names)] for k in range(parts)]
        shared[layer.name] = tile(problem.layers, layer, "height", [1.0] * parts, own)
    return problem.plan(shared)


@click.command()
@click.option("--layers", default=1000, show_default=True)
@click.option("--devices", default=1000, show_default=True)
@click.option("--frames", default=100, show_default=True)
@click.option("--parts", "shares", multiple=True, type=int, default=(1, 2, 4, 16), show_default=True)
def main(layers: int, devices: int, frames: int, shares: Sequence[int]) -> None:
    """Time the simulator on a large cluster."""
    table = Table("parts", "in flight", "planning s", "segments", "messages", "seconds", "CPU s", "events/s")
    over = False
    problem = load_problem(network(layers, max(64, *shares)), f"rpi4x{devices}")
    for parts in shares:
        start = time.perf_counter()
        _, work = problem.workload(in_turn(problem, parts))
        planning = time.perf_counter() - start
        segments = frames * sum(len(device.jobs) for device in work.devices)
        messages = frames * len(work.messages)
        for in_flight in dict.fromkeys((1, frames)):
            start, cpu = time.perf_counter(), time.process_time()
            simulate(work, problem.platform, frames, in_flight)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            over = over or seconds > LIMIT_S
            # A segment ends; a message leaves its line, and arrives.
            events = f"{(segments + 2 * messages) / seconds:,.0f}"
            row = (parts, in_flight, f"{planning:.1f}", segments, messages, f"{seconds:.1f}", f"{cpu:.1f}", events)
            click.echo(" ".join(map(str, row)), err=True)
            table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
