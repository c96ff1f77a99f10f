"""Metrics of a plan: times, energy, memory and traffic of each device and of all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dicompiler.base.objectives import objective_terms, speed_metric

Method = Literal["estimate", "simulation"]
"""How times were predicted."""
MAX_PLAUSIBLE_SPEEDUP_PER_DEVICE = 1.02
"""Speed-ups above this factor times the number of devices are reported as implausible."""


@dataclass(frozen=True)
class DeviceMetrics:
    """Metrics of one device for one frame.

    With replicas, all but the memory are means over the roles (integers are rounded up); memory is for all roles
    together.

    Attributes:
        device: Name of the device.
        flops: Floating-point operations.
        compute_s: Seconds in segments.
        weights: Bytes of constants.
        activations: Peak bytes of computed and received tensors.
        sent: Bytes sent to other devices, including those of the same host.
        received: Bytes received from other devices.
        link_s: Seconds for which its messages occupy a link; unknown (0) in an estimate.
        waits: Seconds of waiting, by the sender of the awaited message ("": for the next frame); unknown in an
            estimate.
        overhead_bytes: Bytes needed in addition to weights and activations: copies for concatenations, and the target's
            overhead (an estimate uses its lower bound). 0 if the target is unknown.
        runtime_s: Seconds that the target's runtime spends on messages.
    """

    device: str
    flops: int
    compute_s: float
    weights: int
    activations: int
    sent: int
    received: int
    link_s: float = 0.0
    waits: Mapping[str, float] = field(default_factory=dict)
    overhead_bytes: int = 0
    runtime_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of computing and of handling messages."""
        return self.compute_s + self.runtime_s

    @property
    def wait_s(self) -> float:
        """Seconds of waiting."""
        return sum(self.waits.values())

    @property
    def memory(self) -> int:
        """Bytes of weights and activations, without the target's overhead."""
        return self.weights + self.activations

    @property
    def total_memory(self) -> int:
        """Bytes that the device's host must provide for it."""
        return self.memory + self.overhead_bytes


@dataclass(frozen=True)
class Metrics:
    """Metrics of a plan for one frame; with replicas, means over the roles.

    Attributes:
        devices: Metrics of the devices that the plan names, in platform order.
        latency_s: Seconds from the inputs on the sources to the outputs on the sinks.
        period_s: Seconds between two frames of a stream, determined by the busiest device or link.
        energy_j: Energy of all devices during the latency, in joules.
        memory: Bytes on the host with the highest use.
        total_bytes: Bytes that devices send to each other.
        method: `simulation`, or `estimate`, which assumes a barrier after each layer.
        input_output_s: Additional seconds to bring the inputs from the client to the sources and the outputs from the
            sinks to the client; 0 in an estimate.
    """

    devices: tuple[DeviceMetrics, ...]
    latency_s: float
    period_s: float
    energy_j: float
    memory: int
    total_bytes: int
    method: Method = "estimate"
    input_output_s: float = 0.0

    def device(self, name: str) -> DeviceMetrics | None:
        """Return the metrics of a device.

        Args:
            name: Name of the device.

        Returns:
            Its metrics; None if the plan does not name it.
        """
        return next((entry for entry in self.devices if entry.device == name), None)

    @property
    def busiest_device(self) -> DeviceMetrics:
        """The device that computes longest."""
        return max(self.devices, key=lambda entry: entry.compute_s)

    def with_overhead(self, added: Mapping[str, int]) -> Metrics:
        """Return the metrics with other memory overheads.

        Args:
            added: `overhead_bytes` by device.

        Returns:
            The new metrics.
        """
        return replace(
            self, devices=tuple(replace(entry, overhead_bytes=added[entry.device]) for entry in self.devices)
        )

    def speedup_over(self, other: Metrics, objective: str) -> float:
        """Return the ratio of another plan's time to this plan's time.

        Args:
            other: Metrics of the other plan.
            objective: The time is the period for a throughput objective, else the latency.

        Returns:
            The ratio; 1 if both take no time.
        """
        own_s, other_s = (getattr(metrics, speed_metric(objective)) for metrics in (self, other))
        return float(other_s / own_s) if own_s else math.inf if other_s else 1.0

    def describe_implausible_gain(self, alone: Metrics, objective: str) -> str:
        """Describe a speed-up over one device that exceeds the number of devices.

        Args:
            alone: Metrics of one device.
            objective: The objective, as for `speedup_over`.

        Returns:
            A warning; '' if the speed-up is plausible.
        """
        gain, count = self.speedup_over(alone, objective), sum(entry.compute_s > 0 for entry in self.devices)
        if gain <= max(count, 1) * MAX_PLAUSIBLE_SPEEDUP_PER_DEVICE:
            return ""
        return (
            f"{gain:.2f} times as fast as one device with {count} devices: this is only plausible if the memory or the "
            "caches of one device are too small for the model: otherwise repeat the measurements on an idle host"
        )

    def objective_value(self, objective: str) -> float:
        """Return the value of an objective, which should be small.

        Args:
            objective: One objective or a weighted sum (see `objective_terms`).

        Returns:
            Seconds, joules or bytes, or their weighted sum.
        """
        numbers = {
            "latency": self.latency_s,
            "throughput": self.period_s,
            "energy": self.energy_j,
            "memory": self.memory,
            "communication": self.total_bytes,
        }
        return sum(weight * numbers[name] for name, weight in objective_terms(objective).items())


@dataclass(frozen=True)
class FailureMetrics:
    """Metrics of the plan that is used while devices are down.

    Attributes:
        failed: The failed devices; () for the plan itself.
        metrics: Metrics of the plan.
        extra_weight_bytes: Bytes of weights that devices store for this plan in addition to those of the plan itself.
    """

    failed: tuple[str, ...]
    metrics: Metrics
    extra_weight_bytes: int


@dataclass(frozen=True)
class DeviceFootprint:
    """Memory of a device's host that a program uses, as measured by the target.

    Attributes:
        device: Name of the device.
        ram: Bytes of RAM.
        flash: Bytes of flash.
        largest_consumers: What uses most of the RAM, and of the flash, in words for error messages.
        details: Further numbers in bytes, by name.
    """

    device: str
    ram: int
    flash: int
    largest_consumers: tuple[str, str]
    details: Mapping[str, int] = field(default_factory=dict)
