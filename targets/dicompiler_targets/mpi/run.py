"""Runs an artifact on this host: builds its program and starts all ranks with mpirun.

In: an artifact's directory, frames. Out: outputs, times, and what each rank reported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunOptions, RunResult
from dicompiler_targets.mpi import build, mpirun, tools
from dicompiler_targets.mpi.artifact import Artifact, read_outputs, write_inputs


def run(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    """Runs the artifact for `frames`: see Target.run. The time of building does not count."""
    artifact = Artifact.load(directory)
    words = mpirun.arguments(artifact, len(frames), options)
    toolchain, count = tools.find(), len(artifact.devices)
    program = build.build(next(iter(artifact.packages.values())), toolchain)
    share = max(1, len(os.sched_getaffinity(0)) // count)
    words += ["--threads", str(share), *["--pin"] * options.pin]
    line = [str(toolchain.mpirun), "--oversubscribe", "--bind-to", "none", "-n", str(count), str(program)]
    with tempfile.TemporaryDirectory(prefix="dicompiler-mpi-") as temporary:
        scratch = Path(temporary)
        (scratch / "data").mkdir()
        for device, package in artifact.packages.items():
            (scratch / "data" / device).symlink_to(package / device)
        write_inputs(scratch / "inputs", frames)
        places = ["--data", "data", "--inputs", "inputs", "--outputs", "outputs"]
        report = mpirun.call(artifact, [*line, *places, *words], scratch, options.timeout_s, {})
        delivered = read_outputs(artifact, scratch / "outputs", mpirun.kept(len(frames), options))
    return mpirun.result(artifact, report, delivered)
