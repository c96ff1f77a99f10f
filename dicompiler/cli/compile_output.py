"""Output of the commands compile, plan, simulate, compare and verify: tables for terminals, or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic_output import tracked_files
from dicompiler.base.errors import DicompilerError
from dicompiler.base.objectives import describe_objective, format_objective, objective_terms
from dicompiler.base.units import format_bytes, format_number, format_seconds
from dicompiler.cli.run_output import show_queueing
from dicompiler.cli.table import print_entries, print_json, print_table, wrap_text

if TYPE_CHECKING:
    from dicompiler.analysis.compare import Comparison, StrategyResult
    from dicompiler.analysis.explain import SplitReason
    from dicompiler.cost.failure_timeline import StreamInterval
    from dicompiler.cost.simulator import SimulationResult
    from dicompiler.driver.compile_result import CompileResult
    from dicompiler.ir.metrics import FailureMetrics, Metrics
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.ir.plan import Plan
    from dicompiler.ir.platform import Platform
    from dicompiler.ir.program import Program
    from dicompiler.verify.comparison import Check, Verification

MIN_NAMED_DIFFERENCE = 0.005
"""Smallest relative difference between simulated and predicted frame period that the output explains."""


def show_compilation(result: CompileResult, as_json: bool) -> None:
    """Print each device's share of the work, the predicted metrics, and the directory of the artifact."""
    from dicompiler.driver.compile_result import shorten_engine

    devices = _device_records(result.program)
    if as_json:
        outputs = [str(result.artifacts / name) for name in tracked_files(result.artifacts)]
        written = {"artifacts": str(result.artifacts), "outputs": outputs}
        memory = {"memory": _footprint_document(result)} if result.footprints else {}
        failures, summary = failures_document(result.failure_metrics), dataclasses.asdict(result.summary)
        prediction = _prediction_document(result)
        unused = {"unused_devices": result.unused_devices}
        print_json({"devices": devices, **unused, **prediction, **failures, **memory, "summary": summary, **written})
        return
    engine = ("engine",) if result.plan.engines else ()
    headers = ("device", "segments", "weights", "sends", "bytes sent", "bytes received", *engine)
    rows = [[shorten_engine(value) if key == "engine" else str(value) for key, value in r.items()] for r in devices]
    print_table(headers, rows, right=range(1, 6))
    if (frames := len(result.program.replica_roles)) > 1:
        click.echo(wrap_text(f"sends and bytes: totals of {frames} frames, one for each replica"))
    click.echo()
    _show_prediction(result)
    show_failure_plans(result)
    if result.footprints:
        click.echo()
        _show_footprints(result)
    click.echo()
    _show_summary(result)
    click.echo(f"\nwritten: {result.artifacts}")


def _show_summary(result: CompileResult) -> None:
    memory = [f"memory: {result.memory_summary}"] if result.memory_summary else []
    print_entries([*result.summary.lines, *memory])
    if result.unused_devices:
        print_entries([f"no part of the plan is on: {', '.join(result.unused_devices)}"])


def _footprint_document(result: PipelineState) -> dict[str, Any]:
    """Return the RAM and flash that each device needs, with the limits of its host, as a JSON object.

    `single_device_ram` is the RAM of one device with the whole network. See `_relative_multiplications` for
    `multiplication_ratio`.
    """
    assert result.platform is not None
    devices = []
    for footprint in result.footprints:
        host = result.platform.host(result.platform.host_of[footprint.device])
        limits = {"ram_limit": host.ram, "flash_limit": host.flash or None}
        sizes = {"ram": footprint.ram, "flash": footprint.flash, **limits, **footprint.details}
        devices.append({"device": footprint.device, **sizes})
    return {
        "devices": devices,
        "single_device_ram": max((footprint.ram for footprint in result.single_device_footprints), default=None),
        "multiplication_ratio": _relative_multiplications(result),
    }


def _relative_multiplications(result: PipelineState) -> float:
    """Return the multiplications of all devices divided by those of the unsplit network.

    The ratio is above 1 if several devices compute the same elements (overlapping tiles).
    """
    from dicompiler.cost.op_counts import count_macs, count_task_macs

    assert result.layers is not None and result.routing is not None
    whole = sum(count_macs(result.layers, layer) for layer in result.layers.layers)
    return sum(count_task_macs(result.layers, task) for task in result.routing.tasks) / max(whole, 1)


def _show_footprints(result: PipelineState) -> None:
    document = _footprint_document(result)
    details = list(result.footprints[0].details)
    keys = ("ram", "ram_limit", "flash", "flash_limit", *details)
    names = {"ram": "RAM", "ram_limit": "of", "flash_limit": "of"}
    headers = ("device", *(names.get(key, key.replace("_", " ")) for key in keys))
    rows = [
        (device["device"], *("–" if device[key] is None else format_bytes(device[key]) for key in keys))
        for device in document["devices"]
    ]
    print_table(headers, rows, right=range(1, len(headers)))
    if document["single_device_ram"] is not None:
        peak = max(device["ram"] for device in document["devices"])
        single_device_ram = f"of a device with the whole network: {format_bytes(document['single_device_ram'])}"
        text = wrap_text(f"RAM of the fullest device: {format_bytes(peak)}; {single_device_ram}")
        click.echo(f"\n{text}")
    click.echo(f"multiplications: {document['multiplication_ratio']:.3f} times those of the unsplit network")


def show_plan(result: CompileResult, written: Path, as_json: bool) -> None:
    if as_json:
        failures = failures_document(result.failure_metrics)
        files = {"plan": str(written), "outputs": [str(written)]}
        summary = dataclasses.asdict(result.summary)
        unused = {"unused_devices": result.unused_devices}
        print_json({**_prediction_document(result), **unused, **failures, "summary": summary, **files})
        return
    _show_prediction(result)
    show_failure_plans(result)
    click.echo()
    _show_summary(result)
    click.echo(f"\nwritten: {written}")


def _device_records(program: Program) -> list[dict[str, Any]]:
    """Return the segments (ONNX submodels), transfers, and bytes of weights and transfers of each device.

    Segments and weights include those of failure plans (plans for the remaining devices). With n replicas (copies of
    the plan on other devices), transfers are the totals of n frames.
    """
    from dicompiler.ir.cluster import DEFAULT_ENGINE
    from dicompiler.ir.program import TensorSpec

    records = []
    has_engines = any(device.engine != DEFAULT_ENGINE for device in program.devices)
    for i, device in enumerate(program.devices):
        segments = [segment for role in program.roles for segment in role.devices[i].segments]
        weights = {tensor.name: tensor for segment in segments for tensor in segment.model.graph.initializer}
        transfers = [transfer for role in program.replica_roles for transfer in role.transfers]
        sent = [transfer for transfer in transfers if transfer.sender == device.device]
        received = [transfer for transfer in transfers if transfer.receiver == device.device]
        records.append(
            {
                "device": device.device,
                "segments": len(segments),
                "weights": sum(TensorSpec(n, t.data_type, tuple(t.dims)).nbytes for n, t in weights.items()),
                "transfers": len(sent),
                "sent": sum(transfer.value.nbytes for transfer in sent),
                "received": sum(transfer.value.nbytes for transfer in received),
                **({"engine": device.engine} if has_engines else {}),
            }
        )
    return records


def _prediction_document(result: PipelineState) -> dict[str, Any]:
    both = {"metrics": result.metrics, "single_device": result.single_device_metrics}
    return {name: None if metrics is None else dataclasses.asdict(metrics) for name, metrics in both.items()}


def _show_prediction(result: PipelineState) -> None:
    if result.metrics is None or result.single_device_metrics is None:
        return
    plan, single = _format_metrics(result.metrics), _format_metrics(result.single_device_metrics)
    rows = [(name, plan[name], single[name]) for name in plan]
    print_table(("predicted per frame", "this plan", "one device"), rows, right=(1, 2))
    if result.plan is not None:
        show_wire(result.plan)


def show_wire(plan: Plan) -> None:
    """Print the element types in which tensors are sent, if any differs from the tensor's own type."""
    if plan.wire_format.dtypes:
        text = wrap_text(f"tensors are sent between devices as {plan.wire_format}")
        click.echo(f"\n{text}")


def show_idle_replicas(plan: Plan, frames: int, in_flight: int) -> None:
    """Print a hint if a stream has at most half as many frames in flight as the plan has replicas."""
    replicas = len(plan.replica_roles)
    if frames >= replicas and 2 * in_flight <= replicas:
        limit = f"{in_flight} frame{'' if in_flight == 1 else 's'} in flight"
        text = f"replicas: at most {in_flight} of {replicas} compute at the same time, because of the limit of {limit}"
        print_entries([text])


def _format_metrics(metrics: Metrics) -> dict[str, str]:
    from dicompiler.ir.metrics import MEMORY_LABEL

    return {
        "frame": format_seconds(metrics.frame.total_s),
        "in the cluster (latency)": format_seconds(metrics.frame.cluster_s),
        "for input and result": format_seconds(metrics.frame.input_output_s),
        "frame period": format_seconds(metrics.period_s),
        **({"energy": f"{format_number(metrics.energy_j)} J"} if metrics.energy_j else {}),
        MEMORY_LABEL: format_bytes(metrics.memory),
        "sent between devices": f"{metrics.total_bytes} bytes",
    }


def show_simulation(
    result: PipelineState,
    simulation: SimulationResult,
    as_json: bool,
    intervals: Sequence[StreamInterval] = (),
    in_flight: int = 1,
) -> None:
    """Print the work of each device in one frame, and the times of a stream of frames.

    Args:
        result: State of the pipeline, with the plan and its metrics.
        simulation: The simulated stream.
        as_json: True to print JSON.
        intervals: Intervals of the stream between failures of devices; empty without failures.
        in_flight: Largest number of frames in flight.
    """
    metrics = result.metrics
    assert metrics is not None and result.program is not None
    frames = len(simulation.frames)
    if as_json:
        stream = {"frames": simulation.frames, "period_s": simulation.period_s, "latency_s": metrics.latency_s}
        stream["queue_wait_s"] = simulation.queued_s
        links = [{"from": a, "to": b, "bytes": count} for (a, b), count in _link_bytes(result).items()]
        pieces = {"intervals": intervals_document(intervals)} if intervals else {}
        print_json(
            {
                **_prediction_document(result),
                **failures_document(result.failure_metrics),
                "stream": stream,
                **pieces,
                "links": links,
            }
        )
        return
    assert result.platform is not None
    show_device_shares(metrics, result.platform)
    energy = f", {format_number(metrics.energy_j)} J" if metrics.energy_j else ""
    click.echo(f"\n{wrap_text(f'one frame: {metrics.frame}{energy}')}")
    if intervals:
        show_intervals(intervals)
        click.echo()
    elif frames > 1:
        text = (
            f"a stream of {frames} frames: one every {format_seconds(simulation.period_s)}, "
            f"{format_number(1 / simulation.period_s)} frames per second"
        )
        click.echo(wrap_text(text))
        if abs(simulation.period_s - metrics.period_s) > MIN_NAMED_DIFFERENCE * metrics.period_s:
            text = (
                f"frame period of compile: {format_seconds(metrics.period_s)}, the sum of the work of the busiest "
                "device or link in one frame; in this stream, frames also overlap and wait for each other"
            )
            click.echo(wrap_text(text))
        frames_s = [end - start for start, end in simulation.frames]
        show_queueing(frames_s, simulation.queued_s, in_flight, metrics.latency_s, len(result.program.replica_roles))
        if result.plan is not None:
            show_idle_replicas(result.plan, frames, in_flight)
    busiest = sorted(_link_bytes(result).items(), key=lambda entry: -entry[1])[:5]
    for (sender, receiver), count in busiest:
        click.echo(f"{sender} → {receiver}: {count} bytes per frame")
    if result.plan is not None:
        show_wire(result.plan)


def show_comparison(comparison: Comparison, splits: Sequence[SplitReason]) -> None:
    """Print a row for each strategy, the lower bound, and the best plan's device times and bottleneck.

    Args:
        comparison: The comparison.
        splits: Conditions under which several devices are better, if the best plan uses one device.
    """
    has_energy = any(row.metrics is not None and row.metrics.energy_j for row in comparison.results)
    energy = ("energy J",) if has_energy else ()
    headers = ("strategy", "latency ms", "frames/s", *energy, "memory MB", "MB sent", "speedup", "search s")
    lines = [_comparison_row(row, comparison, has_energy) for row in comparison.results]
    if len(objective_terms(comparison.problem.objective)) > 1:
        headers = (*headers, "weighted sum")
        values = [
            "-" if row.metrics is None else format_number(comparison.objective_value(row)) for row in comparison.results
        ]
        lines = [(*line, value) for line, value in zip(lines, values, strict=True)]
    if any(row.failures for row in comparison.results):
        headers = (*headers, "worst ms", "failed")
        lines = [
            (*line, *worst_failure_columns(row.worst_failure))
            for line, row in zip(lines, comparison.results, strict=True)
        ]
    print_table(headers, lines, right=range(1, len(headers)))
    for row in comparison.results:
        if row.error:
            prefix = f"{row.strategy}: "
            click.echo(wrap_text(f"{prefix}{row.error.removeprefix(prefix)}"))
    if engines := comparison.problem.platform.engines:
        from dicompiler.driver.compile_result import describe_engines

        text = wrap_text(f"engines: {describe_engines(engines)}")
        click.echo(f"\n{text}")
    _show_best(comparison, splits)


def _comparison_row(row: StrategyResult, comparison: Comparison, has_energy: bool) -> tuple[str, ...]:
    metrics = row.metrics
    if metrics is None:
        return (row.strategy, *["-"] * (5 + has_energy), f"{row.search_s:.1f}")
    return (
        row.strategy,
        f"{1000 * metrics.latency_s:.1f}",
        format_number(1 / metrics.period_s, 3),
        *([format_number(metrics.energy_j, 3)] if has_energy else []),
        f"{metrics.memory / 1e6:.1f}",
        f"{metrics.total_bytes / 1e6:.2f}",
        f"{metrics.speedup_over(comparison.single_device, comparison.problem.objective):.2f}×",
        f"{row.search_s:.1f}",
    )


def _show_best(comparison: Comparison, splits: Sequence[SplitReason]) -> None:
    from dicompiler.analysis.explain import suggest_split

    best, objective = comparison.best, comparison.problem.objective
    if best is None or best.metrics is None:
        return
    if comparison.lower_bound is not None:
        least = format_objective(objective, comparison.lower_bound)
        ratio = comparison.objective_value(best) / comparison.lower_bound
        text = (
            f"no plan's {describe_objective(objective)} is below {least} (cost model "
            f"{comparison.problem.cost_model.name}): the best is {ratio:.2f} times that"
        )
        click.echo(f"\n{wrap_text(text)}")
    text = f"the best by {objective}, {best.strategy}: {comparison.bottleneck}"
    click.echo(f"\n{wrap_text(text)}")
    click.echo(wrap_text(f"why not better: {comparison.limit_reason}"))
    click.echo(f"{wrap_text(f'a frame takes {best.metrics.frame}')}\n")
    show_device_shares(best.metrics, comparison.problem.platform)
    if warning := best.metrics.describe_implausible_gain(comparison.single_device, objective):
        click.echo(wrap_text(f"warning: {warning}"))
    if len(best.metrics.devices) == 1:
        hint = f": {suggest_split(splits)}" if splits else ""
        click.echo(wrap_text(f"no plan of these strategies is better than a single device{hint}"))


def show_device_shares(metrics: Metrics, platform: Platform) -> None:
    """Print the milliseconds that each device computes, sends, receives and waits in a frame."""
    headers = (
        "device",
        "compute ms",
        "messages ms",
        "link ms",
        "wait ms",
        "waits for",
        "MB",
        "bytes sent",
    )
    rows = []
    for device in metrics.devices:
        # A full-duplex link is as slow as its busier direction.
        is_full_duplex = platform.network.kind == "switch"
        link_s = max(device.send_link_s, device.receive_link_s) if is_full_duplex else device.link_s
        cause = max(device.waits, key=lambda peer: device.waits[peer], default="")
        rows.append(
            (
                device.device,
                f"{1000 * device.compute_s:.1f}",
                f"{1000 * device.runtime_s:.1f}",
                f"{1000 * link_s:.1f}",
                f"{1000 * device.wait_s:.1f}",
                cause or "-",
                f"{device.memory / 1e6:.1f}",
                str(device.sent),
            )
        )
    print_table(headers, rows, right=(1, 2, 3, 4, 6, 7))


def _link_bytes(result: PipelineState) -> dict[tuple[str, str], int]:
    """Return the bytes that each (sender, receiver) pair sends per frame.

    If the plan has replicas (copies on other devices, which compute frames in turn), return the mean, rounded up.
    """
    assert result.program is not None
    totals: dict[tuple[str, str], int] = {}
    for transfer in (transfer for role in result.program.replica_roles for transfer in role.transfers):
        key = (transfer.sender, transfer.receiver)
        totals[key] = totals.get(key, 0) + transfer.value.nbytes
    count = len(result.program.replica_roles)
    return {key: -(-total // count) for key, total in totals.items()}


def _describe_outcome(check: Check) -> str:
    return ("ok" if check.applies else "excluded") if check.passed else "FAILED"


def show_verification(verification: Verification, directory: Path, as_json: bool) -> None:
    """Print every check.

    Raises:
        DicompilerError: A check failed.
    """
    checks = verification.checks
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        print_table(
            ("check", "", ""), [(check.name, _describe_outcome(check), check.detail) for check in checks], wrap=2
        )
    require_passed(checks, str(directory))


def require_passed(checks: Sequence[Check], place: str) -> None:
    """Raise DicompilerError if a check failed. `place` is the beginning of the message."""
    for check in checks:
        if not check.passed:
            raise DicompilerError(f"{place}: check {check.name} failed: {check.detail}")


FAILURE_HEADERS = ("failed", "latency ms", "frame period ms", "fullest host MB", "extra weights MB")


def failures_document(failures: Sequence[FailureMetrics]) -> dict[str, Any]:
    """Return {"failures": metrics of each failure plan}; an empty object if there are none.

    A failure plan is the plan for the remaining devices after a failure.
    """
    return {"failures": [dataclasses.asdict(entry) for entry in failures]} if failures else {}


def worst_failure_columns(worst: FailureMetrics | None) -> tuple[str, str]:
    """Return two table cells: the longest latency after a failure, and the devices that fail then."""
    return ("-", "-") if worst is None else (f"{1000 * worst.metrics.latency_s:.1f}", ", ".join(worst.failed))


def show_failure_plans(result: PipelineState) -> None:
    """Print the metrics of each failure plan (plan for the remaining devices), and the memory for all of them."""
    if not result.failure_metrics or result.metrics is None:
        return
    rows = [
        (
            ", ".join(failure.failed) or "none",
            format_number(1000 * failure.metrics.latency_s),
            format_number(1000 * failure.metrics.period_s),
            format_number(failure.metrics.memory / 1e6),
            format_number(failure.extra_weight_bytes / 1e6) if failure.failed else "",
        )
        for failure in result.failure_metrics
    ]
    click.echo()
    print_table(FAILURE_HEADERS, rows, right=range(1, len(FAILURE_HEADERS)))
    without, total = (metrics.memory / 1e6 for metrics in (result.failure_metrics[0].metrics, result.metrics))
    needs = f"{format_number(total)} MB instead of {format_number(without)} MB"
    click.echo(f"\n{wrap_text(f'to tolerate these failures the fullest host needs {needs}')}")


def intervals_document(intervals: Sequence[StreamInterval]) -> list[dict[str, Any]]:
    """Return the intervals of a stream as JSON. A new interval begins when a device fails or returns."""
    return [
        {
            "down": interval.down,
            "since_s": interval.changed_at,
            "start_s": interval.resumed_at,
            "frames": len(interval.frames),
            "period_s": interval.period_s,
            "interruption_s": interval.interruption_s if i else None,
            "replayed_frames": len(intervals[i - 1].replayed) if i else 0,
        }
        for i, interval in enumerate(intervals)
    ]


def show_intervals(intervals: Sequence[StreamInterval]) -> None:
    headers = ("from s", "down", "frames", "frame period ms", "replayed", "interruption s")
    rows = [
        (
            format_number(entry["since_s"]),
            ", ".join(entry["down"]) or "none",
            str(entry["frames"]),
            "-" if entry["period_s"] is None else format_number(1000 * entry["period_s"]),
            str(entry["replayed_frames"]),
            "-" if entry["interruption_s"] is None else format_number(entry["interruption_s"]),
        )
        for entry in intervals_document(intervals)
    ]
    click.echo()
    print_table(headers, rows, right=(0, 2, 3, 4, 5))
