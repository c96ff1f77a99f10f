"""Tests of segment timing: timed calls compute what the segments compute."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import pytest

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import Program
from dicompiler.measure import profile_script
from dicompiler.measure.emulation.segment_timing import (
    CALLS_PER_TURN,
    CallTimer,
    bind_network,
    make_timer,
    measure_segments,
    time_turn,
    writable_copies,
)
from dicompiler.plugin.registry import registry
from dicompiler.verify.comparison import random_inputs
from dicompiler.verify.executor import OrtSession, ProgramExecutor
from dicompiler.verify.run_inputs import prepare_inputs


@pytest.mark.parametrize("target", ["sockets", "mpi", "tflm"])
@pytest.mark.parametrize("strategy", ["single", "modnn", "stahl"])
def test_calls_and_copies_compute_outputs_of_segments(target: str, strategy: str) -> None:
    program = dicompiler.compile(networks.build("ds_cnn", 0), "rpi4x3", strategy).program
    assert program is not None
    left = check_timed_calls(program, target)
    assert (left > 0) == (target != "tflm" and strategy != "single")


def check_timed_calls(program: Program, target: str, tolerance: float = 1e-5) -> int:
    """Check that timed calls compute the outputs of segments; return the number of segments without some operators."""
    found = ProgramExecutor(program, "all").run(random_inputs(program.inputs), True).values
    left = 0
    for device in program.devices:
        made = {name for segment in device.segments for name in segment.outputs}
        memory = writable_copies(found[device.device])
        for name in made:
            memory[name][...] = 0
        for call, segment in zip(
            registry().make("targets", target).segment_calls(device), device.segments, strict=True
        ):
            left += call.segment is not segment
            make_timer(program, device.engine, call, memory).time_call()
        for name in made:
            np.testing.assert_allclose(memory[name], found[device.device][name], atol=tolerance)
    return left


@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_segments_are_timed_in_the_engine_of_their_device(target: str) -> None:
    program = dicompiler.compile(networks.build("ds_cnn", 0), "rpi4x3", "modnn", target=target, engine="ncnn").program
    assert program is not None
    check_timed_calls(program, target, 1e-4)
    device = program.devices[0]
    segment = max(device.segments, key=lambda segment: len(segment.model.graph.node))
    memory = writable_copies(ProgramExecutor(program).run(random_inputs(program.inputs), True).values[device.device])
    by_onnxruntime = memory[segment.outputs[0]].copy()
    memory[segment.outputs[0]][...] = 0
    compute = bind_network(device.engine, Model(segment.model, program.weights), memory)
    assert compute is not None
    compute()
    difference = np.abs(memory[segment.outputs[0]] - by_onnxruntime).max() / np.abs(by_onnxruntime).max()
    assert 0 < difference < 1e-4, "ncnn rounds in another order than onnxruntime"


def test_segment_that_the_engine_does_not_support_is_timed_in_onnxruntime() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> it (float[1,4] x) => (float[1,4] y) { y = Asinh (x) }'
    )
    assert bind_network("ncnn", Model(model), {"x": np.ones((1, 4), np.float32)}) is None


def test_each_segment_has_seconds_in_order_of_roles() -> None:
    model = networks.build("lenet", 0)
    for strategy, objective in (("modnn", "latency"), ("replicate", "throughput")):
        program = dicompiler.compile(model, "rpi4x2", strategy, objective=objective).program
        assert program is not None
        target = registry().make("targets", "sockets")
        seconds = measure_segments(target, program, prepare_inputs(Model.load(model), None), is_long=False)
        for one in program.devices:
            count = sum(len(d.segments) for role in program.roles for d in role.devices if d.device == one.device)
            assert len(seconds[one.device]) == count
        assert 0 < sum(map(sum, seconds.values())) < 10


@pytest.mark.parametrize(("max_s", "warm_up_calls"), [(60.0, profile_script.MAX_WARM_UP_CALLS), (0.0, 1)])
def test_segments_are_called_in_turn_before_they_are_timed(
    max_s: float, warm_up_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_script, "MAX_WARM_UP_S", max_s)
    order: list[str] = []
    timers = tuple(CallTimer(partial(order.append, name)) for name in ("first", "second"))
    time_turn(timers, warms_up=True)
    assert order == ["first", "second"] * (warm_up_calls + CALLS_PER_TURN)
    assert all(timer.quick_call_s >= 0 for timer in timers)


TEXT = """words (string[2] x) => (float[2] y) {
    y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_floats = [1.0, 2.0]> (x) }"""
SEQUENCE = "several (seq(float[2]) x, int64 at) => (float[2] y) { z = SequenceAt (x, at) y = Relu (z) }"


@pytest.mark.parametrize(
    ("text", "x", "y"),
    [(TEXT, np.array(["a", "b"], object), [1, 2]), (SEQUENCE, [np.ones(2, np.float32)], [1, 1])],
)
def test_times_segments_with_strings_or_sequences(text: str, x: object, y: list[int]) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17, "ai.onnx.ml": 3]> {text}')
    session = OrtSession(model, {}, "it", "all")
    found = session.bind({"x": x, "at": np.array(0), "y": np.zeros(2, np.float32)})()
    assert isinstance(found, dict) and found["y"].tolist() == y


def test_output_size_may_depend_on_values() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> it (float[4] x) => (int64[1,m] y) { y = NonZero (x) }'
    )
    memory = {"x": np.ones(4, np.float32), "y": np.zeros((1, 4), np.int64)}
    run = OrtSession(model, {}, "it", "all").bind(memory)
    run()
    memory["x"][:2] = 0
    run()
    assert not memory["y"].any()  # Outputs with a size that depends on values are not written to the given memory.


def test_reports_segment_that_cannot_run_in_one_line() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> it (float[2] x, int64[1] at) => (float[1] y) { y = Gather (x, at) }'
    )
    run = OrtSession(model, {}, "it", "all").bind({"x": np.ones(2, np.float32), "at": np.array([7])})
    with pytest.raises(DicompilerError, match=r"^it: onnxruntime cannot run it: "):
        run()
