"""Measurement of a program's segments (submodels) on this host, called as a target's runtime calls them.

Target + Program + inputs ──measure_segments──► seconds of each segment on one thread, without those of an empty call
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import helper

from dicompiler.analysis.prediction_error import SegmentSeconds
from dicompiler.ir.program import Program
from dicompiler.measure.profile_package import empty_model
from dicompiler.target.run_records import SegmentCall
from dicompiler.target.target_base import Target
from dicompiler.verify.executor import OrtSession, ProgramExecutor

CALLS_PER_TURN = 5
MIN_TURNS = 3
LONG_TIMING_S = 2.0
"""Seconds of a long measurement.

The lower quartile of its values is used, because a host that other programs use too is slow at times.
"""


class CallTimer:
    """Measures the processor time of a call, which executes several functions in order.

    Calls are grouped into turns. In one turn, all segments of one device are called several times; in the next turn,
    those of another device. The value of a turn is the median time of this call in the turn. The first call is
    excluded, because the caches still contain data of the other device.
    """

    def __init__(self, *functions: Callable[[], object]) -> None:
        self._functions = functions
        self._calls_s: list[float] = []
        self._turns_s: list[float] = []

    def time_call(self) -> None:
        """Execute and time one call."""
        start = time.thread_time()
        for function in self._functions:
            function()
        self._calls_s.append(time.thread_time() - start)

    def end_turn(self) -> None:
        """Store the value of the turn, and begin a new one."""
        self._turns_s.append(statistics.median(self._calls_s[1:]))
        self._calls_s.clear()

    @property
    def quick_call_s(self) -> float:
        """Lower quartile in seconds of the values of all turns (groups of calls)."""
        return sorted(self._turns_s)[len(self._turns_s) // 4]


def measure_segments(target: Target, program: Program, inputs: Mapping[str, Any], long: bool) -> SegmentSeconds:
    """Return the seconds of each segment (submodel) on this host, by device name.

    The segments of the main plan come first, then those of replicas and failure plans. All segments of a device are
    called in turn, so that the caches contain the same weights as in a frame.

    Args:
        target: The target; its way of calling segments is timed.
        program: Program with the segments.
        inputs: Arrays by name of the graph input.
        long: Whether to measure for LONG_TIMING_S seconds instead of a short time.
    """
    empty = CallTimer(OrtSession(empty_model(), {}, "empty", "all").bind({"x": np.zeros((1, 1), np.float32)}))
    timers: list[tuple[str, list[CallTimer]]] = []
    for role in program.roles:
        values = ProgramExecutor(role, is_single_use=True).run(inputs, True).values
        for device in role.devices:
            memory = writable_copies(values[device.device])
            calls = target.segment_calls(device)
            timers.append((device.device, [make_timer(program, call, memory) for call in calls]))
    turns, end = 0, time.monotonic() + LONG_TIMING_S * long
    while turns < MIN_TURNS or time.monotonic() < end:
        for _, device_timers in timers:
            for timer in CALLS_PER_TURN * (*device_timers, empty):
                timer.time_call()
            for timer in (*device_timers, empty):
                timer.end_turn()
        turns += 1
    seconds: dict[str, list[float]] = {device.device: [] for device in program.devices}
    for name, device_timers in timers:
        seconds[name] += [max(0.0, timer.quick_call_s - empty.quick_call_s) for timer in device_timers]
    return {name: tuple(values) for name, values in seconds.items()}


def writable_copies(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.array(value, order="C") if isinstance(value, np.ndarray) else value for name, value in tensors.items()
    }


def make_timer(program: Program, call: SegmentCall, memory: dict[str, Any]) -> CallTimer:
    """Return a timer for a call of a segment (submodel), with the runtime's copies before and after the call.

    Args:
        program: Program to which the segment belongs.
        call: Call of the segment, with its copies.
        memory: Tensors of the device in a frame, by name. Tensors that the copies create are added.
    """
    if call.segment is None:
        return CallTimer(*call.make_copies(memory))
    model = call.segment.model
    for value in (*model.graph.input, *model.graph.output):
        if value.name not in memory:
            tensor_type = value.type.tensor_type
            shape = [dim.dim_value for dim in tensor_type.shape.dim]
            memory[value.name] = np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    session = OrtSession(model, program.weights, f"segment {call.segment.name!r}", "all")
    copy_before, copy_after = call.make_copies(memory)
    return CallTimer(copy_before, session.bind(memory), copy_after)
