"""The demo: a real network is split over several devices, verified, and timed on emulated boards.

The names of a network, a platform and a strategy go in; artifacts in a directory and a Demo (who did what) come out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.driver.compile_summary import find_bottleneck
from dicompiler.driver.compiler import compile
from dicompiler.verify.comparison import Verification

if TYPE_CHECKING:
    from onnx import ModelProto

    from dicompiler.ir.metrics import DeviceMetrics
    from dicompiler.ir.pipeline_state import PipelineState

EMULATED_FRAMES = 8
"""Frames in each emulation; the fastest is reported, as whatever else this host does can only slow one down."""


@dataclass(frozen=True)
class BoardShare:
    """One device's share. layers: how many it has a part of; flops: operations, weights: bytes that it holds.

    For a frame, predicted for the boards: sent in bytes; in seconds compute_s, message_s (what its runtime takes for
    messages) and wait_s.
    """

    device: str
    layers: int
    flops: int
    weights: int
    sent: int
    compute_s: float
    message_s: float
    wait_s: float


@dataclass(frozen=True)
class EmulatedTimes:
    """Seconds of the fastest of `frames` frames on emulated boards, by this plan and on one board alone. late: by what
    share computing took longer, over all frames, than it does on the boards, because this host was busy."""

    frame_s: float
    single_device_s: float
    frames: int
    compute_slowdown: float


@dataclass(frozen=True)
class DemoResult:
    """What the demo found. layers, flops, weights (bytes): the whole network's, as one device computes it.

    predicted_s, predicted_alone_s: latency on the platform's boards with this plan and on the best of them alone, by
    the cost model. binding: what takes most of a predicted frame. emulated: the same as measured on emulated boards;
    None where this host cannot play them: `why_not` says why.
    """

    network: str
    platform: str
    strategy: str
    layers: int
    flops: int
    weights: int
    shares: tuple[BoardShare, ...]
    predicted_s: float
    predicted_single_device_s: float
    bottleneck: str
    emulated: EmulatedTimes | None
    not_emulated_reason: str
    verification: Verification


def run_demo(network: str, platform: str, strategy: str, output: Path, progress: Callable[[str], None]) -> DemoResult:
    """Compiles into `output`, verifies, emulates; `tell` is told what comes next. UsageError for unknown names.

    A failed check is reported in the result and raises nothing.
    """
    progress(f"building {network}")
    model = networks.build(network)
    progress(f"splitting {network} over {platform}")
    compilation = compile(model, platform=platform, strategy=strategy, output=output)
    progress("verifying: exact check models, then the real programs against onnxruntime")
    verification = compilation.verify()
    progress(f"measuring: {EMULATED_FRAMES} frames on emulated boards, and {EMULATED_FRAMES} on one of them alone")
    emulated, why_not = _emulate(model, platform, output)
    layers, metrics, single = compilation.layers, compilation.metrics, compilation.single_device_metrics
    assert layers is not None and compilation.platform is not None and metrics is not None and single is not None
    return DemoResult(
        network=network,
        platform=platform,
        strategy=strategy,
        layers=len(layers.layers),
        flops=sum(device.flops for device in single.devices),
        weights=sum(device.weights for device in single.devices),
        shares=_board_shares(compilation, metrics.devices),
        predicted_s=metrics.latency_s,
        predicted_single_device_s=single.latency_s,
        bottleneck=find_bottleneck(compilation.platform, metrics, "latency")[1],
        emulated=emulated,
        not_emulated_reason=why_not,
        verification=verification,
    )


def _emulate(model: ModelProto, platform: str, output: Path) -> tuple[EmulatedTimes | None, str]:
    """What a frame takes on emulated boards, or why this host cannot play them."""
    from dicompiler.emulation.emulate import emulate

    try:
        split = emulate(output, frames=EMULATED_FRAMES)
        with tempfile.TemporaryDirectory(prefix="dicompiler-") as alone:
            compile(model, platform=platform, strategy="single", output=alone)
            one = emulate(alone, frames=EMULATED_FRAMES)
    except RunError:
        raise
    except DicompilerError as error:
        return None, str(error).removeprefix("emulate: ")
    late = max(split.compute_slowdown, one.compute_slowdown)
    return EmulatedTimes(min(split.result.frames_s), min(one.result.frames_s), EMULATED_FRAMES, late), ""


def _board_shares(compilation: PipelineState, devices: tuple[DeviceMetrics, ...]) -> tuple[BoardShare, ...]:
    """The devices that take part, in platform order."""
    assert compilation.routing is not None
    parts = {(task.device, task.layer) for task in compilation.routing.tasks}
    return tuple(
        BoardShare(
            entry.device,
            sum(entry.device == device for device, _ in parts),
            entry.flops,
            entry.weights,
            entry.sent,
            entry.compute_s,
            entry.runtime_s,
            entry.wait_s,
        )
        for entry in devices
    )
