"""Runs on emulated boards of which one thing is believed and another is true. Needs root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import dicompiler
from dicompiler import networks
from dicompiler.cli.file_io import write_json
from dicompiler.driver.run_log import run_document
from dicompiler.emulation.emulate import MAX_COMPUTE_SLOWDOWN, EmulationResult, emulate
from dicompiler.ir.cluster import Network
from dicompiler.ir.platform import Platform

FRAMES, ATTEMPTS = 8, 5


def boards(rates: Sequence[float], bandwidth: float = 2e7, latency: float = 0.002) -> Platform:
    """On a switch, with rates in FLOP/s."""
    given = Platform.load(f"rpi4x{len(rates)}")
    devices = tuple(replace(device, rate=rate) for device, rate in zip(given.devices, rates, strict=True))
    return replace(given, devices=devices, network=Network("switch", bandwidth, latency))


@dataclass(frozen=True)
class Ran:
    """log: of a run of the artifact `net` beside it on boards that are `truth`."""

    log: Path
    truth: Platform


def late(found: EmulationResult) -> float:
    """By what share the device of which that is most true computed longer than its board would."""
    due = {name: FRAMES * sum(seconds) for name, seconds in found.segments_s.items()}
    return max(report.compute_s / due[report.device] for report in found.result.reports) - 1


def ran(
    place: Path,
    network: str,
    guess: Platform,
    truth: Platform | None = None,
    cost: str = "",
    strategy: str = "modnn",
    tolerate_failures: int = 0,
) -> Ran:
    """Compiles for `guess`, and runs as on `truth`, as if those were the same. Where this host was busy it does so
    again, and the run that was least late counts."""
    dicompiler.compile(
        networks.build(network, 0), guess, strategy, tolerate_failures=tolerate_failures, output=place / "net"
    )
    best = emulate(place / "net", truth or guess, frames=FRAMES, cost=cost)
    for _ in range(ATTEMPTS):
        if late(best) > MAX_COMPUTE_SLOWDOWN:
            best = min(best, emulate(place / "net", truth or guess, frames=FRAMES, cost=cost), key=late)
    told, runtime = best.expected.document(), best.runtime
    log = run_document(place / "net", best.result, log_path=place / "run.json", predicted=told, runtime=runtime)
    write_json(place / "run.json", log | {"location": "emulated"})
    return Ran(place / "run.json", truth or guess)
