"""Measure the time to solve the joint problem exactly: VGG16, ResNet-50, MobileNetV2 and YOLOv2 on 2, 4 and 8 boards.

    joint.py [NETWORK …]

The joint problem is to choose one way to split each layer, for all layers at once. The table has the optimum, its lower
bound, MoDNN's value, and the seconds for cost tables and for the search. All values are those of the barrier model, in
which sending and computing do not overlap.

A board has 13.6 GFLOP/s, as a Raspberry Pi 4. The boards share a medium of 100 Mbit/s with a gateway, which supplies
the input and receives the output. Pools and activations are free. The exit code is 1 if a solution is not proven to be
optimal, or takes more than MAX_CPU_S.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.driver.prepare import prepare
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.networks import build
from dicompiler.search.problem import Problem
from dicompiler_strategies.cpsat import CpSat
from dicompiler_strategies.joint.choice_budget import affordable_choices
from dicompiler_strategies.joint.solve import solve_jointly
from dicompiler_strategies.modnn import Modnn
from dicompiler_strategies.tables.cost_tables import build_cost_tables

NETWORKS = ("vgg16", "resnet50", "mobilenet_v2", "yolov2")
DEVICES = (2, 4, 8)
RATE, BANDWIDTH = 13.6e9, 100e6
MAX_CPU_S = 10.0  # Limit for the CPU time of cost tables and search together, in seconds.


def boards(count: int) -> Platform:
    """Return `count` boards behind a gateway without compute."""
    names = [f"pi{i}" for i in range(count)]
    hosts = (Host("gateway", 2**40), *(Host(name, 2**40) for name in names))
    devices = (Device("gateway", "gateway", 0.0), *(Device(name, name, RATE) for name in names))
    return Platform("boards", hosts, devices, Network("shared", BANDWIDTH))


def row(name: str, layers: LayerGraph, count: int) -> tuple[list[str], bool]:
    """Solve the joint problem of a network on `count` boards.

    Return the row of the table, and True if the solution is proven to be optimal in time.
    """
    problem = Problem(layers, boards(count), AnalyticModel(pools=False, elementwise=False, weights=False))
    start = time.process_time()
    tables = build_cost_tables(problem, affordable_choices(problem, CpSat().choice_set()))
    filled = time.process_time()
    solution = solve_jointly(tables)
    end = time.process_time()
    single_s, modnn = tables.total_seconds([0] * len(layers.layers)), problem.estimate(Modnn().plan(problem)).latency_s
    choices = f"{sum(tables.choice_counts) / len(layers.layers):.0f}"
    cells = [
        name,
        str(count),
        choices,
        f"{single_s:.4f}",
        f"{modnn:.4f}",
        f"{solution.value:.4f}",
        f"{solution.bound:.4f}",
    ]
    passed = solution.is_proven and end - start <= MAX_CPU_S
    return [*cells, "yes" if solution.is_proven else "no", f"{filled - start:.2f}", f"{end - filled:.2f}"], passed


def main(names: Sequence[str]) -> int:
    """Print the table, and return 1 if the optimum of a network is not proven in time."""
    titles = "network devices choices one[s] MoDNN[s] best[s] bound[s] proven tables[s] search[s]"
    table = Table(*titles.split())
    all_passed = True
    for name in names or NETWORKS:
        layers = prepare(Model.load(build(name))).layers
        assert layers is not None
        for count in DEVICES:
            cells, passed = row(name, layers, count)
            table.add_row(*cells)
            all_passed &= passed
    Console(width=120).print(table)
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
