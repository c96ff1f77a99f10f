"""Passes that place whole layers (`place`) or split layers in space (`tile-height`, `tile-grid`, `fuse-tiles`).

They set the parts of layers in the plan, and leave the model unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import Layer, LayerGraph, Part, Region
from dicompiler.plugin_api.regions import exit_layer, fused_regions, grid_tiles
from dicompiler_passes.annotation_base import AnnotationPass, LayerAnnotationPass


@dataclass(frozen=True)
class PlacePass(LayerAnnotationPass):
    """Assign whole layers to a device.

    conv1 ⇒ conv1@d1
    """

    name: ClassVar[str] = "place"

    device: str = field(default="", metadata={"help": "device of the layers; default: the first of `devices`"})

    def __post_init__(self) -> None:
        if self.device and self.devices:
            raise ValueError("device and devices are both set: omit one of them")

    @property
    def named_devices(self) -> tuple[str, ...]:
        return (self.device,) if self.device else self.devices

    def layer_parts(
        self,
        graph: LayerGraph,  # noqa: ARG002
        layer: Layer,  # noqa: ARG002
        devices: Sequence[str],
    ) -> Sequence[Part]:
        return (Part(self.device or devices[0]),)


@dataclass(frozen=True)
class TileHeight(LayerAnnotationPass):
    """Cut each layer's output into height tiles (ranges of rows). Each device reads its input rows with a halo.

    conv1 (rows 0:8) ⇒ conv1@d0 (rows 0:4), conv1@d1 (rows 4:8)
    """

    name: ClassVar[str] = "tile-height"

    parts: int = field(default=2, metadata={"help": "number of tiles of each layer"})
    shares: tuple[float, ...] = field(
        default=(), metadata={"help": "relative heights of the tiles, one for each; default: equal"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < share < math.inf for share in self.shares):
            raise ValueError("shares: expected numbers above 0")
        if self.shares and len(self.shares) != self.parts:
            raise ValueError(f"{len(self.shares)} shares for {self.parts} parts: give one share for each part")

    def layer_parts(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> Sequence[Part]:
        return self.make_parts(self.strip_regions(graph, layer, "height", self.parts, self.shares), devices)


@dataclass(frozen=True)
class TileGrid(LayerAnnotationPass):
    """Cut each layer's output into a grid of rows × columns tiles.

    conv1 (8×8) ⇒ conv1@d0 (0:4, 0:4), conv1@d1 (0:4, 4:8), conv1@d2 (4:8, 0:4), conv1@d3 (4:8, 4:8)
    """

    name: ClassVar[str] = "tile-grid"

    rows: int = field(default=2, metadata={"help": "number of rows of the grid"})
    columns: int = field(default=2, metadata={"help": "number of columns of the grid"})

    def part_count(self) -> int:
        return self.rows * self.columns

    def layer_parts(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> Sequence[Part]:
        return self.make_parts(even_grid(graph, layer, self.rows, self.columns, self), devices)


def even_grid(
    graph: LayerGraph, layer: Layer, rows: int, columns: int, annotation: AnnotationPass
) -> tuple[Region, ...]:
    """Return the regions of a grid of rows × columns tiles of a layer's output.

    Raises:
        DicompilerError: The output has fewer rows or columns than the grid.
    """
    tiles = grid_tiles(graph, layer, rows, columns)
    if len(tiles) != rows * columns:
        raise annotation.error(f"layer {layer.name!r} is too small for {rows}×{columns} tiles: use fewer tiles")
    return tiles


@dataclass(frozen=True)
class FuseTiles(AnnotationPass):
    """Tile the last of several layers; each device also computes the regions of the earlier layers that its tile needs.

    conv1 → conv2 (rows 0:8) ⇒ d0: conv1 rows 0:5, conv2 rows 0:4;  d1: conv1 rows 3:8, conv2 rows 4:8
    """

    name: ClassVar[str] = "fuse-tiles"
    missing_layers_hint: ClassVar[str] = "name the layers to fuse: layers=first..last"

    parts: int = field(default=0, metadata={"help": "number of tiles along the height; default: 2"})
    rows: int = field(default=0, metadata={"help": "number of rows of a grid of tiles, instead of parts"})
    columns: int = field(default=1, metadata={"help": "number of columns of a grid of tiles, instead of parts"})

    def part_count(self) -> int:
        return self.parts or (self.rows or 2) * self.columns

    def annotate(
        self, graph: LayerGraph, selected: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        if self.parts and (self.rows or self.columns > 1):
            raise self.error("give either parts (height tiles) or rows and columns (a grid), not both")
        last = exit_layer(graph, selected)
        if self.columns > 1:
            tiles = even_grid(graph, last, self.rows or 2, self.columns, self)
        else:
            tiles = self.strip_regions(graph, last, "height", self.part_count())
        parts_by_layer: dict[str, list[Part]] = {layer.name: [] for layer in selected}
        for part, regions in zip(self.make_parts(tiles, devices), fused_regions(graph, selected, tiles), strict=True):
            for name, region in regions.items():
                parts_by_layer[name].append(Part(part.device, region, lane=part.lane))
        return parts_by_layer
