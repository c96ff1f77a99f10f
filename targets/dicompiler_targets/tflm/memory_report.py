"""RAM and flash of devices, and the layers that need the most of them.

Arenas (working memory of TFLite-micro for a model) are measured on this host, which has pointers of 8 bytes. Their
sizes on boards with pointers of 4 bytes are estimated.
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
"""Size of an arena's records of tensors, nodes and operators with pointers of 4 bytes, divided by that with 8 bytes.

The value is estimated from the fields of the records.
"""


@dataclass(frozen=True)
class DeviceSizes:
    """Memory of a device in bytes.

    Attributes:
        arena_bytes: Size of the largest arena (working memory of one model), including a safety margin.
        needed_arena_bytes: Size of the largest arena without the margin.
        activation_bytes: Peak bytes of the tensors in an arena; the maximum over all models.
        ram_bytes: Size of the one block of memory that contains both the arenas and the tensors outside of them.
        model_bytes: Bytes of the models in flash.
    """

    arena_bytes: int
    needed_arena_bytes: int
    activation_bytes: int
    ram_bytes: int
    model_bytes: int

    @property
    def details(self) -> dict[str, int]:
        """Further sizes in bytes for reports, by name.

        `ram_32_bit_estimate` is the RAM on a board with pointers of 4 bytes, without the stack. `beside_arena` is the
        RAM for tensors outside of the largest arena.
        """
        records = max(0, self.arena_bytes - self.activation_bytes)
        return {
            "ram_32_bit_estimate": self.ram_bytes - records + int(records * POINTER_SIZE_SHARE),
            "arena": self.arena_bytes,
            "arena_needed": self.needed_arena_bytes,
            "beside_arena": self.ram_bytes - self.arena_bytes,
        }


def add_margin(size: int, margin: float) -> int:
    """Return the bytes of an arena with a margin (a fraction of `size`), rounded up to a multiple of 16."""
    return -(-int(size * (1 + margin)) // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


def make_memory_report(sizes: Mapping[str, DeviceSizes], boards: Mapping[str, Host], margin: float) -> Json:
    """Return the content of memory.json: the needed RAM and flash of each device, and the limits of its board.

    Args:
        sizes: The measured sizes, by device name.
        boards: The host of each device, by device name.
        margin: The fraction by which the arenas in `sizes` are larger than necessary.
    """
    entries = []
    for device, device_sizes in sizes.items():
        entry: Json = {
            "device": device,
            "ram": device_sizes.ram_bytes,
            "flash": device_sizes.model_bytes,
            **device_sizes.details,
        }
        if device in boards:
            entry |= {"ram_limit": boards[device].ram, "flash_limit": boards[device].flash}
        entries.append(entry)
    return {"format": MEMORY_FORMAT, "margin": margin, "devices": entries}


def make_footprint(
    device: DeviceProgram, sizes: DeviceSizes, models: DeviceModels, data: Mapping[str, bytes]
) -> DeviceFootprint:
    """Return the RAM and flash of a device, and the layers that need the most of them."""
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
    """Return the bytes of a segment's tensors, by name.

    A float tensor that is dequantized or will be quantized counts as the quantized tensor, the only one that is stored.
    """
    sizes = segment_value_sizes(segment)
    for node in segment.model.graph.node:
        if node.op_type == "DequantizeLinear":
            sizes[node.output[0]] = sizes.get(node.input[0], 0)  # Weights have no size here, because they are in flash.
        elif node.op_type == "QuantizeLinear":
            sizes[node.input[0]] = sizes.get(node.output[0], 0)
    return sizes


def _find_heaviest_layer(segment: Segment, measure: Callable[[Segment], Mapping[str, int]]) -> str:
    """Return a text with the layer of a segment's largest node, by the bytes of its inputs and outputs.

    `measure` returns the bytes of a segment's tensors by name.
    """
    bytes_of, totals = measure(segment), dict[str, int]()
    for node in segment.model.graph.node:
        part = read_part(node)
        layer = node.name if part is None else part[0]
        totals[layer] = max(totals.get(layer, 0), sum(bytes_of.get(name, 0) for name in {*node.input, *node.output}))
    layer = max(totals, key=lambda name: totals[name])
    return f"layer {layer!r} ({format_bytes(totals[layer])} in segment {segment.name!r})"
