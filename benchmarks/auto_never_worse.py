"""Check that `auto` is at least as good as every built-in strategy, by simulation.

    auto_never_worse.py [--network N …] [--platform P …] [--objective O …] [--budget S …] [--equal] [--busy COUNT]

There are 12 networks × 6 platforms × 5 objectives, each with budgets of 2, 10 and 30 s: 1080 rows. A row has the value
of `auto` divided by the best value of all other strategies. They have their default budgets (30 s), or with `--equal`
the budget of `auto`; `genetic` always has its default number of generations. The exit code is 1 if a ratio is above 1.
With `--busy 2`, two processes keep the processors busy in the meantime.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import click
from busy_processes import busy_processes

from dicompiler import networks
from dicompiler.analysis.compare import Comparison, compare_strategies
from dicompiler.base.objectives import OBJECTIVES, format_objective
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network, NetworkKind
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem

NETWORKS = (
    "lenet", "mobilenet_v2", "light/squeezenet", "light/shufflenet", "resnet18", "resnet50", "alexnet", "vgg16",
    "light/inception_v1", "light/densenet121", "yolov8n", "vit_tiny",
)  # fmt: skip
OTHERS = ("single", "pipeline", "replicate", "modnn", "dp", "gradient", "heads", "teams", "cpsat", "genetic")
PI3, PI4, NUC = 3.75e9, 13.6e9, 60e9
"""FLOP/s of a Raspberry Pi 3 and 4 and of a small PC."""
MAX_RATIO = 1 + 1e-9


def boards(kind: NetworkKind, mbits: float, *rates: float) -> Platform:
    """Return a platform on a network of the kind `kind`, with one host for each compute rate in `rates` (FLOP/s)."""
    names = [f"d{i}" for i in range(len(rates))]
    devices = tuple(Device(name, name, rate, 4, 6.4, 2.7) for name, rate in zip(names, rates, strict=True))
    return Platform("boards", tuple(Host(name, 2**32) for name in names), devices, Network(kind, 1e6 * mbits, 2e-4))


PLATFORMS: dict[str, Callable[[], Platform]] = {
    "rpi4-gateway-x4": lambda: Platform.load("rpi4-gateway-x4"),
    "jetson-nx2": lambda: Platform.load("jetson-nx2"),
    "equal4-switch1000": lambda: boards("switch", 1000, *[PI4] * 4),
    "unequal3-switch100": lambda: boards("switch", 100, PI4, PI3, NUC),
    "unequal4-gateway1000": lambda: boards("gateway", 1000, PI4, PI4, PI3, PI3),
    "unequal6-shared300": lambda: boards("shared", 300, NUC, *[PI4] * 3, *[PI3] * 2),
}


@lru_cache(maxsize=1)
def prepared(network: str) -> Problem:
    """Return the problem of a network on one device. It is cached, because all platforms use the same layers."""
    return load_problem(Model.load(networks.build(network, 0)), "rpi4x1")


@dataclass(frozen=True)
class Row:
    """The result of `auto` with one budget.

    Attributes:
        case: Network, platform, objective and budget.
        value: Objective value of the plan of `auto`; lower values are better.
        best: Best objective value of the other strategies.
        best_strategy: Name of the strategy with this value.
        search_s: Seconds that `auto` took.
        bound: Lower bound; 0 if none is known.
    """

    case: tuple[str, str, str, float]
    value: float
    best: float
    best_strategy: str
    search_s: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.value / self.best if self.best else 1.0 if not self.value else float("inf")

    def __str__(self) -> str:
        network, platform, objective, budget = self.case
        values = [format_objective(objective, value) for value in (self.value, self.best)]
        bound = f"  {self.value / self.bound:.2f} × bound" if self.bound else ""
        mark = "" if self.ratio <= MAX_RATIO else " !"
        return (
            f"{network}  {platform}  {objective}  {budget:g} s: {self.ratio:.4f}{mark}  auto {values[0]} in "
            f"{self.search_s:.1f} s  best other {values[1]} by {self.best_strategy}{bound}"
        )


def compare_others(problem: Problem, budget: float | None) -> Comparison:
    """Evaluate all strategies but `auto`, with a budget in seconds, or with their default budgets (None)."""
    strategies = {name: registry().make("strategies", name) for name in OTHERS}
    if budget is not None:
        with_budget = [name for name, strategy in strategies.items() if hasattr(strategy, "budget")]
        strategies |= {name: registry().make("strategies", f"{name}{{budget={budget:g}}}") for name in with_budget}
    return compare_strategies(problem, strategies)


def rows(
    network: str, platform: str, objective: str, budgets: Sequence[float], has_equal_budgets: bool
) -> Iterator[Row]:
    """Compare `auto` with the other strategies for one problem, and yield a row for each of its budgets."""
    problem = replace(prepared(network), platform=PLATFORMS[platform](), objective=objective)
    with_defaults = None if has_equal_budgets else compare_others(problem, None)
    for budget in budgets:
        others = with_defaults or compare_others(problem, budget)
        best = others.best
        assert best is not None
        auto: Comparison = compare_strategies(
            problem, {"auto": registry().make("strategies", f"auto{{budget={budget:g}}}")}
        )
        (result,) = auto.results
        value = auto.objective_value(result) if result.metrics is not None else float("inf")
        case = (network, platform, objective, budget)
        yield Row(case, value, others.objective_value(best), best.strategy, result.search_s, others.lower_bound or 0.0)


@click.command()
@click.option("--network", "chosen_networks", multiple=True, help="Only these networks (repeatable).")
@click.option("--platform", "chosen_platforms", multiple=True, help="Only these platforms (repeatable).")
@click.option("--objective", "objectives", multiple=True, help="Only these objectives (repeatable).")
@click.option("--budget", "budgets", multiple=True, type=float, help="Only these budgets in seconds (repeatable).")
@click.option("--equal", "has_equal_budgets", is_flag=True, help="Give all strategies the budget of auto.")
@click.option("--busy", type=click.IntRange(min=0), default=0, help="Number of busy processes.")
def main(
    chosen_networks: Sequence[str],
    chosen_platforms: Sequence[str],
    objectives: Sequence[str],
    budgets: Sequence[float],
    has_equal_budgets: bool,
    busy: int,
) -> None:
    """Compare auto with all other strategies. "!" marks rows in which another strategy is better."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    failed = count = 0
    with busy_processes(busy):
        for network in chosen_networks or NETWORKS:
            for platform in chosen_platforms or tuple(PLATFORMS):
                for objective in objectives or OBJECTIVES:
                    for row in rows(network, platform, objective, budgets or (2.0, 10.0, 30.0), has_equal_budgets):
                        count, failed = count + 1, failed + (row.ratio > MAX_RATIO)
                        click.echo(row)
                        sys.stdout.flush()
    click.echo(f"auto is at least as good as every other strategy in {count - failed} of {count} rows")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
