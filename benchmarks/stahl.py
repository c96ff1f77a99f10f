"""Stahl's experiment (SAMOS 2019, table 1): YOLOv2 on six boards, with its late layers in LOP or in fused pairs.

    stahl.py [--line MBIT_S …] [--network switch|gateway] [--frames N]

LOP splits a layer by output channels. A fused pair (FUSE) splits the first layer by output channels and the second one
by input channels, without an exchange between them. In the paper, the boards exchange all data through one gateway.

For each bandwidth, this script prints the seconds of a frame with LOP and with FUSE, predicted and measured on emulated
boards. It also prints the speed-up of FUSE next to that of the paper. Run it as README.md says, as root, on an idle
host.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

import dicompiler
from dicompiler import networks
from dicompiler.ir.cluster import Network, NetworkKind
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation.boards import runtime_cost_factor
from dicompiler.measure.emulation.emulate import emulate
from dicompiler_strategies.papers.stahl import PartitionScheme, network_parts

BOARDS = 6
PAPER = {10: 1.16, 100: 1.15, 1000: 1.06}
"""Speed-up of FUSE over LOP in the paper, by bandwidth in Mbit/s."""
NUMBERS = (16, 18, 19, 20, 21, 22, 23, 24, 26, 29, 30)
"""Darknet's numbers of the convolutions that the paper cuts by channels: the last ones of our network."""
CONVOLUTIONS = {number: f"conv{13 + i}" for i, number in enumerate(NUMBERS)}
PAIRS = {"LOP": (), "FUSE": ((18, 19), (20, 21), (22, 23), (29, 30))}
"""Pairs of convolutions that are fused, by Darknet's numbers: none for LOP, and those of the paper's FUSE1 for FUSE.

FUSE1 is the best variant in table 2 of the paper.
"""


@dataclass(frozen=True)
class Case:
    """Predicted and measured times of one plan.

    Attributes:
        predicted_s: Predicted seconds of a frame.
        measured_s: Measured seconds of a frame.
        slowdown: Fraction by which this host computed more slowly than the boards that it emulates.
    """

    predicted_s: float
    measured_s: float
    slowdown: float


def parts(tiled: PipelineState, kind: str) -> Mapping[str, tuple[Part, ...]]:
    """Return the parts of each layer: early layers in height tiles as in the plan of `tiled`, late ones by channels.

    `kind` is "LOP" or "FUSE".
    """
    layers, plan = tiled.layers, tiled.plan
    assert layers is not None and plan is not None
    schemes: dict[str, PartitionScheme] = dict.fromkeys(CONVOLUTIONS.values(), "o")
    for first, second in PAIRS[kind]:
        schemes |= {CONVOLUTIONS[first]: "f", CONVOLUTIONS[second]: "s"}
    late = network_parts(layers, schemes, plan.devices, plan.devices[0])
    begin = layers.position[CONVOLUTIONS[16]]
    return {layer.name: (plan.layers if i < begin else late)[layer.name] for i, layer in enumerate(layers.layers)}


def measured(tiled: PipelineState, platform: Platform, kind: str, frames: int) -> Case:
    """Compile YOLOv2 with its late layers split as `kind` ("LOP" or "FUSE"), and emulate it on the platform."""
    assert tiled.plan is not None
    plan = replace(tiled.plan, layers=parts(tiled, kind))
    cost = f"analytic{{runtime={runtime_cost_factor('sockets', BOARDS):.3g}}}"
    with tempfile.TemporaryDirectory() as scratch:
        artifact = Path(scratch, "net")
        dicompiler.compile(networks.build("yolov2"), platform, plan=plan, cost=cost, output=artifact)
        result = emulate(artifact, frames=frames, cost=cost)
    return Case(result.predicted_s, result.frame_s, result.compute_slowdown)


@click.command(help=__doc__)
@click.option("--line", "lines", multiple=True, type=int, default=tuple(PAPER), show_default=True, help="Mbit/s.")
@click.option("--network", type=click.Choice(["switch", "gateway"]), default="gateway", show_default=True)
@click.option("--frames", default=3, show_default=True)
def main(lines: Sequence[int], network: NetworkKind, frames: int) -> None:
    for line in lines:
        platform = replace(Platform.load(f"rpi3-gateway-x{BOARDS}"), network=Network(network, 1e6 * line))
        tiled = dicompiler.compile(networks.build("yolov2"), platform, "modnn")
        cases = {kind: measured(tiled, platform, kind, frames) for kind in PAIRS}
        for kind, case in cases.items():
            click.echo(
                f"{line:5} Mbit/s  {kind:4}  {case.predicted_s:7.2f} s predicted {case.measured_s:7.2f} measured, "
                f"host too slow by {case.slowdown:.0%}"
            )
        lop, fuse = cases["LOP"], cases["FUSE"]
        click.echo(
            f"{line:5} Mbit/s  FUSE is predicted to be {lop.predicted_s / fuse.predicted_s:.2f} times faster, "
            f"measured {lop.measured_s / fuse.measured_s:.2f}; the paper: {PAPER.get(line, 'no figure')}"
        )


if __name__ == "__main__":
    main()
