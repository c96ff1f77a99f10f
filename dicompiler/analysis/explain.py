"""Why not: for each layer that a plan leaves on one device, and for a network that stays on one, what speaks against
splitting it, and from which bandwidth on, or in which wire type, it would pay.

Problem + Plan → reasons, layer by layer;   Comparison → Why: those of its best plan, and what its splits would take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dicompiler.analysis.compare import Comparison, StrategyResult
from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import format_bytes, format_seconds
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
"""Wire type → by how much it divides the bytes of float32."""
MAX_BANDWIDTH_FACTOR = 1000.0
"""So many times the platform's bandwidth are tried."""


@dataclass(frozen=True)
class LayerReason:
    """Why a layer stays whole, in words. saved: seconds that its best split by itself would compute less; nbytes: what
    would travel for that; bandwidth: bit/s from which on that pays (None: none would); wire: types in which it would at
    the platform's bandwidth."""

    layer: str
    operator: str
    reason: str
    saved_s: float = 0.0
    sent_bytes: int = 0
    break_even_bandwidth: float | None = None
    wire_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitReason:
    """What a strategy's plan on several devices takes to be 3 % better than one device: as in `LayerReason`."""

    strategy: str
    break_even_bandwidth: float | None
    wire_dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Of a comparison's best plan: why each layer that one device computes is not split. splits: if that plan stays on
    one device, what each strategy's plan that does not would take."""

    layers: tuple[LayerReason, ...]
    splits: tuple[SplitReason, ...]


def break_even_text(bandwidth: float | None, wire: Sequence[str]) -> str:
    """From which bandwidth on, or in which wire type, a split pays: in words."""
    if bandwidth is None:
        return "at no bandwidth"
    return f"from {bandwidth / 1e6:.3g} Mbit/s on" + (f", or with --wire {wire[0]}" if wire else "")


def explain(comparison: Comparison) -> Explanation:
    """DicompilerError where no strategy has a plan."""
    best = comparison.best
    if best is None or best.plan is None:
        raise DicompilerError("compare: no strategy has a plan: there is nothing to say why about")
    problem = comparison.problem
    alone = len(_computing_devices(best.plan)) == 1
    rows = [
        row for row in comparison.results if alone and row.plan is not None and len(_computing_devices(row.plan)) > 1
    ]
    if alone and not rows and len(problem.platform.computing_devices) > 1:
        rows = [StrategyResult("shares of each layer", 0.0, _shared_plan(problem, best.plan))]
    return Explanation(tuple(explain_layers(problem, best.plan)), tuple(_explain_split(problem, row) for row in rows))


def _computing_devices(plan: Plan) -> set[str]:
    return {part.device for parts in plan.layers.values() for part in parts}


def _shared_plan(problem: Problem, plan: Plan) -> Plan:
    """Each layer in rows, else in channels, over all devices that compute; what cannot be cut as in `plan`."""
    layers = problem.layers.layers
    return problem.build_plan({one.name: next(_possible_splits(problem, one), plan.layers[one.name]) for one in layers})


def explain_layers(problem: Problem, plan: Plan) -> Iterator[LayerReason]:
    """Of each layer that one device computes, in layer order."""
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
        return LayerReason(layer.name, operator, f"{operator} gives all of its output or nothing: no axis can be cut")
    fitting = [parts for parts in splits if _fits_memory(problem, layer, parts)]
    if not fitting:
        return LayerReason(layer.name, operator, "memory: no device's share of its weights fits everywhere")
    tried = [_evaluate_split(problem, layer, home, operator, parts) for parts in fitting]
    # The one that pays first; of those that never do the one that saves most.
    return min(
        tried,
        key=lambda one: (math.inf if one.break_even_bandwidth is None else one.break_even_bandwidth, -one.saved_s),
    )


def _possible_splits(problem: Problem, layer: Layer) -> Iterator[tuple[Part, ...]]:
    """The layer's rows, and its channels, in shares over all devices that compute; where it has neither, any axis that
    can be cut."""
    devices, layers, some = problem.platform.computing_devices, problem.layers, False
    rates, labels = [one.rate for one in devices], tuple[AxisLabel, ...](("height", "channel"))
    for label in labels:
        try:
            parts = tile_layer(layers, layer, label, rates, [one.name for one in devices])
        except DicompilerError:
            continue
        if len(parts) > 1:
            some = True
            yield parts
    for axis in () if some else cuttable_axes(layers, layer):
        cuts = zip(devices, split_axis(layers, layer, axis, rates), strict=True)
        whole = full_region(output_shape(layers, layer))
        parts = tuple(Part(one.name, with_interval(whole, axis, cut)) for one, cut in cuts if cut[0] < cut[1])
        if len(parts) > 1:
            yield parts


def _fits_memory(problem: Problem, layer: Layer, parts: tuple[Part, ...]) -> bool:
    """Whether each device's host has room for the weights of its part."""
    platform = problem.platform
    tasks = [make_share_task(problem.layers, layer, LayerShare(part.region)) for part in parts]
    held = [sum(weight_regions(problem.layers, task).values()) for task in tasks]
    limits = [platform.host(platform.device(part.device).host).memory for part in parts]
    return all(nbytes <= limit for nbytes, limit in zip(held, limits, strict=True))


def _evaluate_split(problem: Problem, layer: Layer, home: str, operator: str, parts: tuple[Part, ...]) -> LayerReason:
    """What this split of the layer comes to by itself: it is read from home and wanted there."""
    layers, platform = problem.layers, problem.platform
    alone = problem.cost_model.seconds(layers, layer, LayerShare(), platform.device(home))
    shares = [problem.cost_model.seconds(layers, layer, LayerShare(p.region), platform.device(p.device)) for p in parts]
    saved = alone - max(shares)
    sizes = [
        sent_nbytes(layers, key.tensor, region_shape(region))
        for part in parts
        if part.device != home
        for task in [make_share_task(layers, layer, LayerShare(part.region))]
        for key, region in (*task.needs.items(), *task.outputs.items())
        if region is not None
    ]
    nbytes, runtime = sum(sizes), problem.runtime_costs.get(home, FREE_RUNTIME)
    fixed = sum(runtime.send_seconds(size) for size in sizes) + runtime.segment_call_s
    fixed += 2 * (platform.network.latency + runtime.latency)
    gain = saved - fixed
    if saved <= 0:
        moves = not count_operations(layers, layer).flops
        words = "no work: it only moves data" if moves else "a share of it takes as long: each reads the same"
        return LayerReason(layer.name, operator, words, 0.0, nbytes)
    if gain <= 0:
        words = f"too little work: {format_seconds(saved)} saved, messages alone take {format_seconds(fixed)}"
        return LayerReason(layer.name, operator, words, saved, nbytes)
    bandwidth = 8 * nbytes * (1 + runtime.header_share) / gain
    missing = bandwidth / platform.network.bandwidth
    wire = tuple(kind for kind, factor in WIRE_COMPRESSION.items() if 1 < missing <= factor and not layers.wire_dtypes)
    words = f"too little work for its bytes: {format_seconds(saved)} saved, {format_bytes(nbytes)} travel"
    if missing <= 1:
        words = "split by itself it would pay; the plan as a whole is better without"
    return LayerReason(layer.name, operator, words, saved, nbytes, bandwidth, wire)


def _explain_split(problem: Problem, row: StrategyResult) -> SplitReason:
    assert row.plan is not None
    wire = (
        ()
        if problem.layers.wire_dtypes
        else tuple(kind for kind in WIRE_COMPRESSION if _pays_with_wire_dtype(problem, row.plan, kind))
    )
    return SplitReason(row.strategy, _break_even_bandwidth(problem, row.plan), wire)


def _pays_with_wire_dtype(problem: Problem, plan: Plan, kind: str) -> bool:
    """Whether the plan pays where all that travels is of this type."""
    types = ((ALL_TENSORS, kind),)
    return _is_worthwhile(
        replace(problem, layers=with_wire_dtypes(problem.layers, types), target=None),
        replace(plan, wire_format=WireFormat(types)),
    )


def _is_worthwhile(problem: Problem, plan: Plan) -> bool:
    single = problem.best_single_device[1].objective_value(problem.objective)
    return problem.evaluate(plan).objective_value(problem.objective) * MIN_SPLIT_GAIN <= single


def _break_even_bandwidth(problem: Problem, plan: Plan) -> float | None:
    """Bit/s of the platform's network from which on the plan pays, within 3 %; None: not at MOST times as many."""
    network, hosts = problem.platform.network, problem.platform.hosts

    def pays(factor: float) -> bool:
        links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in network.links)
        wider = replace(network, bandwidth=network.bandwidth * factor, links=links)
        own = tuple(replace(one, bandwidth=one.bandwidth and one.bandwidth * factor) for one in hosts)
        platform = replace(problem.platform, network=wider, hosts=own)
        return _is_worthwhile(replace(problem, platform=platform, target=None), plan)

    if not pays(MAX_BANDWIDTH_FACTOR):
        return None
    low, high = 1.0, MAX_BANDWIDTH_FACTOR
    while high > 1.03 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * network.bandwidth
