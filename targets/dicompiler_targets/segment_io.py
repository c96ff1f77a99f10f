"""Copies at the inputs and outputs of a device's segments, which the runtimes of targets make.

A device of a Program → its segments without the hoisted nodes, the files and manifest entries for them, and functions
that make the copies, to be timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from dicompiler.plugin_api import DeviceProgram, Program, Shape, TensorSpec
from dicompiler.plugin_api.artifacts import SENDABLE_TYPES, CopyFunction, Json, SegmentCall, describe_value
from dicompiler_targets.artifact_files import DeviceContents
from dicompiler_targets.copy_hoisting import Assembly, HoistedSegment, StridedCopy, hoist_copies, make_copies

HOISTABLE_TYPES = frozenset(TensorProto.DataType.Value(name) for name in SENDABLE_TYPES)
"""Element types whose size in memory the runtimes know."""

CopyViews = tuple[NDArray[Any], NDArray[Any]]
"""Views of (target, source) of a copy."""


def hoist_device_copies(device: DeviceProgram) -> tuple[HoistedSegment, ...]:
    """Hoist the copies of all segments of a device.

    Tensors that the device itself reads, delivers or stores as states are still computed by the models.
    """
    kept_outputs = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    kept_outputs |= {state.written_name for state in device.states}
    return tuple(hoist_copies(segment, HOISTABLE_TYPES, kept_outputs=kept_outputs) for segment in device.segments)


def make_device_contents(
    program: Program, index: int, hoisted: Sequence[Sequence[HoistedSegment]]
) -> tuple[DeviceContents, list[list[str]]]:
    """Return the files of a device, and the file of each segment, role by role.

    Args:
        program: The program.
        index: Index of the device.
        hoisted: The device's segments, role by role.

    Returns:
        The contents, and for each role the file of each segment; "" for a segment that only moves data.
    """
    roles = []
    for role, role_segments in zip(program.roles, hoisted, strict=True):
        segments = tuple(entry.segment for entry in role_segments if entry.segment is not None)
        devices = (replace(d, segments=segments) if i == index else d for i, d in enumerate(role.devices))
        roles.append(replace(role, devices=tuple(devices)))
    contents = DeviceContents(replace(roles[0], other_roles=tuple(roles[1:])), index)
    pairs = zip(hoisted, contents.segment_files, strict=True)
    return contents, [list(_list_segment_files(role_segments, iter(files))) for role_segments, files in pairs]


def _list_segment_files(hoisted: Sequence[HoistedSegment], files: Iterator[str]) -> Iterator[str]:
    for entry in hoisted:
        yield "" if entry.segment is None else next(files)


def describe_copies(hoisted: HoistedSegment) -> Json:
    """Describe the copies of a segment as manifests do; empty if there are none."""
    sides = {"assembled_inputs": hoisted.assembled_inputs, "assembled_outputs": hoisted.assembled_outputs}
    return {
        key: [_describe_assembly(name, assembly, hoisted.values) for name, assembly in assemblies.items()]
        for key, assemblies in sides.items()
        if assemblies
    }


def _describe_assembly(name: str, assembly: Assembly, values: Mapping[str, TensorSpec]) -> Json:
    pieces = [
        {
            "name": piece.source,
            "shape": list(values[piece.source].shape or ()),
            "source_region": _describe_region(piece.source_start, piece.extent),
            "target_region": _describe_region(piece.target_start, piece.extent),
        }
        for piece in assembly.pieces
    ]
    return describe_value(TensorSpec(name, assembly.dtype, assembly.shape)) | {"pieces": pieces}


def _describe_region(start: Shape, extent: Shape) -> list[list[int]]:
    return [[begin, begin + count] for begin, count in zip(start, extent, strict=True)]


def make_segment_calls(device: DeviceProgram) -> tuple[SegmentCall, ...]:
    """Return the work of a runtime for each segment of a device; see `Target.segment_calls`."""
    hoisted = hoist_device_copies(device)
    return tuple(SegmentCall(entry.segment, partial(_make_copy_functions, entry)) for entry in hoisted)


def _make_copy_functions(
    hoisted: HoistedSegment, memory: Mapping[str, NDArray[Any]]
) -> tuple[CopyFunction, CopyFunction]:
    """Return functions that make the copies before and after a segment with numpy.

    The C++ runtime's copies take the same time, except for about a microsecond each.
    """
    before, after = (
        [
            _make_copy_views(name, copy, memory)
            for name, assembly in assemblies.items()
            for copy in make_copies(name, assembly, hoisted.values)
        ]
        for assemblies in (hoisted.assembled_inputs, hoisted.assembled_outputs)
    )
    return partial(_copy_views, before), partial(_copy_views, after)


def _make_copy_views(target: str, copy: StridedCopy, memory: Mapping[str, NDArray[Any]]) -> CopyViews:
    """Return strided views of the copy's blocks; a block is one element of the view."""
    block = np.dtype(f"u{copy.run_bytes}" if copy.run_bytes in (1, 2, 4, 8) else f"V{copy.run_bytes}")
    counts, source_strides, target_strides = zip(*copy.loops, strict=True) if copy.loops else ((), (), ())
    source_bytes, target_bytes = (memory[name].reshape(-1).view(np.uint8) for name in (str(copy.source), target))
    return (
        np.ndarray(counts, block, target_bytes, copy.target_offset, target_strides),
        np.ndarray(counts, block, source_bytes, copy.source_offset, source_strides),
    )


def _copy_views(views: Sequence[CopyViews]) -> None:
    for target, source in views:
        np.copyto(target, source)
