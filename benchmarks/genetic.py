"""Measure the genetic search: plans per second of its fast model, and the benefit of its encoding and stages.

    genetic.py [--network resnet101] [--platform jetson-nx4] [--generations 40] [--seeds 10]

See README.md. The exit code is 1 if a figure is out of range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import numpy as np
from moocore import hypervolume
from support.layer_graphs import formed

from dicompiler.ir.platform import Platform
from dicompiler.networks import build
from dicompiler.search.pareto_front import AUTODICE_OBJECTIVES
from dicompiler.search.problem import Problem
from dicompiler_strategies.genetic.batched_model import BatchedModel, build_batched_model
from dicompiler_strategies.genetic.exploration import explore
from dicompiler_strategies.papers.autodice import Autodice

PLANS = 40_000
MIN_PLANS_PER_S = 20_000
VARIANTS = {
    "naive, one stage": Autodice(encoding="naive", stages=1),
    "split points, one stage": Autodice(encoding="split", stages=1),
    "split points, all stages": Autodice(encoding="split", stages=0),
}


def speed(tables: BatchedModel) -> float:
    """Return how many plans the fast model evaluates per second; the plans are random pipelines of whole layers."""
    layers, devices = tables.seconds.shape
    rows = np.sort(np.random.default_rng(0).integers(0, devices, (PLANS, layers)), axis=1)
    start = time.perf_counter()
    tables.evaluate(rows)
    return PLANS / (time.perf_counter() - start)


def reference(tables: BatchedModel) -> list[float]:
    """Return the reference point of the hypervolumes: the worst value of each objective on a single device."""
    layers, devices = tables.seconds.shape
    estimates = tables.evaluate(np.repeat(np.arange(devices)[:, None], layers, axis=1))
    return [float(estimates.objective(name).max()) for name in AUTODICE_OBJECTIVES]


def main() -> int:
    """Print the figures and return 1 if one of them is out of range."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", default="resnet101")
    parser.add_argument("--platform", default="jetson-nx4")
    parser.add_argument("--population", type=int, default=100)
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    problem = Problem(formed(build(arguments.network)), Platform.load(arguments.platform))
    tables = build_batched_model(problem)
    rate = speed(tables)
    print(
        f"{arguments.network} on {arguments.platform}: {len(problem.layers.layers)} layers, "
        f"{rate:.0f} pipeline plans per second"
    )
    worst = np.array(reference(tables))
    volumes: dict[str, list[float]] = {}
    for name, variant in VARIANTS.items():
        evaluations = []
        for seed in range(arguments.seeds):
            options = replace(
                variant, population=arguments.population, generations=arguments.generations, measured=0, seed=seed
            )
            front = explore(problem, options)
            points = np.array([[point.objectives[name] for name in AUTODICE_OBJECTIVES] for point in front.points])
            volumes.setdefault(name, []).append(hypervolume(points / worst, ref=np.ones(3)))
            evaluations.append(front.evaluations)
        found = volumes[name]
        print(
            f"{name:<26} hypervolume median {statistics.median(found):.4f}, {min(found):.4f} to {max(found):.4f}; "
            f"evaluations {statistics.median(evaluations):.0f}"
        )
    naive, single_stage, all_stages = map(statistics.median, volumes.values())
    return 0 if rate >= MIN_PLANS_PER_S and naive < single_stage < all_stages else 1


if __name__ == "__main__":
    sys.exit(main())
