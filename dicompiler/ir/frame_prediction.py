"""Predicted time of a frame (one inference request): time in the cluster, and time for inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from dicompiler.base.units import format_seconds

HOST_COSTS_NOTE = "with the message costs of the emulating host"
"""Text after a predicted time of emulated boards, whose messages cost the time of this host and not of real boards."""


@dataclass(frozen=True)
class FramePrediction:
    """The predicted time of a frame (one inference request) if the cluster computes no other frame at the same time.

    Attributes:
        cluster_s: Seconds from the inputs on the sources (devices that have the inputs) to the outputs on the sinks
            (devices that receive the outputs). This is the latency that strategies minimize.
        input_output_s: Additional seconds to bring the inputs from the caller to the sources, and the outputs from the
            sinks to the caller.
    """

    cluster_s: float
    input_output_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the caller's inputs to the caller's outputs, which a run measures."""
        return self.cluster_s + self.input_output_s

    def __str__(self) -> str:
        cluster = f"{format_seconds(self.cluster_s)} in the cluster"
        if not self.input_output_s:
            return cluster
        return (
            f"{format_seconds(self.total_s)} = {cluster} + {format_seconds(self.input_output_s)} for input and result"
        )
