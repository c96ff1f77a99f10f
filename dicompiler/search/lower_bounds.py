"""Bounds that no plan of a problem can beat, whatever it splits and however it overlaps: valid beside a simulation.

Problem → seconds.   They hold for the problem's cost model, which must not cost parts less than their share of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dicompiler.base.objectives import objective_terms
from dicompiler.ir.layers import Layer
from dicompiler.ir.plan import LayerShare
from dicompiler.partition.bounds_inference import cuttable_axes, reduction_length
from dicompiler.search.problem import Problem


@dataclass(frozen=True)
class LatencyBound:
    """Seconds that a frame takes at least. load: all devices compute all the time; path: the longest path of layers,
    each spread over all devices where it can be cut, else on the fastest. `seconds` is the larger one."""

    load_s: float
    path_s: float

    @property
    def seconds(self) -> float:
        return max(self.load_s, self.path_s)


def latency_bound(problem: Problem) -> LatencyBound:
    """The bound on a frame's latency.

    Path: all devices together take for one layer at least 1 / Σ (1 / seconds of it alone on one). Load: for any weights
    y of the devices that add up to 1, the busiest one takes at least Σ over layers of min over devices of y · seconds,
    whatever share of each layer it has (duality); y is taken in proportion to the devices' speed. Rows that a strided
    reader skips may be left out by fine cuts: such work counts by the share that is read.
    """
    layers, devices = problem.layers, problem.platform.computing_devices
    seconds = [
        [
            problem.cost_model.seconds(layers, layer, LayerShare(), device) * _least_computed_share(problem, layer)
            for device in devices
        ]
        for layer in layers.layers
    ]
    speeds = [1 / total if (total := sum(column)) > 0 else 1.0 for column in zip(*seconds, strict=True)]
    load, ends = 0.0, dict.fromkeys(layers.inputs, 0.0)
    for layer, alone in zip(layers.layers, seconds, strict=True):
        load += min(speed * own for speed, own in zip(speeds, alone, strict=True)) / sum(speeds)
        shared = 1 / sum(1 / own for own in alone) if min(alone) > 0 else 0.0
        divisible = bool(cuttable_axes(layers, layer)) or reduction_length(layers, layer) is not None
        start = max((ends.get(name, 0.0) for name in layer.inputs), default=0.0)
        for name in layer.outputs:
            ends[name] = start + (shared if divisible else min(alone))
    return LatencyBound(load, max(ends.values(), default=0.0))


def _least_computed_share(problem: Problem, layer: Layer) -> float:
    """The least share of the layer's output that must be computed: under 1 where every reader strides over some."""
    layers = problem.layers
    readers = layers.consumers.get(layer.output, ())
    if layer.whole_reason or not readers or layer.output in layers.outputs:
        return 1.0
    anchors = [reader.nodes[reader.anchor] for reader in readers]
    reads = [(layers.rule_of(anchor).read_share, layers.operation_of(anchor)) for anchor in anchors]
    return max(1.0 if share is None else share(operation) for share, operation in reads)


def objective_bound(problem: Problem) -> float | None:
    """The bound on the problem's objective: seconds of a frame, or between frames; None where there is none. Of a sum,
    the sum of the terms' bounds, the others at least 0."""
    wanted = objective_terms(problem.objective)
    if not wanted.keys() & {"latency", "throughput"}:
        return None
    found = latency_bound(problem)
    return wanted.get("latency", 0.0) * found.seconds + wanted.get("throughput", 0.0) * found.load_s
