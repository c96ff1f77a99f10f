"""Passes that split layers by output channels (`lop`), by input channels (`lip`), or by both (`fuse`).

They set the parts of layers in the plan, and leave the model unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import Interval, Layer, LayerGraph, LayerShare, Part, Region, UsageError
from dicompiler.plugin_api.regions import (
    fused_regions,
    labelled_axis,
    make_share_task,
    output_shape,
    reduction_length,
    split_proportionally,
)
from dicompiler_passes.annotation_base import AnnotationPass, LayerAnnotationPass

MERGE_HELP = (
    "devices that add the partial sums: one (the first device), scatter (each device adds a range of output channels), "
    "all (each device adds everything)"
)


@dataclass(frozen=True)
class LopPass(LayerAnnotationPass):
    """Split layers by output channels: each device computes a range of them (LOP, layer output partitioning).

    fc1 (channels 0:8) ⇒ fc1@d0 (0:4, weights 0:4), fc1@d1 (4:8, weights 4:8)
    """

    name: ClassVar[str] = "lop"

    parts: int = field(default=2, metadata={"help": "number of parts of each layer"})

    def layer_parts(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> Sequence[Part]:
        return self.make_parts(self.strip_regions(graph, layer, "channel", self.parts), devices)


def merging_parts(
    step: AnnotationPass, graph: LayerGraph, layer: Layer, merge: str, parts: int, devices: Sequence[str]
) -> list[Part]:
    """Return the parts that add up a layer's partial sums over ranges of its input channels.

    Args:
        step: The pass.
        graph: The layer graph.
        layer: The layer.
        merge: `one` (the first device adds everything), `scatter` (each device adds a range of output channels) or
            `all` (each device adds everything).
        parts: Number of partial sums.
        devices: Devices that compute the partial sums.
    """
    places = step.assign_devices(parts, devices)
    if merge == "one":
        return [Part(places[0][0], lane=places[0][1])]
    if merge == "all":
        return [Part(device, lane=lane) for device, lane in places]
    if merge == "scatter":
        return step.make_parts(step.strip_regions(graph, layer, "channel", parts), devices)
    raise UsageError(f"{step.name}: invalid merge {merge!r}: expected one, scatter or all")


@dataclass(frozen=True)
class LipPass(LayerAnnotationPass):
    """Split layers by input channels: each device sums over a range of them (LIP, layer input partitioning).

    fc1 (sum over 0:8) ⇒ fc1@d0 (sum over 0:4) + fc1@d1 (sum over 4:8) → d0
    """

    name: ClassVar[str] = "lip"

    parts: int = field(default=2, metadata={"help": "number of parts of each layer"})
    merge: str = field(default="one", metadata={"help": MERGE_HELP})

    def layer_parts(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> Sequence[Part]:
        extent = reduction_length(graph, layer)
        if extent is None:
            raise self.error(
                f"layer {layer.name!r} cannot be split along input channels: {_why_no_partial_sums(graph, layer)}: "
                "omit this layer"
            )
        if extent < self.parts:
            fault = f"layer {layer.name!r} has {extent} input channels, too few for {self.parts} parts"
            raise self.error(f"{fault}: use fewer parts")
        homes = self.assign_devices(self.parts, devices)
        cuts = split_proportionally(extent, [1.0] * self.parts)
        partials = [Part(d, reduce=cut, lane=lane) for (d, lane), cut in zip(homes, cuts, strict=True)]
        return [*partials, *merging_parts(self, graph, layer, self.merge, self.parts, devices)]


def _why_no_partial_sums(graph: LayerGraph, layer: Layer) -> str:
    is_quantized = layer.anchor > 0 or graph.rule_of(layer.nodes[layer.anchor]).rounds_sums
    rounded = "it is quantized, and rounded partial sums add up to other numbers" if is_quantized else ""
    return layer.whole_reason or rounded or "its main operator has groups, or adds up no channels"


@dataclass(frozen=True)
class FusePass(AnnotationPass):
    """Split the first of several consecutive layers by output channels, and the last one by input channels.

    The devices exchange nothing between these layers. They exchange only the partial sums of the last layer.

    fc1 → fc2 ⇒ d0: fc1 (channels 0:4), fc2 (sum over 0:4);  d1: fc1 (4:8), fc2 (sum over 4:8);  merged on d0
    """

    name: ClassVar[str] = "fuse"
    missing_layers_hint: ClassVar[str] = "name the layers, from the first to the last to be cut: layers=first..last"

    parts: int = field(default=2, metadata={"help": "number of parts of each layer"})
    merge: str = field(default="one", metadata={"help": MERGE_HELP})

    def annotate(
        self, graph: LayerGraph, selected: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        if len(selected) < 2:
            raise self.error("a single layer cannot be fused: name the first and the last layer: layers=first..last")
        first, between, last = selected[0], selected[1:-1], selected[-1]
        parts_by_layer: dict[str, list[Part]] = {layer.name: [] for layer in selected}
        for part in self.make_parts(self.strip_regions(graph, first, "channel", self.parts), devices):
            assert part.region is not None
            reduce = self._reduce(graph, first, between, last, part.region)
            parts_by_layer[first.name].append(part)
            parts_by_layer[last.name].append(Part(part.device, reduce=reduce, lane=part.lane))
            for name, region in _regions_between(graph, between, last, reduce).items():
                parts_by_layer[name].append(Part(part.device, region, lane=part.lane))
        parts_by_layer[last.name] += merging_parts(self, graph, last, self.merge, self.parts, devices)
        return parts_by_layer

    def _reduce(self, graph: LayerGraph, first: Layer, between: Sequence[Layer], last: Layer, tile: Region) -> Interval:
        """Return the input channels of `last` that the layers `between` compute from exactly `tile` of `first`.

        `tile` is a region of the output of `first`. A device with this tile can sum over the channels without other
        data.

        Raises:
            DicompilerError: The channels are not one range.
        """
        extent = reduction_length(graph, last)
        if extent is None:
            raise self.error(
                f"layer {last.name!r} cannot be split along input channels: {_why_no_partial_sums(graph, last)}: "
                "choose another last layer"
            )
        axis = labelled_axis(graph, first, "channel")
        channels = output_shape(graph, first)[axis]
        start, stop = tile[axis]
        reduce = (start * extent // channels, stop * extent // channels)
        if reduce[0] < reduce[1] and _region_of_first(graph, first, between, last, reduce) == tile:
            return reduce
        raise self.error(
            f"channels {start}:{stop} of {first.name!r} are not one range of input channels of {last.name!r}: "
            "choose another first or last layer"
        )


def _regions_between(graph: LayerGraph, between: Sequence[Layer], last: Layer, reduce: Interval) -> dict[str, Region]:
    """Return the regions that a partial sum of `last` needs of the layers `between`, by layer name.

    `reduce` is the range of input channels of `last` over which the partial sum is computed.
    """
    task = make_share_task(graph, last, LayerShare(reduce=reduce))
    if not between:
        return {}
    (need,) = task.needs.values()
    (regions,) = fused_regions(graph, between, [need])
    return regions


def _region_of_first(
    graph: LayerGraph, first: Layer, between: Sequence[Layer], last: Layer, reduce: Interval
) -> Region | None:
    """Return the region of `first` that a partial sum of `last` needs, through the layers `between`.

    `reduce` is the range of input channels of the partial sum. The result is None if it also needs other tensors.
    """
    regions = _regions_between(graph, between, last, reduce)
    readers = [make_share_task(graph, layer, LayerShare(regions[layer.name])) for layer in between]
    readers.append(make_share_task(graph, last, LayerShare(reduce=reduce)))
    outside = {
        key.tensor: need
        for task in readers
        for key, need in task.needs.items()
        if key.tensor not in {layer.output for layer in between}
    }
    return outside.get(first.output) if len(outside) == 1 else None
