"""Runs on emulated boards whose rates or links differ from those that the compiler assumed; logs have simulated times.

Needs root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dicompiler
from dicompiler import networks
from dicompiler.analysis.prediction_error import on_emulation_host, predict_timing
from dicompiler.cli.file_io import write_json
from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import Workload
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.run_log import run_document
from dicompiler.ir.cluster import Network
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation.emulate import emulate
from dicompiler.search.problem import plan_workload
from dicompiler.target.run_records import RunOptions, TimelineEntry

FRAMES = 8


def boards(rates: Sequence[float], bandwidth: float = 2e7, latency: float = 0.002) -> Platform:
    """Return Raspberry Pi 4 boards on a switch.

    Args:
        rates: Rate of each board in FLOP/s.
        bandwidth: Bandwidth of the links in bytes/s.
        latency: Latency of the links in seconds.
    """
    given = Platform.load(f"rpi4x{len(rates)}")
    devices = tuple(replace(device, rate=rate) for device, rate in zip(given.devices, rates, strict=True))
    return replace(given, devices=devices, network=Network("switch", bandwidth, latency))


@dataclass(frozen=True)
class Ran:
    """A finished emulated run.

    Attributes:
        log: The run log; the artifact is in the directory `net` next to it.
        truth: The platform that was emulated.
    """

    log: Path
    truth: Platform


def ran(
    place: Path,
    network: str,
    guess: Platform,
    truth: Platform | None = None,
    cost: str = "",
    strategy: str = "modnn",
    tolerate_failures: int = 0,
) -> Ran:
    """Compile a network for the platform `guess`, and run it on emulated boards of `truth` (`guess` if None).

    The log has the measured times replaced by those of a simulation of `truth`, because a busy host delays a run.
    """
    directory, truth = place / "net", truth or guess
    dicompiler.compile(
        networks.build(network, 0), guess, strategy, tolerate_failures=tolerate_failures, output=directory
    )
    options = RunOptions(in_flight=1)
    run = emulate(directory, truth, frames=FRAMES, cost=cost, options=options)
    told = run.expected.document()
    log = run_document(directory, run.result, options, place / "run.json", told, runtime=run.runtime)
    compilation, _, problem = reopen_artifact(directory, cost or "analytic", truth)
    assert compilation.program is not None and compilation.plan is not None
    problem = on_emulation_host(problem, run.runtime, compilation.program)
    simulated = with_simulated_times(log, plan_workload(problem, compilation.plan)[1], truth)
    write_json(place / "run.json", simulated | {"location": "emulated"})
    return Ran(place / "run.json", truth)


def with_simulated_times(log: dict[str, Any], workload: Workload, platform: Platform) -> dict[str, Any]:
    """Return a run log with the times of a simulation.

    Args:
        log: Log of a run with one frame in flight.
        workload: The work of a frame.
        platform: The boards and links that the times are simulated for.
    """
    frame_s = predict_timing(workload, platform, 1, 1).frame_s
    spans = simulate(workload, platform).spans
    devices = []
    for work, entry in zip(workload.devices, log["devices"], strict=True):
        own = [span for span in spans if span.kind == "compute" and span.device == work.device]
        timeline = [
            TimelineEntry("run", index, FRAMES - 1, span.start + work.runtime.call, span.end)
            for index, span in enumerate(own)
        ]
        seconds = [FRAMES * (span.end - span.start) for span in timeline]
        # Segments of failure plans do not run, so their time is 0.
        unused = [0.0] * (len(entry["segments_s"]) - len(seconds))
        devices.append(
            entry
            | {
                "segments_s": seconds + unused,
                "compute_s": sum(seconds),
                "timeline": [asdict(span) for span in timeline],
            }
        )
    return log | {"frames_s": [frame_s] * FRAMES, "total_s": FRAMES * frame_s, "devices": devices}
