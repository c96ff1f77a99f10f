"""All strategies by simulation over networks × kinds of network × devices × bandwidths: who is best, how far from the
bound. 405 cases in all; `--sample` takes some of them at random.

In: which networks, how many cases. Out: a row for each case as it comes, then a summary, on stdout.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import click

from dicompiler import networks
from dicompiler.comparing import Comparison, compare
from dicompiler.compiler import load_problem
from dicompiler.model import Model
from dicompiler.platform import Device, Host, Network, NetworkKind, Platform
from dicompiler.plugins import registry

KINDS: tuple[NetworkKind, ...] = ("switch", "shared", "gateway")
FAST, SLOW = 13.6e9, 3.75e9  # Raspberry Pi 4 and 3
CLUSTERS = {"2": (2, 0), "4": (4, 0), "8": (8, 0), "2+2": (2, 2), "1+5": (1, 5)}
MBITS = (10, 100, 1000)
STRATEGIES = ("single", "pipeline", "modnn", "dp", "gradient", "cpsat", "auto")
EQUAL = 1.001
"""What lies within a thousandth counts as equal."""


@dataclass(frozen=True)
class Case:
    """One problem: a network on fast and slow devices, joined by a network of some kind."""

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
    """All of them."""
    for case in itertools.product(names, KINDS, CLUSTERS, MBITS):
        yield Case(*case)


def show(case: Case, found: Comparison) -> None:
    cells = [
        f"{row.strategy} {'-' if row.metrics is None else f'{1000 * found.value(row):.1f}'} ({row.seconds:.1f} s)"
        for row in found.rows
    ]
    click.echo(f"{case}: {'  '.join(cells)}  bound {1000 * (found.bound or 0):.1f} ms")


def summary(done: Sequence[Comparison], names: Sequence[str]) -> int:
    """Prints who was best how often, and the gap; how many times auto was worse than another."""
    least = [min(found.value(row) for row in found.rows if row.metrics) for found in done]
    for i, name in enumerate(names):
        own = [found.rows[i] for found in done]
        best = sum(
            row.metrics is not None and found.value(row) <= EQUAL * value
            for row, found, value in zip(own, done, least, strict=True)
        )
        click.echo(f"{name}: best or equal in {best} of {len(done)}, median search {median(own):.1f} s")
    gaps = [value / found.bound for value, found in zip(least, done, strict=True) if found.bound]
    click.echo(f"the best plan is {statistics.median(gaps):.2f} times the valid bound in the median case")
    last = names.index("auto") if "auto" in names else -1
    worse = sum(found.value(found.rows[last]) > EQUAL * value for value, found in zip(least, done, strict=True))
    click.echo(f"auto was worse than another one in {worse} of {len(done)}")
    return worse


def median(rows: Sequence[object]) -> float:
    return statistics.median(row.seconds for row in rows)  # type: ignore[attr-defined]


@click.command()
@click.option("--network", "chosen", multiple=True, help="Only these (repeatable). Default: the nine CNNs of onnx.")
@click.option("--sample", type=click.IntRange(min=1), help="So many cases, taken at random with seed 0.")
def main(chosen: Sequence[str], sample: int | None) -> None:
    """Compare all strategies by simulation."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    every = list(cases(chosen or [f"light/{name}" for name in networks.LIGHT_NAMES]))
    taken = sorted(Random(0).sample(every, min(sample, len(every))), key=every.index) if sample else every
    done, problem = [], None
    for case in taken:
        if problem is None or problem[0] != case.network:
            problem = (case.network, load_problem(Model.load(networks.build(case.network, 1)), "rpi4x1"))
        strategies = {name: registry().make("strategies", name) for name in STRATEGIES}
        found = compare(replace(problem[1], platform=case.platform()), strategies)
        done.append(found)
        show(case, found)
    sys.exit(1 if summary(done, STRATEGIES) else 0)


if __name__ == "__main__":
    main()
