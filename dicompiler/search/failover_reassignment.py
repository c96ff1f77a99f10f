"""Plans for a loss that change as little as can be: others take over the parts of the devices that are lost.

LayerGraph + Plan + lost devices + survivors → Plans in which survivors do what they did, with the weights they have.
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
"""So many survivors are tried as the one that takes over everything."""

_Reassign = Callable[[Layer, Part], Iterable[Part]]


def reassignments(layers: LayerGraph, plan: Plan, failed: Collection[str], survivors: Sequence[str]) -> Iterator[Plan]:
    """`plan` without the devices `lost`, its source and sink as they are. Replicas that need none of them stay, if
    there are any; else their parts go to those that are `left` and compute: each cut for all of them, or whole to
    whoever has got least so far, or all to the same one."""
    turns = plan.replica_roles
    intact = [i for i, turn in enumerate(turns) if not any(part.device in failed for part in _all_parts(turn))]
    if len(intact) > 1:
        yield replace(plan, replicas=tuple(plan.replicas[i] for i in intact))
    elif intact:
        yield turns[intact[0]]
    base = turns[0]

    def given(give: _Reassign) -> Plan:
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

    yield given(lambda layer, part: _cut_for_survivors(layers, layer, part, survivors))
    yield given(_BalancedReassignment(layers, survivors))
    for name in survivors[:MAX_TAKEOVER_CANDIDATES]:
        yield given(_BalancedReassignment(layers, [name]))


def _all_parts(plan: Plan) -> Iterator[Part]:
    return (part for parts in plan.layers.values() for part in parts)


class _BalancedReassignment:
    """Gives each part whole to the one that has got the fewest bytes of weights so far."""

    def __init__(self, layers: LayerGraph, left: Sequence[str]) -> None:
        self.layers, self.assigned_bytes = layers, dict.fromkeys(left, 0)

    def __call__(self, layer: Layer, part: Part) -> Iterator[Part]:
        name = min(self.assigned_bytes, key=lambda name: self.assigned_bytes[name])
        task = make_share_task(self.layers, layer, LayerShare(None if layer.whole_reason else part.region, part.reduce))
        self.assigned_bytes[name] += 1 + sum(weight_regions(self.layers, task).values())
        yield replace(part, device=name)


def _cut_for_survivors(layers: LayerGraph, layer: Layer, part: Part, left: Sequence[str]) -> Iterator[Part]:
    """Equal pieces of the part's region, one for each: along the axis that cuts weights, else along the longest that
    can be cut; a part that cannot be cut goes to the first. A range of input channels stays: parts of other regions may
    have the same."""
    if layer.whole_reason:
        yield replace(part, device=left[0])
        return
    region = part.region or full_region(output_shape(layers, layer))
    axes = [axis for axis in cuttable_axes(layers, layer) if region[axis][1] - region[axis][0] > 1]
    if not axes:
        yield replace(part, device=left[0])
        return
    channel = named_axes(layers)[layer.output].get("channel")
    axis = channel if channel in axes else max(axes, key=lambda axis: region[axis][1] - region[axis][0])
    assert axis is not None
    start, stop = region[axis]
    for name, (low, high) in zip(left, split_proportionally(stop - start, [1.0] * len(left)), strict=True):
        if low < high:
            yield replace(part, device=name, region=with_interval(region, axis, (start + low, start + high)))
