"""Lower bounds on the time of a frame, which no plan of a problem can beat.

The bounds hold if the cost model never predicts that a piece takes less than its proportional share of the whole
layer's time. For example, a half of a layer must take at least half of the time.
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
    """Two lower bounds on the time of a frame.

    Attributes:
        load_s: Seconds that a frame needs at least, even if all devices compute all the time.
        path_s: Seconds of the longest path through the network, if all devices share each layer that can be cut, and
            each other layer is computed by the device that is fastest for it.
    """

    load_s: float
    path_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two bounds, in seconds."""
        return max(self.load_s, self.path_s)


def latency_bound(problem: Problem) -> LatencyBound:
    """Return the lower bounds on the latency of a frame.

    t(l, d) denotes the seconds that device d needs for the whole layer l.

    - `path_s`: All devices together need at least 1 / Σ_d 1/t(l, d) seconds for a layer l that can be cut. The bound is
      the sum of these seconds over the layers of the longest path.
    - `load_s`: Let y_d ≥ 0 be a weight of each device, with Σ_d y_d = 1. By linear programming duality, the busiest
      device computes for at least Σ_l min_d y_d · t(l, d) seconds. The weights are proportional to the speeds of the
      devices.

    If a strided layer reads only some rows of a layer's output, t(l, d) counts only these rows, because plans need not
    compute the others.
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
        load += min(speed * time_s for speed, time_s in zip(speeds, device_seconds, strict=True)) / sum(speeds)
        spread_s = 1 / sum(1 / time_s for time_s in device_seconds) if min(device_seconds) > 0 else 0.0
        can_cut = bool(cuttable_axes(layers, layer)) or reduction_length(layers, layer) is not None
        start = max((end_s.get(name, 0.0) for name in layer.inputs), default=0.0)
        for name in layer.outputs:
            end_s[name] = start + (spread_s if can_cut else min(device_seconds))
    return LatencyBound(load, max(end_s.values(), default=0.0))


def _least_computed_share(problem: Problem, layer: Layer) -> float:
    """Return the smallest share of a layer's output that any plan must compute.

    The share is below 1 if every reader skips some rows, as a strided convolution does.
    """
    layers = problem.layers
    readers = layers.consumers.get(layer.output, ())
    if layer.whole_reason or not readers or layer.output in layers.outputs:
        return 1.0
    anchors = [reader.nodes[reader.anchor] for reader in readers]
    reads = [(layers.rule_of(anchor).read_share, layers.operation_of(anchor)) for anchor in anchors]
    return max(1.0 if share is None else share(operation) for share, operation in reads)


def objective_bound(problem: Problem) -> float | None:
    """Return a lower bound on the problem's objective, in the unit of the objective.

    The bound of a weighted sum is the weighted sum of the bounds on latency and throughput (time between frames). The
    result is None if the objective contains neither latency nor throughput.
    """
    terms = objective_terms(problem.objective)
    if not terms.keys() & {"latency", "throughput"}:
        return None
    bound = latency_bound(problem)
    return terms.get("latency", 0.0) * bound.seconds + terms.get("throughput", 0.0) * bound.load_s
