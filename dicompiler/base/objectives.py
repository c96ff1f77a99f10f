"""Objectives of plans: one objective, or a weighted sum of several. All are minimized.

"latency+0.5*energy" ⇒ {"latency": 1.0, "energy": 0.5}, over seconds, joules and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from dicompiler.base.errors import UsageError, did_you_mean

OBJECTIVES = ("latency", "throughput", "energy", "memory", "communication")
"""Names of the objectives. `throughput` is measured as the seconds between two frames of a stream."""


@lru_cache(maxsize=256)
def objective_terms(text: str) -> Mapping[str, float]:
    """Parse an objective such as "latency", "latency+0.5*energy" or "0.2*throughput+1e-9*memory".

    The terms have different units (seconds, joules, bytes); the weights convert between them.

    Args:
        text: The objective.

    Returns:
        Weight by objective name, in the order of the text.

    Raises:
        UsageError: A name is unknown or appears twice, or a weight is not greater than zero.
    """
    weights: dict[str, float] = {}
    for term in text.replace("e+", "e").replace("E+", "E").split("+"):
        weight, star, name = term.rpartition("*")
        name = name.strip()
        if name not in OBJECTIVES:
            raise UsageError(f"unknown objective {name!r}{did_you_mean(name, OBJECTIVES)}")
        if name in weights:
            raise UsageError(f"objective {text!r}: {name} appears twice: give it one weight")
        weights[name] = _parse_weight(weight, text) if star else 1.0
    return MappingProxyType(weights)


def speed_metric(objective: str) -> str:
    """Return the metric of speed for an objective: `period_s` for throughput, else `latency_s`."""
    wanted = objective_terms(objective)
    return "period_s" if "throughput" in wanted and "latency" not in wanted else "latency_s"


def _parse_weight(text: str, objective: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise UsageError(
            f"objective {objective!r}: weight {text.strip()!r} is not a number above 0: write it as in "
            "latency+0.5*energy"
        )
    return weight
