"""`dicompiler demo`: the main job on a built-in network: split, run as one process per device, verified, timed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.base.atomic import check_parent
from dicompiler.cli.options import json_option, output_option

if TYPE_CHECKING:
    from dicompiler.driver.demo import Demo
    from dicompiler.verify.comparison import Verification

STRATEGY = "cpsat{tries=0}"  # quick, and its work has no limit in seconds: the same on a busy machine


@click.command("demo")
@click.option("--network", metavar="NAME", default="resnet50", show_default=True, help="tiny, lenet, mobilenet_v2, …")
@click.option("--platform", metavar="P", default="rpi4x4", show_default=True, help="A TOML file or a built-in one.")
@click.option("--strategy", metavar="'NAME{…}'", default=STRATEGY, show_default=True, help="Who decides.")
@json_option
@output_option(metavar="DIR", help="Keep what was compiled there. Default: do not.")
def command(network: str, platform: str, strategy: str, as_json: bool, output: Path | None) -> None:
    """Split ResNet-50 over four devices, run and verify it.

    The network is built with seeded weights, compiled for the devices, run on this host as one process per device, and
    verified. Exit code 0 only where every check held.
    """
    from dicompiler.base.errors import DicompilerError
    from dicompiler.cli.progress import progress
    from dicompiler.driver.demo import demo

    check_parent(output)
    with _directory(output) as directory, progress("starting") as tell:
        result = demo(network, platform, strategy, directory, tell)
    if as_json:
        _show_json(result)
    else:
        _show(result)
        if output is not None:
            click.echo(f"\nwritten: {output}")
    for check in result.verification.checks:
        if not check.passed:
            raise DicompilerError(f"demo: {check.name}: {check.detail}")


@contextmanager
def _directory(output: Path | None) -> Iterator[Path]:
    """Where to compile to: `output`, or a temporary directory."""
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as temporary:
        yield Path(temporary, "demo")


def _show_json(result: Demo) -> None:
    import dataclasses

    from dicompiler.cli.tables import show_json

    show_json(dataclasses.asdict(result))


def _show(result: Demo) -> None:
    """Who computes what, the times, and what was verified, in 80 columns."""
    from dicompiler.cli.tables import show

    work, weights = f"{result.flops / 1e9:.3g} GFLOP a frame", f"{result.weights / 2**20:.3g} MiB of weights"
    click.echo(f"{result.network}: {result.layers} layers, {work}, {weights}")
    click.echo(f"split over {result.platform} by {result.strategy}, a process for each device:\n")
    headers = ("device", "layers", "FLOP", "weights MiB", "sent KiB", "computing ms", "waiting ms")
    rows = [
        (
            share.device,
            str(share.layers),
            f"{share.flops / max(1, result.flops):.1%}",
            f"{share.weights / 2**20:.2f}",
            f"{share.sent / 1024:.1f}",
            f"{1000 * share.compute_s:.1f}",
            f"{1000 * share.wait_s:.1f}",
        )
        for share in result.shares
    ]
    show(headers, rows, right=range(1, len(headers)))
    click.echo()
    _show_times(result)
    click.echo()
    _show_checks(result.verification)


def _show_times(result: Demo) -> None:
    from dicompiler.cli.tables import show, wrapped

    many = f"{len(result.shares)} device{'' if len(result.shares) == 1 else 's'}"
    rows = [
        (name, *(f"{1000 * seconds:.4g} ms" for seconds in pair))
        for name, pair in (
            ("predicted for the boards", (result.predicted_s, result.predicted_alone_s)),
            ("measured on this host", (result.frame_s, result.alone_s)),
        )
    ]
    show(("a frame", many, "one alone"), rows, right=(1, 2))
    click.echo(
        wrapped(
            "Predictions rest on the boards' published figures. Measured: the devices' processes share the"
            f" {result.cores} cores of this host, so this is no measurement of speed-up; {result.frames} frames,"
            " above their mean, here the fastest."
        )
    )


def _show_checks(verification: Verification) -> None:
    from dicompiler.cli.tables import wrapped

    width = max(len(check.name) for check in verification.checks)
    for check in verification.checks:
        head = f"{check.name.ljust(width)}  {'ok' if check.passed else 'FAILED'}  "
        click.echo(wrapped(check.detail, head))
