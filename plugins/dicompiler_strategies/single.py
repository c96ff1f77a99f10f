"""The single-device plan: the baseline that every other plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import Device, DicompilerError, Part, Plan, Problem, Strategy
from dicompiler_strategies.pipeline import whole_layer_seconds


@dataclass(frozen=True)
class Single(Strategy):
    """The whole network on one device: the fastest, or the one that is named.

    The inputs travel to it from the source and the outputs to the sink where these are other devices.
    """

    name: ClassVar[str] = "single"
    device: str = field(default="", metadata={"help": "the device's name; the fastest one by default"})

    def plan(self, problem: Problem) -> Plan:
        """Every layer whole on the device. Raises where it is unknown or compute-less."""
        device = problem.platform.device(self.device) if self.device else fastest(problem)
        if not device.computes:
            raise DicompilerError(f"single: device {device.name!r} has no compute: choose another")
        return problem.plan({layer.name: (Part(device.name),) for layer in problem.layers.layers})


def fastest(problem: Problem) -> Device:
    """The device that computes the whole network in the least time by the problem's cost model; of equals the first."""
    return min(problem.platform.computing, key=lambda device: sum(whole_layer_seconds(problem, device)))
