"""What segments only move where they meet is done by runtimes: what they join for them, what they cut for others.

In: a device of a Program. Out: its segments without those nodes, and beside each what is to be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onnx import TensorProto

from dicompiler.plugin_api import DeviceProgram, Program, Shape, TensorSpec
from dicompiler_targets.artifact_files import SENDABLE_TYPES, DeviceContents, Json, describe_value
from dicompiler_targets.copy_hoisting import Assembly, HoistedSegment, hoist_copies

HOISTABLE_TYPES = frozenset(TensorProto.DataType.Value(name) for name in SENDABLE_TYPES)
"""Those of which a runtime knows every byte."""


def hoist_device_copies(device: DeviceProgram) -> tuple[HoistedSegment, ...]:
    """Of all segments of a device, in order. What the device itself reads, delivers or keeps, the model makes."""
    stay = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    stay |= {state.written_name for state in device.states}
    return tuple(hoist_copies(segment, HOISTABLE_TYPES, kept_outputs=stay) for segment in device.segments)


def make_device_contents(
    program: Program, index: int, ends: Sequence[Sequence[HoistedSegment]]
) -> tuple[DeviceContents, list[list[str]]]:
    """What the files of the device at that place hold, and those of its segments, role by role: "" for one that only
    moves. ends: role by role."""
    roles = []
    for role, own in zip(program.roles, ends, strict=True):
        left = tuple(one.segment for one in own if one.segment is not None)
        devices = (replace(d, segments=left) if i == index else d for i, d in enumerate(role.devices))
        roles.append(replace(role, devices=tuple(devices)))
    contents = DeviceContents(replace(roles[0], other_roles=tuple(roles[1:])), index)
    return contents, [
        list(_list_segment_files(own, iter(names))) for own, names in zip(ends, contents.segment_files, strict=True)
    ]


def describe_copies(seam: HoistedSegment) -> Json:
    """What is copied, as manifests have it; empty where nothing is."""
    ends = {"joins": seam.assembled_inputs, "cuts": seam.assembled_outputs}
    return {key: [_describe_assembly(n, a, seam.values) for n, a in own.items()] for key, own in ends.items() if own}


def _list_segment_files(seams_: Sequence[HoistedSegment], names: Iterator[str]) -> Iterator[str]:
    for seam in seams_:
        yield "" if seam.segment is None else next(names)


def _describe_assembly(name: str, assembly: Assembly, values: Mapping[str, TensorSpec]) -> Json:
    pieces = [
        {
            "name": piece.source,
            "shape": list(values[piece.source].shape or ()),
            "cut": _describe_region(piece.source_start, piece.extent),
            "region": _describe_region(piece.target_start, piece.extent),
        }
        for piece in assembly.pieces
    ]
    return describe_value(TensorSpec(name, assembly.dtype, assembly.shape)) | {"pieces": pieces}


def _describe_region(start: Shape, extent: Shape) -> list[list[int]]:
    return [[begin, begin + count] for begin, count in zip(start, extent, strict=True)]
