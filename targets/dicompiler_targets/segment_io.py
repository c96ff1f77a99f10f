"""Copies at the inputs and outputs of segments, which a target's runtime makes instead of the engine.

A segment is the ONNX sub-model that a device runs in one call of its engine. This module hoists the copies out of the
segments of a device, and describes them in manifests. It also makes the copies with numpy, so that they can be timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from dicompiler.plugin_api import DeviceProgram, Program, Shape, TensorSpec
from dicompiler.plugin_api.artifacts import (
    SENDABLE_TYPES,
    CopyFunction,
    EngineFiles,
    Json,
    SegmentCall,
    describe_value,
)
from dicompiler_targets.artifact_files import DeviceContents
from dicompiler_targets.copy_hoisting import CopiedTensor, HoistedSegment, StridedCopy, hoist_copies, make_copies

HOISTABLE_TYPES = frozenset(TensorProto.DataType.Value(name) for name in SENDABLE_TYPES)
"""Element types whose size in memory the runtimes know."""
CopyViews = tuple[NDArray[Any], NDArray[Any]]
"""Two views for a copy: of the target tensor that is written, and of the source tensor that is read."""


def hoist_device_copies(device: DeviceProgram) -> tuple[HoistedSegment, ...]:
    """Move the operators that only copy data, such as Slice and Concat, out of the models of a device's segments.

    The runtime makes these copies instead. An operator stays in its model in three cases: another segment of the device
    reads its output, the output is one of the network, or the device keeps the output as a state for the next frame.
    """
    kept_outputs = {name for segment in device.segments for name in segment.inputs} | set(device.model_outputs)
    kept_outputs |= {state.written_name for state in device.states}
    return tuple(hoist_copies(segment, HOISTABLE_TYPES, kept_outputs=kept_outputs) for segment in device.segments)


def make_device_contents(
    program: Program,
    index: int,
    hoisted: Sequence[Sequence[HoistedSegment]],
    networks: Mapping[bytes, EngineFiles] = MappingProxyType({}),
) -> tuple[DeviceContents, list[list[str]]]:
    """Return the segment and weight files of a device, and for each role the file name of each segment.

    A role is the normal plan, a replica or a failure plan. `hoisted` has, for each role, the device's segments without
    the copies at their inputs and outputs. A segment that only moves data has no file; its file name is "". `networks`
    has the segments that are converted for another engine than onnxruntime, by their serialized models.
    """
    roles = []
    for role, role_segments in zip(program.roles, hoisted, strict=True):
        segments = tuple(entry.segment for entry in role_segments if entry.segment is not None)
        devices = (replace(d, segments=segments) if i == index else d for i, d in enumerate(role.devices))
        roles.append(replace(role, devices=tuple(devices)))
    contents = DeviceContents(replace(roles[0], other_roles=tuple(roles[1:])), index, networks)
    names = []
    for role_segments, segment_files in zip(hoisted, contents.segment_files, strict=True):
        files = iter(segment_files)
        names.append(["" if entry.segment is None else next(files) for entry in role_segments])
    return contents, names


def describe_copies(hoisted: HoistedSegment) -> Json:
    """Return the entries of a manifest for the copies before and after a segment; {} if there are none."""
    sides = {"assembled_inputs": hoisted.copied_inputs, "assembled_outputs": hoisted.copied_outputs}
    return {
        key: [_describe_copied_tensor(name, copied, hoisted.values) for name, copied in tensors.items()]
        for key, tensors in sides.items()
        if tensors
    }


def _describe_copied_tensor(name: str, copied: CopiedTensor, values: Mapping[str, TensorSpec]) -> Json:
    pieces = [
        {
            "name": piece.source,
            "shape": list(values[piece.source].shape or ()),
            "source_region": _describe_region(piece.source_start, piece.extent),
            "target_region": _describe_region(piece.target_start, piece.extent),
        }
        for piece in copied.pieces
    ]
    return describe_value(TensorSpec(name, copied.dtype, copied.shape)) | {"pieces": pieces}


def _describe_region(start: Shape, extent: Shape) -> list[list[int]]:
    return [[begin, begin + count] for begin, count in zip(start, extent, strict=True)]


def make_input_arrays(hoisted: HoistedSegment, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the inputs of a segment's model by name, after the copies that the runtime makes before the model.

    The copies are made from `values`, the tensors that the device stores.
    """
    memory = {name: np.ascontiguousarray(values[name]) for name in values}
    for name, copied in hoisted.copied_inputs.items():
        memory[name] = np.zeros(copied.shape, tensor_dtype_to_np_dtype(copied.dtype))
    _copy_views(_make_views(hoisted, hoisted.copied_inputs, memory))
    return {name: memory[name] for name in hoisted.inputs}


def make_segment_calls(device: DeviceProgram) -> tuple[SegmentCall, ...]:
    """Return the model and the copy functions of each segment of a device, so that they can be timed."""
    hoisted = hoist_device_copies(device)
    return tuple(SegmentCall(entry.segment, partial(_make_copy_functions, entry)) for entry in hoisted)


def _make_copy_functions(
    hoisted: HoistedSegment, memory: Mapping[str, NDArray[Any]]
) -> tuple[CopyFunction, CopyFunction]:
    """Return two functions that make the copies before and after a segment between the arrays in `memory`.

    They use numpy. The C++ runtime takes the same time for these copies, within a microsecond for each.
    """
    before, after = (
        _make_views(hoisted, tensors, memory) for tensors in (hoisted.copied_inputs, hoisted.copied_outputs)
    )
    return partial(_copy_views, before), partial(_copy_views, after)


def _make_views(
    hoisted: HoistedSegment, tensors: Mapping[str, CopiedTensor], memory: Mapping[str, NDArray[Any]]
) -> list[CopyViews]:
    """Return the pairs of views (target, source) of all copies that fill these tensors of a segment."""
    return [
        _make_copy_views(name, copy, memory)
        for name, copied in tensors.items()
        for copy in make_copies(name, copied, hoisted.values)
    ]


def _make_copy_views(target: str, copy: StridedCopy, memory: Mapping[str, NDArray[Any]]) -> CopyViews:
    """Return strided views of the target and source arrays, in which each element is a block of contiguous bytes."""
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
