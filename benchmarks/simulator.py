"""How fast the simulator is: 100 frames of 1 000 layers on 1 000 devices, which are to take less than 60 s.

In: nothing, or sizes. Out: a table on stdout, a row for each way of sharing the layers, and for one frame at a time and
all at once: what planning took (routing, program, workload), and simulating. Exit code 1 where that took longer.

What such a case comes to depends on how many devices share a layer. Here layers go to the devices in turn, `parts` to
each: all devices work, all that a layer makes travels on, and every message takes its ends' processors, its lines (of a
switch) and a latency. A frame has 1 000 × parts segments and about three messages for each: 7 million of both in 100
frames of 16 parts. With every layer on all devices they would be 400 million: nothing that plays single events does
that in a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table
from scale import network

from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulator import simulate
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Network
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.plugin_api.regions import tile_layer
from dicompiler.search.problem import Problem

LIMIT_S = 60.0
COSTS = RuntimeCosts(send=50e-6, receive=60e-6, per_byte=1e-9, gap=10e-6, call=20e-6, per_copied_byte=0.1e-9)


def posed(layers: int, devices: int, rows: int) -> Problem:
    """The network on Raspberry Pis at a switch."""
    platform = replace(Platform.load(f"rpi4x{devices}"), network=Network("switch", 1e9, 100e-6))
    runtime = {device.name: COSTS for device in platform.devices}
    return replace(load_problem(network(layers, rows), platform), runtime=runtime)


def in_turn(problem: Problem, parts: int) -> Plan:
    """Layer i in height slices on `parts` devices from number i × parts on, counted round and round."""
    names = [device.name for device in problem.platform.devices]
    shared = {}
    for i, layer in enumerate(problem.layers.layers):
        own = [names[(i * parts + k) % len(names)] for k in range(parts)]
        shared[layer.name] = tile_layer(problem.layers, layer, "height", [1.0] * parts, own)
    return problem.build_plan(shared)


@click.command()
@click.option("--layers", default=1000, show_default=True)
@click.option("--devices", default=1000, show_default=True)
@click.option("--frames", default=100, show_default=True)
@click.option("--parts", "shares", multiple=True, type=int, default=(1, 2, 4, 16), show_default=True)
def main(layers: int, devices: int, frames: int, shares: Sequence[int]) -> None:
    """Time the simulator on a large cluster."""
    titles = ("parts", "in flight", "planning s", "segments", "messages", "wall s", "CPU s", "per second")
    table, over = Table(*titles), False
    problem = posed(layers, devices, max(64, *shares))
    for parts in shares:
        start = time.perf_counter()
        _, work = problem.workload(in_turn(problem, parts))
        planning = time.perf_counter() - start
        segments, messages = frames * sum(len(one.jobs) for one in work.devices), frames * len(work.messages)
        for in_flight in dict.fromkeys((1, frames)):
            start, cpu = time.perf_counter(), time.process_time()
            simulate(work, problem.platform, frames, in_flight, keep_spans=False)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            over = over or wall > LIMIT_S
            rate = f"{(segments + messages) / wall:,.0f}"
            row = (parts, in_flight, f"{planning:.1f}", segments, messages, f"{wall:.2f}", f"{cpu:.2f}", rate)
            click.echo(" ".join(map(str, row)), err=True)
            table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
