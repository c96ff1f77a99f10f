"""A cost model: the analytic one, plus a fixed time for each part of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import CostModel, Device, Layer, LayerGraph, LayerShare
from dicompiler.plugin_api.costs import AnalyticModel


@dataclass(frozen=True)
class PerCall(CostModel):
    """Seconds as the number of operations divided by the rate, plus a fixed time for each part of a layer."""

    name: ClassVar[str] = "acme-per-call"
    microseconds: float = field(default=50.0, metadata={"help": "fixed time that is added for each part"})

    def __post_init__(self) -> None:
        if not self.microseconds >= 0:
            raise ValueError(f"microseconds must be 0 or more, not {self.microseconds:g}")

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds of the part on the device."""
        return AnalyticModel().seconds(layers, layer, share, device) + 1e-6 * self.microseconds
