"""Runs on emulated boards of which one thing is believed and another is true. Needs root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import dicompiler
from dicompiler import networks
from dicompiler.cli.files import write_json
from dicompiler.driver.emulate import LATE_LIMIT, emulate
from dicompiler.driver.run_log import document
from dicompiler.ir.devices import Network
from dicompiler.ir.platform import Platform

ATTEMPTS = 5


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


def ran(
    place: Path, network: str, guess: Platform, truth: Platform | None = None, cost: str = "", strategy: str = "modnn"
) -> Ran:
    """Compiles for `guess`, and runs as on `truth`, as if those were the same. Again where this host was busy, as far
    as the emulation tells."""
    dicompiler.compile(networks.build(network, 0), guess, strategy, output=place / "net")
    for _ in range(ATTEMPTS):
        found = emulate(place / "net", truth or guess, frames=8, cost=cost)
        if found.late < LATE_LIMIT:
            break
    log = document(place / "net", found.result, place=place / "run.json", predicted=found.expected.document())
    write_json(place / "run.json", log | {"where": "emulated"})
    return Ran(place / "run.json", truth or guess)
