"""RAM and flash of devices: what is needed, what there is, and a table of both.

Arena and buffers are measured on this host, where pointers take 8 bytes; beside them stands an estimate for boards,
where they take 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dicompiler.errors import DicompilerError
from dicompiler.program import DeviceProgram
from dicompiler.units import format_bytes
from dicompiler_targets.files import Json
from dicompiler_targets.tflm.measure import STEP
from dicompiler_targets.tflm.sources import DeviceModels

FORMAT = "dicompiler.tflm-memory/1"
POINTER_SHARE = 0.6
"""What is left of the arena's records (tensors, nodes, operators' data) where pointers take 4 bytes in place of 8: an
estimate from their fields; activations stay as they are."""


@dataclass(frozen=True)
class Limits:
    """Bytes of RAM and flash that a board has for the network."""

    ram: int
    flash: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of a device. arena: with the margin; needed: the least that runs; activations: what of it tensors take at
    once, at least; buffers: tensors outside the arena; models: in flash."""

    arena: int
    needed: int
    activations: int
    buffers: int
    models: int

    @property
    def ram(self) -> int:
        """Arena and buffers; stack and the program's own variables come on top."""
        return self.arena + self.buffers

    @property
    def ram_32(self) -> int:
        """An estimate of the same where pointers take 4 bytes."""
        records = max(0, self.arena - self.activations)
        return self.activations + int(records * POINTER_SHARE) + self.buffers


def with_margin(size: int, margin: float) -> int:
    """The arena that is written out: that share more, a multiple of 16."""
    return -(-int(size * (1 + margin)) // STEP) * STEP


def document(sizes: Mapping[str, Sizes], limits: Mapping[str, Limits], margin: float) -> Json:
    """memory.json."""
    entries = []
    for device, one in sizes.items():
        entry: Json = {"device": device, "ram": one.ram, "ram_32_bit_estimate": one.ram_32, "flash_models": one.models}
        entry |= {"arena": one.arena, "arena_needed": one.needed, "buffers": one.buffers}
        if device in limits:
            entry |= {"ram_limit": limits[device].ram, "flash_limit": limits[device].flash}
        entries.append(entry)
    return {"format": FORMAT, "margin": margin, "devices": entries}


def table(memory: Json) -> str:
    """The same as text, a line for each device. RAM is that of this host's 64 bits, beside it the estimate for 32."""
    head = ("device", "RAM", "(32 bit)", "of", "arena", "buffers", "models in flash", "of")
    rows = [head]
    for entry in memory["devices"]:
        numbers = [entry[key] for key in ("ram", "ram_32_bit_estimate")]
        numbers += [entry.get("ram_limit"), entry["arena"], entry["buffers"], entry["flash_models"]]
        numbers.append(entry.get("flash_limit"))
        rows.append((entry["device"], *("–" if n is None else format_bytes(n) for n in numbers)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return "\n".join(lines)


def check(
    device: DeviceProgram, sizes: Sizes, models: DeviceModels, data: Mapping[str, bytes], limits: Limits | None
) -> None:
    """DicompilerError where the board is too small: by how much, and the segment that takes most of it."""
    if limits is None:
        return
    if sizes.ram > limits.ram:
        worst = models.arenas.index(sizes.arena)
        name = device.segments[models.of.index(worst)].name
        raise DicompilerError(
            f"device {device.device!r} needs {format_bytes(sizes.ram)} of RAM, {format_bytes(sizes.ram - limits.ram)} "
            f"more than the {format_bytes(limits.ram)} of its board: cut the layers of segment {name!r} (arena "
            f"{format_bytes(sizes.arena)}) into smaller tiles"
        )
    if sizes.models > limits.flash:
        largest = max(data, key=lambda name: len(data[name]))
        name = device.segments[models.of.index(models.names.index(largest))].name
        raise DicompilerError(
            f"device {device.device!r} needs {format_bytes(sizes.models)} of flash for its models, "
            f"{format_bytes(sizes.models - limits.flash)} more than the {format_bytes(limits.flash)} of its board: "
            f"give part of segment {name!r} ({format_bytes(len(data[largest]))}) to another device"
        )
