"""What compile, plan, run and verify print: tables of who computes what, or the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic import listed
from dicompiler.base.errors import DicompilerError
from dicompiler.base.objectives import objective_terms
from dicompiler.cli.losses import losses_document, show_losses, show_stretches, stretches_document, worst_columns
from dicompiler.cli.runs import show_queueing
from dicompiler.cli.tables import show, show_json, tell, wrapped

if TYPE_CHECKING:
    from dicompiler.cost.losses import Stretch
    from dicompiler.cost.simulation import Simulation
    from dicompiler.driver.compare import Comparison, Row
    from dicompiler.driver.compiled import Compiled
    from dicompiler.ir.compilation import Compilation
    from dicompiler.ir.metrics import Metrics
    from dicompiler.ir.plan import Plan
    from dicompiler.ir.program import Program
    from dicompiler.verify.comparison import Check, Verification


def show_compiled(result: Compiled, as_json: bool) -> None:
    """Prints what each device does in a frame, what that is predicted to cost, and where it was written."""
    devices = _devices(result.program)
    if as_json:
        outputs = [str(result.artifacts / name) for name in listed(result.artifacts)]
        written = {"artifacts": str(result.artifacts), "outputs": outputs}
        memory = {"memory": _occupied(result)} if result.occupied else {}
        losses, told = losses_document(result.losses), {"summary": dataclasses.asdict(result.summary)}
        show_json({"devices": devices, **_predicted(result), **losses, **memory, **told, **written})
        return
    headers = ("device", "segments", "weights", "sends", "bytes sent", "bytes received")
    show(headers, [[str(value) for value in record.values()] for record in devices], right=range(1, len(headers)))
    click.echo()
    _show_predicted(result)
    show_losses(result)
    if result.occupied:
        click.echo()
        _show_occupied(result)
    click.echo()
    tell(result.summary.lines)
    click.echo(f"\nwritten: {result.artifacts}")


def _occupied(result: Compilation) -> dict[str, Any]:
    """RAM and flash of each device with its host's limits, the most RAM of a device where one has the whole network,
    and how many times the multiplications of the uncut network all devices do together."""
    assert result.platform is not None
    devices = []
    for one in result.occupied:
        host = result.platform.host(result.platform.host_of[one.device])
        limits = {"ram_limit": host.ram, "flash_limit": host.flash or None}
        devices.append({"device": one.device, "ram": one.ram, "flash": one.flash, **limits, **one.details})
    return {
        "devices": devices,
        "uncut_ram": max((one.ram for one in result.occupied_single), default=None),
        "multiplications": _multiplications(result),
    }


def _multiplications(result: Compilation) -> float:
    """Those of all parts of a frame, halos included, as a multiple of the uncut network's."""
    from dicompiler.cost.counting import macs, task_macs

    assert result.layers is not None and result.routing is not None
    whole = sum(macs(result.layers, layer) for layer in result.layers.layers)
    return sum(task_macs(result.layers, task) for task in result.routing.tasks) / max(whole, 1)


def _show_occupied(result: Compilation) -> None:
    from dicompiler.base.units import format_bytes

    occupied = _occupied(result)
    details = list(result.occupied[0].details)
    keys = ("ram", "ram_limit", "flash", "flash_limit", *details)
    names = {"ram": "RAM", "ram_limit": "of", "flash_limit": "of"}
    headers = ("device", *(names.get(key, key.replace("_", " ")) for key in keys))
    rows = [
        (one["device"], *("–" if one[key] is None else format_bytes(one[key]) for key in keys))
        for one in occupied["devices"]
    ]
    show(headers, rows, right=range(1, len(headers)))
    if occupied["uncut_ram"] is not None:
        most = max(one["ram"] for one in occupied["devices"])
        click.echo(
            f"\nRAM of the fullest device: {format_bytes(most)}; of one that has the whole network, uncut: "
            f"{format_bytes(occupied['uncut_ram'])}"
        )
    click.echo(f"multiplications: {occupied['multiplications']:.3f} times those of the uncut network")


def show_planned(result: Compiled, written: Path, as_json: bool) -> None:
    """Prints what a plan is predicted to cost, and where it was written."""
    if as_json:
        losses = losses_document(result.losses)
        told, files = {"summary": dataclasses.asdict(result.summary)}, {"plan": str(written), "outputs": [str(written)]}
        show_json({**_predicted(result), **losses, **told, **files})
        return
    _show_predicted(result)
    show_losses(result)
    click.echo()
    tell(result.summary.lines)
    click.echo(f"\nwritten: {written}")


def _devices(program: Program) -> list[dict[str, Any]]:
    """For each device: its name, how many segments, bytes of weights, how many transfers, bytes sent and received; with
    replicas for a frame of each, and of all that is for losses the segments and weights."""
    from dicompiler.ir.program import Value

    records = []
    for i, device in enumerate(program.devices):
        segments = [segment for role in program.roles for segment in role.devices[i].segments]
        weights = {tensor.name: tensor for segment in segments for tensor in segment.model.graph.initializer}
        transfers = [transfer for role in program.turns for transfer in role.transfers]
        sent = [transfer for transfer in transfers if transfer.sender == device.device]
        received = [transfer for transfer in transfers if transfer.receiver == device.device]
        records.append(
            {
                "device": device.device,
                "segments": len(segments),
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
    if result.plan is not None:
        show_wire(result.plan)


def show_wire(plan: Plan) -> None:
    """Prints in which types tensors travel, where that is not as they are."""
    if plan.wire.types:
        click.echo(f"\ntensors travel between devices as {plan.wire}")


def _numbers(metrics: Metrics) -> dict[str, str]:
    return {
        "latency": f"{1000 * metrics.latency_s:.4g} ms",
        "inputs and outputs, beside it": f"{1000 * metrics.ends_s:.4g} ms",
        "time between frames": f"{1000 * metrics.period_s:.4g} ms",
        **({"energy": f"{metrics.energy_j:.4g} J"} if metrics.energy_j else {}),
        "memory of the fullest host": f"{metrics.memory / 2**20:.4g} MiB",
        "sent between devices": f"{metrics.total_bytes} bytes",
    }


def show_simulation(
    result: Compilation,
    simulation: Simulation,
    as_json: bool,
    stretches: Sequence[Stretch] = (),
    in_flight: int = 1,
) -> None:
    """Prints for each device what it does in a frame of its own, and the times of the stream that was played, piece by
    piece where devices were lost."""
    metrics = result.metrics
    assert metrics is not None
    frames = len(simulation.frames)
    if as_json:
        stream = {"frames": simulation.frames, "period_s": simulation.period_s, "latency_s": metrics.latency_s}
        stream["waited_s"] = simulation.waited
        links = [{"from": a, "to": b, "bytes": count} for (a, b), count in _links(result).items()]
        pieces = {"stretches": stretches_document(stretches)} if stretches else {}
        show_json({**_predicted(result), **losses_document(result.losses), "stream": stream, **pieces, "links": links})
        return
    show_shares(metrics)
    energy = f", {metrics.energy_j:.4g} J" if metrics.energy_j else ""
    click.echo(f"\none frame: {1000 * metrics.latency_s:.4g} ms{energy}")
    if stretches:
        show_stretches(stretches)
        click.echo()
    elif frames > 1:
        click.echo(
            f"a stream of {frames}: {1000 * simulation.period_s:.4g} ms between frames, "
            f"{1 / simulation.period_s:.4g} frames per second"
        )
        show_queueing(
            [end - start for start, end in simulation.frames], simulation.waited, in_flight, metrics.latency_s
        )
    busiest = sorted(_links(result).items(), key=lambda entry: -entry[1])[:5]
    for (sender, receiver), count in busiest:
        click.echo(f"{sender} → {receiver}: {count} bytes a frame")
    if result.plan is not None:
        show_wire(result.plan)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """What `dicompiler compare --json` prints; see the schema comparison."""
    problem, best = comparison.problem, comparison.best
    assert problem.model is not None
    rows = [
        {
            "strategy": row.strategy,
            "search_s": row.seconds,
            "error": row.error or None,
            "metrics": None if row.metrics is None else dataclasses.asdict(row.metrics),
            **losses_document(row.losses),
        }
        for row in comparison.rows
    ]
    return {
        "format": "dicompiler.comparison/1",
        "network": problem.model.digest(),
        "platform": problem.platform.name,
        "objective": problem.objective,
        "rows": rows,
        "best": None if best is None else best.strategy,
        "bound": comparison.bound,
        "single": dataclasses.asdict(comparison.single),
    }


def show_comparison(comparison: Comparison) -> None:
    """Prints a row for each strategy, the bound, and for the best one what each device does and what holds it back."""
    powered = any(row.metrics is not None and row.metrics.energy_j for row in comparison.rows)
    energy = ("energy J",) if powered else ()
    headers = ("strategy", "latency ms", "frames/s", *energy, "memory MiB", "MB sent", "faster", "search s")
    lines = [_compared(row, comparison, powered) for row in comparison.rows]
    if len(objective_terms(comparison.problem.objective)) > 1:
        headers = (*headers, "weighted sum")
        values = ["-" if row.metrics is None else f"{comparison.value(row):.4g}" for row in comparison.rows]
        lines = [(*line, value) for line, value in zip(lines, values, strict=True)]
    if any(row.losses for row in comparison.rows):
        headers = (*headers, "at worst ms", "without")
        lines = [(*line, *worst_columns(row.worst)) for line, row in zip(lines, comparison.rows, strict=True)]
    show(headers, lines, right=range(1, len(headers)))
    for row in comparison.rows:
        if row.error:
            prefix = f"{row.strategy}: "
            click.echo(wrapped(f"{prefix}{row.error.removeprefix(prefix)}"))
    _show_best(comparison)


def _compared(row: Row, comparison: Comparison, powered: bool) -> tuple[str, ...]:
    metrics = row.metrics
    if metrics is None:
        return (row.strategy, *["-"] * (5 + powered), f"{row.seconds:.1f}")
    return (
        row.strategy,
        f"{1000 * metrics.latency_s:.1f}",
        f"{1 / metrics.period_s:.3g}",
        *([f"{metrics.energy_j:.3g}"] if powered else []),
        f"{metrics.memory / 2**20:.1f}",
        f"{metrics.total_bytes / 1e6:.2f}",
        f"{metrics.faster_than(comparison.single, comparison.problem.objective):.2f}×",
        f"{row.seconds:.1f}",
    )


def _show_best(comparison: Comparison) -> None:
    best, objective = comparison.best, comparison.problem.objective
    if best is None or best.metrics is None:
        raise DicompilerError("compare: no strategy has a plan that can be carried out")
    if comparison.bound is not None:
        what = {"throughput": "time between frames"}.get(objective, objective)
        least = (
            f"{1000 * comparison.bound:.1f} ms" if len(objective_terms(objective)) == 1 else f"{comparison.bound:.4g}"
        )
        text = (
            f"no plan's {what} is below {least} (critical path and compute load, cost model "
            f"{comparison.problem.cost.name}): the best is {comparison.value(best) / comparison.bound:.2f} times that"
        )
        click.echo(f"\n{wrapped(text)}")
    text = f"the best by {objective}, {best.strategy}: {comparison.binding}"
    click.echo(f"\n{wrapped(text)}\n")
    show_shares(best.metrics)
    if doubt := best.metrics.doubt(comparison.single, objective):
        click.echo(f"doubtful: {doubt}")
    if len(best.metrics.devices) == 1:
        click.echo("one device alone is best here")


def show_shares(metrics: Metrics) -> None:
    """Prints for each device what it computes, sends, receives and waits for in a frame."""
    headers = (
        "device",
        "compute ms",
        "messages ms",
        "line ms",
        "waiting ms",
        "for",
        "MiB",
        "bytes sent",
    )
    rows = []
    for device in metrics.devices:
        cause = max(device.waits, key=lambda peer: device.waits[peer], default="")
        rows.append(
            (
                device.device,
                f"{1000 * device.compute_s:.1f}",
                f"{1000 * device.runtime_s:.1f}",
                f"{1000 * device.line_s:.1f}",
                f"{1000 * device.wait_s:.1f}",
                cause or "-",
                f"{device.memory / 2**20:.1f}",
                str(device.sent),
            )
        )
    show(headers, rows, right=(1, 2, 3, 4, 6, 7))


def _links(result: Compilation) -> dict[tuple[str, str], int]:
    """(sender, receiver) → bytes of a frame; with replicas in the mean, rounded up."""
    assert result.program is not None
    totals: dict[tuple[str, str], int] = {}
    for transfer in (transfer for role in result.program.turns for transfer in role.transfers):
        key = (transfer.sender, transfer.receiver)
        totals[key] = totals.get(key, 0) + transfer.value.nbytes
    count = len(result.program.turns)
    return {key: -(-total // count) for key, total in totals.items()}


def _outcome(check: Check) -> str:
    return ("ok" if check.applies else "left out") if check.passed else "FAILED"


def show_verification(verification: Verification, directory: Path, as_json: bool) -> None:
    """Prints every check. DicompilerError names the first that failed."""
    checks = verification.checks
    if as_json:
        show_json([dataclasses.asdict(check) for check in checks])
    else:
        show(("check", "", ""), [(check.name, _outcome(check), check.detail) for check in checks], wrap=2)
    for check in checks:
        if not check.passed:
            raise DicompilerError(f"{directory}: {check.name}: {check.detail}")
