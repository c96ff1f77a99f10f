"""The log of a run: what every device measured, as a file. RunResult ──document──► JSON ──load──► the same, checked."""

from __future__ import annotations

import hashlib
import os
import platform as host_platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.target.integrity import load_artifact
from dicompiler.target.run_records import RunOptions, RunResult, default_in_flight
from dicompiler.target.target_base import Target

RUN_FORMAT = "dicompiler.run/2"


def platform_digest(boards: Platform) -> str:
    """The SHA-256 of a platform's text."""
    return hashlib.sha256(platform_to_toml(boards).encode()).hexdigest()


def run_document(
    directory: Path,
    result: RunResult,
    options: RunOptions | None = None,
    log_path: Path | None = None,
    predicted: Mapping[str, Any] | None = None,
    platform: Platform | None = None,
    runtime: RuntimeCosts | None = None,
    dilation: float = 1.0,
) -> dict[str, Any]:
    """What `run` gave of the artifact in `directory`, without the outputs; see the schema run. options: it was run
    with; place: where the log is written; predicted: as `Expected.document` says; boards: those that were emulated;
    runtime: what the target's cost where they were; dilation: how many times slower they were played."""
    artifact, options = load_artifact(directory), options or RunOptions()
    is_remote = options.hosts or options.start_manually or result.is_remote
    location = "emulated" if platform else "boards" if is_remote else "local"
    devices = [asdict(report) for report in result.reports]
    for device in devices:
        device["sent_bytes"] = {str(index): count for index, count in device["sent_bytes"].items()}
    return {
        "format": RUN_FORMAT,
        "artifact_digest": artifact["digest"],
        "artifact_directory": Path(
            os.path.relpath(directory, None if log_path is None else log_path.parent)
        ).as_posix(),
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
    }


def emulation_host(log: Mapping[str, Any], target: Target) -> tuple[RuntimeCosts, int] | None:
    """What the target's runtime cost on the host that emulated a log's boards (of logs without that: as the target
    states), and how many processors that had; None where no boards were emulated."""
    if log.get("location") != "emulated":
        return None
    stated = target.runtime_costs
    costs = RuntimeCosts(**{"in_order": stated.in_order} | log["runtime_costs"]) if "runtime_costs" in log else stated
    return costs, log["host"]["processors"]


def _failure_summary(result: RunResult) -> dict[str, Any]:
    """The losses that a run went on after, and what they came to."""
    return {
        "events": [asdict(event) for event in result.events],
        "replayed_frames": sum(event.replayed_frames for event in result.events),
        "interrupted_s": sum(event.interruption_s for event in result.events),
    }


def frames_in_flight(in_flight: int, devices: int, frames: int) -> int:
    """How many frames are on their way at once at most; in_flight: as `RunOptions` has it."""
    return max(1, min(in_flight or default_in_flight(devices), frames))


def read_log(path: Path) -> dict[str, Any]:
    """Reads a log, whatever artifact it is of. DicompilerError where it is none."""
    log: dict[str, Any] = load_json(path)
    validate(log, "run", str(path))
    return log


def load_log(path: Path, artifact: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Reads and checks a log. DicompilerError where it is none, or of another artifact than the one in the directory
    `artifact`, whose artifact.json is `manifest`."""
    log = read_log(path)
    if log["artifact_digest"] != manifest["digest"]:
        raise DicompilerError(f"{path}: it is of another artifact than {artifact}: run this one again with --log")
    if [device["device"] for device in log["devices"]] != manifest["devices"]:
        raise DicompilerError(f"{path}: devices: they are not those of {artifact}: run it again with --log")
    return log
