"""Reduction of the parts of a plan to the elements that are read.

    rows 0:35 | 21:56, of which 0:34 | 22:56 are read  ⇒  rows 0:34 | 22:56

A part is the region of a layer that one device computes. Neighbouring parts may overlap (halos).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dicompiler.plugin_api import Part, Plan, Problem, Region
from dicompiler.plugin_api.regions import (
    Box,
    Routing,
    TaskId,
    align_region,
    assembly_leaves,
    bounding_region,
    route_on_platform,
)

# Largest number of rounds. Trimmed parts read less, so that the next round can trim the layers before them.
MAX_TRIM_ROUNDS = 32


def trim_parts(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with each part reduced to the bounding box of the elements that are read from it.

    A part is the region of a layer that one device computes. Parts from which nothing is read are removed. If nothing
    can be reduced, the same plan is returned.
    """
    for _ in range(MAX_TRIM_ROUNDS):
        after = _trim_once(plan, route_on_platform(problem.platform, problem.layers, plan))
        if after == plan:
            break
        plan = after
    return plan


def _trim_once(plan: Plan, routing: Routing) -> Plan:
    read: dict[TaskId, list[Region]] = {}
    for box, region in _read_pieces(routing):
        if box.task is not None:
            read.setdefault(box.task, []).append(region)

    def trim_layer(name: str, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        layers, layer = routing.layers, routing.layers.layer_by_name[name]
        if layer.whole_reason or any(part.reduce for part in parts):
            return parts
        trimmed = []
        for index, part in enumerate(parts):
            wanted = bounding_region(read.get((name, index), ()))
            if part.region is None:
                trimmed.append(part)
            elif wanted is not None:
                wanted = align_region(layers, layer, wanted)
                is_tight = wanted == align_region(layers, layer, part.region)
                trimmed.append(part if is_tight else replace(part, region=wanted))
        return tuple(trimmed) or parts

    return replace(plan, layers={name: trim_layer(name, parts) for name, parts in plan.layers.items()})


def _read_pieces(routing: Routing) -> Iterator[tuple[Box, Region]]:
    """Yield (box that a device has computed, piece of it that is read or sent). A box is a region of a tensor."""
    for box in routing.received_boxes:
        if box.origin is not None and box.region is not None:
            yield box.origin, box.region
    trees = [tree for reads in routing.reads.values() for tree in reads.values()]
    trees += [delivery.assembly for delivery in routing.deliveries if delivery.assembly is not None]
    for tree in trees:
        for leaf in assembly_leaves(tree):
            if leaf.box.origin is None:
                yield leaf.box, leaf.region
