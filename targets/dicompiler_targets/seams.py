"""What segments only move where they meet is done by runtimes: what they join for them, what they cut for others.

In: a device of a Program. Out: its segments without those nodes, and beside each what is to be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onnx import TensorProto

from dicompiler.plugin_api import DeviceProgram, Program, Shape, Value
from dicompiler_targets.files import TYPES, Contents, Json, value_document
from dicompiler_targets.moves import Assembly, Peeled, peel

DTYPES = frozenset(TensorProto.DataType.Value(name) for name in TYPES)
"""Those of which a runtime knows every byte."""


def seams(device: DeviceProgram) -> tuple[Peeled, ...]:
    """Of all segments of a device, in order. What the device itself reads, delivers or keeps, the model makes."""
    stay = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    stay |= {state.made for state in device.states}
    return tuple(peel(segment, DTYPES, stay=stay) for segment in device.segments)


def bare(program: Program, index: int, ends: Sequence[Sequence[Peeled]]) -> tuple[Contents, list[list[str]]]:
    """What the files of the device at that place hold, and those of its segments, role by role: "" for one that only
    moves. ends: role by role."""
    roles = []
    for role, own in zip(program.roles, ends, strict=True):
        left = tuple(one.segment for one in own if one.segment is not None)
        devices = (replace(d, segments=left) if i == index else d for i, d in enumerate(role.devices))
        roles.append(replace(role, devices=tuple(devices)))
    contents = Contents(replace(roles[0], others=tuple(roles[1:])), index)
    return contents, [list(_files(own, iter(names))) for own, names in zip(ends, contents.names, strict=True)]


def copies_document(seam: Peeled) -> Json:
    """What is copied, as manifests have it; empty where nothing is."""
    ends = {"joins": seam.joins, "cuts": seam.cuts}
    return {key: [_assembly(n, a, seam.values) for n, a in own.items()] for key, own in ends.items() if own}


def _files(seams_: Sequence[Peeled], names: Iterator[str]) -> Iterator[str]:
    for seam in seams_:
        yield "" if seam.segment is None else next(names)


def _assembly(name: str, assembly: Assembly, values: Mapping[str, Value]) -> Json:
    pieces = [
        {
            "name": piece.source,
            "shape": list(values[piece.source].shape or ()),
            "cut": _region(piece.start, piece.extent),
            "region": _region(piece.to, piece.extent),
        }
        for piece in assembly.pieces
    ]
    return value_document(Value(name, assembly.dtype, assembly.shape)) | {"pieces": pieces}


def _region(start: Shape, extent: Shape) -> list[list[int]]:
    return [[begin, begin + count] for begin, count in zip(start, extent, strict=True)]
