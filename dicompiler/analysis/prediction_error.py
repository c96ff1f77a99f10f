"""Differences between the predicted and the measured times of a run, by device and cause.

Workload + Platform ──predict_timing──► RunTiming;   run log + Program ──measured_timing──► RunTiming
two RunTimings ──find_discrepancies──► Discrepancy, …
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dicompiler.base.units import format_seconds
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulator import SimulationResult, simulate
from dicompiler.cost.workload import DeviceWork, Workload
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.ir.frame_prediction import FramePrediction
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.search.problem import Problem, plan_workload

MAX_SIMULATED_FRAMES = 1000
"""Maximum number of frames that are simulated to predict a stream."""
MIN_DISCREPANCY_SHARE = 0.1
"""A difference is reported only if it exceeds this fraction of the predicted and of the measured time."""
MIN_FRAME_SHARE = 0.02
"""A difference is reported only if it also exceeds this fraction of the time of a frame."""


SegmentSeconds = Mapping[str, tuple[float, ...]]
"""Seconds of computing each segment (ONNX submodel) once, by device name.

The segments of the plan come first, then those of its replicas (copies on other devices).
"""


@dataclass(frozen=True)
class DeviceTiming:
    """Times of a device in one frame.

    Attributes:
        compute_s: Seconds in segments (ONNX submodels).
        send_s: Seconds of sending. Predicted: until messages have left their links. Measured: until the operating
            system has accepted them.
        wait_s: Seconds in which the device waits for messages or for a frame.
        segments_s: Seconds of one call of each segment: first of the plan, then of its replicas (copies on other
            devices). Measurements end with the segments of failure plans.
        waits: Seconds of waiting by the device that is waited for; "" for waiting for a frame. Measured values are of
            the last frame.
    """

    compute_s: float
    send_s: float
    wait_s: float
    segments_s: tuple[float, ...]
    waits: Mapping[str, float]


@dataclass(frozen=True)
class RunTiming:
    """Predicted or measured times of a run.

    Attributes:
        frame_s: Seconds of a frame; of a stream, its seconds divided by the number of frames.
        devices: Times of a device in one frame, by device name.
        input_output_s: Seconds of `frame_s` to bring the inputs to the first devices and the outputs to the caller; 0
            if they are not known, or for a stream.
        is_stream: Whether several frames are in flight.
    """

    frame_s: float
    devices: Mapping[str, DeviceTiming]
    input_output_s: float = 0.0
    is_stream: bool = False

    @property
    def frame_text(self) -> str:
        """The predicted time of a frame as text, with its parts if one frame is in flight."""
        if self.is_stream:
            return f"{format_seconds(self.frame_s)}, by simulation of the whole stream"
        return str(FramePrediction(self.frame_s - self.input_output_s, self.input_output_s))


@dataclass(frozen=True)
class ExpectedTiming:
    """The predicted times of a run of an artifact.

    Attributes:
        cost_model: Name of the cost model.
        program: The steps of each device, and the transfers between devices.
        timing: The predicted times of a frame and of each device.
    """

    cost_model: str
    program: Program
    timing: RunTiming

    def document(self) -> dict[str, Any]:
        """Return the value of the key `predicted` in a run log (schema `run`).

        Returns:
            The cost model and the times, in a form that `json.dumps` accepts.
        """
        devices = [{"device": name, **asdict(timing)} for name, timing in self.timing.devices.items()]
        frame = {"frame_s": self.timing.frame_s, "input_output_s": self.timing.input_output_s}
        return {"cost_model": self.cost_model, **frame, "devices": devices}


@dataclass(frozen=True)
class Discrepancy:
    """A difference between prediction and measurement on one device.

    Attributes:
        device: Name of the device.
        cause: "computing", "sending" or "waiting".
        location: Where the difference is largest: a segment (ONNX submodel) for "computing", the device that was waited
            for for "waiting"; otherwise empty.
        predicted_s: Predicted seconds per frame.
        measured_s: Measured seconds per frame.
    """

    device: str
    cause: str
    location: str
    predicted_s: float
    measured_s: float


def expect_timing(directory: str | Path, cost: str, frames: int, in_flight: int) -> ExpectedTiming:
    """Return the predicted times of running an artifact on its platform.

    Args:
        directory: The artifact.
        cost: The cost model; empty means the one that the artifact was compiled with.
        frames: Number of frames.
        in_flight: Largest number of frames in flight.

    Raises:
        UsageError: The cost model of the artifact needs options.
    """
    compilation, _, problem = reopen_artifact(directory, cost)
    assert compilation.program is not None and compilation.plan is not None
    workload = plan_workload(problem, compilation.plan)[1]
    timing = predict_timing(workload, problem.platform, frames, in_flight)
    return ExpectedTiming(str(problem.cost_model.name), compilation.program, timing)


def on_emulation_host(
    problem: Problem, costs: RuntimeCosts, program: Program, host_processors: int = 0, secure: bool = False
) -> Problem:
    """Return the problem with the runtime costs (for messages, calls and copies) of a host that emulates all boards.

    Args:
        problem: The problem with the boards' own costs.
        costs: Costs of the runtime on the host if it runs a single device.
        program: The emulated program.
        host_processors: Number of processors of the host. Default: those of this host.
        secure: Whether messages are encrypted with TLS.
    """
    count = sum(bool(device.segments) for device in program.devices)
    host_costs = share_processors(costs.with_tls if secure else costs, count, host_processors)
    # An emulated call takes as long as on its board, with copies and cold caches. These three costs are therefore the
    # board's; all others are the host's.
    runtime_costs = {
        name: replace(
            host_costs, per_copy=board.per_copy, per_copied_byte=board.per_copied_byte, cold_call=board.cold_call
        )
        for name, board in problem.runtime_costs.items()
    }
    return replace(problem, runtime_costs=runtime_costs)


def share_processors(costs: RuntimeCosts, boards: int, host_processors: int = 0) -> RuntimeCosts:
    """Return the runtime costs of boards that share the processors of a host.

    Args:
        costs: Costs of a single board on the host.
        boards: Number of boards.
        host_processors: Number of processors of the host. Default: those of this host.
    """
    # Two costs stay the same, because no board computes meanwhile: waking a process, and moving inputs and outputs.
    factor = max(1.0, boards / (host_processors or available_processors()))
    return replace(costs.scaled_by(factor), latency=costs.latency, per_io_byte=costs.per_io_byte)


def available_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def segment_seconds(workload: Workload) -> SegmentSeconds:
    """Return the predicted seconds in which each device computes each of its segments (ONNX submodels).

    The segments of the plan come first, then those of its replicas (copies on other devices).
    """
    return {
        device.device: tuple(
            # `seconds` includes the call of the segment. Rounding errors can make the difference slightly negative.
            max(0.0, job.seconds - device.runtime.call)
            for replica in workload.replicas
            for job in replica.devices[i].jobs
        )
        for i, device in enumerate(workload.devices)
    }


def with_segment_seconds(workload: Workload, seconds: Mapping[str, Sequence[float]]) -> Workload:
    """Return the workload with other computing times of its segments (ONNX submodels).

    Args:
        workload: The work of all devices in a frame.
        seconds: Seconds of each segment by device name: first those of the plan, then those of its replicas (copies on
            other devices).
    """
    remaining = {name: iter(values) for name, values in seconds.items()}

    def with_seconds(device: DeviceWork) -> DeviceWork:
        values, call_s = remaining[device.device], device.runtime.call
        return replace(device, jobs=tuple(replace(job, seconds=next(values) + call_s) for job in device.jobs))

    first, *others = (
        replace(replica, devices=tuple(map(with_seconds, replica.devices))) for replica in workload.replicas
    )
    return replace(first, other_replicas=tuple(others))


def predict_timing(workload: Workload, platform: Platform, frames: int, in_flight: int) -> RunTiming:
    """Simulate a run, and return the predicted times of a frame and of each device.

    Args:
        workload: The work of all devices in a frame.
        platform: The devices and their links.
        frames: Number of frames of the run.
        in_flight: Number of frames in flight.
    """
    # If one frame is in flight, one frame of each replica (copy of the plan on other devices) suffices.
    count = min(frames, MAX_SIMULATED_FRAMES) if in_flight > 1 else len(workload.replicas)
    result = simulate(workload, platform, count, in_flight, keep_spans=False)
    if in_flight > 1:
        frame_s, input_output_s = max(end for _, end in result.frames) / count, 0.0
    else:
        input_output_s = result.input_output_s
        frame_s = sum(end - start for start, end in result.frames) / count + input_output_s
    devices = {
        device.device: _simulated_device(result, workload, i, count) for i, device in enumerate(workload.devices)
    }
    return RunTiming(frame_s, devices, input_output_s, is_stream=in_flight > 1)


def _simulated_device(result: SimulationResult, workload: Workload, i: int, frames: int) -> DeviceTiming:
    device = workload.devices[i]
    sent = [message.nbytes for replica in workload.replicas for message in replica.messages if message.sender == i]
    handling_s = sum(map(device.runtime.send_seconds, sent))
    waits = {peer: seconds / frames for peer, seconds in result.waits.get(device.device, {}).items()}
    segments_s = segment_seconds(workload)[device.device]
    calls = _call_counts([len(replica.devices[i].jobs) for replica in workload.replicas], frames)
    return DeviceTiming(
        compute_s=sum(seconds * count for seconds, count in zip(segments_s, calls, strict=True)) / frames,
        send_s=handling_s / len(workload.replicas) + result.total_seconds("message", device.device) / frames,
        wait_s=sum(waits.values()),
        segments_s=segments_s,
        waits=waits,
    )


def measured_timing(log: Mapping[str, Any], program: Program) -> RunTiming:
    """Return the measured times of a run log (schema `run`)."""
    frames_s, devices = log["frames_s"], {}
    frames = max(1, len(frames_s))
    for i, entry in enumerate(log["devices"]):
        calls = segment_calls(program, i, frames)
        segments_s = tuple(seconds / max(1, count) for seconds, count in zip(entry["segments_s"], calls, strict=True))
        waits = _wait_seconds(entry["timeline"], frames - 1, program)
        compute_s, send_s, wait_s = (entry[key] / frames for key in ("compute_s", "send_s", "wait_s"))
        devices[entry["device"]] = DeviceTiming(compute_s, send_s, wait_s, segments_s, waits)
    is_stream = log.get("in_flight", 1) > 1
    frame_s = log["total_s"] / frames if is_stream else typical_frame_s(frames_s, len(program.replica_roles))
    return RunTiming(frame_s, devices, is_stream=is_stream)


def typical_frame_s(frames_s: Sequence[float], replica_count: int) -> float:
    """Return the typical seconds of a frame in a run with one frame in flight; 0 without frames.

    Args:
        frames_s: Seconds of each frame.
        replica_count: Number of replicas (copies of the plan that compute frames in turn). The result is the mean of
            their medians.
    """
    by_replica = [list(frames_s[replica::replica_count]) for replica in range(replica_count)]
    # The first frame is excluded, because caches are still cold.
    if len(frames_s) > replica_count:
        del by_replica[0][0]
    medians = [statistics.median(times) for times in by_replica if times]
    return statistics.mean(medians) if medians else 0.0


def segment_calls(program: Program, device: int, frames: int) -> list[int]:
    """Return how many times a device calls each of its segments (ONNX submodels) in a run without failures.

    Args:
        program: The program. Segments of its failure plans (for the remaining devices) are last, with 0 calls.
        device: Index of the device.
        frames: Number of frames of the run.
    """
    calls = _call_counts([len(role.devices[device].segments) for role in program.replica_roles], frames)
    return calls + [0] * (sum(len(role.devices[device].segments) for role in program.roles) - len(calls))


def _call_counts(segment_counts: Sequence[int], frames: int) -> list[int]:
    """Return the number of calls of each segment (ONNX submodel) in a run of `frames` frames.

    Args:
        segment_counts: Number of segments of each replica (copy of the plan that computes frames in turn).
        frames: Number of frames of the run.
    """
    replica_count = len(segment_counts)
    return [
        len(range(replica, frames, replica_count)) for replica, count in enumerate(segment_counts) for _ in range(count)
    ]


def _wait_seconds(timeline: list[Mapping[str, Any]], frame: int, program: Program) -> dict[str, float]:
    transfers, waits = program.all_transfers, dict[str, float]()
    for span in timeline:
        if span["kind"] == "wait" and span["frame"] == frame:
            peer = transfers[span["index"]].sender if span["index"] >= 0 else ""
            waits[peer] = waits.get(peer, 0.0) + span["end"] - span["start"]
    return waits


def find_discrepancies(predicted: RunTiming, measured: RunTiming) -> Iterator[Discrepancy]:
    """Yield the differences between predicted and measured times that are large enough to be reported."""
    min_s = MIN_FRAME_SHARE * max(predicted.frame_s, measured.frame_s)
    for name, ours in predicted.devices.items():
        theirs = measured.devices[name]
        for cause, predicted_s, measured_s, location in (
            ("computing", ours.compute_s, theirs.compute_s, _worst_segment(ours.segments_s, theirs.segments_s)),
            # Sending may seem faster than predicted: the operating system accepts messages before they are sent.
            ("sending", ours.send_s, max(ours.send_s, theirs.send_s), ""),
            ("waiting", ours.wait_s, theirs.wait_s, _largest_difference(ours.waits, theirs.waits)),
        ):
            limit_s = max(min_s, MIN_DISCREPANCY_SHARE * max(predicted_s, measured_s))
            if abs(measured_s - predicted_s) > limit_s:
                yield Discrepancy(name, cause, location, predicted_s, measured_s)


def _worst_segment(predicted_s: tuple[float, ...], measured_s: tuple[float, ...]) -> str:
    return f"segment {_largest_difference(dict(enumerate(predicted_s)), dict(enumerate(measured_s)))}"


def _largest_difference(predicted: Mapping[Any, float], measured: Mapping[Any, float]) -> str:
    """Return the key for which the predicted and the measured value differ most; '' if there are no keys."""
    keys = dict.fromkeys([*predicted, *measured])
    return str(max(keys, key=lambda key: abs(predicted.get(key, 0.0) - measured.get(key, 0.0)), default=""))


def find_wrong_bytes(log: Mapping[str, Any], program: Program) -> list[tuple[str, str, int, int]]:
    """Return the pairs of devices between which a wrong number of bytes was sent.

    Each entry is (sender, receiver, predicted bytes, sent bytes).
    """
    frames, replicas = len(log["frames_s"]), len(program.replica_roles)
    sent = {int(index): nbytes for entry in log["devices"] for index, nbytes in entry["sent_bytes"].items()}
    roles = [i for i, role in enumerate(program.replica_roles) for _ in role.transfers]
    counts: dict[tuple[str, str], list[int]] = {}
    # `roles` has the replica of each transfer. Transfers of failure plans are last and have none, so zip() omits them.
    for transfer, role in zip(program.all_transfers, roles, strict=False):
        count = counts.setdefault((transfer.sender, transfer.receiver), [0, 0])
        count[0] += transfer.value.nbytes * len(range(role, frames, replicas))
        count[1] += sent.get(transfer.index, 0)
    return [(*ends, expected, actual) for ends, (expected, actual) in counts.items() if expected != actual]
