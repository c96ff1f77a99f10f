"""Compare splits of networks for microcontrollers in TFLite Micro, on 1, 2 and 4 devices, in float32 and in int8.

The script prints a table with a row per plan, and then the failures; progress is printed on stderr. The exit code is 1
if an output is outside its tolerance. How to run it: see README.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from matrix import finish
from numpy.typing import NDArray
from rich.table import Table
from support.splits import ALL, Case, splits
from support.tflm_runs import int8, play

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.partition.tiling import single_device_plan
from dicompiler.verify.comparison import Check, compare_value
from dicompiler.verify.tolerances import Tolerance
from dicompiler_targets.tflm.reference_checks import LiteRtRuntime, make_tolerances

NETWORKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in ("autoencoder", "ds_cnn", "resnet8", "person_detection", "squeezenet")},
    **{
        f"mobilenet_v2 {width} {size}": ("mobilenet_v2", {"width": width, "size": size})
        for width in (0.35, 1.0)
        for size in (96, 160, 224)
    },
}
PARTIAL = ("lip", "fuse")
"""Kinds of splits with partial sums, which are not possible in int8."""
SAMPLES = 16


@dataclass(frozen=True)
class Row:
    """The comparison of one plan.

    Attributes:
        network: Name of the network.
        numbers: `float32` or `int8`.
        devices: Number of devices.
        kind: Kind of split, or `whole`.
        cut: Number of layers that are split.
        checks: Comparison with onnxruntime, and for int8 also with the unsplit network and with LiteRT.
        seconds: Seconds for compiling and running.
    """

    network: str
    numbers: str
    devices: int
    kind: str
    cut: int
    checks: tuple[Check, ...]
    seconds: float

    def cells(self) -> list[str]:
        """Return the cells of this row in the printed table."""
        details = [check.detail.split(" (")[0].removeprefix("differs by ") for check in self.checks]
        head = [self.network, self.numbers, str(self.devices), self.kind, str(self.cut)]
        return [*head, *details, *["–"] * (3 - len(details)), f"{self.seconds:.1f}"]

    @property
    def failures(self) -> list[str]:
        name = f"{self.network} {self.numbers} {self.kind} on {self.devices}"
        return [f"{name}: {check.name}: {check.detail}" for check in self.checks if not check.passed]


def rows(name: str, numbers: str, kinds: Sequence[str]) -> Iterator[Row]:
    """Yield the row of the unsplit network on one device, then those of each kind of split on two and four devices."""
    network, options = NETWORKS[name]
    source = Model.load(networks.build(network, 1, **options))
    model = source if numbers == "float32" else int8(source, SAMPLES)
    whole: Mapping[str, NDArray[Any]] = {}
    litert: Mapping[str, NDArray[Any]] = {}
    for devices in (1, 2, 4):
        case = Case.of(model, devices)
        plans: list[tuple[str, int, Any]] = [("whole", 0, partial(_whole, case))]
        if devices > 1:
            used = [kind for kind in kinds if numbers == "float32" or kind not in PARTIAL]
            found = splits(case.layers, used, 0, devices=devices)
            plans = [(one.kind, len(one.cut), partial(case.plan, one)) for one in found]
        for kind, cut, plan in plans:
            start = time.perf_counter()
            try:
                made = case.with_plan(plan())
                got = play(made, case.inputs)
                if devices == 1 and numbers == "int8":
                    whole, litert = got, play(made, case.inputs, LiteRtRuntime)
                checks = _checks(model, case, got, whole, litert)
            except DicompilerError as error:
                checks = (Check("error", False, str(error)),)
            yield Row(name, numbers, devices, kind, cut, checks, time.perf_counter() - start)


def _whole(case: Case) -> Plan:
    assert case.compilation.platform is not None
    return single_device_plan(case.layers, case.compilation.platform.fastest_device.name)


def _checks(
    model: Model,
    case: Case,
    got: Mapping[str, NDArray[Any]],
    whole: Mapping[str, NDArray[Any]],
    litert: Mapping[str, NDArray[Any]],
) -> tuple[Check, ...]:
    allowed = make_tolerances(model)
    (name,) = got
    checks = [compare_value("onnxruntime", case.reference[name], got[name], tolerance=allowed[name])]
    if whole:
        checks.append(compare_value("uncut", whole[name], got[name], exact=True))
        checks.append(compare_value("LiteRT", litert[name], got[name], tolerance=Tolerance(1, allowed[name].step)))
    return tuple(checks)


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETWORKS)), help="Only these (repeatable).")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(ALL), help="Only these kinds (repeatable).")
@click.option("--numbers", multiple=True, type=click.Choice(("float32", "int8")), help="Only these.")
def main(names: Sequence[str], kinds: Sequence[str], numbers: Sequence[str]) -> None:
    """Split networks for microcontrollers in every way, and compare their outputs in TFLite Micro."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    table = Table("network", "numbers", "devices", "kind", "layers cut", "onnxruntime", "uncut", "LiteRT", "s")
    failures: list[str] = []
    for name in names or NETWORKS:
        for one in numbers or ("float32", "int8"):
            for row in rows(name, one, kinds or ALL):
                table.add_row(*row.cells())
                failures += row.failures
                click.echo(f"{'  '.join(row.cells())}{'  FAILED' if row.failures else ''}", err=True)
            table.add_section()
    finish(table, failures)


if __name__ == "__main__":
    main()
