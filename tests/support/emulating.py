"""Runs on emulated boards whose rates or links differ from those that the compiler assumed. Needs root."""

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


def late(found: EmulationResult) -> float:
    """Return the largest share by which any device computed longer than its emulated board would have."""
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
    """Compile a network for the platform `guess`, and run it on emulated boards of `truth` (`guess` if None).

    If the host is busy, the run is repeated, and the run that was delayed least is returned.
    """
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
