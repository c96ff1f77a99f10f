"""Verify large networks × kinds of splits on four devices: the exact check, real weights, and the bytes sent.

It prints a row for each pair, then the failures; progress goes to stderr. The exit code is 1 if anything failed. Run it
as README.md says.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import click
from rich.console import Console
from rich.table import Table
from support.splits import ALL, FUSED, Case, Split, splits

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.verify.comparison import Check

LIGHT = tuple(f"light/{name}" for name in networks.LIGHT_NAMES)
BUILT = ("alexnet", "vgg16", "resnet50", "resnet101", "densenet121", "mobilenet_v2", "yolov2")
ASPECTS = ("exact", "real", "bytes")


@dataclass(frozen=True)
class Row:
    """The checks of one network under one kind of split.

    Attributes:
        network: Name of the network.
        kind: Kind of split.
        splits: The splits of this kind; for fused tiles, there may be several with random sets of fused layers.
        checks: Checks of each split, one for each of ASPECTS.
        seconds: Seconds for all splits.
    """

    network: str
    kind: str
    splits: tuple[Split, ...]
    checks: tuple[tuple[Check, ...], ...]
    seconds: float

    @property
    def failures(self) -> list[str]:
        return [
            f"{self.network} {self.kind} {split.number}: {aspect}: {check.detail}"
            for split, checks in zip(self.splits, self.checks, strict=True)
            for aspect, check in zip(ASPECTS, checks, strict=True)
            if not check.passed
        ]

    def cells(self) -> list[str]:
        """Return the cells of the table row: network, kind, number of split layers, result of each check, seconds."""
        cut = sorted(len(split.cut) for split in self.splits)
        layers = str(cut[0]) if cut[0] == cut[-1] else f"{cut[0]}–{cut[-1]}"
        return [self.network, self.kind, layers, *map(self._cell, range(3)), f"{self.seconds:.0f}"]

    def _cell(self, aspect: int) -> str:
        own = [checks[aspect] for checks in self.checks]
        passed = sum(check.passed for check in own)
        if len(own) > 1 or not passed:
            return f"{passed} of {len(own)}"
        return own[0].detail.split(" (")[0].removesuffix(" of max|reference|").removesuffix(" a frame: as predicted")


def _verify(case: Case, split: Split, seeds: Sequence[int] | None) -> tuple[Check, ...]:
    """Return the three checks of a split (exact, real, bytes). If an error is raised, all of them fail."""
    try:
        return case.verify(split, seeds)
    except DicompilerError as error:
        return tuple(Check(aspect, False, str(error)) for aspect in ASPECTS)


def rows(network: str, kinds: Sequence[str], sets: int, seeds: int) -> Iterable[Row]:
    """Yield a row for each kind of split; for fused tiles, also a row for `sets` random sets of fused layers."""
    case = Case.of(networks.build(network, 1))
    for kind in kinds:
        found = tuple(splits(case.layers, [kind], sets))
        for name, chosen in ((kind, found[:1]), (f"{kind} ×{len(found) - 1}", found[1:])):
            if chosen:
                start = time.perf_counter()
                checks = tuple(_verify(case, split, range(seeds) if seeds else None) for split in chosen)
                yield Row(network, name, chosen, checks, time.perf_counter() - start)


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice([*LIGHT, *BUILT]), help="Only these (repeatable).")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(ALL), help="Only these kinds (repeatable).")
@click.option("--sets", default=20, show_default=True, help=f"Random sets for {' and '.join(FUSED)}.")
@click.option("--seeds", default=0, help="Check models for each split; by default all that are needed.")
def main(names: Sequence[str], kinds: Sequence[str], sets: int, seeds: int) -> None:
    """Split networks in every way and verify that they compute the same."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    table = Table("network", "kind", "layers cut", *ASPECTS, "s", title="on 4 devices")
    failures: list[str] = []
    for name in names or (*LIGHT, *BUILT):
        for row in rows(name, kinds or ALL, sets, seeds):
            table.add_row(*row.cells())
            failures += row.failures
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            click.echo(f"{'  '.join(row.cells())}  {'FAILED' if row.failures else ''}({peak:.1f} GiB)", err=True)
        table.add_section()
    finish(table, failures)


def finish(table: Table, failures: Sequence[str]) -> NoReturn:
    """Print the table and the failures, and exit with 1 if there are any."""
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for failure in failures:
        click.echo(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
