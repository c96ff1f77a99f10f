"""Measure the speed of the simulator: 100 frames of 1 000 layers on 1 000 devices must take less than 60 s.

The table on stdout has two rows for each number of parts of a layer: one frame in flight, and all frames in flight. A
row has the seconds of planning (routing, program, workload) and of simulating. The exit code is 1 if a simulation takes
longer.

Each layer is split into `parts` height tiles on as many devices, and the next layer is on the next devices. All devices
therefore work, and all results are sent. Each message takes time of its sender, its receiver and their links to a
switch, and has a latency. A frame has 1 000 × parts segments, and about three messages for each segment. With 16 parts,
100 frames have 7 million segments and messages. With every layer on all devices there would be 400 million, which no
event simulator plays in a minute.
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
from dicompiler.search.problem import Problem, plan_workload

LIMIT_S = 60.0
COSTS = RuntimeCosts(send=50e-6, receive=60e-6, per_byte=1e-9, gap=10e-6, call=20e-6, per_copied_byte=0.1e-9)


def make_problem(layers: int, devices: int, rows: int) -> Problem:
    """Return the problem of a network of `layers` convolutions on `devices` Raspberry Pis 4 at a switch.

    The feature maps of the network have `rows` rows.
    """
    platform = replace(Platform.load(f"rpi4x{devices}"), network=Network("switch", 1e9, 100e-6))
    runtime = {device.name: COSTS for device in platform.devices}
    return replace(load_problem(network(layers, rows), platform), runtime_costs=runtime)


def plan_in_turn(problem: Problem, parts: int) -> Plan:
    """Return a plan with each layer in height tiles on `parts` devices.

    Layer i begins with device number i × parts. After the last device, the first one follows.
    """
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
    problem = make_problem(layers, devices, max(64, *shares))
    for parts in shares:
        start = time.perf_counter()
        _, work = plan_workload(problem, plan_in_turn(problem, parts))
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
