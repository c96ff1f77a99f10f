"""The single-device plan: the baseline that every other plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy


@dataclass(frozen=True)
class Single(Strategy):
    """The whole network on one device: the best by the objective, or the one that is named.

    The inputs travel to it from the source and the outputs to the sink where these are other devices.
    """

    name: ClassVar[str] = "single"
    device: str = field(default="", metadata={"help": "the device's name; the best one by default"})

    def plan(self, problem: Problem) -> Plan:
        """Every layer whole on the device. Raises where it is unknown or compute-less."""
        if not self.device:
            return problem.best_single_device[0]
        device = problem.platform.device(self.device)
        if not device.can_compute:
            raise DicompilerError(f"single: device {device.name!r} has no compute: choose another")
        return problem.single_device_plan(device.name)
