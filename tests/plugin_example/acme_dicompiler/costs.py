"""A cost model: the analytic one, and a time for each call of onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import CostModel, Device, Layer, LayerGraph, LayerShare
from dicompiler.plugin_api.costs import AnalyticModel


@dataclass(frozen=True)
class PerCall(CostModel):
    """Operations / rate, and a fixed time for each part of a layer."""

    name: ClassVar[str] = "acme-per-call"
    microseconds: float = field(default=50.0, metadata={"help": "that a part takes beside its operations"})

    def __post_init__(self) -> None:
        if not self.microseconds >= 0:
            raise ValueError(f"microseconds must be 0 or more, not {self.microseconds:g}")

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Seconds of the part on the device."""
        return AnalyticModel().seconds(layers, layer, share, device) + 1e-6 * self.microseconds
