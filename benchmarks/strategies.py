"""Compare all strategies by simulation, for neural networks × kinds of communication network × devices × bandwidths.

There are 405 cases; `--sample` picks some at random. The script prints a row for each case as it ends, then a summary:
how often each strategy was the best, and how far the best plan is from the lower bound.
"""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

import click

from dicompiler import networks
from dicompiler.analysis.compare import compare_strategies
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network, NetworkKind
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem

KINDS: tuple[NetworkKind, ...] = ("switch", "shared", "gateway")
FAST, SLOW = 13.6e9, 3.75e9  # FLOP/s of a Raspberry Pi 4 and of a Raspberry Pi 3.
CLUSTERS = {"2": (2, 0), "4": (4, 0), "8": (8, 0), "2+2": (2, 2), "1+5": (1, 5)}
MBITS = (10, 100, 1000)
STRATEGIES = ("single", "pipeline", "modnn", "dp", "gradient", "cpsat", "auto")
AUTO_BUDGET_S = 30.0
"""Budget of auto in seconds, at least as long as the slowest of the other strategies takes."""
MAX_EQUAL_RATIO = 1.001
"""A strategy counts as equal to the best one if its time of a frame is at most this factor longer."""


@dataclass(frozen=True)
class Case:
    """One problem: a neural network on fast and slow devices, which a switch, shared medium or gateway connects."""

    network: str
    kind: NetworkKind
    cluster: str
    mbits: int

    def platform(self) -> Platform:
        fast, slow = CLUSTERS[self.cluster]
        rates = [FAST] * fast + [SLOW] * slow
        names = [f"d{i}" for i in range(len(rates))]
        return Platform(
            str(self),
            tuple(Host(name, 4 * 2**30) for name in names),
            tuple(Device(name, name, rate, 4, 6.4, 2.7) for name, rate in zip(names, rates, strict=True)),
            Network(self.kind, 1e6 * self.mbits, 0.0002),
        )

    def __str__(self) -> str:
        return f"{self.network} {self.kind} {self.cluster} {self.mbits} Mbit/s"


def cases(names: Sequence[str]) -> Iterator[Case]:
    """Yield the cases of the neural networks `names`: all kinds of communication network, clusters and bandwidths."""
    for case in itertools.product(names, KINDS, CLUSTERS, MBITS):
        yield Case(*case)


@dataclass(frozen=True)
class Result:
    """The results of all strategies for one case.

    Attributes:
        case: The case.
        values: Seconds of a frame with the plan of each strategy, by name; infinite if the strategy has no plan.
        seconds: Seconds of the search of each strategy, by name.
        bound: Lower bound on the seconds of a frame.
    """

    case: Case
    values: Mapping[str, float]
    seconds: Mapping[str, float]
    bound: float

    @property
    def least(self) -> float:
        return min(self.values.values())

    def is_best(self, name: str) -> bool:
        return self.values[name] <= MAX_EQUAL_RATIO * self.least

    def __str__(self) -> str:
        cells = [
            f"{name} {1000 * value:.1f}{'' if self.is_best(name) else '!'} ({self.seconds[name]:.1f} s)"
            for name, value in self.values.items()
        ]
        return f"{self.case}: {'  '.join(cells)}  bound {1000 * self.bound:.1f} ms"


@lru_cache(maxsize=1)
def problem(network: str) -> Problem:
    """Return the problem of a network on one device. It is cached, because all cases of the network use its layers."""
    return load_problem(Model.load(networks.build(network, 1)), "rpi4x1")


def run(case: Case) -> Result:
    """Return the result of all strategies for one case; `auto` has at least the time of the slowest other strategy."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    case_problem = replace(problem(case.network), platform=case.platform())
    comparison = compare_strategies(
        case_problem, {name: registry().make("strategies", name) for name in STRATEGIES[:-1]}
    )
    longest = max(row.search_s for row in comparison.results)
    auto = compare_strategies(
        case_problem, {"auto": registry().make("strategies", f"auto{{budget={max(AUTO_BUDGET_S, longest)}}}")}
    )
    rows = (*comparison.results, *auto.results)
    values = {row.strategy: math.inf if row.metrics is None else comparison.objective_value(row) for row in rows}
    return Result(case, values, {row.strategy: row.search_s for row in rows}, comparison.lower_bound or 0.0)


def summary(results: Sequence[Result]) -> int:
    """Print how often each strategy was the best, and the ratio of the best plan to the lower bound.

    Return the number of cases in which `auto` was worse than another strategy.
    """
    for name in STRATEGIES:
        best = sum(result.is_best(name) for result in results)
        search = statistics.median(result.seconds[name] for result in results)
        gap = max(result.values[name] / result.least for result in results) - 1
        worst = f", at most {100 * gap:.1f} % behind" if math.isfinite(gap) else ""
        click.echo(f"{name}: best or equal in {best} of {len(results)}{worst}; median search {search:.1f} s")
    gaps = [result.least / result.bound for result in results if result.bound]
    click.echo(f"the best plan is {statistics.median(gaps):.2f} times the valid bound in the median case")
    return sum(not result.is_best("auto") for result in results)


@click.command()
@click.option("--network", "chosen", multiple=True, help="Only these (repeatable). Default: the nine CNNs of onnx.")
@click.option("--sample", type=click.IntRange(min=1), help="Number of cases, picked at random with seed 0.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Cases at the same time, each in its own process.")
def main(chosen: Sequence[str], sample: int | None, jobs: int) -> None:
    """Compare all strategies by simulation. "!" marks strategies that are worse than the best one."""
    all_cases = list(cases(chosen or [f"light/{name}" for name in networks.LIGHT_NAMES]))
    selected = (
        sorted(Random(0).sample(all_cases, min(sample, len(all_cases))), key=all_cases.index) if sample else all_cases
    )
    results = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(run, selected):
            results.append(result)
            click.echo(result)
            sys.stdout.flush()
    sys.exit(1 if summary(results) else 0)


if __name__ == "__main__":
    main()
