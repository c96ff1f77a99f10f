"""What a device's process holds beyond weights, activations and buffers.

Program → bytes by device. BASE was measured on x86-64 Linux with glibc, Python 3.11, numpy 2.4 and onnxruntime 1.31;
other versions differ most in it.
"""

from __future__ import annotations

from dicompiler.plugin_api import Program
from dicompiler.plugin_api.onnx import Optimization
from dicompiler_targets import ort_memory
from dicompiler_targets.ort_memory import MIB_BYTES

PROCESS_BYTES = 63 * MIB_BYTES
"""Python, numpy, onnxruntime and the runtime's threads."""


def added_memory(program: Program, optimization: Optimization) -> dict[str, int]:
    """Device → bytes beyond what `program_memory` counts: at the worst moment of making the sessions or of a frame."""
    return ort_memory.predict_memory_overhead(program, PROCESS_BYTES, optimization)
