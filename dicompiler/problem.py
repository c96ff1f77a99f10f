"""A Problem: what a strategy is given; and the base of all strategies.

LayerGraph + Platform + CostModel + objective → Problem;   Problem → Plan;   Problem + Plan → Metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.costs import Analytic, CostModel
from dicompiler.errors import UsageError, nearest
from dicompiler.layers import LayerGraph
from dicompiler.metrics import OBJECTIVES, Metrics, measure
from dicompiler.plan import Part, Plan
from dicompiler.platform import Platform

__all__ = ["OBJECTIVES", "Metrics", "Problem", "Strategy"]


@dataclass(frozen=True)
class Problem:
    """Layers to place, the platform to place them on, what a piece costs there, and what is to be made small.

    source, sink: the devices that hold the inputs and want the outputs; the platform's first device by default (it
    may be compute-less). Raises UsageError for an unknown objective, DicompilerError for an unknown device.
    """

    layers: LayerGraph = field(repr=False)
    platform: Platform
    cost: CostModel = field(default_factory=Analytic)
    objective: str = "latency"
    source: tuple[str, ...] = ()
    sink: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(f"unknown objective {self.objective!r}{nearest(self.objective, OBJECTIVES)}")
        for name in (*self.source, *self.sink):
            self.platform.device(name)

    def plan(self, parts: Mapping[str, Sequence[Part]]) -> Plan:
        """The plan with these parts by layer name, its layers in layer order, and this problem's source and sink."""
        first = (self.platform.devices[0].name,)
        ordered = {layer.name: tuple(parts[layer.name]) for layer in self.layers.layers}
        return Plan(ordered, self.source or first, self.sink or first)

    def evaluate(self, plan: Plan) -> Metrics:
        """What `plan` comes to on this platform, see `metrics.measure`. Raises DicompilerError where it does not fit
        the layers or names an unknown device."""
        return measure(self.layers, self.platform, self.cost, plan)


@dataclass(frozen=True)
class Strategy(ABC):
    """The base of all strategies. A subclass is a frozen dataclass too: its fields are its options.

    The first line of its docstring is its summary in `dicompiler list strategies`.
    """

    name: ClassVar[str]

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """A plan for every layer of the problem. DicompilerError where there is none."""

    def own_platform(self) -> Platform | None:
        """The platform that the strategy's own input describes, where it does; used if none is given."""
        return None
