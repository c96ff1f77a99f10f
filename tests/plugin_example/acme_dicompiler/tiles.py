"""A strategy that cuts layers into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dicompiler.plugin_api import Layer, Part, Plan, Problem, Strategy
from dicompiler.plugin_api.regions import AxisLabel, cuttable_axes, named_axes, tile_layer

LABELS: tuple[AxisLabel, ...] = ("height", "width", "channel")


@dataclass(frozen=True)
class Tiles(Strategy):
    """One tile of each layer per device; the size of a tile is proportional to the device's rate."""

    name: ClassVar[str] = "acme-tiles"

    def plan(self, problem: Problem) -> Plan:
        return problem.build_plan({layer.name: make_tiles(problem, layer) for layer in problem.layers.layers})


def make_tiles(problem: Problem, layer: Layer) -> tuple[Part, ...]:
    """Cut a layer by rows, otherwise by columns, otherwise by channels; or leave it whole on the first device."""
    layers, devices = problem.layers, problem.platform.computing_devices
    axes, cuttable = named_axes(layers).get(layer.output, {}), cuttable_axes(layers, layer)
    for label in LABELS:
        if axes.get(label) in cuttable:
            rates = [device.rate for device in devices]
            return tile_layer(layers, layer, label, rates, [device.name for device in devices])
    return (Part(devices[0].name),)
