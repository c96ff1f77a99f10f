"""What the segments of a program take on this host, as a target's runtime calls them.

Target + Program + inputs → seconds of each segment on one thread, beside a call that computes nothing.
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

CALLS_PER_TURN, MIN_TURNS, LONG_TIMING_S = 5, 3, 2.0
"""How often a segment is called in a turn, how many turns there are at least, and for how many seconds: of the turns'
medians the lower quartile counts, as a host that others share is slow for a while at a time."""


class CallTimer:
    """Calls something, and notes what that takes."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = steps
        self._taken: list[float] = []
        self._turns: list[float] = []

    def time_call(self) -> None:
        """Once more."""
        start = time.thread_time()
        for step in self._steps:
            step()
        self._taken.append(time.thread_time() - start)

    def end_turn(self) -> None:
        """Notes what its calls since the last turn took, but for the first, before which came another device's."""
        self._turns.append(statistics.median(self._taken[1:]))
        self._taken.clear()

    @property
    def quick_call_s(self) -> float:
        """Of a call in a quick turn."""
        return sorted(self._turns)[len(self._turns) // 4]


def measure_segments(target: Target, program: Program, inputs: Mapping[str, Any], long: bool) -> SegmentSeconds:
    """Device → what each segment takes, role by role: after the device's others, as in frames, so that weights come
    from where they come from then. long: for MEASURED_S."""
    empty = CallTimer(OrtSession(empty_model(), {}, "empty", "all").bind({"x": np.zeros(1, np.float32)}))
    frames = [
        (device.device, [make_timer(program, call, memory) for call in target.segment_calls(device)])
        for role in program.roles
        for held in (ProgramExecutor(role, is_single_use=True).run(inputs, True).values,)
        for device, memory in ((device, writable_copies(held[device.device])) for device in role.devices)
    ]
    turns, end = 0, time.monotonic() + LONG_TIMING_S * long
    while turns < MIN_TURNS or time.monotonic() < end:
        for _, own in frames:
            for one in CALLS_PER_TURN * (*own, empty):
                one.time_call()
            for one in (*own, empty):
                one.end_turn()
        turns += 1
    found: dict[str, list[float]] = {device.device: [] for device in program.devices}
    for name, own in frames:
        found[name] += [max(0.0, one.quick_call_s - empty.quick_call_s) for one in own]
    return {name: tuple(seconds) for name, seconds in found.items()}


def writable_copies(held: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of tensors, in C order."""
    return {n: np.array(v, order="C") if isinstance(v, np.ndarray) else v for n, v in held.items()}


def make_timer(program: Program, call: SegmentCall, memory: dict[str, Any]) -> CallTimer:
    """memory: what the device holds in a frame; what its runtime joins, or cuts, of that is added."""
    if call.segment is None:
        return CallTimer(*call.make_copies(memory))
    model = call.segment.model
    for value in (*model.graph.input, *model.graph.output):
        if value.name not in memory:
            kind = value.type.tensor_type
            shape = [dim.dim_value for dim in kind.shape.dim]
            memory[value.name] = np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type))
    session = OrtSession(model, program.weights, f"segment {call.segment.name!r}", "all")
    before, after = call.make_copies(memory)
    return CallTimer(before, session.bind(memory), after)
