"""Boards that this host plays: their network, and what a target's runtime costs there.

Platform + seconds of each segment → Emulation;   Target → RuntimeCosts of each of two such boards.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dicompiler.analysis.prediction_error import share_processors
from dicompiler.base.errors import RunError, UsageError
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.emulation.network import emulate_network
from dicompiler.ir.platform import Platform
from dicompiler.measure import runtime_benchmarks, runtime_costs_fit
from dicompiler.plugin.registry import registry
from dicompiler.target.run_records import Emulation, RunOptions, RunResult
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

PLAYED_BENCHMARKS = ("one", "calls", "messages")
"""Of the programs that measure a runtime those that are played. Their messages are smaller than what a line lets
through at once; what larger ones take of processors they take while the line carries them."""
STEP_S = 1e-3
"""For how long a step computes: held back it takes the same in each program."""
FRAMES_PER_ROUND, ROUNDS = 40, 3
"""How many frames of each program are played in a round, and how many rounds."""


@contextlib.contextmanager
def open_boards(
    platform: Platform, seconds: Mapping[str, tuple[float, ...]], first: str, dilation: float = 1.0
) -> Iterator[Emulation]:
    """The boards, with this thread on the network of the first one: who gives the frames sits beside it. seconds: that
    a call of each of a device's segments takes, role by role. dilation: here all that takes so many times as long."""
    seconds = {name: tuple(dilation * one for one in own) for name, own in seconds.items()}
    with emulate_network(dilate_network(platform, dilation)) as made:
        hosts = platform.host_of
        emulation = Emulation(
            lambda device: made.enter_host(hosts[device]),
            {name: made.addresses[host] for name, host in hosts.items()},
            {name: made.namespaces[host] for name, host in hosts.items()},
            seconds,
        )
        with made.enter_host(hosts[first]):
            yield emulation


def dilate_network(platform: Platform, times: float) -> Platform:
    """The platform with lines on which everything takes so many times as long."""
    lines = platform.network
    links = tuple(replace(one, bandwidth=one.bandwidth / times, latency=one.latency * times) for one in lines.links)
    slow = replace(lines, bandwidth=lines.bandwidth / times, latency=lines.latency * times, links=links)
    hosts = tuple(
        host if host.bandwidth is None else replace(host, bandwidth=host.bandwidth / times) for host in platform.hosts
    )
    return replace(platform, hosts=hosts, network=slow)


def options_on_boards(emulation: Emulation, first: str, options: RunOptions) -> RunOptions:
    """The options with which a target plays on those boards."""
    return replace(options, emulation=emulation, listen=f"{emulation.addresses[first]}:0", insecure=True)


@cache
def measure_runtime_costs(name: str) -> RuntimeCosts:
    """What the runtime of the target of that name costs on boards that this host plays, two at once; measured once in a
    process, in some seconds. Bytes are free, since they are handled while lines carry them. What is not measured is as
    stated: copies, TLS, ends of frames, what leaves together and in which order. All as stated where its programs do
    not run, which is said. DicompilerError where there can be no network."""
    target: Target = registry().make("targets", name)
    stated = target.runtime_costs
    try:
        found = _measure_target(target)
    except (RunError, UsageError) as error:
        log.warning("what the runtime of %s costs here could not be measured, so it is as stated: %s", name, error)
        return stated
    names = ("per_copy", "per_copied_byte", "per_io_byte", "per_tls_byte", "coalesced_share", "in_order")
    return replace(found, **{name: getattr(stated, name) for name in names})


def runtime_cost_factor(name: str, count: int) -> float:
    """How many times as long as the target of that name states a message takes on so many boards that this host plays:
    for option `runtime` of cost models. Errors as of `costs_here`."""
    here, stated = share_processors(measure_runtime_costs(name), count), registry().make("targets", name).runtime_costs
    ours, theirs = (one.send + one.latency + one.receive for one in (here, stated))
    return ours / theirs if theirs else 1.0


def _measure_target(target: Target) -> RuntimeCosts:
    """By the medians of frames, the lower of all rounds: others that use this host only make them longer."""
    if not target.can_emulate:
        raise UsageError("it plays no boards")
    times, sends = {name: list[float]() for name in PLAYED_BENCHMARKS}, list[float]()
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as scratch:
        programs = {
            name: runtime_benchmarks.emit_benchmark(target, name, Path(scratch, name)) for name in PLAYED_BENCHMARKS
        }
        for name in ROUNDS * PLAYED_BENCHMARKS:
            program = programs[name].program
            assert program is not None
            steps = {device.device: (STEP_S,) * len(device.segments) for device in program.devices}
            result = _play_benchmark(target, Path(scratch, name), steps)
            times[name].append(statistics.median(result.frames_s) - sum(map(sum, steps.values())))
            if name == "messages":
                sends += _send_seconds(result)
    entry, send_s = runtime_benchmarks.benchmarks_entry(target, programs), min(sends, default=None)
    costs: dict[str, Any] = {
        **runtime_costs_fit.fit_costs(entry, {name: min(own) for name, own in times.items()}, send_s)
    }
    return RuntimeCosts(**costs)


def _play_benchmark(target: Target, directory: Path, steps: Mapping[str, tuple[float, ...]]) -> RunResult:
    frame, first = {"x": np.zeros((1, 1, 1, 1), np.float32)}, next(iter(steps))
    with open_boards(runtime_benchmarks.BENCHMARK_PLATFORM, steps, first) as emulation:
        return target.run(
            directory, [frame] * FRAMES_PER_ROUND, options_on_boards(emulation, first, RunOptions(kept_frames=1))
        )


def _send_seconds(result: RunResult) -> list[float]:
    """Seconds of handing a message to the system, in the last frame; none where the target does not tell."""
    spans = [one.end - one.start for report in result.reports for one in report.timeline if one.kind == "send"]
    return [statistics.median(spans)] if spans else []
