"""The log of a run: what every device measured, as a file. RunResult ──document──► JSON ──load──► the same, checked."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json, validate
from dicompiler.target.records import RunResult
from dicompiler.target.seal import open_artifact

FORMAT = "dicompiler.run/1"


def document(directory: Path, result: RunResult) -> dict[str, Any]:
    """What `run` gave of the artifact in `directory`, without the outputs; see the schema run."""
    artifact = open_artifact(directory)
    devices = [asdict(report) for report in result.reports]
    for device in devices:
        device["sent"] = {str(index): count for index, count in device["sent"].items()}
    return {
        "format": FORMAT,
        "artifact": artifact["digest"],
        "target": artifact["target"],
        "host": {"system": platform.system(), "machine": platform.machine(), "processors": os.cpu_count() or 1},
        "frames_s": list(result.frames_s),
        "total_s": result.total_s,
        "devices": devices,
    }


def load(path: Path, artifact: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Reads and checks a log. DicompilerError where it is none, or of another artifact than the one in the directory
    `artifact`, whose artifact.json is `manifest`."""
    log: dict[str, Any] = load_json(path)
    validate(log, "run", str(path))
    if log["artifact"] != manifest["digest"]:
        raise DicompilerError(f"{path}: it is of another artifact than {artifact}: run this one again with --log")
    if [device["device"] for device in log["devices"]] != manifest["devices"]:
        raise DicompilerError(f"{path}: devices: they are not those of {artifact}: run it again with --log")
    return log
