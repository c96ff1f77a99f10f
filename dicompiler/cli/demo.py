"""`dicompiler demo`: compile, verify and time a built-in network on emulated boards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.cli.completion import complete_names, complete_network
from dicompiler.cli.options import json_option, output_option

if TYPE_CHECKING:
    from dicompiler.measure.emulation.demo import DemoSplit, EmulatedTimes
    from dicompiler.verify.comparison import Verification

# The demo uses a fast strategy without a time limit, so that the plan does not depend on the load of the machine.
DEMO_STRATEGY = "cpsat{tries=0}"


@click.command("demo")
@click.option(
    "--network",
    shell_complete=complete_network,
    metavar="NAME",
    default="resnet50",
    show_default=True,
    help="Use this network (see 'dicompiler list networks').",
)
@click.option(
    "--platform",
    metavar="P",
    default="rpi4x4",
    show_default=True,
    help="Use this platform: a TOML file or a built-in name.",
)
@click.option(
    "--strategy",
    shell_complete=complete_names("strategies"),
    metavar="'NAME{…}'",
    default=DEMO_STRATEGY,
    show_default=True,
    help="Use this strategy.",
)
@json_option
@output_option(metavar="DIR", help="Keep the artifact in DIR. Default: a temporary directory.")
def command(network: str, platform: str, strategy: str, as_json: bool, output: Path | None) -> None:
    """Split ResNet-50 over four boards, verify it, and explain the speed-up.

    The network has seeded weights. It is compiled for the boards, run on this host as one process per board, and
    verified. As root it is also timed on emulated boards: this host limits the links and slows down the computation to
    the boards' speed. Each table is printed as soon as its numbers are known. All tables together take about a
    minute. The exit code is 0 only if every check passed.
    """
    from dicompiler.cli.compile_output import require_passed
    from dicompiler.cli.progress import progress
    from dicompiler.measure.emulation.demo import EMULATED_FRAMES, emulate_frames, split_network

    check_writable(output)
    with _output_directory(output) as directory:
        with progress("starting") as tell:
            compiled, split = split_network(network, platform, strategy, directory, tell)
        if not as_json:
            _show_split(split)
        with progress("verifying: exact check models, then the real programs against onnxruntime"):
            verification = compiled.verify()
        if not as_json:
            _show_checks(verification)
        with progress(f"measuring: {EMULATED_FRAMES} frames on emulated boards, and as many on one of them alone"):
            emulated = emulate_frames(split, directory)
    if as_json:
        _show_json(split, verification, emulated)
    else:
        _show_times(split, emulated)
        if output is not None:
            click.echo(f"\nwritten: {output}")
    require_passed(verification.checks, "demo")


@contextmanager
def _output_directory(output: Path | None) -> Iterator[Path]:
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as temporary:  # Removed when the caller's block ends.
        yield Path(temporary, "demo")


def _show_json(split: DemoSplit, verification: Verification, emulated: EmulatedTimes | str) -> None:
    import dataclasses

    from dicompiler.cli.table import print_json

    times, reason = (None, emulated) if isinstance(emulated, str) else (dataclasses.asdict(emulated), "")
    checks = dataclasses.asdict(verification)
    print_json({**dataclasses.asdict(split), "emulated": times, "not_emulated_reason": reason, "verification": checks})


def _show_split(split: DemoSplit) -> None:
    from dicompiler.base.units import format_number
    from dicompiler.cli.table import print_table, wrap_text

    work = f"{format_number(split.flops / 1e9, 3)} GFLOP per frame"
    weights = f"{format_number(split.weights / 1e6, 3)} MB of weights"
    click.echo(f"{split.network}: {split.layers} layers, {work}, {weights}")
    click.echo(wrap_text(f"split over {split.platform} by {split.strategy}; predicted ms per frame on the boards:"))
    click.echo()
    headers = ("board", "layers", "FLOP", "weights MB", "sent kB", "computing", "messages", "waiting")
    rows = [
        (
            share.device,
            str(share.layers),
            f"{share.flops / max(1, split.flops):.1%}",
            f"{share.weights / 1e6:.2f}",
            f"{share.sent / 1000:.1f}",
            *(f"{1000 * seconds:.1f}" for seconds in (share.compute_s, share.message_s, share.wait_s)),
        )
        for share in split.shares
    ]
    print_table(headers, rows, right=range(1, len(headers)))


def _show_times(split: DemoSplit, emulated: EmulatedTimes | str) -> None:
    from dicompiler.base.units import format_number
    from dicompiler.cli.table import print_table, wrap_text
    from dicompiler.measure.emulation.emulate import MAX_COMPUTE_SLOWDOWN

    many = f"{len(split.shares)} board{'' if len(split.shares) == 1 else 's'}"
    pairs = [("predicted for the boards", split.predicted.total_s, split.predicted_single_device.total_s)]
    if not isinstance(emulated, str):
        pairs.append(("emulated on this host", emulated.frame_s, emulated.single_device_s))
    rows = [
        (name, f"{format_number(1000 * a)} ms", f"{format_number(1000 * b)} ms", f"{b / a:.2f}×")
        for name, a, b in pairs
    ]
    click.echo()
    print_table(("frame", many, "one board", "speed-up"), rows, right=(1, 2, 3))
    click.echo(wrap_text(_explain_speedup(split)))
    if isinstance(emulated, str):
        click.echo(wrap_text(f"Not measured on emulated boards: {emulated}."))
        return
    text = (
        "Emulated: one process per board, links and computing slowed down to the boards' speed."
        f" Messages are handled at this host's speed, which is higher. Fastest of {emulated.frames} frames."
    )
    click.echo(wrap_text(text))
    if emulated.compute_slowdown > MAX_COMPUTE_SLOWDOWN:
        slowdown = f"computing took {emulated.compute_slowdown:.0%} longer than on boards"
        click.echo(wrap_text(f"Warning: this host was busy: {slowdown}."))


def _explain_speedup(split: DemoSplit) -> str:
    """Return a text about the busiest board, and why the speed-up is below the number of boards."""
    busiest = max(split.shares, key=lambda share: share.compute_s + share.message_s)
    if len(split.shares) == 1:
        return "One board computes everything. The prediction uses its published figures."
    compute_ms, message_ms, wait_ms = (
        f"{1000 * seconds:.0f}" for seconds in (busiest.compute_s, busiest.message_s, busiest.wait_s)
    )
    gain = split.predicted_single_device.total_s / split.predicted.total_s
    return (
        f"Predicted to be {gain:.1f} times as fast as one board, not {len(split.shares)}: in a frame {busiest.device}"
        f" computes {compute_ms} ms, handles messages for {message_ms} ms and waits for {wait_ms} ms."
        f" By the boards' published figures, a frame takes {split.predicted}."
    )


def _show_checks(verification: Verification) -> None:
    from dicompiler.cli.table import wrap_text

    click.echo()
    width = max(len(check.name) for check in verification.checks)
    for check in verification.checks:
        head = f"{check.name.ljust(width)}  {'ok' if check.passed else 'FAILED'}  "
        click.echo(wrap_text(check.detail, head))
