"""Failure plans that change only the parts of failed devices. A part is one device's piece of a layer.

The parts of the remaining devices do not change, so these devices can use the weights that they already store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from dicompiler.cost.op_counts import weight_regions
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.regions import full_region, split_proportionally, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, make_share_task, output_shape
from dicompiler.partition.tiling import named_axes

MAX_TAKEOVER_CANDIDATES = 8
"""Maximum number of remaining devices that are tried, one by one, as the only device that takes over parts."""

_Reassign = Callable[[Layer, Part], Iterable[Part]]


def reassignments(layers: LayerGraph, plan: Plan, failed: Collection[str], survivors: Sequence[str]) -> Iterator[Plan]:
    """Yield variants of a plan in which the devices `survivors` compute the parts of the devices `failed`.

    Source and sink do not change. If some replicas of the plan (its copies on other devices) use no failed device, the
    first variant consists of these replicas. All other variants have no replicas: each part of a failed device is cut
    into one piece for each survivor, or is moved whole to one survivor.
    """
    roles = plan.replica_roles
    intact = [
        i
        for i, role in enumerate(roles)
        if not any(part.device in failed for parts in role.layers.values() for part in parts)
    ]
    if len(intact) > 1:
        yield replace(plan, replicas=tuple(plan.replicas[i] for i in intact))
    elif intact:
        yield roles[intact[0]]
    base = roles[0]

    def reassign(move_part: _Reassign) -> Plan:
        moved = {}
        for layer in layers.layers:
            parts = [move_part(layer, part) if part.device in failed else [part] for part in base.layers[layer.name]]
            moved[layer.name] = tuple(dict.fromkeys(chain.from_iterable(parts)))
        return replace(base, layers=moved)

    yield reassign(lambda layer, part: _cut_for_survivors(layers, layer, part, survivors))
    yield reassign(_BalancedReassignment(layers, survivors))
    for name in survivors[:MAX_TAKEOVER_CANDIDATES]:
        yield reassign(_BalancedReassignment(layers, [name]))


class _BalancedReassignment:
    """Moves each part as a whole to the survivor that has received the fewest bytes of weights so far."""

    def __init__(self, layers: LayerGraph, survivors: Sequence[str]) -> None:
        self.layers, self.assigned_bytes = layers, dict.fromkeys(survivors, 0)

    def __call__(self, layer: Layer, part: Part) -> Iterator[Part]:
        name = min(self.assigned_bytes, key=lambda name: self.assigned_bytes[name])
        task = make_share_task(self.layers, layer, LayerShare(None if layer.whole_reason else part.region, part.reduce))
        self.assigned_bytes[name] += 1 + sum(weight_regions(self.layers, task).values())
        yield replace(part, device=name)


def _cut_for_survivors(layers: LayerGraph, layer: Layer, part: Part, survivors: Sequence[str]) -> Iterator[Part]:
    """Yield equal pieces of a part, one for each device of `survivors`.

    The part is cut along its channels if possible, because this cuts its weights too; otherwise along its longest axis.
    A part that cannot be cut goes to the first survivor. A range of the reduction axis is never cut, because other
    parts may compute the same range for other regions. A plan with ranges that overlap only partly is not valid.
    """
    region = () if layer.whole_reason else part.region or full_region(output_shape(layers, layer))
    axes = [axis for axis in cuttable_axes(layers, layer) if region[axis][1] - region[axis][0] > 1] if region else []
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
