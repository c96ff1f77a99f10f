"""The strategy `coopai`: eq. (1) and (2) of the CoopAI paper choose blocks of layers, split equally over the devices.

The first device (the leader) does the work of the paper's gateway.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dicompiler.plugin_api import DicompilerError, Layer, Part, Plan, Problem, Strategy, UsageError
from dicompiler_strategies.dp.candidate_runs import LayerRun, run_parts
from dicompiler_strategies.dp.device_team import DeviceTeam, ProblemFacts, TensorForm
from dicompiler_strategies.dp.strategy import device_counts
from dicompiler_strategies.papers.coopai import (
    Chain,
    ConvolutionalLayer,
    CoopaiResult,
    LayerBlock,
    best_k,
    build_chain,
    minimise_latency,
)

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class Coopai(Strategy):
    """The algorithm of the CoopAI paper: fused height tiles and fully connected layers on k identical devices.

    Equations (1) to (5) of the paper choose the number of devices and the blocks: sequences of layers without an
    exchange. The network must be a chain of convolutional and fully connected layers. The method ignores the memory of
    the hosts. The strategy `dp` generalises it.
    """

    name: ClassVar[str] = "coopai"
    method: Literal["mls", "sls"] = field(
        default="mls",
        metadata={"help": "mls (several layers in a block), or its baseline sls with one layer in each block"},
    )
    devices: int = field(default=0, metadata={"help": "number of devices; 0: the best number"})

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ValueError("devices must be positive, or 0 for the best number")

    def plan(self, problem: Problem) -> Plan:
        """Return the plan that the paper's equations choose.

        Raises:
            UsageError: The objective is not latency.
            DicompilerError: The network is not a chain, the devices have different rates, or `devices` is too large.
        """
        if problem.objective != "latency":
            raise UsageError(f"coopai: objective {problem.objective!r} is not supported: use latency")
        facts = ProblemFacts(problem)
        counts = device_counts(self.name, self.devices, problem)
        everyone = DeviceTeam.build(facts, facts.devices_by_speed[: max(counts)], has_equal_parts=True)
        layers, result = choose_blocks(everyone, counts, self.method == "sls")
        log.debug("coopai: %d devices, %d blocks, %.6g s", result.k, len(result.blocks), result.seconds)
        team = DeviceTeam.build(facts, facts.devices_by_speed[: result.k], has_equal_parts=True)
        return problem.build_plan(block_parts(team, layers, result))


def choose_blocks(team: DeviceTeam, counts: Sequence[int], single: bool) -> tuple[Chain, CoopaiResult]:
    """Return the network as CoopAI's chain of layers, and the fastest blocks for the best number of devices.

    A block is a sequence of layers within which devices exchange nothing.

    Args:
        team: The devices and the problem.
        counts: Numbers of devices to try.
        single: True for one layer in each block (the paper's baseline SLS).

    Raises:
        DicompilerError: The devices have different rates, or the network is not a chain.
    """
    platform = team.problem.platform
    rates = {platform.devices[i].rate for i in team.members}
    if len(rates) > 1:
        raise DicompilerError("coopai: all devices must have the same rate: use strategy 'dp'")
    layers = build_chain(team.layers)
    (rate,) = rates
    return layers, best_k([minimise_latency(layers, rate, platform.network.bandwidth, k, single) for k in counts])


def block_parts(team: DeviceTeam, layers: Chain, result: CoopaiResult) -> dict[str, tuple[Part, ...]]:
    """Return the parts (device and region) of each layer, by layer name, for CoopAI's solution `result`.

    `team` has the k devices of the solution.
    """
    layer_parts: dict[str, tuple[Part, ...]] = {}
    for run in _blocks_to_runs(team, layers, result.blocks):
        layer_parts |= run_parts(team, run)
    return layer_parts


def _blocks_to_runs(team: DeviceTeam, layers: Chain, blocks: Sequence[LayerBlock]) -> list[LayerRun]:
    """Return the blocks as `LayerRun`s of the strategy `dp`: consecutive layers that the devices split in one way.

    Layers that are not in the chain belong to the chain's layer before them.
    """
    graph = team.layers
    starts = [0, *(graph.position[layer.names[0]] for layer in layers[1:]), len(graph.layers)]
    runs: list[LayerRun] = []
    for block in blocks:
        for r in range(block.i, block.j + 1):
            modes = _output_form(block, r)
            if isinstance(layers[r], ConvolutionalLayer) and block.mode != "device":
                if r == block.i:
                    last = max(r for r in range(block.i, block.j + 1) if isinstance(layers[r], ConvolutionalLayer))
                    runs.extend(
                        _grid_runs(team, starts[block.i], starts[last + 1], _wanted_form(layers, blocks, last + 1))
                    )
                continue
            at = graph.position[layers[r].names[0]]
            runs.extend(LayerRun(i, i + 1, "cut", "whole") for i in range(starts[r], at))
            sums = block.mode != "device" and modes == "whole"
            runs.append(LayerRun(at, at + 1, "sums" if sums else "cut", _possible_form(team, graph.layers[at], modes)))
            runs.extend(
                LayerRun(i, i + 1, "cut", _possible_form(team, graph.layers[i], modes))
                for i in range(at + 1, starts[r + 1])
            )
    return runs


def _output_form(block: LayerBlock, r: int) -> TensorForm:
    """Return "channels" if each device has a range of layer r's output channels, "whole" if one device has all."""
    return "channels" if block.mode == "model" or (block.mode == "hybrid" and r == block.i) else "whole"


def _wanted_form(layers: Chain, blocks: Sequence[LayerBlock], r: int) -> TensorForm:
    """Return the distribution over devices that layer `r` of the chain needs as its input.

    If `r` is the number of layers, return the distribution of the network's output.
    """
    if r == len(layers):
        return "whole"
    block = next(block for block in blocks if block.i <= r <= block.j)
    return "channels" if block.mode in ("data", "grids+data") else "everywhere"


def _grid_runs(team: DeviceTeam, start: int, stop: int, wanted: TensorForm) -> list[LayerRun]:
    """Divide the layers `start` to `stop` − 1 into runs (consecutive layers that are split together).

    The layers before the first one without rows become fused height tiles. Each further layer is a run. Its output
    has the distribution `wanted` if possible.
    """
    graph = team.layers
    end = start
    while end < stop and graph.layers[end].name in team.row_maps:
        end += 1
    if end == start:
        return [LayerRun(i, i + 1, "cut", "whole") for i in range(start, stop)]
    rest = [LayerRun(i, i + 1, "cut", _possible_form(team, graph.layers[i], wanted)) for i in range(end, stop)]
    return [LayerRun(start, end, "rows", "rows"), *rest]


def _possible_form(team: DeviceTeam, layer: Layer, wanted: TensorForm) -> TensorForm:
    """Return `wanted`, or another distribution of a layer's output over devices that is possible.

    A layer without a channel axis is computed whole by every device ("everywhere"). A layer that must stay whole, such
    as one with an unknown operator, is computed on one device ("whole").
    """
    if wanted == "channels" and team.cut_axis_of(layer, "channels") is None:
        wanted = "everywhere"
    return "whole" if layer.whole_reason else wanted
