"""Measurement of the seconds that segments (ONNX submodels of devices) take on this host, without a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from onnx import helper

from dicompiler.analysis.prediction_error import SegmentSeconds
from dicompiler.driver.engines import make_engine
from dicompiler.ir.cluster import DEFAULT_ENGINE
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import Program
from dicompiler.measure.profile_package import relu_model
from dicompiler.measure.profile_script import warm_up
from dicompiler.target.engine import UnsupportedByEngine
from dicompiler.target.engine_check import convert_checked, load_files, output_shapes
from dicompiler.target.run_records import SegmentCall
from dicompiler.target.target_base import Target
from dicompiler.verify.executor import OrtSession, ProgramExecutor

CALLS_PER_TURN = 5
MIN_TURNS = 3
LONG_TIMING_S = 2.0
"""Seconds of a long measurement."""


class CallTimer:
    """A timer of a call that executes several functions in order.

    Calls are timed in turns, i.e. groups of calls. Between two turns, other devices' calls are timed.
    """

    def __init__(self, *functions: Callable[[], object]) -> None:
        self._functions = functions
        self._calls_s: list[float] = []
        self._turns_s: list[float] = []

    def call(self) -> None:
        for function in self._functions:
            function()

    def time_call(self) -> None:
        """Execute the call once, and store its seconds of processor time."""
        start = time.thread_time()
        self.call()
        self._calls_s.append(time.thread_time() - start)

    def end_turn(self) -> None:
        """Store the median of the calls since the last turn (group of calls)."""
        self._turns_s.append(statistics.median(self._calls_s))
        self._calls_s.clear()

    @property
    def quick_call_s(self) -> float:
        """Lower quartile in seconds over all turns (groups of calls), because a busy host is slow at times."""
        return sorted(self._turns_s)[len(self._turns_s) // 4]


def measure_segments(target: Target, program: Program, inputs: Mapping[str, Any], is_long: bool) -> SegmentSeconds:
    """Return the seconds of each segment (submodel) on one thread of this host, by device name.

    The segments of the main plan come first, then those of its replicas (copies on other devices) and failure plans.

    Args:
        target: The target; its way of calling segments is timed.
        program: Program with the segments.
        inputs: Arrays by the names of the graph inputs.
        is_long: True to measure exactly: for LONG_TIMING_S seconds, and with warm caches.
    """
    timers: list[tuple[str, list[CallTimer], CallTimer]] = []
    empty_timer = cache(make_empty_timer)
    for role in program.roles:
        values = ProgramExecutor(role, is_single_use=True).run(inputs, True).values
        for device in role.devices:
            memory = writable_copies(values[device.device])
            calls = target.segment_calls(device)
            device_timers = [make_timer(program, device.engine, call, memory) for call in calls]
            timers.append((device.device, device_timers, empty_timer(device.engine)))
    turns, end = 0, time.monotonic() + LONG_TIMING_S * is_long
    # All segments of a device are called in turn, so that the caches contain the same weights as in a frame.
    while turns < MIN_TURNS or time.monotonic() < end:
        for _, device_timers, empty in timers:
            time_turn((*device_timers, empty), warms_up=is_long)
        turns += 1
    seconds: dict[str, list[float]] = {device.device: [] for device in program.devices}
    for name, device_timers, empty in timers:
        seconds[name] += [max(0.0, timer.quick_call_s - empty.quick_call_s) for timer in device_timers]
    return {name: tuple(values) for name, values in seconds.items()}


def time_turn(timers: tuple[CallTimer, ...], warms_up: bool) -> None:
    """Time each call of a device, all in turn; with `warms_up`, first call them until their data is in the caches."""

    def call_all() -> None:
        for timer in timers:
            timer.call()

    if warms_up:
        warm_up(call_all)
    for timer in CALLS_PER_TURN * timers:
        timer.time_call()
    for timer in timers:
        timer.end_turn()


def writable_copies(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.array(value, order="C") if isinstance(value, np.ndarray) else value for name, value in tensors.items()
    }


def make_empty_timer(engine: str) -> CallTimer:
    """Return a timer for a call of an engine that computes almost nothing. `engine` is its name, with its options."""
    model, memory = Model(relu_model()), {name: np.zeros((1, 1), np.float32) for name in "xy"}
    compute = None if engine == DEFAULT_ENGINE else bind_network(engine, model, memory)
    return CallTimer(compute or OrtSession(model.proto, {}, "empty", "all").bind(memory))


def make_timer(program: Program, engine: str, call: SegmentCall, memory: dict[str, Any]) -> CallTimer:
    """Return a timer for a call of a segment (submodel), with the runtime's copies before and after the call.

    Args:
        program: Program to which the segment belongs.
        engine: Name of the engine of the segment's device, with its options.
        call: Call of the segment, with its copies.
        memory: Tensors of the device in a frame, by name. Tensors that the copies create are added.
    """
    if call.segment is None:
        return CallTimer(*call.make_copies(memory))
    model = Model(call.segment.model, program.weights)
    for value in (*model.proto.graph.input, *model.proto.graph.output):
        if value.name not in memory:
            tensor_type = value.type.tensor_type
            shape = [dim.dim_value for dim in tensor_type.shape.dim]
            memory[value.name] = np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    copy_before, copy_after = call.make_copies(memory)
    compute = None
    if engine != DEFAULT_ENGINE:
        copy_before()  # The engine's results are checked with the inputs of a frame.
        compute = bind_network(engine, model, memory)
    if compute is None:
        compute = OrtSession(model.proto, model.weights, f"segment {call.segment.name!r}", "all").bind(memory)
    return CallTimer(copy_before, compute, copy_after)


def bind_network(engine_name: str, model: Model, memory: Mapping[str, Any]) -> Callable[[], object] | None:
    """Return a function that computes a segment (submodel) with an engine, from and to the arrays in `memory`.

    The result is None if the engine leaves the segment to onnxruntime.

    Args:
        engine_name: Name of the engine, with its options.
        model: The segment.
        memory: The inputs and outputs of the segment, by name.
    """
    engine, graph = make_engine(engine_name), model.proto.graph
    inputs = {value.name: memory[value.name] for value in graph.input}
    try:
        files = convert_checked(engine, model, inputs)
    except UnsupportedByEngine:
        return None
    if files is None:
        return None
    network, shapes = load_files(engine, files), output_shapes(graph)
    outputs = [memory[value.name] for value in graph.output]

    def compute() -> None:
        for target, array in zip(outputs, network.run(list(inputs.values()), shapes), strict=True):
            np.copyto(target, array)

    return compute
