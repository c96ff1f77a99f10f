"""Calibration: correct the rates and links of a platform, or the times of a profile, by measured runs of an artifact.

Compute rates follow from the measured seconds of segments (submodels that a device runs one after another). Bandwidths
and latencies are fitted to the pauses between segments, which need no common clock of the devices.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dicompiler.analysis.prediction_error import (
    find_wrong_bytes,
    measured_timing,
    on_emulation_host,
    predict_timing,
    segment_calls,
    segment_seconds,
    with_segment_seconds,
)
from dicompiler.base.errors import DicompilerError
from dicompiler.base.option_specs import Spec
from dicompiler.base.schema import load_json
from dicompiler.base.units import format_seconds
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.workload import Workload, build_workload
from dicompiler.driver import run_log
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.problem_setup import on_platform
from dicompiler.ir.cluster import Device, engine_name
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.measure.fit_links import NetworkParameter, find_pauses, fit_links, round_to_4_digits
from dicompiler.search.problem import Problem
from dicompiler.target.manifest import load_artifact
from dicompiler.target.target_base import Target

MAX_RATE_CORRECTIONS = 50
"""Largest number of corrections in `fit_rates`."""
MIN_FRAMES = 3
MAX_BUSY_TIME_RATIO = 2.0
"""The machine counts as busy if two times that should be similar differ by more than this factor."""
MAX_UNEXPLAINED_SHARE = 0.25
"""A warning is given if measured and simulated waits of a device differ by more than this fraction of a frame."""
_TIME_KEYS = ("median_s", "min_s", "max_s")
CALIBRATED_NOTE = " Rates and links corrected by 'dicompiler calibrate'."


@dataclass(frozen=True)
class CalibratedValue:
    """A number of the platform or profile, before and after the calibration.

    Attributes:
        name: Name for messages, such as "pi01 rate".
        unit: "FLOP/s", "bit/s", "s", or empty for a factor.
        before: The number before the calibration.
        after: The corrected number; None if the runs do not determine it.
        reason: Reason why the runs do not determine it.
    """

    name: str
    unit: str
    before: float
    after: float | None
    reason: str = ""


@dataclass(frozen=True)
class CalibratedFrame:
    """Measured and simulated seconds of a frame of one run, without the time until the inputs had arrived.

    Attributes:
        log: Path of the run log.
        measured_s: Seconds measured in the run.
        before_s: Seconds simulated before the calibration.
        after_s: Seconds simulated with the corrected platform or profile.
    """

    log: str
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        platform: The corrected platform; rates and links are unchanged if a profile was corrected instead.
        document: The corrected profile as JSON; None if the platform was corrected.
        values: The numbers before and after the calibration.
        frames: Seconds of a frame of each run.
        warnings: Signs that a machine was busy during a run.
    """

    platform: Platform
    document: Mapping[str, Any] | None
    values: tuple[CalibratedValue, ...]
    frames: tuple[CalibratedFrame, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class LoggedRun:
    """The log of a run, and the program that was run.

    Attributes:
        path: Path of the log, for messages.
        log: Content of the log.
        program: The program that was run.
    """

    path: str
    log: Mapping[str, Any]
    program: Program

    @property
    def frame_count(self) -> int:
        return len(self.log["frames_s"])

    @property
    def is_streamed(self) -> bool:
        return bool(self.log["in_flight"] > 1)

    @property
    def last_role(self) -> int:
        return (self.frame_count - 1) % len(self.program.replica_roles)

    @cached_property
    def last_frame_spans(self) -> Mapping[str, Sequence[tuple[float, float]]] | None:
        """Start and end of each segment (submodel) in the last frame, by device name; None if the log lacks a segment.

        The times are in seconds since the start of the frame.
        """
        spans_by_device = {}
        for i, entry in enumerate(self.log["devices"]):
            counts = [len(role.devices[i].segments) for role in self.program.roles]
            first, count = sum(counts[: self.last_role]), counts[self.last_role]
            spans = {
                span["index"] - first: (span["start"], span["end"])
                for span in entry["timeline"]
                if span["kind"] == "run" and span["frame"] == self.frame_count - 1
            }
            if sorted(spans) != list(range(count)):
                return None
            spans_by_device[entry["device"]] = [spans[index] for index in range(count)]
        return spans_by_device

    @property
    def input_arrival_s(self) -> float:
        """Seconds from the start of the last frame until all source devices had received its inputs."""
        spans = [span for entry in self.log["devices"] for span in entry["timeline"]]
        input_wait = ("wait", -1, self.frame_count - 1)
        ends = [span["end"] for span in spans if (span["kind"], span["index"], span["frame"]) == input_wait]
        return max(ends, default=0.0)


@dataclass(frozen=True)
class CalibrationCase:
    """The artifact of the runs, opened for their calibration.

    Attributes:
        program: The program of the artifact.
        routing: The regions of tensors that devices exchange.
        problem: The problem that was compiled, with the platform before the calibration.
        target: The target that wrote the artifact.
        emulation_host: Runtime costs and number of processors of the host that emulated the boards; None if no boards
            were emulated.
    """

    program: Program
    routing: Routing
    problem: Problem
    target: Target
    emulation_host: tuple[RuntimeCosts, int] | None

    def with_platform(self, platform: Platform) -> Problem:
        if self.emulation_host:
            costs, processors = self.emulation_host
            return on_emulation_host(replace(self.problem, platform=platform), costs, self.program, processors)
        return on_platform(self.problem, platform, self.target)

    def make_workload(self, problem: Problem, with_runtime: bool = True) -> Workload:
        """Return the work of one frame on every device.

        Args:
            problem: The problem with the platform.
            with_runtime: True to include the runtime's time for messages and calls.
        """
        costs = problem.runtime_costs if with_runtime else {}
        return build_workload(self.program, self.routing, problem.platform, problem.cost_model, costs)


def calibrate(
    logs: Sequence[str | Path],
    artifact: str | Path | None = None,
    profile: str | Path | None = None,
    force: bool = False,
    platform: Platform | None = None,
) -> Calibration:
    """Correct the rates and links of a platform, or the times of a profile, by measured runs.

    Device rates are corrected by the measured seconds of computing, bandwidths and latencies by the pauses between
    them.

    Args:
        logs: Run logs of one artifact.
        artifact: The artifact. Default: the one that the first log names.
        profile: A profile to correct instead of the platform: all of its times are multiplied by one factor.
        force: True to accept runs on a busy machine.
        platform: The platform to correct. Default: the artifact's.

    Raises:
        DicompilerError: A log belongs to another artifact or platform, has too few frames, or shows a busy machine.
    """
    directory = Path(artifact) if artifact is not None else _artifact_directory(Path(logs[0]))
    profile_spec = Spec.from_mapping("profile", {"file": str(profile), "others": "true", "force": str(force).lower()})
    cost = "analytic" if profile is None else str(profile_spec)
    compilation, target, problem = reopen_artifact(directory, cost, platform)
    assert compilation.program is not None and compilation.routing is not None
    runs = [_load_run(Path(log), directory, compilation.program, problem.platform) for log in logs]
    if len({run.log["location"] for run in runs}) > 1:
        raise DicompilerError(
            f"{runs[0].path}: only some of the runs are emulated: use either emulated runs or runs on boards"
        )
    host = run_log.emulation_host(runs[0].log, target)
    case = CalibrationCase(compilation.program, compilation.routing, problem, target, host)
    return _calibrate_runs(case, runs, None if profile is None else Path(profile), force)


def _artifact_directory(log: Path) -> Path:
    document = run_log.read_log(log)
    if "artifact_directory" not in document:
        raise DicompilerError(f"{log}: artifact_directory is missing: run the artifact again with --log")
    return log.parent / str(document["artifact_directory"])


def _load_run(path: Path, directory: Path, program: Program, platform: Platform) -> LoggedRun:
    """Return a run log; raise DicompilerError if the run cannot be used for a calibration."""
    log = run_log.load_log(path, directory, load_artifact(directory))
    run, digest = LoggedRun(str(path), log, program), run_log.platform_digest(platform)
    if log.get("platform_digest", digest) != digest:
        raise DicompilerError(
            f"{path}: the run emulated another platform than {directory} was compiled for: emulate the platform "
            "of the artifact"
        )
    if log.get("events"):
        raise DicompilerError(
            f"{path}: a device failed or returned in this run, or another plan was used: repeat the run"
        )
    hosts = {platform.host_of[device.device] for device in program.devices}
    if log["location"] == "local" and len(hosts) > 1:
        raise DicompilerError(
            f"{path}: all devices ran on one host, but the platform has {len(hosts)} hosts: run the artifact on the "
            "boards (dicompiler deploy), or emulate them (dicompiler emulate)"
        )
    if run.frame_count < MIN_FRAMES:
        raise DicompilerError(
            f"{path}: {run.frame_count} frames are too few: run at least {MIN_FRAMES} frames, better 20 (--frames)"
        )
    for sender, receiver, expected, actual in find_wrong_bytes(log, program):
        raise DicompilerError(
            f"{path}: {sender} → {receiver}: {actual} bytes sent, {expected} predicted: run the artifact again"
        )
    return run


def _calibrate_runs(case: CalibrationCase, runs: Sequence[LoggedRun], profile: Path | None, force: bool) -> Calibration:
    warnings = [warning for run in runs for warning in _find_disturbances(run)]
    platform, document, factor = case.problem.platform, None, 1.0
    if profile is None:
        platform, values = _correct_rates(case, runs)
        platform, network_values, network_warnings = _correct_links(case, runs, platform)
        values += network_values
        warnings += network_warnings
    else:
        factor, document = _scale_profile(case, runs, profile)
        values = [CalibratedValue(f"seconds of {profile}", "", 1.0, factor)]
    if warnings and not force:
        raise DicompilerError(f"{warnings[0]}: repeat the run on an idle machine, or use this run anyway (--force)")
    frames = tuple(_compare_frame(case, run, platform, factor) for run in runs)
    description = (platform.description.removesuffix(CALIBRATED_NOTE) + CALIBRATED_NOTE).strip()
    return Calibration(replace(platform, description=description), document, tuple(values), frames, tuple(warnings))


def _find_disturbances(run: LoggedRun) -> Iterator[str]:
    """Yield a message for each sign that a machine was busy during a run.

    The signs are frames of very different durations, and segments (submodels that a device runs) that took a very
    different time in the last frame than in the other frames.
    """
    replica_count = len(run.program.replica_roles)
    for replica in range(0 if run.is_streamed else replica_count):
        frames_s = run.log["frames_s"][1 + replica :: replica_count]
        if frames_s and (median := statistics.median(frames_s)) > MAX_BUSY_TIME_RATIO * min(frames_s):
            shortest, typical = format_seconds(min(frames_s)), format_seconds(median)
            yield f"{run.path}: the machine was busy: a frame takes {shortest} to {typical} (the median)"
            break
    if run.last_frame_spans is None:
        return
    for i, entry in enumerate(run.log["devices"]):
        calls = segment_calls(run.program, i, run.frame_count)
        first = sum(len(role.devices[i].segments) for role in run.program.roles[: run.last_role])
        for index, (start, end) in enumerate(run.last_frame_spans[entry["device"]], first):
            last_s, count = end - start, calls[index]
            others_s = (entry["segments_s"][index] - last_s) / (count - 1) if count > 1 else last_s
            shorter, longer = sorted((others_s, last_s))
            if longer > MAX_BUSY_TIME_RATIO * shorter and longer * count > 0.1 * entry["compute_s"]:
                times = f"{format_seconds(last_s)} in the last frame, {format_seconds(others_s)} in others"
                yield f"{run.path}: the machine was busy: segment {index} of {entry['device']} takes {times}"


def _predicted_compute_s(case: CalibrationCase, runs: Sequence[LoggedRun], workload: Workload, device: int) -> float:
    seconds = segment_seconds(workload)[workload.devices[device].device]
    total = 0.0
    for run in runs:
        # Segments of failure plans are at the end of `calls`. These were never called, so zip() omits them.
        calls = segment_calls(case.program, device, run.frame_count)
        total += sum(segment_s * count for segment_s, count in zip(seconds, calls, strict=False))
    return total


def _correct_rates(case: CalibrationCase, runs: Sequence[LoggedRun]) -> tuple[Platform, list[CalibratedValue]]:
    """Return the platform with corrected device rates, and each rate before and after the correction."""
    start = case.problem.platform
    names = [device.device for device in case.program.devices]
    measured_s = {name: sum(run.log["devices"][i]["compute_s"] for run in runs) for i, name in enumerate(names)}

    def predict(platform: Platform) -> Mapping[str, float]:
        workload = case.make_workload(case.with_platform(platform))
        return {name: _predicted_compute_s(case, runs, workload, i) for i, name in enumerate(names)}

    platform, factors = fit_rates(start, measured_s, predict)
    values = []
    for name in names:
        device, reason = start.device(name), ""
        if not factors[name]:
            reason = "it computes nothing in this plan"
        elif abs(factors[name] - 1) > 0.01:
            reason = "the predicted time of copies and weights alone exceeds its whole computing time"
            devices = tuple(device if other.name == name else other for other in platform.devices)
            platform = replace(platform, devices=devices)
        rate = None if reason else platform.device(name).rate
        values.append(CalibratedValue(f"{name} rate", "FLOP/s", device.rate, rate, reason))
    return platform, values


def fit_rates(
    platform: Platform, measured_s: Mapping[str, float], predict: Callable[[Platform], Mapping[str, float]]
) -> tuple[Platform, Mapping[str, float]]:
    """Correct the rates of devices until the predicted seconds of computing equal the measured ones.

    Args:
        platform: The platform to correct.
        measured_s: Measured seconds by device name. Devices with 0 seconds keep their rates.
        predict: Function that returns the predicted seconds by device name for a platform.

    Returns:
        The corrected platform, and the last factors (predicted / measured seconds) by device name; 0 without any
        seconds.
    """
    factors: dict[str, float] = {}
    # One correction is not enough, because predicted times of copies are not inversely proportional to the rate.
    for _ in range(MAX_RATE_CORRECTIONS):
        predicted_s = predict(platform)
        factors = {
            name: predicted_s.get(name, 0.0) / seconds if seconds else 0.0 for name, seconds in measured_s.items()
        }
        changes = {name: factor for name, factor in factors.items() if factor}
        platform = scale_rates(platform, changes)
        if all(abs(factor - 1) < 1e-3 for factor in changes.values()):
            break
    return platform, factors


def scale_rates(platform: Platform, factors: Mapping[str, float]) -> Platform:
    """Return the platform with the compute rates of some devices multiplied by a factor.

    Args:
        platform: The platform with the old rates.
        factors: Factors by device name; other devices keep their rates.
    """
    devices = (_scale_device(device, factors.get(device.name, 1.0)) for device in platform.devices)
    return replace(platform, devices=tuple(devices))


def _scale_device(device: Device, factor: float) -> Device:
    engine_rates = tuple(
        replace(entry, rate=round_to_4_digits(entry.rate * factor))
        if entry.engine == engine_name(device.engine)
        else entry
        for entry in device.engine_rates
    )
    return replace(device, rate=round_to_4_digits(device.rate * factor), engine_rates=engine_rates)


def _correct_links(
    case: CalibrationCase, runs: Sequence[LoggedRun], platform: Platform
) -> tuple[Platform, list[CalibratedValue], list[str]]:
    """Return the platform with fitted links, the old and new values, and warnings about unexplained waits.

    A wait is unexplained if the simulation with the fitted links does not show it.
    """
    spans_of_runs = [(run, run.last_frame_spans) for run in runs if not run.is_streamed]
    usable = [(run, spans) for run, spans in spans_of_runs if spans is not None]
    parameters = NetworkParameter.of_platform(platform)
    if not usable or not case.program.all_transfers:
        reason = "no run with one frame in flight has the times of all segments"
        if not case.program.all_transfers:
            reason = "nothing is sent"
        unchanged = [
            CalibratedValue(parameter.name, parameter.unit, parameter.value(platform), None, reason)
            for parameter in parameters
        ]
        return platform, unchanged, []
    workload = case.make_workload(case.with_platform(platform))
    observed = [find_pauses(spans, run.input_arrival_s) for run, spans in usable]
    measured = [_with_measured_seconds(workload.replicas[run.last_role], spans) for run, spans in usable]
    typical = []
    if len(workload.replicas) == 1:
        for run, _ in usable:
            typical.append((workload, measured_timing(run.log, case.program).frame_s - run.input_arrival_s))
    fitted, reasons, unexplained = fit_links(platform, parameters, measured, observed, typical)
    corrected = []
    for parameter in parameters:
        before, reason = parameter.value(platform), reasons.get(parameter.name, "")
        corrected.append(
            CalibratedValue(parameter.name, parameter.unit, before, None if reason else parameter.value(fitted), reason)
        )
    warnings = []
    for (run, _), waits_s in zip(usable, unexplained, strict=True):
        frame_s = measured_timing(run.log, case.program).frame_s
        worst = max(waits_s, key=lambda name: waits_s[name])
        if waits_s[worst] > MAX_UNEXPLAINED_SHARE * frame_s:
            waits = f"unexplained waits: {format_seconds(waits_s[worst])} of {worst} in a frame of"
            warnings.append(f"{run.path}: {waits} {format_seconds(frame_s)}")
    return fitted, corrected, warnings


def _with_measured_seconds(workload: Workload, spans: Mapping[str, Sequence[tuple[float, float]]]) -> Workload:
    seconds = {device: [end - start for start, end in segments] for device, segments in spans.items()}
    return with_segment_seconds(workload, seconds)


def _scale_profile(case: CalibrationCase, runs: Sequence[LoggedRun], profile: Path) -> tuple[float, Mapping[str, Any]]:
    """Correct the times of a profile; return the factor and the corrected profile as JSON.

    The factor is the ratio of measured to profiled seconds, without copies and cold caches, which profiles do not
    contain.
    """
    document = load_json(profile)
    problem = case.with_platform(case.problem.platform)
    names = [device.device for device in case.program.devices]
    devices = [i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, document["device"])]
    measured_s = sum(run.log["devices"][i]["compute_s"] for run in runs for i in devices)
    bare, complete = case.make_workload(problem, with_runtime=False), case.make_workload(problem)
    bare_s = sum(_predicted_compute_s(case, runs, bare, i) for i in devices)
    extra_s = sum(_predicted_compute_s(case, runs, complete, i) for i in devices) - bare_s
    if not bare_s or measured_s <= extra_s:
        raise DicompilerError(
            f"{profile}: the profile is for devices named {document['device']}, and none of them computed in these "
            "runs: use runs of a plan with such a device"
        )
    factor = round_to_4_digits((measured_s - extra_s) / bare_s)
    for measurements in (document, *document.get("engines", ())):
        _scale_times(measurements, factor)
    return factor, document


def _scale_times(measurements: dict[str, Any], factor: float) -> None:
    """Multiply all times of one engine in a profile by a factor."""
    pieces = [piece for layer in measurements["layers"] for piece in layer["measurements"]]
    entries = [
        (piece, key) for piece in (*pieces, *measurements.get("transfers", ())) for key in _TIME_KEYS if key in piece
    ]
    if measurements.get("whole_model_s") is not None:
        entries.append((measurements, "whole_model_s"))
    for entry, key in entries:
        # Each time includes the seconds of an empty call, which are not multiplied.
        call_s = min(measurements["call_s"], entry[key])
        entry[key] = round(call_s + (entry[key] - call_s) * factor, 9)
    for key in ("weight_byte_s", "read_byte_s"):
        if key in measurements:
            measurements[key] *= factor


def _compare_frame(case: CalibrationCase, run: LoggedRun, platform: Platform, profile_factor: float) -> CalibratedFrame:
    """Return the seconds of a frame: measured, and simulated before and after the calibration.

    Args:
        case: The artifact, with the platform before the calibration.
        run: The log of the run.
        platform: The corrected platform.
        profile_factor: Factor of the profile's times; 1 if the platform was corrected instead.
    """
    in_flight = run.log["in_flight"]
    before, after = case.with_platform(case.problem.platform), case.with_platform(platform)
    old_workload, new_workload = case.make_workload(before), case.make_workload(after)
    if profile_factor != 1.0:
        new_workload = _scale_compute(new_workload, case.make_workload(after, with_runtime=False), profile_factor)
    measured_s = measured_timing(run.log, case.program).frame_s - (0.0 if run.is_streamed else run.input_arrival_s)
    before_s = predict_timing(old_workload, before.platform, run.frame_count, in_flight).frame_s
    after_s = predict_timing(new_workload, after.platform, run.frame_count, in_flight).frame_s
    return CalibratedFrame(run.path, measured_s, before_s, after_s)


def _scale_compute(workload: Workload, bare: Workload, factor: float) -> Workload:
    """Return a workload in which only the computing times are multiplied by `factor`.

    `bare` is the same workload without runtime costs, i.e. with the computing times only.
    """
    replicas = []
    for replica, bare_replica in zip(workload.replicas, bare.replicas, strict=True):
        devices = []
        for device, bare_device in zip(replica.devices, bare_replica.devices, strict=True):
            jobs = tuple(
                replace(job, seconds=job.seconds + (factor - 1) * bare_job.seconds)
                for job, bare_job in zip(device.jobs, bare_device.jobs, strict=True)
            )
            devices.append(replace(device, jobs=jobs))
        replicas.append(replace(replica, devices=tuple(devices)))
    first, *others = replicas
    return replace(first, other_replicas=tuple(others))
