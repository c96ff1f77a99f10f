"""Metrics of a plan: means over the roles by hand, and sums and peaks by the routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alone import alone, posed
from support.planning import make_cluster as rated
from support.random_problems import any_plan, random_problem

from dicompiler.driver.prepare import load_problem
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.plan import Part

IMAGE, CLASSES = 4 * 32 * 32, 4 * 10  # Bytes of the input and of the output of LeNet.
THREE: tuple[dict[str, str], ...] = ({}, {"d0": "d1"}, {"d0": "d2"})


@pytest.mark.parametrize("bandwidth", [1e9, 1e6])
@pytest.mark.parametrize("how", ["estimate", "evaluate"])
def test_metrics_of_replicas_by_hand(how: str, bandwidth: float) -> None:
    problem = posed(rated("switch", 1, 1, 1, bandwidth=bandwidth, power=(3, 1)))
    seconds = problem.estimate(alone(problem)).latency_s
    metrics: Metrics = getattr(problem, how)(alone(problem, THREE))
    # Two of three frames are sent from d0 to d1 or d2 and back, so d0's outgoing link is the busiest one.
    there, back = 8 * IMAGE / bandwidth, 8 * CLASSES / bandwidth
    assert metrics.latency_s == pytest.approx(seconds + 2 * (there + back) / 3)
    assert metrics.period_s == pytest.approx(max(seconds / 3, 2 * there / 3))
    assert [entry.compute_s for entry in metrics.devices] == pytest.approx([seconds / 3] * 3)
    assert [entry.sent for entry in metrics.devices] == [-(-2 * IMAGE // 3), -(-CLASSES // 3), -(-CLASSES // 3)]
    assert metrics.total_bytes == -(-2 * (IMAGE + CLASSES) // 3)
    assert sum(entry.link_s for entry in metrics.devices) == pytest.approx(2 * 2 * (there + back) / 3)
    assert metrics.energy_j == pytest.approx(3 * seconds + (3 * metrics.latency_s - seconds))


@pytest.mark.parametrize("replicas", [THREE, (*THREE, {}), ({"d0": "d1"}, {"d0": "d2"})])
@pytest.mark.parametrize("kind", ["switch", "shared"])
def test_stream_reaches_predicted_period(replicas: Any, kind: Any) -> None:
    problem = posed(rated(kind, 1, 1, 1, bandwidth=1e8))
    plan = alone(problem, replicas)
    stream = problem.simulate(plan, frames=120, in_flight=12)
    assert stream.period_s == pytest.approx(problem.evaluate(plan).period_s, rel=0.03)


def test_identity_replica_equals_no_replica() -> None:
    problem = posed(rated("switch", 1, 1))
    assert problem.evaluate(alone(problem, ({},))) == problem.evaluate(alone(problem))
    assert problem.estimate(alone(problem, ({},))) == problem.estimate(alone(problem))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_estimate_and_simulation_agree_on_all_but_times(network: int, seed: int) -> None:
    problem = random_problem(network)
    plan = any_plan(seed, problem)
    guess, played = problem.estimate(plan), problem.evaluate(plan)
    assert (guess.method, played.method) == ("estimate", "simulation")
    assert (guess.total_bytes, guess.memory) == (played.total_bytes, played.memory)
    for one, other in zip(guess.devices, played.devices, strict=True):
        assert one.send_link_s == pytest.approx(other.send_link_s)
        assert one.receive_link_s == pytest.approx(other.receive_link_s)
        times = {"send_link_s": 0.0, "receive_link_s": 0.0, "waits": {}, "occupied_s": 0.0}
        assert replace(other, **times) == replace(one, **times)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_sent_bytes_are_received_and_memory_is_of_fullest_host(network: int, seed: int) -> None:
    problem = random_problem(network)
    plan = any_plan(seed, problem)
    metrics = problem.estimate(plan)
    named = [device.name for device in problem.platform.devices if device.name in plan.devices]
    assert [entry.device for entry in metrics.devices] == named
    assert sum(entry.sent for entry in metrics.devices) == sum(entry.received for entry in metrics.devices)
    assert sum(entry.sent for entry in metrics.devices) == metrics.total_bytes
    # Each device has its own host, so a host needs the memory of one device.
    assert metrics.memory == max(entry.memory for entry in metrics.devices)
    busy = sum(5.0 * entry.compute_s for entry in metrics.devices)
    assert metrics.energy_j >= busy * (1 - 1e-9)
    assert metrics.period_s >= metrics.busiest_device.compute_s * (1 - 1e-9)


def test_period_is_at_least_time_to_renew_state() -> None:
    """Device d0 reads the state, d1 computes, and d0 makes the new state.

    The period is the time of this cycle, not the time of the busier device.
    """
    cell = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        cell (float[64, 64] x, float[64, 64] h) => (float[64, 64] y, float[64, 64] hn)
        {
            a = MatMul(x, h)
            b = MatMul(a, a)
            hn = MatMul(b, b)
            y = Relu(b)
        }""")
    problem = load_problem(cell, rated("switch", 1, 1), state=["h=hn"])
    names = [layer.name for layer in problem.layers.layers]
    plan = problem.build_plan(
        {name: (Part(f"d{int('b' in problem.layers.layer_by_name[name].outputs)}", None),) for name in names}
    )
    metrics = problem.evaluate(plan)
    one = metrics.devices[1].compute_s
    assert metrics.devices[0].compute_s > 2 * one
    assert 3 * one < metrics.period_s <= metrics.latency_s * 1.001
