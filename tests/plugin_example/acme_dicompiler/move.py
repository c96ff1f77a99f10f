"""A pass that changes the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Part, Pass, PipelineState
from dicompiler.plugin_api.regions import single_device_plan


@dataclass(frozen=True)
class Move(Pass):
    """Compute whole layers on one device. The other layers keep their parts."""

    name: ClassVar[str] = "acme-move"
    requires: ClassVar[tuple[str, ...]] = ("layers", "platform")
    provides: ClassVar[tuple[str, ...]] = ("plan",)
    layers: tuple[str, ...] = ()
    device: str = ""

    def run(self, state: PipelineState) -> PipelineState:
        assert state.layers is not None and state.platform is not None  # because of `requires`
        devices = [device.name for device in state.platform.computing_devices]
        if self.device not in devices:
            raise DicompilerError(f"acme-move: device {self.device!r} cannot compute: use one of {devices}")
        plan = state.plan or single_device_plan(state.layers, devices[0])
        for layer in self.layers:
            if layer not in plan.layers:
                raise DicompilerError(f"acme-move: no layer {layer!r}: use one of {list(plan.layers)}")
        moved = {layer: (Part(self.device),) for layer in self.layers}
        return replace(state, plan=replace(plan, layers={**plan.layers, **moved}))
