"""RAM and flash of devices: what is needed, and what takes most of it.

Arena and buffers are measured on this host, where pointers take 8 bytes; beside them stands an estimate for boards,
where they take 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dicompiler.plugin_api import (
    DeviceProgram,
    Host,
    Occupied,
    Segment,
    constant_sizes,
    format_bytes,
    part_of,
    segment_values,
)
from dicompiler_targets.files import Json
from dicompiler_targets.tflm.measure import STEP
from dicompiler_targets.tflm.sources import DeviceModels

FORMAT = "dicompiler.tflm-memory/1"
POINTER_SHARE = 0.6
"""What is left of the arena's records (tensors, nodes, operators' data) where pointers take 4 bytes in place of 8: an
estimate from their fields; activations stay as they are."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a device. arena: the largest, with the margin; needed: the least that runs; activations: what of it
    tensors take at once, at least; ram: arenas and the tensors beside them, which take turns; models: in flash."""

    arena: int
    needed: int
    activations: int
    ram: int
    models: int

    @property
    def details(self) -> dict[str, int]:
        """The figures beside RAM and flash; stack and the program's own variables come on top of all. The estimate is
        of RAM where pointers take 4 bytes."""
        records = max(0, self.arena - self.activations)
        return {
            "ram_32_bit_estimate": self.ram - records + int(records * POINTER_SHARE),
            "arena": self.arena,
            "arena_needed": self.needed,
            "beside_arena": self.ram - self.arena,
        }


def with_margin(size: int, margin: float) -> int:
    """The arena that is written out: that share more, a multiple of 16."""
    return -(-int(size * (1 + margin)) // STEP) * STEP


def document(sizes: Mapping[str, Sizes], boards: Mapping[str, Host], margin: float) -> Json:
    """memory.json; boards: by device. Where one has no flash, its RAM is for the models too."""
    entries = []
    for device, one in sizes.items():
        entry: Json = {"device": device, "ram": one.ram, "flash": one.models, **one.details}
        if device in boards:
            entry |= {"ram_limit": boards[device].ram, "flash_limit": boards[device].flash}
        entries.append(entry)
    return {"format": FORMAT, "margin": margin, "devices": entries}


def occupied(device: DeviceProgram, sizes: Sizes, models: DeviceModels, data: Mapping[str, bytes]) -> Occupied:
    """What a device takes, and the layers that take most of it."""
    ram = flash = "its buffers"
    if models.arenas:
        largest = max(data, key=lambda name: len(data[name]))
        ram = _heaviest(device.segments[models.of.index(models.arenas.index(sizes.arena))], _activations)
        flash = _heaviest(device.segments[models.of.index(models.names.index(largest))], constant_sizes)
    return Occupied(device.device, sizes.ram, sizes.models, (ram, flash), sizes.details)


def _activations(segment: Segment) -> dict[str, int]:
    """Bytes of the segment's tensors; what is dequantised only there counts as what it is made of, or goes into."""
    sizes = segment_values(segment)
    for node in segment.model.graph.node:
        if node.op_type == "DequantizeLinear":
            sizes[node.output[0]] = sizes.get(node.input[0], 0)  # nothing of weights
        elif node.op_type == "QuantizeLinear":
            sizes[node.input[0]] = sizes.get(node.output[0], 0)
    return sizes


def _heaviest(segment: Segment, measure: Callable[[Segment], Mapping[str, int]]) -> str:
    """The layer of the segment whose nodes read and make most of what is measured, for errors."""
    bytes_of, totals = measure(segment), dict[str, int]()
    for node in segment.model.graph.node:
        part = part_of(node)
        layer = node.name if part is None else part[0]
        totals[layer] = max(totals.get(layer, 0), sum(bytes_of.get(name, 0) for name in {*node.input, *node.output}))
    layer = max(totals, key=lambda name: totals[name])
    return f"layer {layer!r} ({format_bytes(totals[layer])} in segment {segment.name!r})"
