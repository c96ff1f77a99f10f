"""A strategy that gives whole layers to the devices in turn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import ClassVar, Literal

from dicompiler.plugin_api import Part, Plan, Problem, Strategy


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Whole layers, given to the computing devices in turn."""

    name: ClassVar[str] = "acme-round-robin"
    order: Literal["forward", "backward"] = "forward"

    def plan(self, problem: Problem) -> Plan:
        """Return a plan with layer i on device i mod n."""
        devices = (
            problem.platform.computing_devices if self.order == "forward" else problem.platform.computing_devices[::-1]
        )
        turns = cycle(devices)
        return problem.build_plan({layer.name: (Part(next(turns).name),) for layer in problem.layers.layers})
