"""Run logs: JSON files with the measurements of all devices in a run."""

from __future__ import annotations

import hashlib
import math
import os
import platform as host_platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.target.manifest import load_artifact
from dicompiler.target.run_records import (
    DeviceReport,
    FrameTimes,
    RunEvent,
    RunOptions,
    RunResult,
    default_in_flight,
)
from dicompiler.target.target_base import Target

RUN_FORMAT = "dicompiler.run/2"


def platform_digest(platform: Platform) -> str:
    """Return the SHA-256 digest of a platform's TOML text, by which a run log identifies its platform."""
    return hashlib.sha256(platform_to_toml(platform).encode()).hexdigest()


def run_document(
    directory: Path,
    result: RunResult,
    options: RunOptions | None = None,
    log_path: Path | None = None,
    predicted: Mapping[str, Any] | None = None,
    platform: Platform | None = None,
    runtime: RuntimeCosts | None = None,
    dilation: float = 1.0,
    unfinished: str = "",
) -> dict[str, Any]:
    """Return a run as a JSON document with the schema `run`, without the outputs.

    Args:
        directory: The artifact that was run.
        result: The result of the run.
        options: The options of the run.
        log_path: The file that the document will be written to. The document states the artifact's path relative to it.
        predicted: The predicted times of the run and of its devices, as entries of the key `predicted`.
        platform: The platform that was emulated; None if no boards were emulated.
        runtime: Costs of the target's runtime on the host that emulated the boards.
        dilation: Factor by which the emulation ran slower than the boards would.
        unfinished: Why the run ended before all frames were finished; empty if it did not.
    """
    artifact, options = load_artifact(directory), options or RunOptions()
    uses_boards = options.hosts or options.start_manually or result.is_remote
    location = "emulated" if platform is not None else "boards" if uses_boards else "local"
    devices = [asdict(report) for report in result.reports]
    for device in devices:
        device["sent_bytes"] = {str(index): nbytes for index, nbytes in device["sent_bytes"].items()}
    log_directory = None if log_path is None else log_path.parent
    return {
        "format": RUN_FORMAT,
        "artifact_digest": artifact["digest"],
        "artifact_directory": Path(os.path.relpath(directory, log_directory)).as_posix(),
        "target": artifact["target"],
        "host": {
            "system": host_platform.system(),
            "machine": host_platform.machine(),
            "processors": os.cpu_count() or 1,
        },
        "location": location,
        **({"platform_digest": platform_digest(platform)} if platform else {}),
        **({"runtime_costs": asdict(runtime)} if runtime else {}),
        **({"dilation": dilation} if dilation != 1 else {}),
        "in_flight": frames_in_flight(options.in_flight, len(devices), len(result.frames_s)),
        "frames_s": list(result.frames_s),
        **({"queue_wait_s": list(result.queue_wait_s)} if result.queue_wait_s else {}),
        "total_s": result.total_s,
        "devices": devices,
        **(_failure_summary(result) if result.events else {}),
        **({"predicted": dict(predicted)} if predicted else {}),
        **({"unfinished": unfinished} if unfinished else {}),
    }


class FrameRecorder:
    """A recorder of finished frames and events, for the log of a run that ends early.

    Attributes:
        frames_s: For each finished frame, the seconds from sending its inputs to having all its outputs.
        events: The events so far.
    """

    frames_s: list[float]
    events: list[RunEvent]

    def __init__(self) -> None:
        self.frames_s, self.events = [], []
        self._compute_s = Counter[str]()
        self._first_sent_at, self._last_finished_at = math.inf, 0.0

    def observe(self, options: RunOptions) -> RunOptions:
        """Return run options that record each frame and event, and still call the functions of `options`."""

        def record_frame(times: FrameTimes) -> None:
            self._last_finished_at = time.perf_counter()
            # Several frames are in flight, and this function may be called late. The run must not seem shorter than one
            # of its frames.
            self._first_sent_at = min(self._first_sent_at, self._last_finished_at - times.frame_s)
            self.frames_s.append(times.frame_s)
            self._compute_s.update(times.compute_s)
            if options.on_frame is not None:
                options.on_frame(times)

        def record_event(event: RunEvent) -> None:
            self.events.append(event)
            if options.on_event is not None:
                options.on_event(event)

        return replace(options, on_frame=record_frame, on_event=record_event)

    def make_result(self, devices: Sequence[str]) -> RunResult:
        """Return the recorded frames as the result of a run on `devices`, without outputs."""
        # Devices report all other measurements only at the end of a run, so these are 0 or empty.
        reports = tuple(DeviceReport(name, self._compute_s[name], 0.0, 0.0, {}, (), 0) for name in devices)
        total_s = self._last_finished_at - self._first_sent_at
        return RunResult((), reports, frames_s=tuple(self.frames_s), total_s=total_s, events=tuple(self.events))


def emulation_host(log: Mapping[str, Any], target: Target) -> tuple[RuntimeCosts, int] | None:
    """Return the runtime costs and the number of processors of the host on which a logged run was emulated.

    Args:
        log: The content of a run log.
        target: The target of the run. Its stated costs are used if the log has none.

    Returns:
        The costs and the number; None if the run was not emulated.
    """
    if log.get("location") != "emulated":
        return None
    stated = target.runtime_costs
    costs = RuntimeCosts(**{"in_order": stated.in_order} | log["runtime_costs"]) if "runtime_costs" in log else stated
    return costs, log["host"]["processors"]


def _failure_summary(result: RunResult) -> dict[str, Any]:
    return {
        "events": [asdict(event) for event in result.events],
        "replayed_frames": sum(event.replayed_frames for event in result.events),
        "interrupted_s": sum(event.interruption_s for event in result.events),
    }


def frames_in_flight(in_flight: int, devices: int, frames: int) -> int:
    """Return the largest number of frames in flight in a run of `frames` frames.

    Args:
        in_flight: The option of the run; 0 for the default, which depends on the number of devices.
        devices: Number of devices.
        frames: Number of frames.
    """
    return max(1, min(in_flight or default_in_flight(devices), frames))


def read_log(path: Path) -> dict[str, Any]:
    """Return the content of a run log; raise DicompilerError if the file is not a run log of this version."""
    log: dict[str, Any] = load_json(path)
    validate(log, "run", str(path))
    return log


def _name_logged_artifact(path: Path, log: Mapping[str, Any], artifact: Path) -> str:
    """Return the advice to use the artifact that a log names; "" if its directory is missing or is `artifact`."""
    logged = Path(os.path.normpath(path.parent / log["artifact_directory"]))
    if not logged.is_dir() or logged.resolve() == artifact.resolve():
        return ""
    is_swapped = any(event["kind"] == "swap" for event in log.get("events", ()))
    return f"use {logged}{', to which the run changed' if is_swapped else ''}, or "


def load_log(path: Path, artifact: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a run log after checking that the log belongs to an artifact.

    Args:
        path: The run log.
        artifact: The artifact's directory.
        manifest: The content of the artifact's artifact.json.

    Raises:
        DicompilerError: The file is not a run log, belongs to another artifact, or the run ended early.
    """
    log = read_log(path)
    if "unfinished" in log:
        cause = f"the run ended early ({log['unfinished']}), so the log lacks measurements of the devices"
        raise DicompilerError(f"{path}: {cause}: run {artifact} again with --log")
    if log["artifact_digest"] != manifest["digest"]:
        raise DicompilerError(
            f"{path}: the log is of another artifact than {artifact}: {_name_logged_artifact(path, log, artifact)}"
            "run this artifact with --log"
        )
    if [device["device"] for device in log["devices"]] != manifest["devices"]:
        raise DicompilerError(
            f"{path}: devices: the log has other devices than {artifact}: run the artifact with --log"
        )
    return log
