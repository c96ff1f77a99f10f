"""Plans for a loss that change as little as can be: others take over the parts of the devices that are lost.

LayerGraph + Plan + lost devices + survivors → Plans in which survivors do what they did, with the weights they have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from dicompiler.cost.counting import weight_regions
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import Part, Plan, Share
from dicompiler.ir.regions import full, shares, with_interval
from dicompiler.partition.bounds_inference import cuttable, output_shape, share_task
from dicompiler.partition.tiling import named_axes

MOST = 8
"""So many survivors are tried as the one that takes over everything."""

_Give = Callable[[Layer, Part], Iterable[Part]]


def takeovers(layers: LayerGraph, plan: Plan, lost: Collection[str], left: Sequence[str]) -> Iterator[Plan]:
    """`plan` without the devices `lost`, its source and sink as they are. Replicas that need none of them stay, if
    there are any; else their parts go to those that are `left` and compute: each cut for all of them, or whole to
    whoever has got least so far, or all to the same one."""
    turns = plan.turns
    intact = [i for i, turn in enumerate(turns) if not any(part.device in lost for part in _parts(turn))]
    if len(intact) > 1:
        yield replace(plan, replicas=tuple(plan.replicas[i] for i in intact))
    elif intact:
        yield turns[intact[0]]
    base = turns[0]

    def given(give: _Give) -> Plan:
        moved = {
            layer.name: tuple(
                dict.fromkeys(
                    new
                    for part in base.layers[layer.name]
                    for new in (give(layer, part) if part.device in lost else (part,))
                )
            )
            for layer in layers.layers
        }
        return replace(base, layers=moved)

    yield given(lambda layer, part: _cut(layers, layer, part, left))
    yield given(_Balanced(layers, left))
    for name in left[:MOST]:
        yield given(_Balanced(layers, [name]))


def _parts(plan: Plan) -> Iterator[Part]:
    return (part for parts in plan.layers.values() for part in parts)


class _Balanced:
    """Gives each part whole to the one that has got the fewest bytes of weights so far."""

    def __init__(self, layers: LayerGraph, left: Sequence[str]) -> None:
        self.layers, self.got = layers, dict.fromkeys(left, 0)

    def __call__(self, layer: Layer, part: Part) -> Iterator[Part]:
        name = min(self.got, key=lambda name: self.got[name])
        task = share_task(self.layers, layer, Share(None if layer.reason else part.region, part.reduce))
        self.got[name] += 1 + sum(weight_regions(self.layers, task).values())
        yield replace(part, device=name)


def _cut(layers: LayerGraph, layer: Layer, part: Part, left: Sequence[str]) -> Iterator[Part]:
    """Equal pieces of the part's region, one for each: along the axis that cuts weights, else along the longest that
    can be cut; a part that cannot be cut goes to the first. A range of input channels stays: parts of other regions may
    have the same."""
    if layer.reason:
        yield replace(part, device=left[0])
        return
    region = part.region or full(output_shape(layers, layer))
    axes = [axis for axis in cuttable(layers, layer) if region[axis][1] - region[axis][0] > 1]
    if not axes:
        yield replace(part, device=left[0])
        return
    channel = named_axes(layers)[layer.output].get("channel")
    axis = channel if channel in axes else max(axes, key=lambda axis: region[axis][1] - region[axis][0])
    assert axis is not None
    start, stop = region[axis]
    for name, (low, high) in zip(left, shares(stop - start, [1.0] * len(left)), strict=True):
        if low < high:
            yield replace(part, device=name, region=with_interval(region, axis, (start + low, start + high)))
