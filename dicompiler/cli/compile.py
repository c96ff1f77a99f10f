"""`dicompiler compile`: one model and one platform in, a directory of programs out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.cli.options import (
    PATH,
    check_parent,
    json_option,
    model_argument,
    objective_option,
    platform_option,
    shape_option,
    strategy_option,
)
from dicompiler.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command("compile")
@model_argument
@platform_option
@strategy_option
@click.option("--plan", metavar="PLAN.json", type=PATH, help="A plan to carry out, instead of a strategy.")
@objective_option
@click.option("--target", metavar="'NAME{…}'", help="What to emit: see 'dicompiler list targets'. Default: sockets.")
@shape_option
@json_option
@click.option("-o", "--output", metavar="DIR", type=PATH, required=True, help="The directory to write.")
def command(
    model: Path,
    platform: str | None,
    strategy: str | None,
    plan: Path | None,
    objective: str | None,
    target: str | None,
    shape: tuple[str, ...],
    as_json: bool,
    output: Path,
) -> None:
    """Compile a model into programs for the devices of a platform.

    Prints who computes what; 'dicompiler verify DIR' then proves that the programs compute what the model does.
    """
    from dicompiler.compiler import compile

    if strategy is not None and plan is not None:
        raise UsageError("compile: --strategy and --plan exclude each other: a plan needs no strategy")
    check_parent(output)
    given: dict[str, Any] = {
        "platform": platform,
        "strategy": strategy,
        "plan": plan,
        "objective": objective,
        "target": target,
        "shape": shape or None,
    }
    result = compile(model, output=output, **{name: value for name, value in given.items() if value is not None})
    show_result(result, as_json)


def show_result(result: Any, as_json: bool) -> None:
    """Prints what each device does in a frame and what that is predicted to cost."""
    from dicompiler.cli.tables import show, show_json

    devices = _devices(result.program)
    if as_json:
        document = {"devices": devices, "metrics": metrics(result.metrics), "artifacts": str(result.artifacts)}
        show_json(document)
        return
    head = ("device", "segments", "weights", "sends", "bytes sent", "bytes received")
    show(head, [[str(value) for value in record.values()] for record in devices], right=range(1, len(head)))
    show(("predicted", ""), [(name, value) for name, value in _totals(metrics(result.metrics))])
    click.echo(f"written: {result.artifacts}")


def _devices(program: Any) -> list[dict[str, Any]]:
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
                "weights": sum(program.weights[name].nbytes for name in sorted(held & set(program.weights))),
                "transfers": len(sent),
                "sent": sum(transfer.value.nbytes for transfer in sent),
                "received": sum(transfer.value.nbytes for transfer in received),
            }
        )
    return records


def metrics(found: Any) -> dict[str, Any]:
    """Predicted metrics as JSON has them; empty where none were predicted."""
    import dataclasses

    return dataclasses.asdict(found) if dataclasses.is_dataclass(found) and not isinstance(found, type) else {}


_UNITS = {
    "latency_s": ("latency", "ms", 1e3),
    "period_s": ("period", "ms", 1e3),
    "energy_j": ("energy", "J", 1.0),
    "memory": ("memory of the fullest host", "MiB", 2.0**-20),
    "total_bytes": ("traffic", "bytes", 1.0),
}


def _totals(found: dict[str, Any]) -> Sequence[tuple[str, str]]:
    rows = []
    for key, (name, unit, factor) in _UNITS.items():
        if key in found:
            value = found[key] if factor == 1.0 and isinstance(found[key], int) else f"{found[key] * factor:.4g}"
            rows.append((name, f"{value} {unit}"))
    return rows
