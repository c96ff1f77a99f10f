"""Swap artifacts in a stream on boards over ssh: check for lost or mixed frames, and measure the times around a swap.

    PYTHONPATH=tests python benchmarks/swaps.py --swaps 200 --output swaps.json

Five boards are network namespaces of this host, each with its own sshd (needs root). Two artifacts replace each other
while a stream runs. In a third of the swaps, a device of either artifact is killed at a random moment. Each output
shows its frame and the artifact that computed it (`tests/support/swapping.py`). A lost, doubled, reordered or mixed
frame is an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from support.boards import cluster
from support.running import pids
from support.swapping import compile_times, factor_of, frames

import dicompiler
from dicompiler.base.errors import RunError
from dicompiler.target.run_records import RunOptions

FRAMES_BEFORE, FRAMES_AFTERWARDS = 50, 100
"""Numbers of frames in the stream before the first swap and after the last one."""
NAMES = ("pi01", "pi02", "pi03", "pi04", "pi05")


def main() -> None:
    """Run the swaps, print the figures, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        figures = run_swaps(Path(place), options.swaps, Random(options.seed))
    print(json.dumps(figures, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1))


def run_swaps(place: Path, count: int, rng: Random) -> dict[str, Any]:
    """Swap two artifacts `count` times in one stream; return the numbers of swaps and frames, and the times by name."""
    directories = {
        factor: compile_times(factor, place / f"times{factor}", "rpi4x5", tolerate_failures=1) for factor in (3, 5)
    }
    refused: list[str] = []
    finished: list[float] = []
    switched: list[float] = []
    (place / "boards").mkdir()
    with cluster(place / "boards", NAMES) as boards, boards.inside():
        hosts = boards.hosts(place / "hosts.toml")
        session_options = RunOptions(insecure=True, heartbeat_s=0.5)
        with dicompiler.connect_swappable(directories[3], session_options, hosts=hosts) as session:

            def swap_often() -> None:
                for number in range(count):
                    new = directories[8 - factors[-1]]
                    killer = None
                    if number % 3 == 0:
                        victim, device = directories[rng.choice((3, 5))], rng.choice(NAMES)
                        home = boards.boards[device].home / ".cache" / "dicompiler" / victim.name
                        killer = threading.Timer(rng.uniform(0, 3), kill, (home, device))
                        killer.start()
                    try:
                        session.swap(new)
                        switched.append(time.perf_counter())
                        factors.append(8 - factors[-1])
                    except RunError as error:
                        refused.append(str(error))
                    if killer is not None:
                        killer.join()

            factors = [3]
            swapper = threading.Thread(target=swap_often)

            def read() -> Any:
                left = FRAMES_AFTERWARDS
                for given in frames():
                    left -= len(finished) > FRAMES_BEFORE and not swapper.is_alive()
                    if not left:
                        return
                    yield given

            seen: list[int] = []
            for outputs in session.stream(read()):
                seen.append(factor_of(outputs, len(seen) + 1))
                finished.append(time.perf_counter())
                if len(seen) == FRAMES_BEFORE:
                    swapper.start()
            swaps = list(session.swaps)
    changes = [(i, factor) for i, factor in enumerate(seen) if i == 0 or seen[i - 1] != factor]
    expected = list(zip([0, *(swap.first_frame for swap in swaps)], factors, strict=True))
    gaps = [b - a for a, b in itertools.pairwise(finished)]
    around = [finished[swap.first_frame] - finished[swap.first_frame - 1] for swap in swaps]
    return {
        "swaps": len(swaps),
        "refused": len(refused),
        "reasons": sorted({reason.partition(":")[2][:100] for reason in refused}),
        "frames": len(seen),
        "frames in the right artifact": changes == expected,
        "seconds of a swap (median)": round(statistics.median(swap.seconds for swap in swaps), 2),
        "ms between frames (median)": round(1000 * statistics.median(gaps), 2),
        "ms between the last old and the first new frame (median)": round(1000 * statistics.median(around), 2),
        "the same (largest)": round(1000 * max(around), 2),
    }


def kill(directory: Path, device: str) -> None:
    """Kill the process of a device of the artifact in `directory`, if it runs."""
    if (pid := pids(directory).get(device)) is not None:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
