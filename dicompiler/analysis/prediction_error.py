"""Where a run parts from what was predicted for it: computing, sending and waiting of each device, and the frame.

Workload + Platform → Told (predicted);   log of a run + Program → Told (measured);   both → Parting, one by one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulation_result import SimulationResult
from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import DeviceWork, Workload
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.search.problem import Problem

MAX_SIMULATED_FRAMES = 1000
"""So many frames of a stream are simulated at most."""
MIN_DISCREPANCY_SHARE = 0.1
"""By what share of the larger one prediction and measurement must part to be told."""
MIN_FRAME_SHARE = 0.02
"""What is less than this share of a frame is not told."""


SegmentSeconds = Mapping[str, tuple[float, ...]]
"""Device → seconds of a call of each of its segments, role by role, beside what its runtime takes for the call."""


@dataclass(frozen=True)
class DeviceTiming:
    """What a device does in a frame, in seconds. segments: a call of each, role by role. send_s: predicted until its
    messages have left their lines, measured until the system has taken them. waits: by the device that it waited for
    ("": whoever gives the frames); measured of the last frame alone."""

    compute_s: float
    send_s: float
    wait_s: float
    segments_s: tuple[float, ...]
    waits: Mapping[str, float]


@dataclass(frozen=True)
class RunTiming:
    """What is predicted, or was measured, of a run. frame_s: seconds of a frame, of several on their way at once their
    whole time by their number. devices: by name."""

    frame_s: float
    devices: Mapping[str, DeviceTiming]


@dataclass(frozen=True)
class ExpectedTiming:
    """What a run of an artifact should show. cost: the model that says so; program: what is run."""

    cost_model: str
    program: Program
    timing: RunTiming

    def document(self) -> dict[str, Any]:
        """As a log has it, see `predicted` of the schema run."""
        devices = [{"device": name, **asdict(share)} for name, share in self.timing.devices.items()]
        return {"cost": self.cost_model, "frame_s": self.timing.frame_s, "devices": devices}


@dataclass(frozen=True)
class Discrepancy:
    """A cause of a difference. cause: computing, sending or waiting; where: the segment, or the device waited for, with
    the largest part in it. Seconds a frame."""

    device: str
    cause: str
    location: str
    predicted_s: float
    measured_s: float


def expect_timing(directory: str | Path, cost: str, frames: int, in_flight: int) -> ExpectedTiming:
    """What running an artifact on its platform should show. UsageError where the cost model that it was compiled with
    needs options that `cost` does not give."""
    compilation, _, problem = reopen_artifact(directory, cost)
    assert compilation.program is not None and compilation.plan is not None
    work = problem.workload(compilation.plan)[1]
    told = predict_timing(work, problem.platform, frames, in_flight)
    return ExpectedTiming(str(problem.cost_model.name), compilation.program, told)


def on_emulation_host(
    problem: Problem, costs: RuntimeCosts, program: Program, host_processors: int = 0, secure: bool = False
) -> Problem:
    """The problem where boards are emulated by a host on which their runtime costs `costs` and which has `own`
    processors (default: as this one): as long as it takes to run them together, but for what segments do, which are
    held back: slices, joins, and filling caches. secure: messages are in TLS."""
    count = sum(bool(device.segments) for device in program.devices)
    here = share_processors(costs.with_tls if secure else costs, count, host_processors)
    held = {
        name: replace(
            here, per_copy=boards.per_copy, per_copied_byte=boards.per_copied_byte, cold_call=boards.cold_call
        )
        for name, boards in problem.runtime_costs.items()
    }
    return replace(problem, runtime_costs=held)


def share_processors(costs: RuntimeCosts, boards: int, host_processors: int = 0) -> RuntimeCosts:
    """What a runtime that costs `costs` alone costs so many boards that share the processors of a host: `own`, by
    default those of this one. It takes processors as many times longer as there are boards for each; who sleeps wakes
    as before, and inputs and outputs go while no board computes."""
    times = max(1.0, boards / (host_processors or available_processors()))
    return replace(costs.scaled_by(times), latency=costs.latency, per_io_byte=costs.per_io_byte)


def available_processors() -> int:
    """Those of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def segment_seconds(work: Workload) -> SegmentSeconds:
    """What each segment takes by a prediction: at least 0, however the sum was rounded."""
    return {
        one.device: tuple(
            max(0.0, job.seconds - one.runtime.call) for role in work.roles for job in role.devices[i].jobs
        )
        for i, one in enumerate(work.devices)
    }


def with_segment_seconds(work: Workload, seconds: Mapping[str, Sequence[float]]) -> Workload:
    """The workload with these seconds of each segment in place of those that `computing` tells."""
    rest = {name: iter(each) for name, each in seconds.items()}

    def held(one: DeviceWork) -> DeviceWork:
        call = one.runtime.call
        return replace(one, jobs=tuple(replace(job, seconds=next(rest[one.device]) + call) for job in one.jobs))

    first, *others = (replace(role, devices=tuple(map(held, role.devices))) for role in work.roles)
    return replace(first, other_roles=tuple(others))


def predict_timing(work: Workload, platform: Platform, frames: int, in_flight: int) -> RunTiming:
    """What the simulator says: one at a time, of a frame of each role; else of the stream."""
    count = min(frames, MAX_SIMULATED_FRAMES) if in_flight > 1 else len(work.roles)
    played = simulate(work, platform, count, in_flight, keep_spans=False)
    if in_flight > 1:
        frame_s = max(end for _, end in played.frames) / count
    else:
        ends_s = sum(role.ends_s for role in work.roles) / len(work.roles)
        frame_s = sum(end - start for start, end in played.frames) / count + ends_s
    return RunTiming(
        frame_s, {one.device: _simulated_device(played, work, i, count) for i, one in enumerate(work.devices)}
    )


def _simulated_device(played: SimulationResult, work: Workload, i: int, frames: int) -> DeviceTiming:
    one = work.devices[i]
    handed = sum(one.runtime.send_seconds(m.nbytes) for role in work.roles for m in role.messages if m.sender == i)
    waits = {peer: seconds / frames for peer, seconds in played.waits.get(one.device, {}).items()}
    segments = segment_seconds(work)[one.device]
    calls = _call_counts([len(role.devices[i].jobs) for role in work.roles], frames)
    return DeviceTiming(
        sum(s * n for s, n in zip(segments, calls, strict=True)) / frames,
        handed / len(work.roles) + played.total_seconds("message", one.device) / frames,
        sum(waits.values()),
        segments,
        waits,
    )


def measured_timing(log: Mapping[str, Any], program: Program) -> RunTiming:
    """What a log (schema run) says of the program's run."""
    times, devices = log["frames_s"], {}
    frames = max(1, len(times))
    for i, entry in enumerate(log["devices"]):
        calls = segment_calls(program, i, frames)
        segments = tuple(s / max(1, n) for s, n in zip(entry["segments"], calls, strict=True))
        waits = _wait_seconds(entry["timeline"], frames - 1, program)
        compute_s, send_s, wait_s = (entry[key] / frames for key in ("compute_s", "send_s", "wait_s"))
        devices[entry["device"]] = DeviceTiming(compute_s, send_s, wait_s, segments, waits)
    streamed = log.get("in_flight", 1) > 1
    return RunTiming(
        log["total_s"] / frames if streamed else typical_frame_s(times, len(program.replica_roles)), devices
    )


def typical_frame_s(times: Sequence[float], roles: int) -> float:
    """Seconds of a frame where they went one at a time: the median without the first, which warms up, where there are
    more; with replicas the mean of theirs. 0 without frames."""
    own = [times[r + (roles if r == 0 and len(times) > roles else 0) :: roles] for r in range(roles)]
    medians = [statistics.median(each) for each in own if each]
    return statistics.mean(medians) if medians else 0.0


def segment_calls(program: Program, device: int, frames: int) -> list[int]:
    """How often each segment of a device is called in so many frames, role by role; none of those for losses."""
    played = _call_counts([len(role.devices[device].segments) for role in program.replica_roles], frames)
    return played + [0] * (sum(len(role.devices[device].segments) for role in program.roles) - len(played))


def _call_counts(segments: Sequence[int], frames: int) -> list[int]:
    """segments: how many there are, by role."""
    return [len(range(r, frames, len(segments))) for r, count in enumerate(segments) for _ in range(count)]


def _wait_seconds(timeline: list[Mapping[str, Any]], last: int, program: Program) -> dict[str, float]:
    transfers, waits = program.all_transfers, dict[str, float]()
    for span in timeline:
        if span["kind"] == "wait" and span["frame"] == last:
            peer = transfers[span["index"]].sender if span["index"] >= 0 else ""
            waits[peer] = waits.get(peer, 0.0) + span["end"] - span["start"]
    return waits


def find_discrepancies(predicted: RunTiming, found: RunTiming) -> Iterator[Discrepancy]:
    """Where they part notably, device by device. Sending counts only where it took longer than predicted: what the
    system takes at once has not left yet."""
    least = MIN_FRAME_SHARE * max(predicted.frame_s, found.frame_s)
    for name, ours in predicted.devices.items():
        theirs = found.devices[name]
        for cause, ahead, seen, where in (
            ("computing", ours.compute_s, theirs.compute_s, _worst_segment(ours.segments_s, theirs.segments_s)),
            ("sending", ours.send_s, max(ours.send_s, theirs.send_s), ""),
            ("waiting", ours.wait_s, theirs.wait_s, _largest_difference(ours.waits, theirs.waits)),
        ):
            if abs(seen - ahead) > max(least, MIN_DISCREPANCY_SHARE * max(ahead, seen)):
                yield Discrepancy(name, cause, where, ahead, seen)


def _worst_segment(ours: tuple[float, ...], theirs: tuple[float, ...]) -> str:
    return f"segment {_largest_difference(dict(enumerate(ours)), dict(enumerate(theirs)))}"


def _largest_difference(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> str:
    """The key at which they differ most; "" without any."""
    keys = dict.fromkeys([*ours, *theirs])
    return str(max(keys, key=lambda key: abs(ours.get(key, 0.0) - theirs.get(key, 0.0)), default=""))


def find_wrong_bytes(log: Mapping[str, Any], program: Program) -> list[tuple[str, str, int, int]]:
    """(Sender, receiver, bytes predicted, bytes sent) of each line that carried others than predicted."""
    frames, count = len(log["frames_s"]), len(program.replica_roles)
    sent = {int(index): total for entry in log["devices"] for index, total in entry["sent"].items()}
    roles = [r for r, role in enumerate(program.replica_roles) for _ in role.transfers]
    lines: dict[tuple[str, str], list[int]] = {}
    for transfer, role in zip(program.all_transfers, roles, strict=False):  # those for losses come last
        line = lines.setdefault((transfer.sender, transfer.receiver), [0, 0])
        line[0] += transfer.value.nbytes * len(range(role, frames, count))
        line[1] += sent.get(transfer.index, 0)
    return [(*ends, due, got) for ends, (due, got) in lines.items() if due != got]
