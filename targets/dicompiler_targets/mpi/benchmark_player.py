"""Plays artifacts with mpirun on this host and says how long frames took: see Target.player. It builds programs, as
`dicompiler run` does, and needs what that needs."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dicompiler.plugin_api import DicompilerError, RunOptions
from dicompiler_targets.mpi.target import MpiTarget

MIN_FRAMES, MAX_FRAMES = 5, 2000
"""Frames that are played."""


def time_artifact(artifact: Path, seconds: float) -> dict[str, Any]:
    """Seconds of each frame, and of handing a message to MPI: the median in the last frame."""
    frame = {"x": np.zeros((1, 1, 1, 1), np.float32)}
    first = MpiTarget().run(artifact, [frame] * MIN_FRAMES, RunOptions())
    count = min(MAX_FRAMES, max(MIN_FRAMES, round(seconds / min(first.frames_s))))
    result = MpiTarget().run(artifact, [frame] * count, RunOptions(kept_frames=1))
    spans = [one.end - one.start for report in result.reports for one in report.timeline if one.kind == "send"]
    return {"frames": result.frames_s, "send": statistics.median(spans) if spans else None}


if __name__ == "__main__":
    try:
        for name in sys.argv[2:]:
            print(json.dumps(time_artifact(Path(name), float(sys.argv[1]))), flush=True)
    except DicompilerError as error:
        sys.exit(str(error))
