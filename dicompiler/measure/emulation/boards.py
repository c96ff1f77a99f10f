"""Emulated boards: their network on this host, and the costs of a target's runtime on this host."""

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
from dicompiler.ir.platform import Platform
from dicompiler.measure import runtime_benchmarks, runtime_costs_fit
from dicompiler.measure.emulation.network import emulate_network
from dicompiler.plugin.registry import registry
from dicompiler.target.run_records import Emulation, RunOptions, RunResult
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

RUN_BENCHMARKS = ("one", "calls", "messages")
"""Names of the benchmark programs from which the runtime costs are measured.

Their messages are short. The costs of larger messages do not matter, because they pass while the link sends.
"""
COMPUTED_S = 10e-3
"""Seconds to which the segments (submodels) of a benchmark program are delayed, per frame.

They are subtracted from the frame time. With 1 ms, one segment needed longer without a delay, which spoiled the result.
"""
FRAMES_PER_ROUND, ROUND_COUNT = 40, 3
"""Number of frames whose median time is one measurement, and number of measurements in a run of a benchmark program."""


@contextlib.contextmanager
def open_boards(
    platform: Platform, segments_s: Mapping[str, tuple[float, ...]], first: str, dilation: float = 1.0
) -> Iterator[Emulation]:
    """Open emulated boards until the end of the `with` block, with the calling thread on the network of one of them.

    Args:
        platform: The boards and their network.
        segments_s: For each device, the seconds of a call of each of its segments (ONNX submodels): first those of the
            main plan, then those of its replicas (copies on other devices) and failure plans.
        first: Name of the device on whose network the calling thread is.
        dilation: Factor by which everything runs slower than on the boards.
    """
    with emulate_network(dilate_network(platform, dilation)) as network:
        hosts = platform.host_of
        emulation = Emulation(
            lambda device: network.enter_host(hosts[device]),
            {name: network.addresses[host] for name, host in hosts.items()},
            {name: network.namespaces[host] for name, host in hosts.items()},
            scale_seconds(segments_s, dilation),
            scale_links=network.scale_links,
            dilation=dilation,
        )
        with network.enter_host(hosts[first]):
            yield emulation


def check_dilation(dilation: float) -> None:
    """Raise UsageError if a dilation (the factor by which an emulation is slowed) is below 1 or infinite."""
    if not 1 <= dilation < float("inf"):
        raise UsageError(f"emulate: dilation must be at least 1, not {dilation!r}")


def scale_seconds(segments_s: Mapping[str, tuple[float, ...]], factor: float) -> dict[str, tuple[float, ...]]:
    """Return the seconds of segments (ONNX submodels), by device name, multiplied by a factor."""
    return {name: tuple(factor * seconds for seconds in call_times) for name, call_times in segments_s.items()}


def dilate_network(platform: Platform, factor: float) -> Platform:
    network = platform.network
    links = tuple(
        replace(link, bandwidth=link.bandwidth / factor, latency=link.latency * factor) for link in network.links
    )
    slower = replace(network, bandwidth=network.bandwidth / factor, latency=network.latency * factor, links=links)
    hosts = tuple(
        host if host.bandwidth is None else replace(host, bandwidth=host.bandwidth / factor) for host in platform.hosts
    )
    return replace(platform, hosts=hosts, network=slower)


def options_on_boards(emulation: Emulation, first: str, options: RunOptions) -> RunOptions:
    """Return the options for a run on emulated boards; the calling process listens on the network of device `first`."""
    return replace(options, emulation=emulation, listen=f"{emulation.addresses[first]}:0", insecure=True)


@cache
def measure_runtime_costs(name: str) -> RuntimeCosts:
    """Return the costs of a target's runtime, measured on two emulated boards in some seconds.

    Costs that cannot be measured have the values that the target states.

    Args:
        name: Name of the target.

    Raises:
        DicompilerError: This host cannot emulate a network.
    """
    target: Target = registry().make("targets", name)
    stated = target.runtime_costs
    try:
        measured = _measure_target(target)
    except (RunError, UsageError) as error:
        log.warning(
            "the runtime costs of %s on this host cannot be measured, so its stated costs are used: %s", name, error
        )
        return stated
    return replace(
        measured,
        per_copy=stated.per_copy,
        per_copied_byte=stated.per_copied_byte,
        per_io_byte=stated.per_io_byte,
        per_tls_byte=stated.per_tls_byte,
        coalesced_share=stated.coalesced_share,
        in_order=stated.in_order,
    )


def runtime_cost_factor(name: str, count: int) -> float:
    """Return the time of a message on emulated boards, divided by the time that the target states for real boards.

    Args:
        name: Name of the target.
        count: Number of emulated boards that share this host.
    """
    emulated = share_processors(measure_runtime_costs(name), count)
    stated = registry().make("targets", name).runtime_costs
    emulated_s, stated_s = (costs.send + costs.latency + costs.receive for costs in (emulated, stated))
    return emulated_s / stated_s if stated_s else 1.0


def _measure_target(target: Target) -> RuntimeCosts:
    """Return the measured costs of a target's runtime."""
    if not target.can_emulate:
        raise UsageError("its programs cannot run on emulated boards")
    times, sends = {name: list[float]() for name in RUN_BENCHMARKS}, list[float]()
    costs, call_s = dict[str, Any](), 0.0
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as scratch:
        states = {name: runtime_benchmarks.emit_benchmark(target, name, Path(scratch, name)) for name in RUN_BENCHMARKS}
        entry = runtime_benchmarks.benchmarks_entry(target, states)
        for _ in range(runtime_costs_fit.MAX_FITS):
            for name in RUN_BENCHMARKS:
                program = states[name].program
                assert program is not None
                segment_s = COMPUTED_S / sum(len(device.segments) for device in program.devices)
                steps_s = {device.device: (segment_s,) * len(device.segments) for device in program.devices}
                result = _run_benchmark(target, Path(scratch, name), steps_s)
                for first in range(0, len(result.frames_s), FRAMES_PER_ROUND):
                    frames_s = result.frames_s[first : first + FRAMES_PER_ROUND]
                    times[name].append(statistics.median(frames_s) - COMPUTED_S)
                if name == "messages":
                    sends += _send_seconds(result)
            # Other load on this host can only delay frames and messages, so the fastest round of each program and the
            # fastest message are used. A message takes ten times as long if the receiver wakes up on the sender's
            # processor.
            fastest_s = {name: min(frame_times) for name, frame_times in times.items()}
            costs = {**runtime_costs_fit.fit_costs(entry, fastest_s, min(sends, default=None))}
            # The seconds of a segment on an emulated board include its call, so the fitted cost of a call can be 0 s.
            call_s = costs.pop("call")
            if not runtime_costs_fit.find_zero_costs(costs):
                break
    if reason := runtime_costs_fit.describe_zero_costs(costs):
        log.warning("the stated costs of %s are used instead of measured ones: %s", target.name, reason)
    stated = target.runtime_costs
    costs |= {name: getattr(stated, name) for name in runtime_costs_fit.find_zero_costs(costs)}
    return RuntimeCosts(**costs, call=call_s)


def _run_benchmark(target: Target, directory: Path, steps_s: Mapping[str, tuple[float, ...]]) -> RunResult:
    frame, first = {"x": np.zeros((1, 1, 1, 1), np.float32)}, next(iter(steps_s))
    with open_boards(runtime_benchmarks.BENCHMARK_PLATFORM, steps_s, first) as emulation:
        options = options_on_boards(emulation, first, RunOptions(in_flight=1, kept_frames=1))
        return target.run(directory, [frame] * (ROUND_COUNT * FRAMES_PER_ROUND), options)


def _send_seconds(result: RunResult) -> list[float]:
    """Return the seconds of handing each message of the last frame to the operating system."""
    return [span.end - span.start for report in result.reports for span in report.timeline if span.kind == "send"]
