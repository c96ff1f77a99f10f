"""Costs of runtimes: scaled to each device, overridden by the option, and decisive for plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.commands import failed

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import UsageError
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.cost.runtime_overhead import (
    FREE_RUNTIME,
    REFERENCE_FLOPS_PER_S,
    RuntimeCosts,
    runtime_slowdown,
    scale_to_device,
)
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Network
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry

COSTS = RuntimeCosts(
    latency=1e-3, send=2e-3, receive=3e-3, per_byte=1e-9, gap=4e-3, call=5e-3, per_copy=6e-3, per_copied_byte=2e-9,
    per_io_byte=3e-9, per_tls_byte=5e-9, header_share=0.05,
)  # fmt: skip


def test_slower_device_takes_longer_but_sends_no_more() -> None:
    pi = Platform.load("rpi4x1").devices[0]
    # Published slowdowns of a Pi 4 are smaller for C++ programs and larger for plain code.
    assert 2 < runtime_slowdown(pi) < 3
    assert (
        runtime_slowdown(Device("d", "d", 4 * REFERENCE_FLOPS_PER_S, 4))
        == 1.0
        == runtime_slowdown(Device("camera", "d", 0.0))
    )
    # Runtimes of faster devices are not faster than on the reference host.
    assert runtime_slowdown(Device("d", "d", 8 * REFERENCE_FLOPS_PER_S, 4)) == 1.0
    twice = COSTS.scaled_by(2.0)
    assert (twice.latency, twice.per_byte, twice.header_share) == (2e-3, 2e-9, 0.05)
    assert COSTS.scaled_by(0.0) == FREE_RUNTIME
    assert all(replace(COSTS, in_order=True).scaled_by(factor).in_order for factor in (0.0, 2.0))
    assert (COSTS.with_tls.per_byte, COSTS.with_tls.per_io_byte, COSTS.with_tls.per_tls_byte) == (6e-9, 13e-9, 0.0)
    assert COSTS.send_seconds(10**6) == pytest.approx(3e-3) and COSTS.receive_seconds(10**6) == pytest.approx(4e-3)
    assert COSTS.copy_seconds(3, 10**6) == pytest.approx(20e-3)
    assert COSTS.link_seconds(Network("switch", 8e6), 10**6, 0.5) == pytest.approx(1.05 + 0.5 + 4e-3)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_rejects_negative_and_infinite_costs(value: float) -> None:
    with pytest.raises(ValueError, match=r"^gap must be at least 0"):
        RuntimeCosts(gap=value)
    with pytest.raises(UsageError, match=r"^analytic: runtime must be at least 0"):
        load_problem(networks.build("tiny"), "rpi4x2", cost=AnalyticModel(runtime=value), target="sockets")


def test_option_runtime_scales_every_runtime(tmp_path: Path) -> None:
    stated = registry().make("targets", "mpi").runtime_costs
    for given, expected in ((0.0, replace(FREE_RUNTIME, in_order=True)), (1.0, stated), (3.0, stated.scaled_by(3.0))):
        problem = load_problem(networks.build("tiny"), "rpi4x2", cost=AnalyticModel(runtime=given), target="mpi")
        assert dict(problem.runtime_costs) == {"pi01": expected, "pi02": expected}
    # Only a target states runtime costs, and no target was given here.
    assert not load_problem(networks.build("tiny"), "rpi4x2").runtime_costs
    assert registry().make("targets", "tflm").runtime_costs == FREE_RUNTIME
    onnx.save(networks.build("tiny"), tmp_path / "m.onnx")
    for value in ("slow", "-1"):
        said = failed(
            2, "compare", tmp_path / "m.onnx", "--platform", "rpi4x2", "--cost", f"analytic{{runtime={value}}}"
        )
        assert "runtime" in said


@pytest.mark.parametrize("strategy", ["dp", "cpsat", "gradient{restarts=4 iterations=50}", "auto{tries=8}"])
def test_strategies_do_not_split_if_messages_are_too_slow(strategy: str) -> None:
    """LeNet takes 4 ms on a board. Two boards share it if messages are free, but not at 5 ms per message."""
    boards = Platform.load("rpi4x2")
    boards = replace(
        boards, devices=tuple(replace(one, rate=2e8) for one in boards.devices), network=Network("switch", 1e9)
    )
    free = dicompiler.compile(networks.build("lenet"), boards, strategy, cost=AnalyticModel(runtime=0.0))
    slow = dicompiler.compile(networks.build("lenet"), boards, strategy, cost=AnalyticModel(runtime=20.0))
    used = [
        {part.device for parts in made.plan.layers.values() for part in parts}
        for made in (free, slow)
        if made.plan is not None
    ]
    assert [len(one) for one in used] == [2, 1]
    assert free.metrics is not None and slow.metrics is not None and slow.single_device_metrics is not None
    assert slow.metrics.latency_s <= slow.single_device_metrics.latency_s * (1 + 1e-9)
    assert free.metrics.devices[0].runtime_s == 0.0


def test_copies_scale_like_plain_code() -> None:
    """Copies take six times as long on a Pi 4 as on the reference host, like Geekbench on one core."""
    pi = Platform.load("rpi4x1").devices[0]
    assert 5.5 < scale_to_device(COSTS, pi).per_copy / COSTS.per_copy < 6.5


def test_copied_byte_is_read_and_written() -> None:
    slow, fast = (
        Device("d", "d", 4 * REFERENCE_FLOPS_PER_S, 4, memory_bandwidth=bandwidth) for bandwidth in (1e9, 1e12)
    )
    stated = RuntimeCosts(per_copied_byte=1e-10)
    assert scale_to_device(stated, slow).per_copied_byte == pytest.approx(2e-9)
    assert scale_to_device(stated, fast).per_copied_byte == pytest.approx(1e-10)
    assert scale_to_device(FREE_RUNTIME, slow) == FREE_RUNTIME
