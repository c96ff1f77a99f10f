"""The richest choice set whose cost tables fit into a budget.

This module does not import the solver.
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
"""Elements of the largest array of a table that a choice set may need."""


def affordable_choices(problem: Problem, options: ChoiceSet, seconds: float = math.inf) -> ChoiceSet:
    """Return the choice set, or a smaller one if its tables would be too large or take too long to fill.

    Filling them may take this many seconds of the reference computer. First extra rows and row cuts are reduced, then
    the numbers of devices.
    """
    uniform = build_link_loads(problem).is_uniform
    pairs = len(problem.platform.devices) ** (1 if uniform else 2)
    layers = problem.layers.layers
    edges = sum(len(layer.inputs) for layer in layers)
    most = min(
        math.isqrt(MAX_ARRAY_ELEMENTS // pairs),
        math.isqrt(4 * MAX_ARRAY_ELEMENTS // max(1, edges)),
        round(MAX_TABLE_ELEMENTS ** (1 / 3)),
    )
    distinct = list({footprint_key(problem, layer): layer for layer in layers}.values())
    sample = distinct[:: max(1, len(distinct) // 8)]
    places = len(distinct) / len(sample) * len(problem.platform.devices)
    chosen = options
    for chosen in _smaller_choice_sets(problem, options):
        counts = [len(list_choices(problem, layer, chosen, most + 1)) for layer in sample]
        if max(counts) <= most and places * sum(counts) <= seconds * FILLED_PARTS_PER_S[uniform]:
            break
    return chosen


def _smaller_choice_sets(problem: Problem, options: ChoiceSet) -> Iterator[ChoiceSet]:
    yield options
    fewer = replace(options, extra_rows=min(options.extra_rows, 2))
    yield fewer
    fewer = replace(fewer, row_cuts=options.row_cuts[:2][-1:])
    yield fewer
    least = replace(fewer, extra_rows=min(options.extra_rows, 1))
    yield least
    devices = len(problem.platform.computing_devices)
    counts = tuple(count for count in options.device_counts or range(2, devices + 1) if count <= devices)
    for step in (1.3, 2.0, 4.0):
        kept: list[int] = []
        for count in counts:
            if not kept or count >= step * kept[-1] or count == counts[-1]:
                kept.append(count)
        yield replace(least, device_counts=tuple(kept))
        least = replace(least, each_device=False, shares=options.shares[:1]) if step > 1.3 else least
    yield replace(
        least, device_counts=counts[-1:], extra_rows=0, each_device=False, shares=options.shares[:1], merges=("one",)
    )
