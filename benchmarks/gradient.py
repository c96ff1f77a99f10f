"""The gap of the strategies `gradient` and `diapason` to the exact optimum, for 2 to 8 devices, and their time.

    gradient.py [NETWORK] [--devices N …] [--seeds N]

Raspberry Pi 4 boards and a camera, which is source and sink, share a medium of 100 Mbit/s. Pools and element-wise
operations are free. The exit code is 1 if the plan of `gradient` with default options is more than 3 % above the
optimum.
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean
from time import perf_counter

from support.layer_graphs import formed, vgg16

from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.platform import Platform
from dicompiler.networks import NAMES, build
from dicompiler.search.problem import Problem
from dicompiler_strategies.gradient.objective_tables import build_objective_tables
from dicompiler_strategies.gradient.relaxation import DescentSettings, minimise_relaxation
from dicompiler_strategies.gradient.strategy import Gradient
from dicompiler_strategies.joint.variable_elimination import build_elimination_order, minimise_exactly
from dicompiler_strategies.papers.diapason import Diapason
from dicompiler_strategies.tables.cost_tables import build_cost_tables

MAX_GAP_PERCENT = 3.0


def setting(count: int) -> Platform:
    """Return a platform of `count` Raspberry Pi 4 boards and a camera, which is its first device and cannot compute."""
    boards = Platform.load(f"rpi4-gateway-x{count}")
    hosts, devices = (Host("cam", 2**30), *boards.hosts), (Device("cam", "cam", 0.0), *boards.devices)
    return Platform(boards.name, hosts, devices, Network("shared", 100e6))


def row(layers: LayerGraph, count: int, seeds: int) -> bool:
    """Print the row for `count` devices, and return True if `gradient` is close enough to the optimum for all seeds."""
    problem = Problem(layers, setting(count), AnalyticModel(pools=False, elementwise=False, weights=False))
    start = perf_counter()
    tables = build_cost_tables(problem, Gradient().choice_set(problem))
    filled = perf_counter()
    exact, _ = minimise_exactly(
        build_elimination_order([len(choices) for choices in tables.node_seconds], list(tables.edge_seconds)),
        tables.node_seconds,
        tables.edge_seconds,
    )
    eliminated = perf_counter()
    best = [Gradient(seed=seed).search_tables(tables).value for seed in range(seeds)]
    searched = perf_counter()
    (objective,) = build_objective_tables(tables, "latency")
    descended = [
        float(objective.values(minimise_relaxation(objective, DescentSettings(seed=seed))).min())
        for seed in range(seeds)
    ]
    relaxed = perf_counter()
    printed = problem.estimate(Diapason().plan(problem)).latency_s
    done = perf_counter()
    random_starts = [
        problem.estimate(Diapason(initialisation="random", seed=seed).plan(problem)).latency_s for seed in range(seeds)
    ]

    def gap(value: float) -> str:
        return f"{100 * (value / exact - 1):8.2f}"

    times = (
        f"{filled - start:7.2f} {eliminated - filled:7.2f} {(searched - eliminated) / seeds:7.2f} {done - relaxed:7.2f}"
    )
    gaps = f"{gap(max(best))} {gap(mean(descended))} {gap(printed)} {gap(mean(random_starts))}"
    print(f"{count:7} {sum(tables.choice_counts):7} {exact:8.4f} {gaps} {times}", flush=True)
    return max(best) <= exact * (1 + MAX_GAP_PERCENT / 100)


def main() -> int:
    """Print a row for each number of devices, and return 0 if all plans are close enough to the optimum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", nargs="?", default="vgg16", choices=("vgg16", *(n for n in NAMES if n != "vgg16")))
    parser.add_argument("--devices", nargs="+", type=int, default=list(range(2, 9)))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    layers = vgg16() if arguments.network == "vgg16" else formed(build(arguments.network))
    print(
        f"{arguments.network}, {len(layers.layers)} layers, {arguments.seeds} seeds. "
        "Gap to the optimum over the same choices:"
    )
    print(
        "gradient (worst seed), without local search (mean), diapason, diapason with random weights (mean), in percent;"
    )
    print("seconds: tables, elimination, search over the tables, diapason from start to plan")
    print("devices choices  optimum gradient  descent diapason   random  tables   exact  search diapason")
    results = [row(layers, count, arguments.seeds) for count in arguments.devices]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
