"""What the loop of a program moves for a segment: see dicompiler_targets.copy_hoisting. On the wire, images lie channels last.

In: a segment. Out: what a model is left to compute, and the boxes to be copied at its ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from dicompiler.plugin_api import Segment, TensorSpec
from dicompiler_targets import copy_hoisting
from dicompiler_targets.boxes import StridedCopy
from dicompiler_targets.copy_hoisting import Assembly, HoistedSegment
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC

MAX_COPY_LOOPS = 3
"""Loops of a copy at most: those of four axes, of which one is in one piece."""
HOISTABLE_TYPES = (TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT32, TensorProto.BOOL)
"""TFLite-micro's."""


def hoist_segment_copies(segment: Segment) -> HoistedSegment:
    """The segment without the nodes that the loop does."""
    return copy_hoisting.hoist_copies(segment, HOISTABLE_TYPES, MAX_COPY_LOOPS + 1)


def make_wire_copies(
    target: str | int, assembly: Assembly, values: Mapping[str, TensorSpec]
) -> tuple[StridedCopy, ...]:
    """What is to be copied for an assembly, as tensors lie on the wire. values: its sources."""
    return copy_hoisting.make_copies(target, assembly, values, NCHW_TO_NHWC if len(assembly.shape) == 4 else None)
