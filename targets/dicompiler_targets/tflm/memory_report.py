"""RAM and flash of devices: what is needed, and what takes most of it.

Arena and buffers are measured on this host, where pointers take 8 bytes; beside them stands an estimate for boards,
where they take 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dicompiler.plugin_api import DeviceProgram, Host, Segment
from dicompiler.plugin_api.artifacts import Json
from dicompiler.plugin_api.costs import DeviceFootprint, constant_sizes, segment_value_sizes
from dicompiler.plugin_api.regions import read_part
from dicompiler.plugin_api.utilities import format_bytes
from dicompiler_targets.tflm.arena_size import ARENA_ALIGNMENT_BYTES
from dicompiler_targets.tflm.codegen import DeviceModels

MEMORY_FORMAT = "dicompiler.tflm-memory/1"
POINTER_SIZE_SHARE = 0.6
"""What is left of the arena's records (tensors, nodes, operators' data) where pointers take 4 bytes in place of 8: an
estimate from their fields; activations stay as they are."""


@dataclass(frozen=True)
class DeviceSizes:
    """Bytes of a device. arena: the largest, with the margin; needed: the least that runs; activations: what of it
    tensors take at once, at least; ram: arenas and the tensors beside them, which take turns; models: in flash."""

    arena_bytes: int
    needed_arena_bytes: int
    activation_bytes: int
    ram_bytes: int
    model_bytes: int

    @property
    def details(self) -> dict[str, int]:
        """The figures beside RAM and flash; stack and the program's own variables come on top of all. The estimate is
        of RAM where pointers take 4 bytes."""
        records = max(0, self.arena_bytes - self.activation_bytes)
        return {
            "ram_32_bit_estimate": self.ram_bytes - records + int(records * POINTER_SIZE_SHARE),
            "arena": self.arena_bytes,
            "arena_needed": self.needed_arena_bytes,
            "beside_arena": self.ram_bytes - self.arena_bytes,
        }


def add_margin(size: int, margin: float) -> int:
    """The arena that is written out: that share more, a multiple of 16."""
    return -(-int(size * (1 + margin)) // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


def make_memory_report(sizes: Mapping[str, DeviceSizes], boards: Mapping[str, Host], margin: float) -> Json:
    """memory.json; boards: by device. Where one has no flash, its RAM is for the models too."""
    entries = []
    for device, one in sizes.items():
        entry: Json = {"device": device, "ram": one.ram_bytes, "flash": one.model_bytes, **one.details}
        if device in boards:
            entry |= {"ram_limit": boards[device].ram, "flash_limit": boards[device].flash}
        entries.append(entry)
    return {"format": MEMORY_FORMAT, "margin": margin, "devices": entries}


def make_footprint(
    device: DeviceProgram, sizes: DeviceSizes, models: DeviceModels, data: Mapping[str, bytes]
) -> DeviceFootprint:
    """What a device takes, and the layers that take most of it."""
    ram = flash = "its buffers"
    if models.arena_bytes:
        largest = max(data, key=lambda name: len(data[name]))
        ram = _find_heaviest_layer(
            device.segments[models.model_of_segment.index(models.arena_bytes.index(sizes.arena_bytes))],
            _get_activation_sizes,
        )
        flash = _find_heaviest_layer(
            device.segments[models.model_of_segment.index(models.names.index(largest))], constant_sizes
        )
    return DeviceFootprint(device.device, sizes.ram_bytes, sizes.model_bytes, (ram, flash), sizes.details)


def _get_activation_sizes(segment: Segment) -> dict[str, int]:
    """Bytes of the segment's tensors; what is dequantised only there counts as what it is made of, or goes into."""
    sizes = segment_value_sizes(segment)
    for node in segment.model.graph.node:
        if node.op_type == "DequantizeLinear":
            sizes[node.output[0]] = sizes.get(node.input[0], 0)  # nothing of weights
        elif node.op_type == "QuantizeLinear":
            sizes[node.input[0]] = sizes.get(node.output[0], 0)
    return sizes


def _find_heaviest_layer(segment: Segment, measure: Callable[[Segment], Mapping[str, int]]) -> str:
    """The layer of the segment whose nodes read and make most of what is measured, for errors."""
    bytes_of, totals = measure(segment), dict[str, int]()
    for node in segment.model.graph.node:
        part = read_part(node)
        layer = node.name if part is None else part[0]
        totals[layer] = max(totals.get(layer, 0), sum(bytes_of.get(name, 0) for name in {*node.input, *node.output}))
    layer = max(totals, key=lambda name: totals[name])
    return f"layer {layer!r} ({format_bytes(totals[layer])} in segment {segment.name!r})"
