"""The demo: split a built-in network over several boards, verify it, and time it on emulated boards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.driver.compile_result import CompileResult, find_bottleneck
from dicompiler.driver.compiler import compile
from dicompiler.ir.frame_prediction import FramePrediction

EMULATED_FRAMES = 8
"""Number of frames in each emulation. The fastest is reported, because other load on this host delays frames."""


@dataclass(frozen=True)
class BoardShare:
    """The work of one device in the demo.

    Attributes:
        device: Name of the device.
        layers: Number of layers that the device computes or computes a part of.
        flops: Floating-point operations per frame.
        weights: Bytes of weights that the device stores.
        sent: Bytes that the device sends per frame.
        compute_s: Predicted seconds of computing per frame.
        message_s: Predicted seconds in which the runtime handles messages, per frame.
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
        compute_slowdown: How much longer computing took than intended, because this host was busy (0.05 means 5 %).
    """

    frame_s: float
    single_device_s: float
    frames: int
    compute_slowdown: float


@dataclass(frozen=True)
class DemoSplit:
    """A built-in network that is split over a platform, and its predicted times.

    Attributes:
        network: Name of the network.
        platform: Name of the platform.
        strategy: Name of the strategy that made the plan.
        layers: Number of layers of the network.
        flops: Floating-point operations of the whole network per frame.
        weights: Bytes of all weights.
        shares: The work of each device.
        predicted: Predicted time of a frame on the boards.
        predicted_single_device: Predicted time of a frame on the best single board.
        bottleneck: Description of the bottleneck.
    """

    network: str
    platform: str
    strategy: str
    layers: int
    flops: int
    weights: int
    shares: tuple[BoardShare, ...]
    predicted: FramePrediction
    predicted_single_device: FramePrediction
    bottleneck: str


def split_network(
    network: str, platform: str, strategy: str, output: Path, progress: Callable[[str], None]
) -> tuple[CompileResult, DemoSplit]:
    """Compile a built-in network into an artifact.

    Args:
        network: Name of the network.
        platform: A TOML file or the name of a built-in platform.
        strategy: Name of the strategy that splits the network.
        output: Directory for the artifact.
        progress: Function that is called with a message before each step.

    Returns:
        The compilation, and a description of the plan.

    Raises:
        UsageError: A name is unknown.
    """
    progress(f"building {network}")
    model = networks.build(network)
    progress(f"splitting {network} over {platform}")
    compiled = compile(model, platform=platform, strategy=strategy, output=output)
    metrics, single = compiled.metrics, compiled.single_device_metrics
    return compiled, DemoSplit(
        network=network,
        platform=platform,
        strategy=strategy,
        layers=len(compiled.layers.layers),
        flops=sum(device.flops for device in single.devices),
        weights=sum(device.weights for device in single.devices),
        shares=_board_shares(compiled),
        predicted=metrics.frame,
        predicted_single_device=single.frame,
        bottleneck=find_bottleneck(metrics, "latency")[1],
    )


def emulate_frames(split: DemoSplit, output: Path) -> EmulatedTimes | str:
    """Run the network on all emulated boards together, and then on only one of them.

    Args:
        split: Description of the split network, from `split_network`.
        output: Directory of the artifact of the split network.

    Returns:
        The times, or the reason why this host cannot emulate the boards.

    Raises:
        RunError: A run on emulated boards failed.
    """
    from dicompiler.measure.emulation.emulate import emulate

    try:
        together = emulate(output, frames=EMULATED_FRAMES)
        with tempfile.TemporaryDirectory(prefix="dicompiler-") as directory:
            compile(networks.build(split.network), platform=split.platform, strategy="single", output=directory)
            alone = emulate(directory, frames=EMULATED_FRAMES)
    except RunError:
        raise
    except DicompilerError as error:
        return str(error).removeprefix("emulate: ")
    slowdown = max(together.compute_slowdown, alone.compute_slowdown)
    return EmulatedTimes(min(together.result.frames_s), min(alone.result.frames_s), EMULATED_FRAMES, slowdown)


def _board_shares(compiled: CompileResult) -> tuple[BoardShare, ...]:
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
