"""How many choices a search can afford: the richest choice set whose tables are small enough. Problem + ChoiceSet →
ChoiceSet.   Nothing of the solver is imported here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dicompiler.plugin_api import Problem
from dicompiler_strategies.joint.elimination import LIMIT
from dicompiler_strategies.tables.choices import ChoiceSet, choices
from dicompiler_strategies.tables.footprints import shareable
from dicompiler_strategies.tables.lines import lines
from dicompiler_strategies.work import FILLED

WORK = 1 << 23  # elements of the largest array of a table that the choice set may ask for


def fitting(problem: Problem, options: ChoiceSet, seconds: float = math.inf) -> ChoiceSet:
    """`options`, or where the tables would be too large (many devices, many layers), or filling them would take more
    than about so many seconds, the richest of some smaller sets that is not: fewer extra rows and bases first, then
    fewer numbers of devices."""
    uniform = lines(problem).uniform
    pairs = len(problem.platform.devices) ** (1 if uniform else 2)
    layers = problem.layers.layers
    edges = sum(len(layer.inputs) for layer in layers)
    most = min(math.isqrt(WORK // pairs), math.isqrt(4 * WORK // max(1, edges)), round(LIMIT ** (1 / 3)))
    distinct = list({shareable(problem, layer): layer for layer in layers}.values())
    sample = distinct[:: max(1, len(distinct) // 8)]
    places = len(distinct) / len(sample) * len(problem.platform.devices)
    chosen = options
    for chosen in _smaller(problem, options):
        counts = [len(choices(problem, layer, chosen, most + 1)) for layer in sample]
        if max(counts) <= most and places * sum(counts) <= seconds * FILLED[uniform]:
            break
    return chosen


def _smaller(problem: Problem, options: ChoiceSet) -> Iterator[ChoiceSet]:
    yield options
    fewer = replace(options, extra=min(options.extra, 2))
    yield fewer
    fewer = replace(fewer, bases=options.bases[:2][-1:])
    yield fewer
    least = replace(fewer, extra=min(options.extra, 1))
    yield least
    devices = len(problem.platform.computing)
    counts = tuple(count for count in options.counts or range(2, devices + 1) if count <= devices)
    for step in (1.3, 2.0, 4.0):
        kept: list[int] = []
        for count in counts:
            if not kept or count >= step * kept[-1] or count == counts[-1]:
                kept.append(count)
        yield replace(least, counts=tuple(kept))
        least = replace(least, each=False, shares=options.shares[:1]) if step > 1.3 else least
    yield replace(least, counts=counts[-1:], extra=0, each=False, shares=options.shares[:1], finishes=("one",))
