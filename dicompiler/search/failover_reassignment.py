"""Failure plans that change little: surviving devices take over the parts of the failed ones.

The parts of the survivors stay as they are, so that they can use the weights that they already store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from dicompiler.cost.op_counts import weight_regions
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.regions import full_region, split_proportionally, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, make_share_task, output_shape
from dicompiler.partition.tiling import named_axes

MAX_TAKEOVER_CANDIDATES = 8
"""Number of survivors that are tried as the one that takes over everything."""

_Reassign = Callable[[Layer, Part], Iterable[Part]]


def reassignments(layers: LayerGraph, plan: Plan, failed: Collection[str], survivors: Sequence[str]) -> Iterator[Plan]:
    """Yield variants of a plan that do without the failed devices; source and sink stay.

    If the plan has replicas that do not need the failed devices, those are kept. Otherwise the parts of the failed
    devices are reassigned in several ways: each part is cut for all survivors, or goes to the survivor with the least
    weights so far, or all parts go to the same survivor.

    Args:
        layers: The layers.
        plan: The plan to change.
        failed: Devices that failed.
        survivors: Devices that remain and compute.

    Yields:
        Plans for the survivors.
    """
    roles = plan.replica_roles
    intact = [i for i, role in enumerate(roles) if not any(part.device in failed for part in _all_parts(role))]
    if len(intact) > 1:
        yield replace(plan, replicas=tuple(plan.replicas[i] for i in intact))
    elif intact:
        yield roles[intact[0]]
    base = roles[0]

    def reassign(give: _Reassign) -> Plan:
        moved = {
            layer.name: tuple(
                dict.fromkeys(
                    new
                    for part in base.layers[layer.name]
                    for new in (give(layer, part) if part.device in failed else (part,))
                )
            )
            for layer in layers.layers
        }
        return replace(base, layers=moved)

    yield reassign(lambda layer, part: _cut_for_survivors(layers, layer, part, survivors))
    yield reassign(_BalancedReassignment(layers, survivors))
    for name in survivors[:MAX_TAKEOVER_CANDIDATES]:
        yield reassign(_BalancedReassignment(layers, [name]))


def _all_parts(plan: Plan) -> Iterator[Part]:
    return (part for parts in plan.layers.values() for part in parts)


class _BalancedReassignment:
    """Assigns each part whole to the survivor that has received the fewest bytes of weights so far."""

    def __init__(self, layers: LayerGraph, survivors: Sequence[str]) -> None:
        self.layers, self.assigned_bytes = layers, dict.fromkeys(survivors, 0)

    def __call__(self, layer: Layer, part: Part) -> Iterator[Part]:
        name = min(self.assigned_bytes, key=lambda name: self.assigned_bytes[name])
        task = make_share_task(self.layers, layer, LayerShare(None if layer.whole_reason else part.region, part.reduce))
        self.assigned_bytes[name] += 1 + sum(weight_regions(self.layers, task).values())
        yield replace(part, device=name)


def _cut_for_survivors(layers: LayerGraph, layer: Layer, part: Part, survivors: Sequence[str]) -> Iterator[Part]:
    """Yield equal pieces of a part, one for each survivor.

    The part is cut along the axis that cuts weights, or else along its longest axis. A part that cannot be cut goes to
    the first survivor. The range of the reduction axis stays, because parts of other regions may have the same range.
    """
    if layer.whole_reason:
        yield replace(part, device=survivors[0])
        return
    region = part.region or full_region(output_shape(layers, layer))
    axes = [axis for axis in cuttable_axes(layers, layer) if region[axis][1] - region[axis][0] > 1]
    if not axes:
        yield replace(part, device=survivors[0])
        return
    channel = named_axes(layers)[layer.output].get("channel")
    axis = channel if channel in axes else max(axes, key=lambda axis: region[axis][1] - region[axis][0])
    assert axis is not None
    start, stop = region[axis]
    for name, (low, high) in zip(survivors, split_proportionally(stop - start, [1.0] * len(survivors)), strict=True):
        if low < high:
            yield replace(part, device=name, region=with_interval(region, axis, (start + low, start + high)))
