"""The annotating passes that cut in space: place (no cut at all), tile-height, tile-grid, fuse-tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dicompiler.layers import Layer, LayerGraph
from dicompiler.plan import Part
from dicompiler.regions import Region, full, replace
from dicompiler.tasks import output_shape
from dicompiler.tiling import axis_of, cut_axis, exit_of, fused, grid
from dicompiler_passes.annotating import Annotation


@dataclass(frozen=True)
class Place(Annotation):
    """Puts whole layers on one device.

    conv1 ⇒ conv1@d1
    """

    name: ClassVar[str] = "place"

    device: str = ""

    def count(self) -> int:
        return 1

    def annotate(
        self,
        graph: LayerGraph,  # noqa: ARG002
        chosen: Sequence[Layer],
        devices: Sequence[str],
    ) -> Mapping[str, Sequence[Part]]:
        device = self.device or devices[0]
        if self.device and self.devices:
            raise self.fail("give either device or devices, not both")
        return {layer.name: (Part(device),) for layer in chosen}


def height_tiles(
    graph: LayerGraph, layer: Layer, parts: int, shares: Sequence[float], annotation: Annotation
) -> tuple[Region, ...]:
    """`parts` tiles of the layer's output along its height; raises where it has fewer rows."""
    if shares and len(shares) != parts:
        raise annotation.fail(f"{len(shares)} shares for {parts} parts")
    axis = axis_of(graph, layer, "height")
    intervals = cut_axis(graph, layer, axis, shares or [1.0] * parts)
    whole = full(output_shape(graph, layer))
    if any(start >= stop for start, stop in intervals):
        raise annotation.fail(f"layer {layer.name!r} has {whole[axis][1]} rows, too few for {parts} parts")
    return tuple(replace(whole, axis, interval) for interval in intervals)


@dataclass(frozen=True)
class TileHeight(Annotation):
    """Cuts each layer's output into height tiles; each tile needs a halo of the layer's input.

    conv1 (rows 0:8) ⇒ conv1@d0 (rows 0:4), conv1@d1 (rows 4:8)
    """

    name: ClassVar[str] = "tile-height"

    parts: int = 2
    shares: tuple[float, ...] = ()

    def count(self) -> int:
        return self.parts

    def annotate(
        self, graph: LayerGraph, chosen: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        homes = self.spread(self.parts, devices)
        return {
            layer.name: [
                Part(device, region, lane=lane)
                for (device, lane), region in zip(
                    homes, height_tiles(graph, layer, self.parts, self.shares, self), strict=True
                )
            ]
            for layer in chosen
        }


@dataclass(frozen=True)
class TileGrid(Annotation):
    """Cuts each layer's output into a grid of rows × columns tiles.

    conv1 (8×8) ⇒ conv1@d0 (0:4, 0:4), conv1@d1 (0:4, 4:8), conv1@d2 (4:8, 0:4), conv1@d3 (4:8, 4:8)
    """

    name: ClassVar[str] = "tile-grid"

    rows: int = 2
    columns: int = 2

    def count(self) -> int:
        return self.rows * self.columns

    def annotate(
        self, graph: LayerGraph, chosen: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        result: dict[str, Sequence[Part]] = {}
        for layer in chosen:
            tiles = grid(graph, layer, self.rows, self.columns)
            if len(tiles) != self.count():
                raise self.fail(f"layer {layer.name!r} is too small for {self.rows}×{self.columns} tiles")
            homes = self.spread(self.count(), devices)
            result[layer.name] = [Part(d, region, lane=lane) for (d, lane), region in zip(homes, tiles, strict=True)]
        return result


@dataclass(frozen=True)
class FuseTiles(Annotation):
    """Tiles the exit of a set of layers; each device computes all that its tile needs, so nothing travels within.

    conv1 → conv2 (rows 0:8) ⇒ d0: conv1 rows 0:5, conv2 rows 0:4;  d1: conv1 rows 3:8, conv2 rows 4:8
    """

    name: ClassVar[str] = "fuse-tiles"
    unnamed: ClassVar[str] = "name the layers to fuse: layers=first..last"

    parts: int = 0
    rows: int = 0
    columns: int = 1

    def count(self) -> int:
        return self.parts or (self.rows or 2) * self.columns

    def annotate(
        self, graph: LayerGraph, chosen: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        if self.parts and self.rows:
            raise self.fail("give either parts (height tiles) or rows and columns (a grid), not both")
        last = exit_of(graph, chosen)
        if self.columns > 1:
            tiles: Sequence[Region] = grid(graph, last, self.rows or 2, self.columns)
            if len(tiles) != self.count():
                raise self.fail(f"layer {last.name!r} is too small for {self.rows or 2}×{self.columns} tiles")
        else:
            tiles = height_tiles(graph, last, self.count(), (), self)
        result: dict[str, list[Part]] = {layer.name: [] for layer in chosen}
        homes = self.spread(self.count(), devices)
        for (device, lane), regions in zip(homes, fused(graph, chosen, tiles), strict=True):
            for name, region in regions.items():
                result[name].append(Part(device, region, lane=lane))
        return result
