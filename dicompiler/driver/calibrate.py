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

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json
from dicompiler.base.specs import Spec
from dicompiler.base.units import format_seconds
from dicompiler.cost.runtime import RuntimeCosts
from dicompiler.cost.workload import Workload, workload
from dicompiler.driver import run_log
from dicompiler.driver.artifact import reopen
from dicompiler.driver.fidelity import at_host_speed, computing, measured, predict, segment_calls, taking, wrong_bytes
from dicompiler.driver.fit_lines import Line, fit_lines, pauses
from dicompiler.driver.prepare import runtime_costs
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.search.problem import Problem
from dicompiler.target.interface import Target
from dicompiler.target.seal import open_artifact

FRAMES = 3
"""So many frames a run must have at least."""
SPREAD = 2.0
"""How many times as long as before a segment, or as the shortest a median frame, may take in one run."""
LEFT = 0.25
"""What share of a frame may be left that neither computing nor messages explain."""
_TIMES = ("seconds", "low", "high")
NOTE = " Rates and lines corrected by 'dicompiler calibrate'."


@dataclass(frozen=True)
class Figure:
    """A figure that was corrected. unit: FLOP/s, bit/s, s, or "" for a factor; after: None where it could not be told,
    and why says so."""

    name: str
    unit: str
    before: float
    after: float | None
    why: str = ""


@dataclass(frozen=True)
class Frame:
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
    frames: tuple[Frame, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One log. place: its file; program: what was run; role: of its last frame; streamed: whether frames were on their
    way at once."""

    place: str
    log: Mapping[str, Any]
    program: Program

    @property
    def frames(self) -> int:
        return len(self.log["frames_s"])

    @property
    def streamed(self) -> bool:
        return bool(self.log["in_flight"] > 1)

    @property
    def role(self) -> int:
        return (self.frames - 1) % len(self.program.turns)

    @cached_property
    def last(self) -> Mapping[str, Sequence[tuple[float, float]]] | None:
        """Device → (start, end) of each of its segments in the last frame; None where the log does not tell."""
        found = {}
        for i, entry in enumerate(self.log["devices"]):
            counts = [len(role.devices[i].segments) for role in self.program.roles]
            first, count = sum(counts[: self.role]), counts[self.role]
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
    def input_s(self) -> float:
        """Until the last frame's inputs had come from whoever gives the frames."""
        return max(
            (span["end"] for entry in self.log["devices"] for span in entry["timeline"]
             if (span["kind"], span["index"], span["frame"]) == ("wait", -1, self.frames - 1)),
            default=0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What was run: `problem` with the artifact's platform. emulated: of the host that emulated its boards, see
    `run_log.emulated_by`."""

    program: Program
    routing: Routing
    problem: Problem
    target: Target
    emulated: tuple[RuntimeCosts, int] | None

    def on(self, platform: Platform) -> Problem:
        """The problem with other figures."""
        if self.emulated:
            costs, processors = self.emulated
            return at_host_speed(replace(self.problem, platform=platform), costs, self.program, processors)
        runtime = runtime_costs(platform, self.problem.cost, self.target)
        return replace(self.problem, platform=platform, runtime=runtime)

    def work(self, problem: Problem, free: bool = False) -> Workload:
        """Of the program; `free`: without what its runtime takes."""
        runtime = {} if free else problem.runtime
        return workload(self.program, self.routing, problem.platform, problem.cost, runtime)


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
    directory = Path(artifact) if artifact is not None else _directory(Path(logs[0]))
    measured_there = Spec.of("profile", {"file": str(profile), "others": "true", "force": str(force).lower()})
    cost = "analytic" if profile is None else str(measured_there)
    compilation, target, problem = reopen(directory, cost, platform)
    assert compilation.program is not None and compilation.routing is not None
    runs = [_load(Path(log), directory, compilation.program, problem.platform) for log in logs]
    if len({run.log["where"] for run in runs}) > 1:
        raise DicompilerError(f"{runs[0].place}: some runs are emulated and some are not: calibrate by one kind alone")
    case = Case(compilation.program, compilation.routing, problem, target, run_log.emulated_by(runs[0].log, target))
    return _calibrated(case, runs, None if profile is None else Path(profile), force)


def _directory(log: Path) -> Path:
    document = run_log.checked(log)
    if "directory" not in document:
        raise DicompilerError(f"{log}: an earlier version wrote it: run the artifact again with --log")
    return log.parent / str(document["directory"])


def _load(path: Path, directory: Path, program: Program, platform: Platform) -> Run:
    """A log, with everything that makes it useless refused."""
    log = run_log.load(path, directory, open_artifact(directory))
    run, place = Run(str(path), log, program), str(path)
    if "directory" not in log:
        raise DicompilerError(f"{place}: an earlier version wrote it: run the artifact again with --log")
    if log.get("platform", (own := run_log.digest_of(platform))) != own:
        raise DicompilerError(f"{place}: other boards were emulated than {directory} was compiled for: emulate those")
    if log.get("events"):
        raise DicompilerError(f"{place}: a device was lost, or came back, in this run: run it again without that")
    hosts = {platform.host_of[device.device] for device in program.devices}
    if log["where"] == "here" and len(hosts) > 1:
        raise DicompilerError(
            f"{place}: all devices ran on one host, its platform has {len(hosts)}: deploy it, or emulate them"
        )
    if run.frames < FRAMES:
        raise DicompilerError(f"{place}: {run.frames} frames are too few: run at least {FRAMES}, better 20 (--frames)")
    for sender, receiver, due, got in wrong_bytes(log, program):
        raise DicompilerError(f"{place}: {sender} → {receiver}: {got} bytes sent, {due} predicted: run it again")
    return run


def _calibrated(case: Case, runs: Sequence[Run], profile: Path | None, force: bool) -> Calibration:
    doubts = [doubt for run in runs for doubt in _restless(run)]
    platform = case.problem.platform
    if profile is None:
        platform, figures = _rates(case, runs)
        lines, told, left = _lines(case, runs, platform)
        platform, figures = lines, figures + told
        doubts += left
        factor, document = 1.0, None
    else:
        factor, document = _scaled(case, runs, profile)
        figures = [Figure(f"seconds of {profile}", "", 1.0, factor)]
    if doubts and not force:
        raise DicompilerError(f"{doubts[0]}: run it again on an idle machine, or take it as it is (--force)")
    frames = tuple(_frame(case, run, platform, factor) for run in runs)
    noted = platform.description.removesuffix(NOTE) + NOTE
    return Calibration(replace(platform, description=noted.strip()), document, tuple(figures), frames, tuple(doubts))


def _restless(run: Run) -> Iterator[str]:
    """What shows that a machine had something else to do: frames, or segments, that differ from one another."""
    roles = len(run.program.turns)
    for own in () if run.streamed else (run.log["frames_s"][1 + r :: roles] for r in range(roles)):
        if own and (median := statistics.median(own)) > SPREAD * min(own):
            quick, usual = format_seconds(min(own)), format_seconds(median)
            yield f"{run.place}: the machine was busy: a frame takes {quick} to {usual} (the median)"
            break
    for i, entry in enumerate(run.log["devices"] if run.last else ()):
        spans, counts = run.last[entry["device"]], segment_calls(run.program, i, run.frames)  # type: ignore[index]
        first = sum(len(role.devices[i].segments) for role in run.program.roles[: run.role])
        for k, (start, end) in enumerate(spans):
            total, calls = entry["segments"][first + k], counts[first + k]
            others = (total - (end - start)) / (calls - 1) if calls > 1 else end - start
            low, high = sorted((others, end - start))
            if high > SPREAD * low and high * calls > 0.1 * entry["compute_s"]:
                took = f"{format_seconds(end - start)} in the last frame, {format_seconds(others)} in others"
                yield f"{run.place}: the machine was busy: segment {first + k} of {entry['device']} takes {took}"


def _computed(case: Case, runs: Sequence[Run], work: Workload, device: int) -> float:
    """Seconds that all segments of a device take in all runs, by a prediction."""
    seconds = computing(work)[work.devices[device].device]
    calls = (segment_calls(case.program, device, run.frames) for run in runs)
    return sum(s * n for own in calls for s, n in zip(seconds, own, strict=False))  # those for losses come last


def _rates(case: Case, runs: Sequence[Run]) -> tuple[Platform, list[Figure]]:
    """The platform with the rates at which its devices computed."""
    start = platform = case.problem.platform
    names = [one.device for one in case.program.devices]
    took = [sum(run.log["devices"][i]["compute_s"] for run in runs) for i in range(len(names))]
    for _ in range(50):  # what copies take follows the rate, more slowly
        work = case.work(case.on(platform))
        ratios = {name: _computed(case, runs, work, i) / took[i] if took[i] else 0.0 for i, name in enumerate(names)}
        changed = {name: ratio for name, ratio in ratios.items() if ratio}
        platform = _with_rates(platform, changed)
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


def _with_rates(platform: Platform, factors: Mapping[str, float]) -> Platform:
    return replace(
        platform,
        devices=tuple(replace(one, rate=_short(one.rate * factors.get(one.name, 1.0))) for one in platform.devices),
    )


def _short(value: float) -> float:
    """With as many digits as mean something."""
    return float(f"{value:.4g}")


def _lines(case: Case, runs: Sequence[Run], platform: Platform) -> tuple[Platform, list[Figure], list[str]]:
    """The platform with its lines as they were, and doubts about waits that no line explains."""
    telling = [run for run in runs if run.last is not None and not run.streamed]
    lines = Line.of(platform)
    if not telling or not case.program.all_transfers:
        why = "nothing is sent" if not case.program.all_transfers else "no run tells a frame's course by itself"
        return platform, [Figure(one.name, one.unit, one.value(platform), None, why) for one in lines], []
    base = case.work(case.on(platform))
    seen = [pauses(_last(run), run.input_s) for run in telling]
    works = [_as_measured(base.roles[run.role], _last(run)) for run in telling]
    usual = []
    if len(base.roles) == 1:
        usual = [(base, measured(run.log, case.program).frame_s - run.input_s) for run in telling]
    fitted, reasons, left = fit_lines(platform, lines, works, seen, usual)
    figures = [
        Figure(one.name, one.unit, one.value(platform), None if one.name in reasons else one.value(fitted),
               reasons.get(one.name, ""))
        for one in lines
    ]  # fmt: skip
    doubts = []
    for run, by_device in zip(telling, left, strict=True):
        frame_s = measured(run.log, case.program).frame_s
        worst = max(by_device, key=lambda name: by_device[name])
        if by_device[worst] > LEFT * frame_s:
            waits = f"waits that no message explains: {format_seconds(by_device[worst])} of {worst} in a frame of"
            doubts.append(f"{run.place}: {waits} {format_seconds(frame_s)}")
    return fitted, figures, doubts


def _last(run: Run) -> Mapping[str, Sequence[tuple[float, float]]]:
    assert run.last is not None
    return run.last


def _as_measured(work: Workload, spans: Mapping[str, Sequence[tuple[float, float]]]) -> Workload:
    """A role with the seconds that its segments took."""
    return taking(work, {name: [end - start for start, end in own] for name, own in spans.items()})


def _scaled(case: Case, runs: Sequence[Run], profile: Path) -> tuple[float, Mapping[str, Any]]:
    """(How many times as long as in the profile pieces took on the devices that it holds for, the profile with that.)
    What copies take, and that calls find caches cold, is not in it."""
    document = load_json(profile)
    problem = case.on(case.problem.platform)
    own = [i for i, one in enumerate(case.program.devices) if fnmatch.fnmatchcase(one.device, document["device"])]
    took = sum(run.log["devices"][i]["compute_s"] for run in runs for i in own)
    bare = sum(_computed(case, runs, case.work(problem, free=True), i) for i in own)
    beside = sum(_computed(case, runs, case.work(problem), i) for i in own) - bare
    if not bare or took <= beside:
        raise DicompilerError(f"{profile}: no device that it holds for ({document['device']}) computed in these runs")
    factor = _short((took - beside) / bare)
    pieces = [(one, key) for layer in document["layers"] for one in layer["measurements"] for key in _TIMES]
    if "whole_s" in document:  # by which whole layers go
        pieces.append((document, "whole_s"))
    for one, key in pieces:
        call_s = min(document["call_s"], one[key])
        one[key] = round(call_s + (one[key] - call_s) * factor, 9)
    for key in ("weight_s", "read_s"):
        if key in document:
            document[key] *= factor
    return factor, document


def _frame(case: Case, run: Run, platform: Platform, factor: float) -> Frame:
    """factor: of what its computing takes by the cost model."""
    flight, place = run.log["in_flight"], run.place
    before, after = case.on(case.problem.platform), case.on(platform)
    found = measured(run.log, case.program).frame_s - (0.0 if run.streamed else run.input_s)
    new = case.work(after)
    if factor != 1.0:
        new = _stretched(new, case.work(after, free=True), factor)
    told = [
        predict(work, one, run.frames, flight).frame_s
        for work, one in ((case.work(before), before.platform), (new, after.platform))
    ]
    return Frame(place, found, *told)


def _stretched(work: Workload, bare: Workload, factor: float) -> Workload:
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
    return replace(first, others=tuple(others))
