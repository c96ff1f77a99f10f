"""Metrics of a plan: times, energy, memory and traffic of each device and of all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dicompiler.base.objectives import objective_terms, speed_metric
from dicompiler.ir.frame_prediction import FramePrediction

Method = Literal["estimate", "simulation"]
"""Method by which times were predicted.

`simulation` executes the steps of each device in a model of the cluster. `estimate` is faster: it assumes that all
devices wait for each other after each layer.
"""
MAX_PLAUSIBLE_SPEEDUP_PER_DEVICE = 1.02
"""A speed-up is reported as implausible if it exceeds the number of devices times this factor."""
MEMORY_LABEL = "weights and layer outputs, fullest host"
"""Name of `Metrics.memory` for users."""


@dataclass(frozen=True)
class DeviceMetrics:
    """Metrics of one device for one frame.

    If a plan has replicas (copies on other devices, which frames use in turn), times and counts are means over them.
    Sizes of memory are for all replicas together.

    Attributes:
        device: Name of the device.
        flops: Number of floating-point operations.
        compute_s: Seconds in which the device computes segments (ONNX submodels).
        weights: Bytes of weights and other constants that the device stores.
        activations: Peak bytes of computed and received tensors.
        sent: Bytes sent to other devices, including devices of the same host.
        received: Bytes received from other devices, including devices of the same host.
        send_link_s: Seconds for which messages from the device occupy links.
        receive_link_s: Seconds for which messages to the device occupy links.
        waits: Seconds of waiting, by the name of the device that sends the awaited message; "": waiting for the next
            frame. Empty in an estimate.
        overhead_bytes: Bytes needed in addition to weights and activations: copies for concatenations, and memory of
            the target's runtime. An estimate uses a lower bound. 0 if the target is unknown.
        runtime_s: Seconds that the target's runtime spends on messages.
        occupied_s: Seconds in which the device computes or handles messages. Time in which it does both is counted
            once. 0 in an estimate.
    """

    device: str
    flops: int
    compute_s: float
    weights: int
    activations: int
    sent: int
    received: int
    send_link_s: float = 0.0
    receive_link_s: float = 0.0
    waits: Mapping[str, float] = field(default_factory=dict)
    overhead_bytes: int = 0
    runtime_s: float = 0.0
    occupied_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of computing plus seconds of processing messages (`compute_s` + `runtime_s`)."""
        return self.compute_s + self.runtime_s

    @property
    def working_s(self) -> float:
        """Seconds in which the device computes or handles messages; in an estimate, seconds of computing."""
        return max(self.occupied_s, self.compute_s)

    @property
    def link_s(self) -> float:
        """Sum of `send_link_s` and `receive_link_s`, which can be longer than a frame: links are full-duplex."""
        return self.send_link_s + self.receive_link_s

    @property
    def wait_s(self) -> float:
        """Seconds in which the device waits for messages of other devices or for the next frame."""
        return sum(self.waits.values())

    @property
    def memory(self) -> int:
        """Bytes of weights and activations, without `overhead_bytes`."""
        return self.weights + self.activations

    @property
    def total_memory(self) -> int:
        """Bytes of weights, activations and overhead, which the device's host must provide."""
        return self.memory + self.overhead_bytes


@dataclass(frozen=True)
class Metrics:
    """Metrics of a plan for one frame.

    If the plan has replicas (copies on other devices, which frames use in turn), the metrics are means over them.

    Attributes:
        devices: Metrics of the devices that the plan names, in platform order.
        latency_s: Seconds from the inputs on the sources (devices that have the inputs) to the outputs on the sinks
            (devices that receive the outputs).
        period_s: Seconds from one frame to the next in a stream, determined by the busiest device or link.
        energy_j: Energy in joules that all devices use during the latency of one frame.
        memory: Bytes of weights and of inputs and outputs of layers, on the host with the most of them.
        total_bytes: Bytes that devices send to each other.
        method: `simulation`, or `estimate`, which assumes a barrier after each layer.
        input_output_s: Additional seconds to bring the inputs from the client to the sources and the outputs from the
            sinks to the client; 0 in an estimate.
        active_s: Seconds from the start of a frame until all devices and links have finished. It exceeds the latency if
            something is computed after the outputs, such as states for the next frame. 0 in an estimate.
        link_loads: Seconds per frame that each link needs at its full bandwidth, by its name for users ("the outgoing
            link of pi01"). The two directions of a full-duplex link are two links. Empty in an estimate.
    """

    devices: tuple[DeviceMetrics, ...]
    latency_s: float
    period_s: float
    energy_j: float
    memory: int
    total_bytes: int
    method: Method = "estimate"
    input_output_s: float = 0.0
    active_s: float = 0.0
    link_loads: Mapping[str, float] = field(default_factory=dict)

    def device(self, name: str) -> DeviceMetrics | None:
        """Return the metrics of a device.

        Args:
            name: Name of the device.

        Returns:
            Metrics of the device; None if the plan does not name it.
        """
        return next((entry for entry in self.devices if entry.device == name), None)

    @property
    def frame(self) -> FramePrediction:
        """The predicted time of a frame: the time in the cluster, and the time for inputs and outputs."""
        return FramePrediction(self.latency_s, self.input_output_s)

    @property
    def busiest_device(self) -> DeviceMetrics:
        """Metrics of the device that is busy with computing and messages for the longest time."""
        return max(self.devices, key=lambda entry: entry.working_s)

    def with_overhead(self, added: Mapping[str, int]) -> Metrics:
        """Return a copy of the metrics in which the `overhead_bytes` of each device are replaced.

        Args:
            added: New `overhead_bytes` of each device, by device name.

        Returns:
            The new metrics.
        """
        devices = tuple(replace(entry, overhead_bytes=added[entry.device]) for entry in self.devices)
        return replace(self, devices=devices)

    def speedup_over(self, other: Metrics, objective: str) -> float:
        """Return the time of another plan divided by the time of this plan.

        Args:
            other: Metrics of the other plan.
            objective: Objective that selects the compared time: the period for throughput, else the latency.

        Returns:
            The speed-up, which is above 1 if this plan is faster. Infinite if only its time is 0; 1 if both times are
            0.
        """
        own_s, other_s = (getattr(metrics, speed_metric(objective)) for metrics in (self, other))
        return float(other_s / own_s) if own_s else math.inf if other_s else 1.0

    def describe_implausible_gain(self, single_device: Metrics, objective: str) -> str:
        """Return a warning if the plan's speed-up over one device exceeds the number of computing devices.

        Args:
            single_device: Metrics of the plan that uses one device only.
            objective: Objective that selects the compared time: the period for throughput, else the latency.

        Returns:
            The warning; '' if the speed-up is plausible.
        """
        gain, count = self.speedup_over(single_device, objective), sum(entry.compute_s > 0 for entry in self.devices)
        if gain <= max(count, 1) * MAX_PLAUSIBLE_SPEEDUP_PER_DEVICE:
            return ""
        return (
            f"{gain:.2f} times as fast as one device with {count} devices: this is only plausible if the memory or the "
            "caches of one device are too small for the model: otherwise repeat the measurements on an idle host"
        )

    def objective_value(self, objective: str) -> float:
        """Return the value of an objective. Smaller values are better.

        Args:
            objective: Name of one objective, or a weighted sum such as "latency+0.5*energy".

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
    """Metrics of the plan that is used while certain devices are down.

    Attributes:
        failed: Names of the devices that are down; () for the main plan.
        metrics: Metrics of the plan.
        extra_weight_bytes: Bytes of weights that devices store for this plan in addition to those for the main plan.
    """

    failed: tuple[str, ...]
    metrics: Metrics
    extra_weight_bytes: int


@dataclass(frozen=True)
class DeviceFootprint:
    """RAM and flash that a program uses on the host of a device, as measured by the target.

    Attributes:
        device: Name of the device.
        ram: Bytes of RAM that the program uses.
        flash: Bytes of flash that the program uses.
        largest_consumers: Two descriptions for error messages, such as "layer 'conv1'": the largest consumer of RAM,
            and the largest consumer of flash.
        details: Further sizes in bytes, by name, such as the size of the target's working memory ("arena").
    """

    device: str
    ram: int
    flash: int
    largest_consumers: tuple[str, str]
    details: Mapping[str, int] = field(default_factory=dict)
