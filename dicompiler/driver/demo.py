"""The demo: a real network is split over several devices, run as that many processes, verified, and timed.

The names of a network, a platform and a strategy go in; artifacts in a directory and a Demo (who did what) come out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler import networks
from dicompiler.driver.artifact import run
from dicompiler.driver.compiler import compile
from dicompiler.target.manifest import REFERENCE
from dicompiler.verify.comparison import Verification, random_inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.ir.compilation import Compilation
    from dicompiler.target.records import RunResult

FRAMES = 20
"""Frames in each measurement; the fastest of them is reported, as whatever else a host does can only slow one down."""


@dataclass(frozen=True)
class Share:
    """One device's share. layers: how many it has a part of; flops: operations, weights: bytes that it holds.

    For a frame, measured (the mean over all frames): sent in bytes, compute_s and wait_s in seconds.
    """

    device: str
    layers: int
    flops: int
    weights: int
    sent: int
    compute_s: float
    wait_s: float


@dataclass(frozen=True)
class Demo:
    """What the demo found. layers, flops, weights (bytes): the whole network's, as one device computes it.

    predicted_s, predicted_alone_s: latency on the platform's boards with this plan and on the fastest of them alone,
    by the cost model. frame_s: seconds for the fastest of `frames` frames in one process per device on this host;
    alone_s: the same in a single process of onnxruntime, on one or on all `cores` of this host, whichever is faster.
    """

    network: str
    platform: str
    strategy: str
    layers: int
    flops: int
    weights: int
    shares: tuple[Share, ...]
    predicted_s: float
    predicted_alone_s: float
    frame_s: float
    alone_s: float
    frames: int
    cores: int
    verification: Verification


def demo(network: str, platform: str, strategy: str, output: Path, tell: Callable[[str], None]) -> Demo:
    """Compiles into `output`, verifies, measures; `tell` is told what comes next. UsageError for unknown names.

    A failed check is reported in the result and raises nothing.
    """
    tell(f"building {network}")
    model = networks.build(network)
    tell(f"splitting {network} over {platform}")
    compilation = compile(model, platform=platform, strategy=strategy, output=output)
    tell("verifying: exact check models, then the real programs against onnxruntime")
    verification = compilation.verify()
    tell(f"measuring: {FRAMES} frames, a process for each device")
    result = run(output, frames=FRAMES)
    tell(f"measuring: {FRAMES} frames, one process of onnxruntime")
    layers, program = compilation.layers, compilation.program
    metrics, single = compilation.metrics, compilation.single
    assert layers is not None and program is not None and metrics is not None and single is not None
    return Demo(
        network=network,
        platform=platform,
        strategy=strategy,
        layers=len(layers.layers),
        flops=sum(device.flops for device in single.devices),
        weights=sum(device.weights for device in single.devices),
        shares=_shares(compilation, result),
        predicted_s=metrics.latency_s,
        predicted_alone_s=single.latency_s,
        frame_s=min(result.frames_s),
        alone_s=_alone(output / REFERENCE, random_inputs(program.inputs)),
        frames=FRAMES,
        cores=_cores(),
        verification=verification,
    )


def _shares(compilation: Compilation, result: RunResult) -> tuple[Share, ...]:
    """The devices that took part, in the order of their reports."""
    assert compilation.metrics is not None and compilation.routing is not None
    planned = {device.device: device for device in compilation.metrics.devices}
    parts = {(task.device, task.layer) for task in compilation.routing.tasks}
    frames = len(result.outputs)
    return tuple(
        Share(
            report.device,
            sum(device == report.device for device, _ in parts),
            planned[report.device].flops,
            planned[report.device].weights,
            sum(report.sent.values()) // frames,
            report.compute_s / frames,
            report.wait_s / frames,
        )
        for report in result.reports
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _alone(path: Path, inputs: Mapping[str, NDArray[Any]]) -> float:
    """Seconds of the fastest frame in one session of onnxruntime in this process, left to its default settings but
    for the threads: on a busy host one thread may be faster than many."""
    import onnxruntime as ort

    times = []
    for threads in sorted({1, _cores()}):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        for _ in range(FRAMES):
            start = time.perf_counter()
            session.run(None, dict(inputs))
            times.append(time.perf_counter() - start)
    return min(times)
