"""Measure how swaps and adaptive sessions slow down the frames of a stream.

A swap replaces the artifact of a running session. An adaptive session searches for another plan, and swaps to it, if a
device or a link becomes slower.

    PYTHONPATH=tests python benchmarks/swap_costs.py                  all figures (root, ten minutes)
    PYTHONPATH=tests python benchmarks/swap_costs.py --figure idle
    PYTHONPATH=tests python benchmarks/swap_costs.py --figure "slow link" --dilation 3

- **idle**: the additional time of a frame in an adaptive session with nothing to do, for a small network.
- **crossing**: the seconds of the frames around a swap, as a multiple of those of other frames.
- **copying**: the time between frames while a swap copies files to the boards, as a multiple of that before.
- **slow board**, **slow link**: seconds until another plan is in force, and the time between frames then, as a multiple
  of that of the plan that `auto` makes for the slow board or link. Each step of the adaptation is listed with its
  seconds, and with the processor seconds of all processes of the benchmark. With `--dilation N`, boards and links are N
  times slower, and all times are divided by N, as on a host that is N times faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.boards import cluster, shape

import dicompiler
from dicompiler import networks
from dicompiler.cost.speed_changes import SpeedChange
from dicompiler.driver.swap import SwappableSession
from dicompiler.ir.platform import Platform
from dicompiler.measure.adapt import AdaptOptions, SpeedTrial
from dicompiler.measure.emulation.boards import open_boards, options_on_boards
from dicompiler.measure.emulation.speed_changes import emulate_speed_changes, segment_times
from dicompiler.measure.simulate_adaptation import change_platform
from dicompiler.target.client import Session
from dicompiler.target.remote.ssh import RemoteCommands
from dicompiler.target.run_records import FrameTimes, RunOptions

PLATFORM = Platform.load('rpi4x4{bandwidth="100 Mbit/s"}')
INPUT = {"input": np.zeros((1, 3, 224, 224), np.float32)}


def main() -> None:
    """Measure the chosen figures and print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    figures: dict[str, Callable[[Path], Mapping[str, Any]]] = {
        "idle": measure_idle_session,
        "crossing": measure_crossing,
        "copying": measure_copying,
        "slow board": lambda place: measure_adaptation(
            place, "pi03=0.4@15s", "replicate", "throughput", options.dilation
        ),
        "slow link": lambda place: measure_adaptation(
            place, "link:pi03=0.333@15s", "modnn", "latency", options.dilation
        ),
    }
    parser.add_argument("--figure", choices=figures, action="append")
    parser.add_argument("--dilation", type=float, default=1.0)
    options = parser.parse_args()
    for name in options.figure or figures:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps({name: figures[name](Path(place))}, indent=1), flush=True)


def compile_network(
    directory: Path, seed: int = 0, strategy: str = "modnn", objective: str = "latency", network: str = "resnet18"
) -> Path:
    dicompiler.compile(
        networks.build(network, seed), PLATFORM, strategy, objective=objective, output=directory, allow_worse=True
    )
    return directory


def mean_period(finished_s: Sequence[float]) -> float:
    return (finished_s[-1] - finished_s[0]) / (len(finished_s) - 1)


def total_cpu_s() -> float:
    """Return the processor seconds of this process and its descendants, ended ones included."""
    times, children = dict[int, float](), dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        # The file of a process is missing if the process has ended in the meantime.
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            children.setdefault(int(fields[1]), []).append(process)
            times[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def add(process: int) -> float:
        return times.get(process, 0.0) + sum(map(add, children.get(process, ())))

    return add(os.getpid())


class StepRecorder(logging.Handler):
    """A log handler that records the time and the processor seconds at the end of each step of an adaptation."""

    STEPS: Mapping[str, str] = {
        "adapt: searching": "detection",
        "adapt: the best plan is": "search",
        "swap: %s replaces": "start and verification of the new devices",
    }

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.points: list[tuple[str, float, float]] = []
        self.first_frame_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        for beginning, step in self.STEPS.items():
            if str(record.msg).startswith(beginning):
                self.points.append((step, time.perf_counter(), total_cpu_s()))

    def record_frame(self, _times: FrameTimes) -> None:
        self.first_frame_at = self.first_frame_at or time.perf_counter()

    def list_steps(self, trial: SpeedTrial, change_s: float, dilation: float) -> Iterator[str]:
        """Yield the seconds of each step of the first adaptation, divided by the dilation."""
        start = self.first_frame_at / dilation - trial.finished_s[0]
        before_s, before_cpu_s = change_s, math.nan
        for step, ended_at, cpu_s in self.points[: len(self.STEPS)]:
            ended_s = ended_at / dilation - start
            yield f"{step}: {ended_s - before_s:.1f} s, {cpu_s - before_cpu_s:.1f} processor seconds"
            before_s, before_cpu_s = ended_s, cpu_s
        swap = next((found.swap for found in trial.adaptations if found.swap), None)
        if swap is not None:
            yield f"old frames: {trial.finished_s[swap.first_frame] - before_s:.1f} s"


def measure_idle_session(place: Path) -> Mapping[str, Any]:
    """Measure how much later an adaptive session delivers a frame, if no search starts.

    The network is LeNet on four devices of this host, because the difference is too small to be seen in frames of
    larger networks. The two sessions compute slices of frames in turn. The baseline is a session of `connect`.
    """
    directory = compile_network(place / "net", network="lenet")
    frames = [{"input": np.zeros((1, 1, 32, 32), np.float32)}] * 100
    never = AdaptOptions(deviation=1e9, link_deviation=1e9)
    plain_s, differences_s = list[float](), list[float]()
    for _ in range(6):
        with dicompiler.connect(directory) as plain, dicompiler.connect_adaptive(directory, adapt=never) as adaptive:
            time.sleep(10)  # The adaptive session prepares the process of its searches.
            for _ in range(40):
                before_s, adaptive_s = measure_slice(plain, frames), measure_slice(adaptive, frames)
                after_s = measure_slice(plain, frames)
                plain_s += before_s, after_s
                differences_s.append(adaptive_s - (before_s + after_s) / 2)
            assert not adaptive.adaptations
    quartiles = statistics.quantiles(differences_s, n=4)
    return {
        "ms of a frame of LeNet without adaptation (median)": round(1000 * statistics.median(plain_s), 4),
        "additional ms of a frame with adaptation (quartiles)": [round(1000 * seconds, 4) for seconds in quartiles],
        "pairs of slices": len(differences_s),
    }


def measure_slice(session: Session, frames: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean seconds of a frame in a stream."""
    start_s = time.perf_counter()
    for _ in session.stream(frames):
        pass
    return (time.perf_counter() - start_s) / len(frames)


def measure_crossing(place: Path) -> Mapping[str, Any]:
    """Swap ten times between two artifacts on emulated boards, with one frame in flight."""
    artifacts = [compile_network(place / "a"), compile_network(place / "b", seed=1)]
    ratios: list[float] = []
    frames_s: list[float] = []
    first = "pi01"

    def with_segment_times(directory: Path, options: RunOptions) -> RunOptions:
        assert options.emulation is not None
        emulation = replace(options.emulation, min_segments_s=segment_times(directory, "", PLATFORM))
        return replace(options, emulation=emulation)

    with open_boards(PLATFORM, {}, first) as emulation:
        options = options_on_boards(emulation, first, RunOptions(in_flight=1))
        with SwappableSession(artifacts[0], options, with_segment_times) as session:
            for number in range(10):
                swapper = threading.Thread(target=session.swap, args=(artifacts[1 - number % 2],))
                count = len(frames_s)
                while swapper.ident is None or swapper.is_alive() or len(frames_s) < count + 40:
                    if len(frames_s) == count + 20:
                        swapper.start()
                    start_s = time.perf_counter()
                    session.infer(INPUT)
                    frames_s.append(time.perf_counter() - start_s)
                first_frame = session.swaps[-1].first_frame
                around = frames_s[first_frame - 1 : first_frame + 2]
                ratios.append(max(around) / statistics.median(frames_s[count : count + 20]))
    return {"ratio (median)": round(statistics.median(ratios), 3), "ratio (largest)": round(max(ratios), 3)}


def measure_copying(place: Path) -> Mapping[str, Any]:
    """Swap to an artifact with other weights, on boards over ssh with links of 100 Mbit/s."""
    old, new = (compile_network(place / name, seed, network="mobilenet_v2") for name, seed in (("a", 0), ("b", 1)))
    copies: list[tuple[float, float]] = []
    copy_files = RemoteCommands.copy_files

    def timed(self: RemoteCommands, *arguments: Any, **options: Any) -> int:
        start = time.perf_counter()
        try:
            return copy_files(self, *arguments, **options)
        finally:
            copies.append((start, time.perf_counter()))

    finished: list[float] = []
    (place / "boards").mkdir()
    with cluster(place / "boards", [device.name for device in PLATFORM.devices]) as boards, boards.inside():
        shape(boards, "100mbit", "64kb")
        hosts = boards.hosts(place / "hosts.toml")
        with dicompiler.connect_swappable(old, RunOptions(in_flight=4, insecure=True), hosts=hosts) as session:
            RemoteCommands.copy_files = timed  # type: ignore[method-assign]
            swapper = threading.Thread(target=session.swap, args=(new,))

            def frames() -> Iterator[Mapping[str, Any]]:
                start = time.perf_counter()
                while time.perf_counter() < start + 30 or swapper.is_alive():
                    if time.perf_counter() > start + 20 and swapper.ident is None:
                        swapper.start()
                    yield INPUT

            finished.extend(time.perf_counter() for _ in session.stream(frames()))
    start, end = min(copies)[0], max(end for _, end in copies)
    before = [at for at in finished if at < start]
    during = [at for at in finished if start <= at <= end]
    return {
        "ratio": round(mean_period(during) / mean_period(before), 3),
        "seconds of copying": round(end - start, 1),
        "frames": len(during),
    }


def measure_adaptation(place: Path, text: str, strategy: str, objective: str, dilation: float) -> Mapping[str, Any]:
    """Let a board or link become slower in a stream, and compare the time between frames with that of the best plan."""
    change = SpeedChange.parse(text)
    directory = compile_network(place / "net", strategy=strategy, objective=objective)
    recorder, log = StepRecorder(), logging.getLogger("dicompiler")
    log.setLevel(logging.INFO)
    log.addHandler(recorder)
    options = RunOptions(on_frame=recorder.record_frame)
    # Only the changed link should start a search. One host computes for all boards, so boards may seem slower than
    # predicted; they may therefore deviate by 100 %.
    adapt = AdaptOptions(deviation=1.0) if text.startswith("link:") else AdaptOptions()
    trial = emulate_speed_changes(directory, [change], adapt, duration_s=45, options=options, dilation=dilation)
    load = os.getloadavg()[0]
    log.removeHandler(recorder)
    swaps = [found for found in trial.adaptations if found.swap is not None]
    slow_platform = change_platform(PLATFORM, [change], change.start_s)
    best = place / "best"
    dicompiler.compile(
        networks.build("resnet18", 0), slow_platform, "auto{budget=10}", objective=objective, output=best
    )
    expected = emulate_speed_changes(
        best, [replace(change, start_s=0.0)], platform=PLATFORM, duration_s=20, dilation=dilation
    )
    period_s = mean_period([at for at in trial.finished_s if at > 30])
    figures = {
        "searches": [f"{found.at_s:.1f} s: {found.message}" for found in trial.adaptations],
        "steps": list(recorder.list_steps(trial, change.start_s, dilation)),
        "load average": load,
        "ms between frames": round(1000 * period_s, 1),
        "ratio": round(period_s / mean_period([at for at in expected.finished_s if at > 3]), 3),
    }
    if not swaps:
        return figures
    assert swaps[0].swap is not None
    first_new = trial.finished_s[swaps[0].swap.first_frame]
    return {**figures, "seconds until the new plan": round(first_new - change.start_s, 1)}


if __name__ == "__main__":
    main()
