"""Runs benchmark artifacts with mpirun on this host, and prints the seconds of each frame as JSON.

A benchmark artifact is a small network that measures the times of messages, calls and copies. Building its C++ program
needs the same tools as `dicompiler run`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dicompiler.plugin_api import DicompilerError, RunOptions
from dicompiler_targets.mpi.target import MpiTarget

MIN_FRAMES, MAX_FRAMES = 5, 2000


def time_artifact(artifact: Path, seconds: float) -> dict[str, Any]:
    """Run an artifact for about `seconds` seconds and return its measured times in seconds.

    "frames" has the time of each frame. "send" is the shortest time of a send in the last frame, from MPI_Isend until
    the send is found complete; None if nothing is sent.
    """
    frame = {"x": np.zeros((1, 1, 1, 1), np.float32)}
    first = MpiTarget().run(artifact, [frame] * MIN_FRAMES, RunOptions(in_flight=1))
    count = min(MAX_FRAMES, max(MIN_FRAMES, round(seconds / min(first.frames_s))))
    result = MpiTarget().run(artifact, [frame] * count, RunOptions(in_flight=1, kept_frames=1))
    timeline = [entry for report in result.reports for entry in report.timeline]
    send_s = [entry.end - entry.start for entry in timeline if entry.kind == "send"]
    return {"frames": result.frames_s, "send": min(send_s, default=None)}


if __name__ == "__main__":
    try:
        for name in sys.argv[2:]:
            print(json.dumps(time_artifact(Path(name), float(sys.argv[1]))), flush=True)
    except DicompilerError as error:
        sys.exit(str(error))
