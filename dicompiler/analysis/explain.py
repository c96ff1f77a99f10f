"""Explanations why a plan does not split a layer or the network, and under which conditions a split is faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dicompiler.analysis.compare import Comparison, StrategyResult
from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import format_bytes, format_number, format_seconds
from dicompiler.cost.op_counts import count_operations, weight_regions
from dicompiler.cost.runtime_overhead import FREE_RUNTIME
from dicompiler.ir.layers import Layer
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.regions import full_region, region_shape, with_interval
from dicompiler.ir.wire_dtype import ALL_TENSORS, WireFormat, sent_nbytes, with_wire_dtypes
from dicompiler.partition.bounds_inference import cuttable_axes, make_share_task, output_shape
from dicompiler.partition.tiling import AxisLabel, split_axis, tile_layer
from dicompiler.search.problem import MIN_SPLIT_GAIN, Problem

WIRE_COMPRESSION = {"float16": 2.0, "int8": 4.0}
"""Factor by which sending in a type saves bytes compared with float32, by the name of the type."""
MAX_BANDWIDTH_FACTOR = 1000.0
"""Larger bandwidths than this multiple of the platform's are not tried to make a split worthwhile."""

SHARED_PLAN_NAME = "shares of each layer"
"""Name of the plan that splits each layer over all devices, in place of the name of a strategy."""


@dataclass(frozen=True)
class LayerReason:
    """The reason why one device computes a whole layer.

    Attributes:
        layer: Name of the layer.
        operator: The layer's main operator.
        reason: Text that states the reason.
        saved_s: Seconds of computing that the best split of only this layer would save.
        sent_bytes: Bytes that this split would send.
        break_even_bandwidth: Bandwidth in bit/s above which this split is faster; None if it never is.
        wire_dtypes: Types for sending tensors, such as "float16", with which this split is faster at the platform's
            bandwidth.
    """

    layer: str
    operator: str
    reason: str
    saved_s: float = 0.0
    sent_bytes: int = 0
    break_even_bandwidth: float | None = None
    wire_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitReason:
    """Conditions under which a plan on several devices is at least 3 % better than one device.

    Attributes:
        strategy: The strategy that made the plan.
        break_even_bandwidth: Bandwidth in bit/s above which the plan is 3 % better; None if it never is.
        wire_dtypes: Types for sending tensors, such as "float16", with which the plan is 3 % better at the platform's
            bandwidth.
    """

    strategy: str
    break_even_bandwidth: float | None
    wire_dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Reasons why the best plan of a comparison does not split more layers.

    Attributes:
        layers: Reasons for the layers that one device computes.
        splits: Conditions under which plans on several devices are better than one device; empty if the best plan
            itself uses several devices.
    """

    layers: tuple[LayerReason, ...]
    splits: tuple[SplitReason, ...]


def break_even_text(bandwidth: float | None, wire_dtypes: Sequence[str]) -> str:
    """Return the conditions under which a split is faster, such as "above 80 Mbit/s, or with --wire-dtype float16"."""
    if bandwidth is None:
        return "at no bandwidth"
    text = f"above {format_number(bandwidth / 1e6, 3)} Mbit/s"
    return f"{text}, or with --wire-dtype {wire_dtypes[0]}" if wire_dtypes else text


def suggest_split(splits: Sequence[SplitReason]) -> str:
    """Return as text under which conditions the most promising split is better than one device.

    Args:
        splits: The conditions for each split; at least one.
    """
    best = min(splits, key=lambda split: (split.break_even_bandwidth or math.inf, not split.wire_dtypes))
    if best.break_even_bandwidth is None:
        return "no tried split is better at any bandwidth"
    name = "a split of each layer" if best.strategy == SHARED_PLAN_NAME else best.strategy
    return f"{name} is 3 % better {break_even_text(best.break_even_bandwidth, best.wire_dtypes)}"


def explain(comparison: Comparison) -> Explanation:
    """Explain why the best plan of a comparison does not split more layers.

    Raises:
        DicompilerError: No strategy has a plan.
    """
    return Explanation(tuple(explain_layers(comparison.problem, _best_plan(comparison))), explain_splits(comparison))


def explain_splits(comparison: Comparison) -> tuple[SplitReason, ...]:
    """Return the conditions under which plans on several devices are better than one device.

    If no strategy has such a plan, the conditions are those of a plan that splits each layer over all devices.

    Args:
        comparison: The results of all strategies.

    Returns:
        The conditions for each plan; empty if the best plan itself uses several devices, or if only one can compute.

    Raises:
        DicompilerError: No strategy has a plan.
    """
    best, problem = _best_plan(comparison), comparison.problem
    if len(_computing_devices(best)) > 1 or len(problem.platform.computing_devices) < 2:
        return ()
    planned = [result for result in comparison.results if result.plan is not None]
    splits = [result for result in planned if result.plan and len(_computing_devices(result.plan)) > 1]
    if not splits:
        splits = [StrategyResult(SHARED_PLAN_NAME, 0.0, _shared_plan(problem, best))]
    return tuple(_explain_split(problem, result) for result in splits)


def _best_plan(comparison: Comparison) -> Plan:
    best = comparison.best
    if best is None or best.plan is None:
        raise DicompilerError("compare: no strategy has a plan: there is nothing to explain")
    return best.plan


def _computing_devices(plan: Plan) -> set[str]:
    return {part.device for parts in plan.layers.values() for part in parts}


def _shared_plan(problem: Problem, plan: Plan) -> Plan:
    """Return a plan that splits each layer over all computing devices, if possible, or else as `plan` does."""
    parts = {
        layer.name: next(_possible_splits(problem, layer), plan.layers[layer.name]) for layer in problem.layers.layers
    }
    return problem.build_plan(parts)


def explain_layers(problem: Problem, plan: Plan) -> Iterator[LayerReason]:
    """Yield, for each layer that one device computes, the reason why it is not split."""
    for layer in problem.layers.layers:
        devices = {part.device for part in plan.layers[layer.name]}
        if len(devices) == 1:
            yield _explain_layer(problem, layer, devices.pop())


def _explain_layer(problem: Problem, layer: Layer, home: str) -> LayerReason:
    operator = layer.nodes[layer.anchor].op
    if layer.whole_reason:
        return LayerReason(layer.name, operator, layer.whole_reason)
    if len(problem.platform.computing_devices) < 2:
        return LayerReason(layer.name, operator, "no other device computes")
    splits = list(_possible_splits(problem, layer))
    if not splits:
        return LayerReason(layer.name, operator, f"{operator} cannot be split along any axis of its output")
    fitting = [parts for parts in splits if _fits_memory(problem, layer, parts)]
    if not fitting:
        return LayerReason(layer.name, operator, "memory: some device has no room for its share of the weights")
    reasons = [_evaluate_split(problem, layer, home, operator, parts) for parts in fitting]

    def rank(reason: LayerReason) -> tuple[float, float]:
        # The best split needs the lowest bandwidth to be faster than one device. Among equal ones, it saves the most
        # time.
        bandwidth = math.inf if reason.break_even_bandwidth is None else reason.break_even_bandwidth
        return bandwidth, -reason.saved_s

    return min(reasons, key=rank)


def _possible_splits(problem: Problem, layer: Layer) -> Iterator[tuple[Part, ...]]:
    """Yield splits of a layer over all computing devices: by rows and by channels, or else by each other axis."""
    devices, layers = problem.platform.computing_devices, problem.layers
    names, rates = [device.name for device in devices], [device.rate for device in devices]
    labels: tuple[AxisLabel, ...] = ("height", "channel")
    has_split = False
    for label in labels:
        try:
            parts = tile_layer(layers, layer, label, rates, names)
        except DicompilerError:
            continue
        if len(parts) > 1:
            has_split = True
            yield parts
    if has_split:
        return
    whole = full_region(output_shape(layers, layer))
    for axis in cuttable_axes(layers, layer):
        intervals = zip(names, split_axis(layers, layer, axis, rates), strict=True)
        parts = tuple(
            Part(name, with_interval(whole, axis, interval))
            for name, interval in intervals
            if interval[0] < interval[1]
        )
        if len(parts) > 1:
            yield parts


def _fits_memory(problem: Problem, layer: Layer, parts: tuple[Part, ...]) -> bool:
    """Return True if each device's host has enough memory for the weights of its part of the layer."""
    platform = problem.platform
    for part in parts:
        task = make_share_task(problem.layers, layer, LayerShare(part.region))
        nbytes = sum(weight_regions(problem.layers, task).values())
        if nbytes > platform.host(platform.device(part.device).host).memory:
            return False
    return True


def _evaluate_split(problem: Problem, layer: Layer, home: str, operator: str, parts: tuple[Part, ...]) -> LayerReason:
    """Return the reason not to split a layer into `parts`, with the saved seconds and the sent bytes.

    Args:
        problem: The problem with the platform and the cost model.
        layer: The layer. All other layers stay on one device.
        home: Name of the device that has the layer's inputs and needs its outputs.
        operator: The layer's main operator.
        parts: The parts of the split.
    """
    layers, platform, cost_model = problem.layers, problem.platform, problem.cost_model
    whole_s = cost_model.seconds(layers, layer, LayerShare(), platform.device(home))
    parts_s = [
        cost_model.seconds(layers, layer, LayerShare(part.region), platform.device(part.device)) for part in parts
    ]
    saved_s = whole_s - max(parts_s)
    sizes = []
    for part in parts:
        if part.device != home:
            task = make_share_task(layers, layer, LayerShare(part.region))
            regions = (*task.needs.items(), *task.outputs.items())
            sizes += [
                sent_nbytes(layers, key.tensor, region_shape(region)) for key, region in regions if region is not None
            ]
    sent_bytes, runtime = sum(sizes), problem.runtime_costs.get(home, FREE_RUNTIME)
    fixed_s = sum(runtime.send_seconds(size) for size in sizes) + runtime.segment_call_s
    fixed_s += 2 * (platform.network.latency + runtime.latency)
    if saved_s <= 0:
        has_work = count_operations(layers, layer).flops > 0
        reason = (
            "a share takes as long as the whole layer: it reads the same data"
            if has_work
            else "no work: it only moves data"
        )
        return LayerReason(layer.name, operator, reason, 0.0, sent_bytes)
    if saved_s <= fixed_s:
        reason = f"too little work: {format_seconds(saved_s)} saved, the messages alone take {format_seconds(fixed_s)}"
        return LayerReason(layer.name, operator, reason, saved_s, sent_bytes)
    bandwidth = 8 * sent_bytes * (1 + runtime.header_share) / (saved_s - fixed_s)
    missing_factor = bandwidth / platform.network.bandwidth
    wire_dtypes: tuple[str, ...] = ()
    if not layers.wire_dtypes:
        wire_dtypes = tuple(dtype for dtype, factor in WIRE_COMPRESSION.items() if 1 < missing_factor <= factor)
    reason = f"too little work for its bytes: {format_seconds(saved_s)} saved, {format_bytes(sent_bytes)} sent"
    if missing_factor <= 1:
        reason = "splitting this layer alone would be faster, but the best plan as a whole does not split it"
    return LayerReason(layer.name, operator, reason, saved_s, sent_bytes, bandwidth, wire_dtypes)


def _explain_split(problem: Problem, result: StrategyResult) -> SplitReason:
    plan = result.plan
    assert plan is not None
    wire_dtypes: tuple[str, ...] = ()
    if not problem.layers.wire_dtypes:
        wire_dtypes = tuple(dtype for dtype in WIRE_COMPRESSION if _is_worthwhile_with_wire_dtype(problem, plan, dtype))
    return SplitReason(result.strategy, _break_even_bandwidth(problem, plan), wire_dtypes)


def _is_worthwhile_with_wire_dtype(problem: Problem, plan: Plan, dtype: str) -> bool:
    dtypes = ((ALL_TENSORS, dtype),)
    narrowed = replace(problem, layers=with_wire_dtypes(problem.layers, dtypes), target=None)
    return _is_worthwhile(narrowed, replace(plan, wire_format=WireFormat(dtypes)))


def _is_worthwhile(problem: Problem, plan: Plan) -> bool:
    single = problem.best_single_device[1].objective_value(problem.objective)
    return problem.evaluate(plan).objective_value(problem.objective) * MIN_SPLIT_GAIN <= single


def _break_even_bandwidth(problem: Problem, plan: Plan) -> float | None:
    """Return the bandwidth in bit/s above which the plan is 3 % better than one device; None if there is none."""
    network, hosts = problem.platform.network, problem.platform.hosts

    def pays(factor: float) -> bool:
        links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in network.links)
        faster = replace(network, bandwidth=network.bandwidth * factor, links=links)
        faster_hosts = tuple(replace(host, bandwidth=host.bandwidth and host.bandwidth * factor) for host in hosts)
        platform = replace(problem.platform, network=faster, hosts=faster_hosts)
        return _is_worthwhile(replace(problem, platform=platform, target=None), plan)

    if not pays(MAX_BANDWIDTH_FACTOR):
        return None
    low, high = 1.0, MAX_BANDWIDTH_FACTOR
    # The bandwidth is searched with an accuracy of 3 %.
    while high > 1.03 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * network.bandwidth
