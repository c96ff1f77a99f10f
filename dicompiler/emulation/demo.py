"""The demo: split a built-in network over several boards, verify it, and time it on emulated boards.

names of a network, a platform and a strategy ──run_demo──► artifact and DemoResult
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.driver.compile_result import CompileResult
from dicompiler.driver.compile_summary import find_bottleneck
from dicompiler.driver.compiler import compile
from dicompiler.verify.comparison import Verification

if TYPE_CHECKING:
    from onnx import ModelProto

EMULATED_FRAMES = 8
"""Frames in each emulation. The fastest is reported, because other load on this host only makes frames longer."""


@dataclass(frozen=True)
class BoardShare:
    """The work of one device in the demo.

    Attributes:
        device: Name of the device.
        layers: Number of layers that the device computes or computes a part of.
        flops: Floating-point operations per frame.
        weights: Bytes of weights.
        sent: Bytes that the device sends per frame.
        compute_s: Predicted seconds of computing per frame.
        message_s: Predicted seconds that the runtime needs for messages per frame.
        wait_s: Predicted seconds of waiting per frame.
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
    """Times on emulated boards.

    Attributes:
        frame_s: Seconds of the fastest frame on all boards.
        single_device_s: Seconds of the fastest frame on one board.
        frames: Number of frames in each emulation.
        compute_slowdown: How much longer computing took than on the boards because this host was busy, as a fraction
            (0.05 means 5 %).
    """

    frame_s: float
    single_device_s: float
    frames: int
    compute_slowdown: float


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo.

    Attributes:
        network: Name of the network.
        platform: Name of the platform.
        strategy: The strategy.
        layers: Number of layers.
        flops: Floating-point operations of the whole network per frame.
        weights: Bytes of all weights.
        shares: The work of each device.
        predicted_s: Predicted latency on the boards in seconds.
        predicted_single_device_s: Predicted latency on the best single board in seconds.
        bottleneck: Description of the bottleneck.
        emulated: Times on emulated boards; None if this host cannot emulate them.
        not_emulated_reason: Reason why this host cannot emulate them; empty if it can.
        verification: The checks, passed or failed.
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
    """Compile a built-in network, verify it, and run it on emulated boards.

    A failed check is part of the result and raises no error.

    Args:
        network: Name of the network.
        platform: A TOML file or the name of a built-in platform.
        strategy: The strategy.
        output: Directory for the artifact.
        progress: Function that is called with a message before each step.

    Raises:
        UsageError: A name is unknown.
    """
    progress(f"building {network}")
    model = networks.build(network)
    progress(f"splitting {network} over {platform}")
    compiled = compile(model, platform=platform, strategy=strategy, output=output)
    progress("verifying: exact check models, then the real programs against onnxruntime")
    verification = compiled.verify()
    progress(f"measuring: {EMULATED_FRAMES} frames on emulated boards, and {EMULATED_FRAMES} on one of them alone")
    emulated, reason = _emulate(model, platform, output)
    metrics, single = compiled.metrics, compiled.single_device_metrics
    return DemoResult(
        network=network,
        platform=platform,
        strategy=strategy,
        layers=len(compiled.layers.layers),
        flops=sum(device.flops for device in single.devices),
        weights=sum(device.weights for device in single.devices),
        shares=_board_shares(compiled),
        predicted_s=metrics.latency_s,
        predicted_single_device_s=single.latency_s,
        bottleneck=find_bottleneck(compiled.platform, metrics, "latency")[1],
        emulated=emulated,
        not_emulated_reason=reason,
        verification=verification,
    )


def _emulate(model: ModelProto, platform: str, output: Path) -> tuple[EmulatedTimes | None, str]:
    """Return the times on emulated boards, or None and the reason why this host cannot emulate them."""
    from dicompiler.emulation.emulate import emulate

    try:
        split = emulate(output, frames=EMULATED_FRAMES)
        with tempfile.TemporaryDirectory(prefix="dicompiler-") as directory:
            compile(model, platform=platform, strategy="single", output=directory)
            single = emulate(directory, frames=EMULATED_FRAMES)
    except RunError:
        raise
    except DicompilerError as error:
        return None, str(error).removeprefix("emulate: ")
    slowdown = max(split.compute_slowdown, single.compute_slowdown)
    return EmulatedTimes(min(split.result.frames_s), min(single.result.frames_s), EMULATED_FRAMES, slowdown), ""


def _board_shares(compiled: CompileResult) -> tuple[BoardShare, ...]:
    """Return the work of each device that the plan uses, in the order of the platform."""
    parts = {(task.device, task.layer) for task in compiled.routing.tasks}
    return tuple(
        BoardShare(
            device=metrics.device,
            layers=sum(metrics.device == device for device, _ in parts),
            flops=metrics.flops,
            weights=metrics.weights,
            sent=metrics.sent,
            compute_s=metrics.compute_s,
            message_s=metrics.runtime_s,
            wait_s=metrics.wait_s,
        )
        for metrics in compiled.metrics.devices
    )
