"""Calibrating: a platform's or a profile's figures are corrected by what runs of one artifact measured.

logs of runs + artifact → Calibration.   Rates follow from the seconds of segments; lines from the pauses between them,
which need no clock that all devices share: the simulator plays the segments as they were measured, and those
bandwidths and that latency are taken with which it makes the pauses that were seen.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Iterator, Mapping, Sequence
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
from dicompiler.driver.prepare import runtime_costs
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.measure.fit_links import NetworkFigure, find_pauses, fit_links
from dicompiler.search.problem import Problem
from dicompiler.target.integrity import load_artifact
from dicompiler.target.target_base import Target

MIN_FRAMES = 3
"""So many frames a run must have at least."""
MAX_SPREAD_FACTOR = 2.0
"""How many times as long as before a segment, or as the shortest a median frame, may take in one run."""
MAX_UNEXPLAINED_SHARE = 0.25
"""What share of a frame may be left that neither computing nor messages explain."""
_TIME_KEYS = ("seconds", "low", "high")
CALIBRATED_NOTE = " Rates and lines corrected by 'dicompiler calibrate'."


@dataclass(frozen=True)
class Figure:
    """A figure that was corrected. unit: FLOP/s, bit/s, s, or "" for a factor; after: None where it could not be told,
    and why says so."""

    name: str
    unit: str
    before: float
    after: float | None
    reason: str = ""


@dataclass(frozen=True)
class CalibratedFrame:
    """A frame of a run in seconds, without the time until its inputs came: as measured, and as simulated with the
    figures before and after."""

    log: str
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True)
class Calibration:
    """document: the profile that was corrected, where one was. doubts: what speaks against the runs; nothing where they
    were clean."""

    platform: Platform
    document: Mapping[str, Any] | None
    figures: tuple[Figure, ...]
    frames: tuple[CalibratedFrame, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class LoggedRun:
    """One log. place: its file; program: what was run; role: of its last frame; streamed: whether frames were on their
    way at once."""

    path: str
    log: Mapping[str, Any]
    program: Program

    @property
    def frames(self) -> int:
        return len(self.log["frames_s"])

    @property
    def is_streamed(self) -> bool:
        return bool(self.log["in_flight"] > 1)

    @property
    def last_role(self) -> int:
        return (self.frames - 1) % len(self.program.replica_roles)

    @cached_property
    def last_frame_spans(self) -> Mapping[str, Sequence[tuple[float, float]]] | None:
        """Device → (start, end) of each of its segments in the last frame; None where the log does not tell."""
        found = {}
        for i, entry in enumerate(self.log["devices"]):
            counts = [len(role.devices[i].segments) for role in self.program.roles]
            first, count = sum(counts[: self.last_role]), counts[self.last_role]
            spans = {
                span["index"] - first: (span["start"], span["end"])
                for span in entry["timeline"]
                if span["kind"] == "run" and span["frame"] == self.frames - 1
            }
            if sorted(spans) != list(range(count)):
                return None
            found[entry["device"]] = [spans[k] for k in range(count)]
        return found

    @property
    def input_arrival_s(self) -> float:
        """Until the last frame's inputs had come from whoever gives the frames."""
        return max(
            (span["end"] for entry in self.log["devices"] for span in entry["timeline"]
             if (span["kind"], span["index"], span["frame"]) == ("wait", -1, self.frames - 1)),
            default=0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class CalibrationCase:
    """What was run: `problem` with the artifact's platform. emulated: of the host that emulated its boards, see
    `run_log.emulated_by`."""

    program: Program
    routing: Routing
    problem: Problem
    target: Target
    emulation_host: tuple[RuntimeCosts, int] | None

    def with_platform(self, platform: Platform) -> Problem:
        """The problem with other figures."""
        if self.emulation_host:
            costs, processors = self.emulation_host
            return on_emulation_host(replace(self.problem, platform=platform), costs, self.program, processors)
        runtime = runtime_costs(platform, self.problem.cost_model, self.target)
        return replace(self.problem, platform=platform, runtime_costs=runtime)

    def make_workload(self, problem: Problem, free: bool = False) -> Workload:
        """Of the program; `free`: without what its runtime takes."""
        runtime = {} if free else problem.runtime_costs
        return build_workload(self.program, self.routing, problem.platform, problem.cost_model, runtime)


def calibrate(
    logs: Sequence[str | Path],
    artifact: str | Path | None = None,
    profile: str | Path | None = None,
    force: bool = False,
    platform: Platform | None = None,
) -> Calibration:
    """Corrects the platform of the artifact that was run, or `profile`, by what `logs` measured.

    artifact: where it is, by default where the first log says. A rate becomes that with which its device's segments are
    predicted to take what they took, all frames together; a profile's seconds are multiplied likewise. platform: whose
    figures are corrected, by default the artifact's. DicompilerError
    for a log of another artifact, of another platform, with too few frames, and unless `force` of a busy machine.
    """
    directory = Path(artifact) if artifact is not None else _artifact_directory(Path(logs[0]))
    measured_there = Spec.from_mapping("profile", {"file": str(profile), "others": "true", "force": str(force).lower()})
    cost = "analytic" if profile is None else str(measured_there)
    compilation, target, problem = reopen_artifact(directory, cost, platform)
    assert compilation.program is not None and compilation.routing is not None
    runs = [_load_run(Path(log), directory, compilation.program, problem.platform) for log in logs]
    if len({run.log["where"] for run in runs}) > 1:
        raise DicompilerError(f"{runs[0].path}: some runs are emulated and some are not: calibrate by one kind alone")
    case = CalibrationCase(
        compilation.program, compilation.routing, problem, target, run_log.emulation_host(runs[0].log, target)
    )
    return _calibrate_runs(case, runs, None if profile is None else Path(profile), force)


def _artifact_directory(log: Path) -> Path:
    document = run_log.read_log(log)
    if "directory" not in document:
        raise DicompilerError(f"{log}: an earlier version wrote it: run the artifact again with --log")
    return log.parent / str(document["directory"])


def _load_run(path: Path, directory: Path, program: Program, platform: Platform) -> LoggedRun:
    """A log, with everything that makes it useless refused."""
    log = run_log.load_log(path, directory, load_artifact(directory))
    run, place = LoggedRun(str(path), log, program), str(path)
    if "directory" not in log:
        raise DicompilerError(f"{place}: an earlier version wrote it: run the artifact again with --log")
    if log.get("platform", (own := run_log.platform_digest(platform))) != own:
        raise DicompilerError(f"{place}: other boards were emulated than {directory} was compiled for: emulate those")
    if log.get("events"):
        raise DicompilerError(f"{place}: a device was lost, or came back, in this run: run it again without that")
    hosts = {platform.host_of[device.device] for device in program.devices}
    if log["where"] == "here" and len(hosts) > 1:
        raise DicompilerError(
            f"{place}: all devices ran on one host, its platform has {len(hosts)}: deploy it, or emulate them"
        )
    if run.frames < MIN_FRAMES:
        raise DicompilerError(
            f"{place}: {run.frames} frames are too few: run at least {MIN_FRAMES}, better 20 (--frames)"
        )
    for sender, receiver, due, got in find_wrong_bytes(log, program):
        raise DicompilerError(f"{place}: {sender} → {receiver}: {got} bytes sent, {due} predicted: run it again")
    return run


def _calibrate_runs(case: CalibrationCase, runs: Sequence[LoggedRun], profile: Path | None, force: bool) -> Calibration:
    doubts = [doubt for run in runs for doubt in _find_disturbances(run)]
    platform = case.problem.platform
    if profile is None:
        platform, figures = _correct_rates(case, runs)
        lines, told, left = _correct_links(case, runs, platform)
        platform, figures = lines, figures + told
        doubts += left
        factor, document = 1.0, None
    else:
        factor, document = _scale_profile(case, runs, profile)
        figures = [Figure(f"seconds of {profile}", "", 1.0, factor)]
    if doubts and not force:
        raise DicompilerError(f"{doubts[0]}: run it again on an idle machine, or take it as it is (--force)")
    frames = tuple(_compare_frame(case, run, platform, factor) for run in runs)
    noted = platform.description.removesuffix(CALIBRATED_NOTE) + CALIBRATED_NOTE
    return Calibration(replace(platform, description=noted.strip()), document, tuple(figures), frames, tuple(doubts))


def _find_disturbances(run: LoggedRun) -> Iterator[str]:
    """What shows that a machine had something else to do: frames, or segments, that differ from one another."""
    roles = len(run.program.replica_roles)
    for own in () if run.is_streamed else (run.log["frames_s"][1 + r :: roles] for r in range(roles)):
        if own and (median := statistics.median(own)) > MAX_SPREAD_FACTOR * min(own):
            quick, usual = format_seconds(min(own)), format_seconds(median)
            yield f"{run.path}: the machine was busy: a frame takes {quick} to {usual} (the median)"
            break
    for i, entry in enumerate(run.log["devices"] if run.last_frame_spans else ()):
        spans, counts = run.last_frame_spans[entry["device"]], segment_calls(run.program, i, run.frames)  # type: ignore[index]
        first = sum(len(role.devices[i].segments) for role in run.program.roles[: run.last_role])
        for k, (start, end) in enumerate(spans):
            total, calls = entry["segments"][first + k], counts[first + k]
            others = (total - (end - start)) / (calls - 1) if calls > 1 else end - start
            low, high = sorted((others, end - start))
            if high > MAX_SPREAD_FACTOR * low and high * calls > 0.1 * entry["compute_s"]:
                took = f"{format_seconds(end - start)} in the last frame, {format_seconds(others)} in others"
                yield f"{run.path}: the machine was busy: segment {first + k} of {entry['device']} takes {took}"


def _predicted_compute_s(case: CalibrationCase, runs: Sequence[LoggedRun], work: Workload, device: int) -> float:
    """Seconds that all segments of a device take in all runs, by a prediction."""
    seconds = segment_seconds(work)[work.devices[device].device]
    calls = (segment_calls(case.program, device, run.frames) for run in runs)
    return sum(s * n for own in calls for s, n in zip(seconds, own, strict=False))  # those for losses come last


def _correct_rates(case: CalibrationCase, runs: Sequence[LoggedRun]) -> tuple[Platform, list[Figure]]:
    """The platform with the rates at which its devices computed."""
    start = platform = case.problem.platform
    names = [one.device for one in case.program.devices]
    took = [sum(run.log["devices"][i]["compute_s"] for run in runs) for i in range(len(names))]
    for _ in range(50):  # what copies take follows the rate, more slowly
        work = case.make_workload(case.with_platform(platform))
        ratios = {
            name: _predicted_compute_s(case, runs, work, i) / took[i] if took[i] else 0.0
            for i, name in enumerate(names)
        }
        changed = {name: ratio for name, ratio in ratios.items() if ratio}
        platform = _scale_rates(platform, changed)
        if all(abs(ratio - 1) < 1e-3 for ratio in changed.values()):
            break
    figures = []
    for name in names:
        old, why = start.device(name), ""
        if not ratios[name]:
            why = "it computes nothing in this plan"
        elif abs(ratios[name] - 1) > 0.01:
            why = "copies and weights alone are predicted to take longer than all that it computed"
            platform = replace(platform, devices=tuple(old if d.name == name else d for d in platform.devices))
        figures.append(Figure(f"{name} rate", "FLOP/s", old.rate, None if why else platform.device(name).rate, why))
    return platform, figures


def _scale_rates(platform: Platform, factors: Mapping[str, float]) -> Platform:
    return replace(
        platform,
        devices=tuple(
            replace(one, rate=_round_figure(one.rate * factors.get(one.name, 1.0))) for one in platform.devices
        ),
    )


def _round_figure(value: float) -> float:
    """With as many digits as mean something."""
    return float(f"{value:.4g}")


def _correct_links(
    case: CalibrationCase, runs: Sequence[LoggedRun], platform: Platform
) -> tuple[Platform, list[Figure], list[str]]:
    """The platform with its lines as they were, and doubts about waits that no line explains."""
    telling = [run for run in runs if run.last_frame_spans is not None and not run.is_streamed]
    lines = NetworkFigure.of_platform(platform)
    if not telling or not case.program.all_transfers:
        why = "nothing is sent" if not case.program.all_transfers else "no run tells a frame's course by itself"
        return platform, [Figure(one.name, one.unit, one.value(platform), None, why) for one in lines], []
    base = case.make_workload(case.with_platform(platform))
    seen = [find_pauses(_require_last_spans(run), run.input_arrival_s) for run in telling]
    works = [_with_measured_seconds(base.roles[run.last_role], _require_last_spans(run)) for run in telling]
    usual = []
    if len(base.roles) == 1:
        usual = [(base, measured_timing(run.log, case.program).frame_s - run.input_arrival_s) for run in telling]
    fitted, reasons, left = fit_links(platform, lines, works, seen, usual)
    figures = [
        Figure(one.name, one.unit, one.value(platform), None if one.name in reasons else one.value(fitted),
               reasons.get(one.name, ""))
        for one in lines
    ]  # fmt: skip
    doubts = []
    for run, by_device in zip(telling, left, strict=True):
        frame_s = measured_timing(run.log, case.program).frame_s
        worst = max(by_device, key=lambda name: by_device[name])
        if by_device[worst] > MAX_UNEXPLAINED_SHARE * frame_s:
            waits = f"waits that no message explains: {format_seconds(by_device[worst])} of {worst} in a frame of"
            doubts.append(f"{run.path}: {waits} {format_seconds(frame_s)}")
    return fitted, figures, doubts


def _require_last_spans(run: LoggedRun) -> Mapping[str, Sequence[tuple[float, float]]]:
    assert run.last_frame_spans is not None
    return run.last_frame_spans


def _with_measured_seconds(work: Workload, spans: Mapping[str, Sequence[tuple[float, float]]]) -> Workload:
    """A role with the seconds that its segments took."""
    return with_segment_seconds(work, {name: [end - start for start, end in own] for name, own in spans.items()})


def _scale_profile(case: CalibrationCase, runs: Sequence[LoggedRun], profile: Path) -> tuple[float, Mapping[str, Any]]:
    """(How many times as long as in the profile pieces took on the devices that it holds for, the profile with that.)
    What copies take, and that calls find caches cold, is not in it."""
    document = load_json(profile)
    problem = case.with_platform(case.problem.platform)
    own = [i for i, one in enumerate(case.program.devices) if fnmatch.fnmatchcase(one.device, document["device"])]
    took = sum(run.log["devices"][i]["compute_s"] for run in runs for i in own)
    bare = sum(_predicted_compute_s(case, runs, case.make_workload(problem, free=True), i) for i in own)
    beside = sum(_predicted_compute_s(case, runs, case.make_workload(problem), i) for i in own) - bare
    if not bare or took <= beside:
        raise DicompilerError(f"{profile}: no device that it holds for ({document['device']}) computed in these runs")
    factor = _round_figure((took - beside) / bare)
    pieces = [(one, key) for layer in document["layers"] for one in layer["measurements"] for key in _TIME_KEYS]
    if "whole_s" in document:  # by which whole layers go
        pieces.append((document, "whole_s"))
    for one, key in pieces:
        call_s = min(document["call_s"], one[key])
        one[key] = round(call_s + (one[key] - call_s) * factor, 9)
    for key in ("weight_s", "read_s"):
        if key in document:
            document[key] *= factor
    return factor, document


def _compare_frame(case: CalibrationCase, run: LoggedRun, platform: Platform, factor: float) -> CalibratedFrame:
    """factor: of what its computing takes by the cost model."""
    flight, place = run.log["in_flight"], run.path
    before, after = case.with_platform(case.problem.platform), case.with_platform(platform)
    found = measured_timing(run.log, case.program).frame_s - (0.0 if run.is_streamed else run.input_arrival_s)
    new = case.make_workload(after)
    if factor != 1.0:
        new = _scale_compute(new, case.make_workload(after, free=True), factor)
    told = [
        predict_timing(work, one, run.frames, flight).frame_s
        for work, one in ((case.make_workload(before), before.platform), (new, after.platform))
    ]
    return CalibratedFrame(place, found, *told)


def _scale_compute(work: Workload, bare: Workload, factor: float) -> Workload:
    """The workload with `factor` times what `bare` computes, and what else there is to it as it was."""
    first, *others = (
        replace(role, devices=tuple(
            replace(one, jobs=tuple(
                replace(job, seconds=job.seconds + (factor - 1) * alone.seconds)
                for job, alone in zip(one.jobs, own.jobs, strict=True)
            ))
            for one, own in zip(role.devices, least.devices, strict=True)
        ))
        for role, least in zip(work.roles, bare.roles, strict=True)
    )  # fmt: skip
    return replace(first, other_roles=tuple(others))
