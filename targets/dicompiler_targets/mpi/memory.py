"""What a rank's process holds beyond weights, activations and buffers.

Program → bytes by device. BASE was measured on x86-64 Linux with glibc, Open MPI 5.0 and onnxruntime 1.31.
"""

from __future__ import annotations

from dicompiler.plugin_api import DeviceProgram, Program
from dicompiler.plugin_api.costs import peak_nbytes, segment_value_sizes
from dicompiler.plugin_api.onnx import Optimization
from dicompiler_targets import ort_memory
from dicompiler_targets.ort_memory import MIB_BYTES

RANK_BASE_BYTES = 40 * MIB_BYTES
"""MPI, onnxruntime and two threads."""


def predict_rank_memory(program: Program, optimization: Optimization) -> dict[str, int]:
    """Device → bytes beyond what `program_memory` counts: at the worst moment of making the sessions or of a frame."""
    held = ort_memory.predict_memory_overhead(program, RANK_BASE_BYTES, optimization)
    return {d.device: held[d.device] + _count_retained_bytes(program, d) for d in program.devices}


def _count_retained_bytes(program: Program, device: DeviceProgram) -> int:
    """What a frame's buffers take more because all that is sent or delivered stays in them to its end, and what is kept
    for the next frame."""
    end = len(device.segments)
    sizes = {name: size for segment in device.segments for name, size in segment_value_sizes(segment).items()}
    first = {name: index for index, segment in enumerate(device.segments) for name in segment.outputs}
    last = {name: index for index, segment in enumerate(device.segments) for name in segment.inputs}
    kept = {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"} | set(
        device.sinks
    )
    spans = [(first[name], max(first[name], last.get(name, 0)), sizes.get(name, 0)) for name in first]
    longer = [
        (first[name], end if name in kept else stop, size) for name, (_, stop, size) in zip(first, spans, strict=True)
    ]
    between_frames = sum(state.value.nbytes for state in device.states)
    return peak_nbytes(longer) - peak_nbytes(spans) + between_frames
