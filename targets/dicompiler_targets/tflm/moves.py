"""What the loop of a program moves for a segment: see dicompiler_targets.moves. On the wire, images lie channels last.

In: a segment. Out: what a model is left to compute, and the boxes to be copied at its ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from dicompiler.plugin_api import Segment, Value
from dicompiler_targets import moves
from dicompiler_targets.boxes import Copy
from dicompiler_targets.moves import Assembly, Peeled
from dicompiler_targets.tflm.writer import IMAGE

LOOPS = 3
"""Loops of a copy at most: those of four axes, of which one is in one piece."""
DTYPES = (TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT32, TensorProto.BOOL)
"""TFLite-micro's."""


def peel(segment: Segment) -> Peeled:
    """The segment without the nodes that the loop does."""
    return moves.peel(segment, DTYPES, LOOPS + 1)


def copies(target: str | int, assembly: Assembly, values: Mapping[str, Value]) -> tuple[Copy, ...]:
    """What is to be copied for an assembly, as tensors lie on the wire. values: its sources."""
    return moves.copies(target, assembly, values, IMAGE if len(assembly.shape) == 4 else None)
