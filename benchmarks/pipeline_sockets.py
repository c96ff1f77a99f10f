"""Measure a pipeline of two devices with the target `sockets`, each process on its own core.

The time of a frame is compared with the time of its segments and of its bytes on the wire. The frames per second are
compared with those of one device. The script prints medians. How to run it (on an idle host): see README.md.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import dicompiler
from dicompiler import networks
from dicompiler.base.schema import load_json
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import random_inputs
from dicompiler_targets.sockets.runtime.segments import SegmentIO, make_sessions, run_segment, value_from_bytes
from dicompiler_targets.sockets.target import SocketsTarget

SLACK, SPEEDUP = 1.05, 1.6
"""Limits: the time of a frame divided by that of its segments and bytes, and the speed-up over one device."""


@dataclass(frozen=True)
class Round:
    """The measurements of one repetition.

    Attributes:
        frame_s: Seconds of a frame through both devices.
        alone_s: Seconds of its segments in one process.
        wire_s: Seconds of its bytes over a loopback connection.
        period_s: Seconds between two frames of a stream, on two devices.
        single_s: Seconds between two frames of a stream, on one device.
        other_share: Fraction of this host's processor time that other processes used.
    """

    frame_s: float
    alone_s: float
    wire_s: float
    period_s: float
    single_s: float
    other_share: float

    @property
    def overhead(self) -> float:
        return self.frame_s / (self.alone_s + self.wire_s)

    @property
    def speedup(self) -> float:
        return self.single_s / self.period_s


def read_processor_times() -> tuple[float, float, float]:
    """Return three times in seconds, for two calls whose difference is taken.

    They are the processor time of all processes of this host, that of this process and its ended children, and the
    clock.
    """
    busy = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = sum(map(int, busy)) - int(busy[3]) - int(busy[4])
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(usage.ru_utime + usage.ru_stime for usage in own)
    return ticks / os.sysconf("SC_CLK_TCK"), spent, time.monotonic()


def segments_alone(directory: Path, inputs: Mapping[str, Any], times: int) -> float:
    """Run all segments of an artifact in this process, with the runtime's code; return the sum of their median seconds.

    No messages are sent. Each segment runs `times` times.
    """
    todo: list[tuple[Any, Mapping[str, Any]]] = []
    given: dict[str, Any] = {}
    for device in load_json(directory / "artifact.json")["devices"]:
        manifest = load_json(directory / device / "manifest.json")
        todo += zip(make_sessions(directory / device, manifest, 1), manifest["segments"], strict=True)
        given |= {value["name"]: value_from_bytes(_bytes(inputs[value["name"]]), value) for value in manifest["inputs"]}
    seconds: dict[str, list[float]] = {segment["name"]: [] for _, segment in todo}
    for _ in range(times):
        values, left = dict(given), list(todo)
        while left:
            session, segment = next(entry for entry in left if all(name in values for name in entry[1]["inputs"]))
            left.remove((session, segment))
            segment_io = SegmentIO(segment, session)
            start = time.perf_counter()
            inputs_of_session = segment_io.join_inputs(values)
            computed = {} if session is None else run_segment(session, segment_io.session_entry, inputs_of_session)
            values.update(segment_io.cut_outputs(computed, values))
            seconds[segment["name"]].append(time.perf_counter() - start)
    return sum(map(statistics.median, seconds.values()))


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def wire(count: int, times: int) -> float:
    """Return the median seconds to send `count` bytes over a loopback connection into new memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two = listener.accept()[0]
    payload, seconds = bytes(count), []

    def receive() -> None:
        view, done = memoryview(bytearray(count)), 0
        while done < count:
            done += two.recv_into(view[done:])

    with one, two:
        for _ in range(times):
            reader = threading.Thread(target=receive)
            start = time.perf_counter()
            reader.start()
            one.sendall(payload)
            reader.join()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(pair: Path, single: Path, inputs: Mapping[str, Any], frames: int) -> Round:
    """Measure all figures of one repetition one after another, so that other load on the host affects all of them."""
    target, cores, before = SocketsTarget(), sorted(os.sched_getaffinity(0)), read_processor_times()
    one = target.run(pair, [inputs] * frames, RunOptions(in_flight=1, pin=True, kept_frames=1))
    stream = target.run(pair, [inputs] * frames, RunOptions(pin=True, kept_frames=1))
    os.sched_setaffinity(0, cores[:1])
    try:
        alone = target.run(single, [inputs] * frames, RunOptions(pin=True, kept_frames=1))
        alone_s = segments_alone(pair, inputs, max(5, frames // 2))
    finally:
        os.sched_setaffinity(0, cores)
    document = load_json(pair / "artifact.json")
    moved = [v["bytes"] for key in ("inputs", "transfers", "outputs") for v in document[key]]
    return Round(
        statistics.median(one.frames_s),
        alone_s,
        sum(wire(count, 20) for count in moved),
        stream.total_s / frames,
        alone.total_s / frames,
        other_share(before, read_processor_times()),
    )


def other_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Return the fraction of this host's processor time that other processes used between `before` and `after`.

    Both are results of `read_processor_times`.
    """
    everybody, own, passed = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, everybody - own) / (passed * (os.cpu_count() or 1))


def report(network: str, rounds: list[Round]) -> bool:
    """Print the medians of all repetitions, and return True if the frame time and the speed-up are within limits."""
    click.echo(f"{network}, medians of {len(rounds)} repetitions on {len(os.sched_getaffinity(0))} cores")
    for name in ("frame_s", "alone_s", "wire_s", "period_s", "single_s"):
        low, *_, high = values = sorted(1000 * getattr(one, name) for one in (*rounds, *rounds))
        click.echo(f"  {name:9} {statistics.median(values):9.2f} ms  (from {low:.2f} to {high:.2f})")
    overhead = statistics.median(one.overhead for one in rounds)
    speedup = statistics.median(one.speedup for one in rounds)
    click.echo(f"a frame takes {100 * overhead - 100:+.1f} % longer than its segments and bytes (limit: +5 %)")
    click.echo(f"a stream has {speedup:.2f} times the frames per second of one device (goal: {SPEEDUP})")
    click.echo(
        f"other processes used {100 * statistics.median(one.other_share for one in rounds):.0f} % of the processors"
    )
    return overhead <= SLACK and speedup >= SPEEDUP


@click.command()
@click.option("--network", default="vgg16", show_default=True, help="Its name in dicompiler.networks.")
@click.option("--frames", default=12, show_default=True, help="Frames of each run.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions of everything.")
def main(network: str, frames: int, rounds: int) -> None:
    """Measure a pipeline of two devices."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    model, target = networks.build(network), "sockets{threads=1}"
    with tempfile.TemporaryDirectory() as place:
        pair, single = Path(place, "pair"), Path(place, "single")
        made = dicompiler.compile(
            model,
            platform="rpi4-gateway-x2",
            strategy="pipeline{turns=false}",
            objective="throughput",
            target=target,
            output=pair,
        )
        dicompiler.compile(model, platform="rpi4x1", strategy="single", target=target, output=single)
        assert made.program is not None
        inputs = random_inputs(made.program.inputs)
        found = []
        for number in range(rounds):
            found.append(one := measure(pair, single, inputs, frames))
            ratios = f"{one.overhead:.3f} × its parts, {one.speedup:.2f} × one device"
            click.echo(f"{number}: {ratios}, others {one.other_share:.0%}", err=True)
    sys.exit(0 if report(network, found) else 1)


if __name__ == "__main__":
    main()
