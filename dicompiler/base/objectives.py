"""Objectives of plans: one objective, or a weighted sum of several. Smaller values are better.

"latency+0.5*energy" ⇒ {"latency": 1.0, "energy": 0.5}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.base.units import format_bytes, format_joules, format_number, format_seconds

OBJECTIVES = ("latency", "throughput", "energy", "memory", "communication")
"""Names of the objectives. `throughput` is measured as the seconds from one frame of a stream to the next."""


@lru_cache(maxsize=256)
def objective_terms(text: str) -> Mapping[str, float]:
    """Parse an objective such as "latency", "latency+0.5*energy" or "0.2*throughput+1e-9*memory".

    The objectives have different units (seconds, joules, bytes), so the weights also convert between units.

    Args:
        text: The objective.

    Returns:
        Weight by name of the objective, in the order of the text.

    Raises:
        UsageError: A name is unknown or appears twice, or a weight is not greater than zero.
    """
    weights: dict[str, float] = {}
    for term in text.replace("e+", "e").replace("E+", "E").split("+"):
        weight, star, name = term.rpartition("*")
        name = name.strip()
        if name not in OBJECTIVES and weight.strip() in OBJECTIVES:
            before, after = weight.strip(), name
            raise UsageError(f"objective {text!r}: the weight comes first: write {after}*{before}")
        if (names := [part.strip() for part in name.split(",")])[1:] and set(names) <= set(OBJECTIVES):
            raise UsageError(f"objective {text!r}: a sum is written with '+': write {'+'.join(names)}")
        if name not in OBJECTIVES:
            raise UsageError(f"unknown objective {name!r}{did_you_mean(name, OBJECTIVES)}")
        if name in weights:
            raise UsageError(f"objective {text!r}: {name} appears twice: give it one weight")
        weights[name] = _parse_weight(weight, text) if star else 1.0
    return MappingProxyType(weights)


def speed_metric(objective: str) -> str:
    """Return the metric that measures speed for an objective: `period_s` for throughput, else `latency_s`."""
    terms = objective_terms(objective)
    return "period_s" if "throughput" in terms and "latency" not in terms else "latency_s"


def format_objective(objective: str, value: float) -> str:
    """Return a value of an objective as short text with its unit. Weighted sums have no unit.

    ("throughput", 0.0123) ⇒ "12.3 ms"; ("memory", 4.03e6) ⇒ "4.03 MB"
    """
    formats = {"energy": format_joules, "memory": format_bytes, "communication": format_bytes}
    if objective not in OBJECTIVES:
        return format_number(value)
    return formats.get(objective, format_seconds)(value)


def describe_objective(objective: str) -> str:
    """Return the name of the quantity that an objective minimises, such as "sent bytes" for "communication"."""
    names = {"throughput": "time between frames", "memory": "memory of the fullest host", "communication": "sent bytes"}
    return names.get(objective, objective)


def _parse_weight(text: str, objective: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        fault = f"weight {text.strip()!r} is not a number above 0"
        raise UsageError(f"objective {objective!r}: {fault}: write it as in latency+0.5*energy")
    return weight
