"""What compile, plan, run and verify print: tables of who computes what, or the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from dicompiler.cli.tables import show, show_json
from dicompiler.errors import DicompilerError

if TYPE_CHECKING:
    from dicompiler.metrics import Metrics
    from dicompiler.program import Program
    from dicompiler.target import RunResult


def show_compiled(program: Program, metrics: Metrics | None, directory: Path, as_json: bool) -> None:
    """Prints what each device does in a frame, what that is predicted to cost, and where it was written."""
    devices = _devices(program)
    if as_json:
        show_json({"devices": devices, "metrics": _metrics(metrics), "artifacts": str(directory)})
        return
    headers = ("device", "segments", "weights", "sends", "bytes sent", "bytes received")
    show(headers, [[str(value) for value in record.values()] for record in devices], right=range(1, len(headers)))
    click.echo()
    _show_totals(metrics)
    click.echo(f"written: {directory}")


def show_metrics(metrics: Metrics | None, written: Path, as_json: bool) -> None:
    """Prints what a plan is predicted to cost, and where it was written."""
    if as_json:
        show_json({"metrics": _metrics(metrics), "plan": str(written)})
        return
    _show_totals(metrics)
    click.echo(f"written: {written}")


def _devices(program: Program) -> list[dict[str, Any]]:
    """For each device: its name, how many segments, bytes of weights, how many transfers, bytes sent and received."""
    records = []
    for device in program.devices:
        held = {tensor.name for segment in device.segments for tensor in segment.model.graph.initializer}
        sent = [transfer for transfer in program.transfers if transfer.sender == device.device]
        received = [transfer for transfer in program.transfers if transfer.receiver == device.device]
        records.append(
            {
                "device": device.device,
                "segments": len(device.segments),
                "weights": sum(weight.nbytes for name, weight in program.weights.items() if name in held),
                "transfers": len(sent),
                "sent": sum(transfer.value.nbytes for transfer in sent),
                "received": sum(transfer.value.nbytes for transfer in received),
            }
        )
    return records


def _metrics(metrics: Metrics | None) -> dict[str, Any] | None:
    return None if metrics is None else dataclasses.asdict(metrics)


def _show_totals(metrics: Metrics | None) -> None:
    if metrics is not None:
        rows = (
            ("latency", f"{1000 * metrics.latency_s:.4g} ms"),
            ("time between frames", f"{1000 * metrics.period_s:.4g} ms"),
            ("energy", f"{metrics.energy_j:.4g} J"),
            ("memory of the fullest host", f"{metrics.memory / 2**20:.4g} MiB"),
            ("sent between devices", f"{metrics.total_bytes} bytes"),
        )
        show(("predicted for a frame", ""), rows, right=(1,))


def show_run(result: RunResult, as_json: bool) -> None:
    """Prints what each device's process reported, over all frames."""
    if as_json:
        show_json([dataclasses.asdict(report) for report in result.reports])
        return
    headers = ("device", "computing s", "waiting s", "sending s", "bytes sent", "memory MiB")
    rows = [
        (
            report.device,
            f"{report.compute_s:.4f}",
            f"{report.wait_s:.4f}",
            f"{report.send_s:.4f}",
            str(sum(report.sent.values())),
            f"{report.memory_peak / 2**20:.1f}",
        )
        for report in result.reports
    ]
    show(headers, rows, right=range(1, len(headers)))


class Check(Protocol):
    """One thing that verify compared: what it is, whether it held, and the numbers."""

    @property
    def name(self) -> str:
        """An output, or the transfers."""

    @property
    def passed(self) -> bool:
        """Whether it held."""

    @property
    def detail(self) -> str:
        """The difference that was found and the one that is allowed."""


def show_verification(checks: Sequence[Check], directory: Path, as_json: bool) -> None:
    """Prints every check. DicompilerError names the first that failed."""
    if as_json:
        show_json([{"name": check.name, "passed": check.passed, "detail": check.detail} for check in checks])
    else:
        show(("check", "", ""), [(check.name, "ok" if check.passed else "FAILED", check.detail) for check in checks])
    for check in checks:
        if not check.passed:
            raise DicompilerError(f"{directory}: {check.name}: {check.detail}")
