"""The strategy `modnn`: MoDNN (Mao et al., DATE 2017), height slices in proportion to the devices' rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dicompiler.plugin_api import Layer, Part, Plan, Problem, Strategy
from dicompiler.plugin_api.regions import tile_layer
from dicompiler_strategies.tables.choices import find_cuttable_axis


@dataclass(frozen=True)
class Modnn(Strategy):
    """Method of the MoDNN paper (BODP): each layer in height slices in proportion to the devices' compute rates.

        conv1 (112 rows), rates 2 : 1 : 1     ⇒  rows 0..56 on the first, 56..84 on the second, 84..112 on the third

    A layer with fewer rows than devices uses fewer devices. Layers that cannot be split by rows (fully connected ones)
    are computed whole on the fastest device. MoDNN's scheme for sparse fully connected layers is not included.
    """

    name: ClassVar[str] = "modnn"

    def plan(self, problem: Problem) -> Plan:
        layers, devices = problem.layers, problem.platform.computing_devices
        names, rates = [device.name for device in devices], [device.rate for device in devices]

        def parts(layer: Layer) -> tuple[Part, ...]:
            if find_cuttable_axis(layers, layer, "height") is None:
                return (Part(problem.platform.fastest_device.name),)
            return tile_layer(layers, layer, "height", rates, names)

        return problem.build_plan({layer.name: parts(layer) for layer in layers.layers})
