"""Metrics: sums over a device, and values of objectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dicompiler.base.errors import UsageError
from dicompiler.base.objectives import OBJECTIVES
from dicompiler.ir.metrics import DeviceMetrics, Metrics

IDLE = DeviceMetrics("idle", 0, 0.0, 10, 5, 0, 8)
BUSY = DeviceMetrics("busy", 100, 0.5, 200, 30, 8, 0, 0.1, 0.2, {"idle": 0.25, "": 0.125}, 1000)
BOTH = Metrics((IDLE, BUSY), latency_s=2.0, period_s=0.5, energy_j=3.0, memory=1230, total_bytes=8)


def test_total_memory_adds_weights_activations_and_overhead() -> None:
    assert (BUSY.memory, BUSY.total_memory) == (230, 1230)
    assert (IDLE.memory, IDLE.total_memory) == (15, 15)
    assert (BUSY.wait_s, IDLE.wait_s) == (0.375, 0.0)


def test_busiest_device_is_busy_longest() -> None:
    assert BOTH.device("busy") is BUSY
    assert BOTH.device("none") is None
    assert BOTH.busiest_device is BUSY
    talking = replace(IDLE, compute_s=0.4, occupied_s=0.6)
    assert replace(BOTH, devices=(BUSY, talking)).busiest_device is talking


def test_with_overhead_replaces_only_the_overhead() -> None:
    changed = BOTH.with_overhead({"idle": 7, "busy": 0})
    assert [device.overhead_bytes for device in changed.devices] == [7, 0]
    assert [device.memory for device in changed.devices] == [15, 230]
    assert changed.latency_s == BOTH.latency_s
    assert BUSY.overhead_bytes == 1000


def test_objective_values_are_metrics_or_their_weighted_sum() -> None:
    assert [BOTH.objective_value(name) for name in OBJECTIVES] == [2.0, 0.5, 3.0, 1230, 8]
    assert BOTH.objective_value("latency+0.5*energy") == 3.5
    assert BOTH.objective_value("10*throughput+2*communication") == 21.0
    with pytest.raises(UsageError, match=r"^objective 'latency\+energy\*2': the weight comes first: write 2\*energy$"):
        BOTH.objective_value("latency+energy*2")
    with pytest.raises(UsageError, match="unknown objective 'speed'"):
        BOTH.objective_value("speed")
