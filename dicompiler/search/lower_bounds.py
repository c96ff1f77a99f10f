"""Lower bounds on the objectives, which no plan of a problem can beat.

They assume that a part of a layer takes at least its proportional share of the whole layer's time. For example, a half
of a layer must take at least half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dicompiler.base.objectives import objective_terms
from dicompiler.cost.op_counts import weight_regions
from dicompiler.ir.layers import Layer
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.plan import LayerShare
from dicompiler.partition.bounds_inference import cuttable_axes, make_share_task, reduction_length
from dicompiler.search.problem import Problem

MAX_ROUNDING_ERROR = 1e-6
"""Largest share by which a value may be below a lower bound because of rounding errors."""


@dataclass(frozen=True)
class LatencyBound:
    """Two lower bounds on the time of a frame.

    Attributes:
        load_s: Seconds that a frame needs at least, even if all devices compute all the time.
        path_s: Seconds of the longest path through the network. Each layer is assumed to run on all devices, or on the
            fastest one if it cannot be split.
    """

    load_s: float
    path_s: float

    @property
    def seconds(self) -> float:
        return max(self.load_s, self.path_s)


def latency_bound(problem: Problem) -> LatencyBound:
    """Return the lower bounds on the latency of a frame.

    t(l, d) denotes the seconds that device d needs for the whole layer l, without the rows that strided layers skip.

    - `path_s`: All devices together need at least 1 / Σ_d (1 / t(l, d)) seconds for a layer l that can be split. The
      bound is the sum of these seconds over the layers of the longest path.
    - `load_s`: Give each device d a weight y_d ≥ 0, such that Σ_d y_d = 1. The busiest device then computes for at
      least Σ_l min_d (y_d · t(l, d)) seconds (linear programming duality). The weights are proportional to the devices'
      speeds.
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

    It is below 1 if every layer that reads the output skips some rows, as a strided convolution does.
    """
    layers = problem.layers
    readers = layers.consumers.get(layer.output, ())
    if layer.whole_reason or not readers or layer.output in layers.outputs:
        return 1.0
    return max(_read_share(problem, reader, layer.output) for reader in readers)


def _read_share(problem: Problem, reader: Layer, tensor: str) -> float:
    """Return the share (0 to 1) of a tensor's elements that a layer reads.

    It is 1 unless only the layer's main operator (such as Conv) reads the tensor.
    """
    layers, anchor = problem.layers, reader.nodes[reader.anchor]
    share = layers.rule_of(anchor).read_share
    if share is None or any(tensor in node.inputs for node in reader.nodes if node is not anchor):
        return 1.0
    return share(layers.operation_of(anchor)) if tensor == anchor.inputs[0] else 1.0


def energy_bound(problem: Problem) -> float:
    """Return a lower bound on the energy of a frame in joules: the larger one of two bounds.

    - The energy of the layers: layer l needs at least min_d (power(d) · t(l, d)), with the active power of device d and
      the seconds that d needs for the whole layer.
    - The idle power of the sources and sinks during the whole frame, plus the energy of the layers with the difference
      between active and idle power. It is used if no device needs more power when idle than when active.
    """
    layers, platform = problem.layers, problem.platform
    devices = platform.computing_devices
    first = (platform.devices[0].name,)
    ends = dict.fromkeys((*(problem.source or first), *(problem.sink or first)))
    idle_j = sum(platform.device(name).power_idle for name in ends) * latency_bound(problem).seconds
    active_j = added_j = 0.0
    for layer in layers.layers:
        share = _least_computed_share(problem, layer)
        seconds = [share * problem.cost_model.seconds(layers, layer, LayerShare(), device) for device in devices]
        active_j += min(device.power_active * time_s for device, time_s in zip(devices, seconds, strict=True))
        powers = [device.power_active - device.power_idle for device in devices]
        added_j += min(power * time_s for power, time_s in zip(powers, seconds, strict=True))
    draws_less_when_idle = all(device.power_active >= device.power_idle for device in platform.devices)
    return max(active_j, added_j + idle_j) if draws_less_when_idle else active_j


def memory_bound(problem: Problem) -> float:
    """Return a lower bound on the memory of the fullest host in bytes: the larger one of two bounds.

    - The bytes of all weights divided by the number of hosts that compute, because each weight is stored on some host.
    - The bytes of all outputs, because a sink stores them at the end of a frame.
    """
    layers = problem.layers
    nbytes: dict[object, float] = {}
    for layer in layers.layers:
        share = _least_computed_share(problem, layer)
        for key, size in weight_regions(layers, make_share_task(layers, layer, LayerShare())).items():
            nbytes[key] = max(nbytes.get(key, 0.0), share * size)
    hosts = {device.host for device in problem.platform.computing_devices}
    outputs = [layers.tensors[name] for name in layers.delivered_outputs]
    output_bytes = sum(raw_nbytes(tensor.dtype, tensor.shape) for tensor in outputs if tensor.shape is not None)
    return max(sum(nbytes.values()) / len(hosts), float(output_bytes))


def unrefuted_bound(bound: float | None, *values: float) -> float | None:
    """Return a lower bound of an objective, or None if one of `values` refutes it.

    `values` are the objective's values of some plans. `bound` is None if no bound is known.
    """
    return None if bound is None or any(value < bound * (1 - MAX_ROUNDING_ERROR) for value in values) else bound


def objective_bound(problem: Problem) -> float | None:
    """Return a lower bound on the problem's objective, in the unit of the objective.

    Throughput is measured as the time between two frames. The bound on communication is 0.

    Args:
        problem: The problem.

    Returns:
        The bound; None if it is 0.
    """
    bounds: dict[str, Callable[[], float]] = {
        "latency": lambda: latency_bound(problem).seconds,
        "throughput": lambda: latency_bound(problem).load_s,
        "energy": lambda: energy_bound(problem),
        "memory": lambda: memory_bound(problem),
        "communication": lambda: 0.0,
    }
    return sum(weight * bounds[name]() for name, weight in objective_terms(problem.objective).items()) or None
