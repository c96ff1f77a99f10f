"""The strategy `single`: the whole network on one device, the baseline for every other plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, UsageError


@dataclass(frozen=True)
class Single(Strategy):
    """The whole network on one device: the device that you name, or the best one for the objective."""

    name: ClassVar[str] = "single"
    device: str = field(default="", metadata={"help": "name of the device; the best one by default"})

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with every layer on one device.

        Raises:
            UsageError: The device is unknown or cannot compute.
        """
        if not self.device:
            return problem.best_single_device[0]
        try:
            device = problem.platform.device(self.device)
        except DicompilerError as error:
            raise UsageError(str(error)) from error
        if not device.can_compute:
            raise UsageError(f"single: device {device.name!r} has no compute: use another device")
        return problem.single_device_plan(device.name)
