"""Lower bounds that no plan of a problem can beat, whatever it splits and however it overlaps work.

The bounds hold for the problem's cost model if that never charges a part less than its share of the layer.
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
    """Lower bounds on the time of a frame.

    Attributes:
        load_s: Seconds if all devices compute all the time.
        path_s: Seconds of the longest path of layers. Each layer is spread over all devices if it can be cut; otherwise
            it is on the device that is fastest for it.
    """

    load_s: float
    path_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two bounds, in seconds."""
        return max(self.load_s, self.path_s)


def latency_bound(problem: Problem) -> LatencyBound:
    """Return the lower bounds on the latency of a frame.

    Let t(l, d) be the seconds of layer l whole on device d.

    - Path: all devices together need at least 1 / Σ_d 1/t(l, d) for layer l. The bound is the longest path of such
      times.
    - Load: for any weights y_d ≥ 0 with Σ_d y_d = 1, the busiest device computes for at least Σ_l min_d y_d · t(l, d),
      however the layers are shared out (linear programming duality). y_d is proportional to the speed of device d.

    If a strided reader skips rows, a fine cut may leave them out; then only the share that is read is counted.
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
    load, end_s = 0.0, dict.fromkeys(layers.inputs, 0.0)
    for layer, device_seconds in zip(layers.layers, seconds, strict=True):
        load += min(speed * own for speed, own in zip(speeds, device_seconds, strict=True)) / sum(speeds)
        spread_s = 1 / sum(1 / own for own in device_seconds) if min(device_seconds) > 0 else 0.0
        can_cut = bool(cuttable_axes(layers, layer)) or reduction_length(layers, layer) is not None
        start = max((end_s.get(name, 0.0) for name in layer.inputs), default=0.0)
        for name in layer.outputs:
            end_s[name] = start + (spread_s if can_cut else min(device_seconds))
    return LatencyBound(load, max(end_s.values(), default=0.0))


def _least_computed_share(problem: Problem, layer: Layer) -> float:
    """Return the least share of the layer's output that must be computed.

    It is below 1 if all readers skip some rows.
    """
    layers = problem.layers
    readers = layers.consumers.get(layer.output, ())
    if layer.whole_reason or not readers or layer.output in layers.outputs:
        return 1.0
    anchors = [reader.nodes[reader.anchor] for reader in readers]
    reads = [(layers.rule_of(anchor).read_share, layers.operation_of(anchor)) for anchor in anchors]
    return max(1.0 if share is None else share(operation) for share, operation in reads)


def objective_bound(problem: Problem) -> float | None:
    """Return a lower bound on the problem's objective.

    Args:
        problem: The problem.

    Returns:
        Seconds of a frame or between frames; for a weighted sum, the weighted sum of the bounds of its terms. None if
            the
        objective contains neither latency nor throughput.
    """
    terms = objective_terms(problem.objective)
    if not terms.keys() & {"latency", "throughput"}:
        return None
    bound = latency_bound(problem)
    return terms.get("latency", 0.0) * bound.seconds + terms.get("throughput", 0.0) * bound.load_s
