"""What a device keeps outside the arena: the tensors at the borders of its segments, each at a place in one buffer.

DeviceProgram + shapes → places. A tensor holds its place from when it is made, or from the start of the frame where it
is given or received, to its last reader; places are shared by tensors that are not there at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from dicompiler.program import DeviceProgram, Program, Value
from dicompiler_targets.tflm.lowering import Border, wire_shape
from dicompiler_targets.tflm.moves import Peeled

ALIGN = 16
"""Bytes; each tensor starts at a multiple of it."""


@dataclass(frozen=True)
class Held:
    """A tensor with its place: `offset` in bytes; there from step `first` to step `last`."""

    border: Border
    first: int
    last: int
    offset: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.border.nbytes


def border(value: Value) -> Border:
    """A tensor of the program as it lies on the wire; its shape is static."""
    assert value.shape is not None
    dtype = str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype)))
    return Border(value.name, dtype, wire_shape(value.shape))


def received(device: DeviceProgram) -> tuple[int, ...]:
    """The transfers that the device receives, by index."""
    return tuple(step.index for step in device.steps if step.kind == "receive")


def given(program: Program, device: DeviceProgram) -> tuple[str, ...]:
    """The network's inputs that the device must be given: those that it reads or sends."""
    used = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    used |= {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"}
    return tuple(value.name for value in program.inputs if value.name in device.sources and value.name in used)


def layout(program: Program, device: DeviceProgram, peeled: Sequence[Peeled]) -> dict[str, Held]:
    """Every tensor outside the arena by name. `peeled`: the device's segments, in order."""
    borders = {name: border(value) for one in peeled for name, value in one.values.items()}
    at_start = dict.fromkeys(given(program, device))
    at_start |= dict.fromkeys(program.transfers[i].value.name for i in received(device))
    known = (*program.inputs, *(transfer.value for transfer in program.transfers))
    borders |= {value.name: border(value) for value in known if value.name in at_start}
    first, last = dict.fromkeys(at_start, 0), dict.fromkeys(at_start, 0)
    steps = [step for step in device.steps if step.kind != "receive"]
    for time, step in enumerate(steps, 1):
        if step.kind == "run":
            segment = device.segments[step.index]
            first |= dict.fromkeys(segment.outputs, time)
            last |= dict.fromkeys((*segment.inputs, *segment.outputs), time)
        else:
            last[program.transfers[step.index].value.name] = time
    last |= dict.fromkeys(device.sinks, len(steps) + 1)
    spans = {name: (first[name], last[name]) for name in first}
    return _placed(borders, spans)


def _placed(borders: Mapping[str, Border], spans: Mapping[str, tuple[int, int]]) -> dict[str, Held]:
    """Large ones first, each at the lowest place that is free as long as it is there."""
    placed: dict[str, Held] = {}
    for name in sorted(spans, key=lambda n: (-borders[n].nbytes, spans[n])):
        start, stop = spans[name]
        others = sorted(
            (held for held in placed.values() if held.first <= stop and start <= held.last),
            key=lambda held: held.offset,
        )
        offset = 0
        for held in others:
            if offset + borders[name].nbytes <= held.offset:
                break
            offset = max(offset, -(-held.end // ALIGN) * ALIGN)
        placed[name] = Held(borders[name], start, stop, offset)
    return {name: placed[name] for name in spans}


def buffer_bytes(held: Mapping[str, Held]) -> int:
    """Bytes of the whole buffer."""
    return max((one.end for one in held.values()), default=0)
