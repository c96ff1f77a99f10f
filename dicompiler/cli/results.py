"""What compile, plan, run and verify print: tables of who computes what, or the same as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.cli.tables import show, show_json
from dicompiler.errors import DicompilerError

if TYPE_CHECKING:
    from dicompiler.compilation import Compilation
    from dicompiler.metrics import Metrics
    from dicompiler.program import Program
    from dicompiler.target import RunResult
    from dicompiler.verify import Check, Verification


def show_compiled(result: Compilation, as_json: bool) -> None:
    """Prints what each device does in a frame, what that is predicted to cost, and where it was written."""
    assert result.program is not None
    devices = _devices(result.program)
    if as_json:
        show_json({"devices": devices, **_predicted(result), "artifacts": str(result.artifacts)})
        return
    headers = ("device", "segments", "weights", "sends", "bytes sent", "bytes received")
    show(headers, [[str(value) for value in record.values()] for record in devices], right=range(1, len(headers)))
    click.echo()
    _show_predicted(result)
    click.echo(f"\nwritten: {result.artifacts}")


def show_planned(result: Compilation, written: Path, as_json: bool) -> None:
    """Prints what a plan is predicted to cost, and where it was written."""
    if as_json:
        show_json({**_predicted(result), "plan": str(written)})
        return
    _show_predicted(result)
    click.echo(f"\nwritten: {written}")


def _devices(program: Program) -> list[dict[str, Any]]:
    """For each device: its name, how many segments, bytes of weights, how many transfers, bytes sent and received."""
    from dicompiler.program import Value

    records = []
    for device in program.devices:
        weights = {tensor.name: tensor for segment in device.segments for tensor in segment.model.graph.initializer}
        sent = [transfer for transfer in program.transfers if transfer.sender == device.device]
        received = [transfer for transfer in program.transfers if transfer.receiver == device.device]
        records.append(
            {
                "device": device.device,
                "segments": len(device.segments),
                "weights": sum(Value(n, t.data_type, tuple(t.dims)).nbytes for n, t in weights.items()),
                "transfers": len(sent),
                "sent": sum(transfer.value.nbytes for transfer in sent),
                "received": sum(transfer.value.nbytes for transfer in received),
            }
        )
    return records


def _predicted(result: Compilation) -> dict[str, Any]:
    """`metrics` of the plan and, beside them, of the best single device (`single`)."""
    both = {"metrics": result.metrics, "single": result.single}
    return {name: None if metrics is None else dataclasses.asdict(metrics) for name, metrics in both.items()}


def _show_predicted(result: Compilation) -> None:
    if result.metrics is None or result.single is None:
        return
    plan, single = _numbers(result.metrics), _numbers(result.single)
    rows = [(name, plan[name], single[name]) for name in plan]
    show(("predicted for a frame", "this plan", "one device"), rows, right=(1, 2))


def _numbers(metrics: Metrics) -> dict[str, str]:
    return {
        "latency": f"{1000 * metrics.latency_s:.4g} ms",
        "time between frames": f"{1000 * metrics.period_s:.4g} ms",
        "energy": f"{metrics.energy_j:.4g} J",
        "memory of the fullest host": f"{metrics.memory / 2**20:.4g} MiB",
        "sent between devices": f"{metrics.total_bytes} bytes",
    }


def show_run(result: RunResult, as_json: bool) -> None:
    """Prints what each device's process reported, over all frames."""
    if as_json:
        reports = [dataclasses.asdict(report) for report in result.reports]
        show_json({"devices": reports, "frames_s": list(result.frames_s), "total_s": result.total_s})
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
    if result.frames_s:
        times = ", ".join(f"{seconds:.4f}" for seconds in result.frames_s[:8])
        click.echo(f"\nseconds for each frame: {times}{', …' if len(result.frames_s) > 8 else ''}")
    if len(result.frames_s) > 1:
        click.echo(f"frames per second: {len(result.frames_s) / result.total_s:.2f}")


def _outcome(check: Check) -> str:
    return ("ok" if check.applies else "left out") if check.passed else "FAILED"


def show_verification(verification: Verification, directory: Path, as_json: bool) -> None:
    """Prints every check. DicompilerError names the first that failed."""
    checks = verification.checks
    if as_json:
        show_json([dataclasses.asdict(check) for check in checks])
    else:
        show(("check", "", ""), [(check.name, _outcome(check), check.detail) for check in checks])
    for check in checks:
        if not check.passed:
            raise DicompilerError(f"{directory}: {check.name}: {check.detail}")
