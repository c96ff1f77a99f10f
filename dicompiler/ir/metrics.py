"""What a plan comes to, as numbers: those of each device and of all, and what a target measured of its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dicompiler.base.objectives import objective_terms, speed_metric

Method = Literal["estimate", "simulation"]
"""Where times come from."""
MAX_PLAUSIBLE_SPEEDUP_PER_DEVICE = 1.02
"""How many times the number of devices a gain may be before it is doubted."""


@dataclass(frozen=True)
class DeviceMetrics:
    """One device's share of one frame. flops: operations; compute_s: seconds in segments; runtime_s: seconds that its
    runtime takes for messages; all others in bytes.

    With replicas all but the memory are means over the roles (whole numbers rounded up); the memory is for all roles.
    weights: the constants that it holds; activations: the most that it holds at once of computed and received tensors;
    sent, received: what travels between it and other devices (of its own host as well). line_s: seconds in which its
    messages occupy a line; waits: seconds in which it had nothing that it could do, by the device whose message it
    waited for ("": for a frame). An estimate knows neither. added: what running it takes beside weights and
    activations: copies that joins make, and what the problem's target adds (of which an estimate knows the least that
    it can be); 0 where the problem names no target.
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
        """Seconds in which it computes or handles messages."""
        return self.compute_s + self.runtime_s

    @property
    def wait_s(self) -> float:
        """Seconds of all waits."""
        return sum(self.waits.values())

    @property
    def memory(self) -> int:
        """Bytes of weights and activations; what a target adds is not in it."""
        return self.weights + self.activations

    @property
    def total_memory(self) -> int:
        """Bytes that the device's host must have for it."""
        return self.memory + self.overhead_bytes


@dataclass(frozen=True)
class Metrics:
    """What a plan comes to for one frame, with replicas in the mean over the roles. `devices`: those that the plan
    names, in platform order.

    latency_s: seconds from the inputs on the sources to the outputs on the sinks; ends_s: seconds beside that until the
    inputs have come from whoever gives the frames, and the outputs have gone there (of an estimate 0); period_s:
    seconds between frames where many follow each other, set by the busiest device or line; energy_j: Joule of all
    devices over the latency; memory: bytes on the fullest host; total_bytes: what travels between devices. method:
    whether times come from the simulator or are an estimate that supposes barriers between layers.
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
        """What a device does, None where the plan does not name it."""
        return next((entry for entry in self.devices if entry.device == name), None)

    @property
    def busiest_device(self) -> DeviceMetrics:
        """The device that computes longest."""
        return max(self.devices, key=lambda entry: entry.compute_s)

    def with_overhead(self, added: Mapping[str, int]) -> Metrics:
        """The same with `added` by device."""
        return replace(
            self, devices=tuple(replace(entry, overhead_bytes=added[entry.device]) for entry in self.devices)
        )

    def speedup_over(self, other: Metrics, objective: str) -> float:
        """How many times faster it is than another plan: in frames a second where the objective is of throughput. 1
        where both take no time."""
        own, others = (getattr(one, speed_metric(objective)) for one in (self, other))
        return float(others / own) if own else math.inf if others else 1.0

    def describe_implausible_gain(self, alone: Metrics, objective: str) -> str:
        """What is odd in a gain over one device that is larger than the number of devices; '' where it is not."""
        gain, count = self.speedup_over(alone, objective), sum(entry.compute_s > 0 for entry in self.devices)
        if gain <= max(count, 1) * MAX_PLAUSIBLE_SPEEDUP_PER_DEVICE:
            return ""
        return (
            f"{gain:.2f} times as fast as one device, with {count}: only memory or caches too small for the whole "
            "network explain more than the number of devices; else measurements are wrong: repeat them on an idle host"
        )

    def objective_value(self, objective: str) -> float:
        """The number that `objective`, a text as `objectives.terms` takes it, wants small."""
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
    """What a frame comes to while devices are lost. lost: which (() for none); metrics: of the plan that is in force
    then, by itself. stored: bytes of weights that devices hold for it beside those of the plan without a loss."""

    failed: tuple[str, ...]
    metrics: Metrics
    extra_weight_bytes: int


@dataclass(frozen=True)
class DeviceFootprint:
    """What a program takes of a device's host, by the target's own measure, in bytes. ram, flash: in all; where: what
    takes most of the RAM, and of the flash, as an error names it. details: further figures by name, of what they are.
    """

    device: str
    ram: int
    flash: int
    largest_consumers: tuple[str, str]
    details: Mapping[str, int] = field(default_factory=dict)
