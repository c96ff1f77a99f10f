"""What a plan may be asked to be good at: one objective, or a weighted sum of several.

"latency"; "latency+0.5*energy" → {"latency": 1.0, "energy": 0.5}.   Seconds, joules and bytes, all to be made small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from dicompiler.base.errors import UsageError, did_you_mean

OBJECTIVES = ("latency", "throughput", "energy", "memory", "communication")
"""throughput is measured by the seconds between two frames of a stream."""


@lru_cache(maxsize=256)
def objective_terms(text: str) -> Mapping[str, float]:
    """Objective → weight of a text such as "latency", "latency+0.5*energy", "0.2*throughput+1e-9*memory".

    The sum is over seconds, joules and bytes: what a joule is worth in seconds is the weight's to say. UsageError for
    an unknown objective, one that stands twice, and a weight that is not more than zero.
    """
    weights: dict[str, float] = {}
    for term in text.replace("e+", "e").replace("E+", "E").split("+"):
        weight, star, name = term.rpartition("*")
        name = name.strip()
        if name not in OBJECTIVES:
            raise UsageError(f"unknown objective {name!r}{did_you_mean(name, OBJECTIVES)}")
        if name in weights:
            raise UsageError(f"objective {text!r}: {name} stands twice: give it one weight")
        weights[name] = _parse_weight(weight, text) if star else 1.0
    return MappingProxyType(weights)


def speed_metric(objective: str) -> str:
    """Which of the metrics says how fast a plan is for who wants that objective: the seconds between frames where it
    is of throughput and not of latency, else those of a frame."""
    wanted = objective_terms(objective)
    return "period_s" if "throughput" in wanted and "latency" not in wanted else "latency_s"


def _parse_weight(text: str, objective: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise UsageError(
            f"objective {objective!r}: weight {text.strip()!r} is no number over 0: write it as in latency+0.5*energy"
        )
    return weight
