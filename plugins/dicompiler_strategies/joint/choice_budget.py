"""The largest set of ways to split layers for which the cost tables fit into a budget of time and memory.

This module does not import CP-SAT, so that strategies without this solver start faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dicompiler.plugin_api import Problem
from dicompiler_strategies.joint.variable_elimination import MAX_TABLE_ELEMENTS
from dicompiler_strategies.tables.choice_footprints import footprint_key
from dicompiler_strategies.tables.choices import ChoiceSet, list_choices
from dicompiler_strategies.tables.cost_tables import FILLED_PARTS_PER_S
from dicompiler_strategies.tables.link_loads import build_link_loads

MAX_ARRAY_ELEMENTS = 1 << 23
"""Largest number of elements of an array in cost tables."""


def affordable_choices(problem: Problem, options: ChoiceSet, seconds: float = math.inf) -> ChoiceSet:
    """Return `options`, or a smaller choice set if its cost tables would be too large or take too long to compute.

    A choice set describes the ways to split layers over devices that a search may use. It is made smaller step by step
    until the tables are small enough:

    1. Tiles may compute at most two rows beyond their share (`extra_rows`).
    2. There is only one way to place the borders between tiles (`row_cuts`).
    3. Tiles may compute at most one row beyond their share.
    4. Fewer and fewer of the numbers of devices to split over (`device_counts`) remain.

    Args:
        problem: The problem.
        options: The largest choice set.
        seconds: Time limit, in seconds of the computer on which `FILLED_PARTS_PER_S` was measured.
    """
    is_uniform = build_link_loads(problem).is_uniform
    devices, layers = len(problem.platform.devices), problem.layers.layers
    edges = sum(len(layer.inputs) for layer in layers)
    max_choices = min(
        math.isqrt(MAX_ARRAY_ELEMENTS // (devices if is_uniform else devices**2)),
        math.isqrt(4 * MAX_ARRAY_ELEMENTS // max(1, edges)),
        round(MAX_TABLE_ELEMENTS ** (1 / 3)),
    )
    distinct = list({footprint_key(problem, layer): layer for layer in layers}.values())
    sample = distinct[:: max(1, len(distinct) // 8)]
    parts_per_choice = len(distinct) / len(sample) * devices
    choice_set = options
    for choice_set in _smaller_choice_sets(problem, options):
        counts = [len(list_choices(problem, layer, choice_set, max_choices + 1)) for layer in sample]
        if max(counts) <= max_choices and parts_per_choice * sum(counts) <= seconds * FILLED_PARTS_PER_S[is_uniform]:
            break
    return choice_set


def _smaller_choice_sets(problem: Problem, options: ChoiceSet) -> Iterator[ChoiceSet]:
    yield options
    smaller = replace(options, extra_rows=min(options.extra_rows, 2))
    yield smaller
    smaller = replace(smaller, row_cuts=options.row_cuts[:2][-1:])
    yield smaller
    smaller = replace(smaller, extra_rows=min(options.extra_rows, 1))
    yield smaller
    devices = len(problem.platform.computing_devices)
    counts = tuple(count for count in options.device_counts or range(2, devices + 1) if count <= devices)
    for factor in (1.3, 2.0, 4.0):
        kept: list[int] = []
        for count in counts:
            if not kept or count >= factor * kept[-1] or count == counts[-1]:
                kept.append(count)
        yield replace(smaller, device_counts=tuple(kept))
        if factor > 1.3:
            smaller = replace(smaller, each_device=False, shares=options.shares[:1])
    yield replace(smaller, device_counts=counts[-1:], extra_rows=0, merges=("one",))
