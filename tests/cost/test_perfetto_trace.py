"""Traces: valid JSON with a track for each device and every span in its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_problems import any_plan, random_problem
from support.workloads import cluster, fan

from dicompiler.cli.simulate import format_trace
from dicompiler.cost.simulator import simulate


def test_trace_has_every_span_on_its_track() -> None:
    simulation = simulate(fan(), cluster(3))
    document = json.loads(format_trace(simulation, ["d0", "d1", "d2"]))
    drawn = [event for event in document["traceEvents"] if event["ph"] == "X"]
    messages = sum(span.kind == "message" for span in simulation.spans)
    # A trace shows each message twice: at its sender and at its receiver.
    assert len(drawn) == len(simulation.spans) + messages
    assert {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"} == {
        "d0",
        "d1",
        "d2",
    }
    assert max(event["ts"] + event["dur"] for event in drawn) == pytest.approx(1e6 * simulation.latency_s)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32), st.integers(1, 3))
def test_trace_of_random_plan_is_valid_json(network: int, seed: int, frames: int) -> None:
    problem = random_problem(network)
    simulation = problem.simulate(any_plan(seed, problem), frames, frames)
    names = [device.name for device in problem.platform.devices]
    events = json.loads(format_trace(simulation, names))["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    spans = [event for event in events if event["ph"] == "X"]
    last = 1e6 * max(end for _, end in simulation.frames)
    for event in spans:
        assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= last + 0.01
        assert 0 <= event["pid"] < len(names)
        assert 0 <= event["args"]["frame"] < frames
    sent = sum(event["dur"] for event in spans if event["tid"] == 1)
    received = sum(event["dur"] for event in spans if event["tid"] == 2)
    assert sent == pytest.approx(received)


def test_devices_have_three_tracks_in_order() -> None:
    events = json.loads(format_trace(simulate(fan(), cluster(3)), ["d2", "d0", "d1"]))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["d2", "d0", "d1"]
    for process in range(3):
        tracks = [
            event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == process
        ]
        assert tracks == ["computing", "sending", "receiving"]
