"""Base classes of annotating passes, which set the parts of layers in the plan; selection of layers by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Layer, LayerGraph, Part, Pass, PipelineState, Region, UsageError
from dicompiler.plugin_api.onnx import NodeOrigins
from dicompiler.plugin_api.regions import (
    AxisLabel,
    full_region,
    labelled_axis,
    output_shape,
    single_device_plan,
    split_axis,
    with_interval,
)
from dicompiler.plugin_api.utilities import did_you_mean

MAX_PARTS = 1 << 16
"""Largest number of parts of one layer."""


@dataclass(frozen=True)
class AnnotationPass(Pass):
    """Base class of passes that set the parts of selected layers in the plan, and leave the model unchanged.

    A part is the region of a layer's output that one device computes. The option `layers` accepts the names of layers,
    and of nodes of the model file. Without a platform, the devices are d0, d1, and so on.

    Attributes:
        missing_layers_hint: Error message if `layers` is missing; '' if the default is all layers.
    """

    layers: tuple[str, ...] = field(
        default=(),
        metadata={"help": "names, patterns (conv*) or ranges (conv1..conv4) of layers; default: all that can be split"},
    )
    devices: tuple[str, ...] = field(
        default=(), metadata={"help": "devices of the parts, in order; default: the platform's computing devices"}
    )

    requires: ClassVar[tuple[str, ...]] = ("layers",)
    provides: ClassVar[tuple[str, ...]] = ("plan",)
    missing_layers_hint: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in ("parts", "rows", "columns") and value != option.default and value < 1:
                raise ValueError(f"{option.name}: expected a number of at least 1, got {value}")
        if self.part_count() > MAX_PARTS:
            raise ValueError(f"{self.part_count()} parts are too many: use at most {MAX_PARTS}")

    @property
    def named_devices(self) -> tuple[str, ...]:
        return self.devices

    @abstractmethod
    def annotate(
        self, graph: LayerGraph, selected: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        """Return the new parts (regions on devices), by layer name. All other layers keep their parts.

        Raises:
            DicompilerError: A layer of `selected` cannot be split in this way.
        """

    def part_count(self) -> int:
        return int(getattr(self, "parts", 1))

    def run(self, state: PipelineState) -> PipelineState:
        graph, platform = state.layers, state.platform
        assert graph is not None
        names = [device.name for device in platform.devices] if platform else []
        computing = [device.name for device in platform.devices if device.rate > 0] if platform else []
        for name in self.named_devices if platform else ():
            if name not in names:
                raise UsageError(f"{self.name}: the platform has no device {name!r}{did_you_mean(name, names)}")
        plan = state.plan or replace(
            single_device_plan(graph, (computing or ["d0"])[0]),
            source=((names or ["d0"])[0],),
            sink=((names or ["d0"])[0],),
        )
        devices = self.devices or tuple(computing) or tuple(f"d{i}" for i in range(self.part_count()))
        origins = NodeOrigins(graph, state.loaded_graph)
        selected = (
            select_layers(origins, self.layers, self.name) if self.layers else self.all_supported_layers(graph, devices)
        )
        parts = self.annotate(graph, selected, devices)
        new = {name: tuple(layer_parts) for name, layer_parts in parts.items()}
        return replace(state, plan=replace(plan, layers={**plan.layers, **new}))

    def all_supported_layers(self, graph: LayerGraph, devices: Sequence[str]) -> tuple[Layer, ...]:
        """Return all layers that the pass can split. They are the default of the option `layers`.

        Raises:
            UsageError: The pass needs the option `layers`.
        """
        if self.missing_layers_hint:
            raise UsageError(f"{self.name}: {self.missing_layers_hint}")
        return tuple(layer for layer in graph.layers if self._supports(graph, layer, devices))

    def _supports(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> bool:
        try:
            self.annotate(graph, (layer,), devices)
        except UsageError:
            raise
        except DicompilerError:
            return False
        return True

    def strip_regions(
        self, graph: LayerGraph, layer: Layer, label: AxisLabel, parts: int, shares: Sequence[float] = ()
    ) -> tuple[Region, ...]:
        """Split one axis of a layer's output into `parts` intervals, and return the regions.

        Args:
            graph: The layer graph.
            layer: The layer.
            label: The axis: height, width or channel.
            parts: Number of regions.
            shares: Relative lengths of the intervals; empty for equal lengths.

        Raises:
            DicompilerError: The axis is shorter than the number of parts.
        """
        axis = labelled_axis(graph, layer, label)
        whole = full_region(output_shape(graph, layer))
        intervals = split_axis(graph, layer, axis, shares or [1.0] * parts)
        if any(start >= stop for start, stop in intervals):
            noun = {"height": "rows", "width": "columns", "channel": "output channels"}[label]
            fault = f"layer {layer.name!r} has {whole[axis][1]} {noun}, too few for {parts} parts"
            raise self.error(f"{fault}: use fewer parts")
        return tuple(with_interval(whole, axis, interval) for interval in intervals)

    def assign_devices(self, parts: int, devices: Sequence[str]) -> list[tuple[str, int]]:
        """Return (device, lane) for each part. Parts of a device in lanes 0, 1, … run in turn and share memory.

        5 parts on 2 devices ⇒ (d0, 0) (d0, 1) (d0, 2) (d1, 0) (d1, 1)
        """
        used = devices[:parts]
        per_device, remainder = divmod(parts, len(used))
        return [(device, lane) for i, device in enumerate(used) for lane in range(per_device + (i < remainder))]

    def make_parts(self, regions: Sequence[Region], devices: Sequence[str]) -> list[Part]:
        places = self.assign_devices(len(regions), devices)
        return [Part(device, region, lane=lane) for (device, lane), region in zip(places, regions, strict=True)]

    def error(self, message: str) -> DicompilerError:
        return DicompilerError(f"{self.name}: {message}")


@dataclass(frozen=True)
class LayerAnnotationPass(AnnotationPass):
    """Base class of passes that set the parts (regions on devices) of each layer independently of other layers."""

    @abstractmethod
    def layer_parts(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> Sequence[Part]:
        """Return the new parts of a layer: regions of its output on some of `devices`."""

    def annotate(
        self, graph: LayerGraph, selected: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        return {layer.name: self.layer_parts(graph, layer, devices) for layer in selected}


def select_layers(origins: NodeOrigins, wanted: Sequence[str], place: str) -> tuple[Layer, ...]:
    """Return the layers that match names, patterns (conv*) or ranges (conv1..conv4), in topological order.

    Args:
        origins: The layers, and the nodes of the model file from which they were formed.
        wanted: Names, patterns and ranges.
        place: Name of the pass, which begins error messages.
    """
    names = [layer.name for layer in origins.layers.layers]
    selected: set[str] = set()
    for item in wanted:
        first, is_range, last = item.partition("..")
        if item in names:
            selected.add(item)
        elif is_range:
            start, stop = _layers_named(origins, first, place)[0], _layers_named(origins, last, place)[-1]
            between = names[names.index(start) : names.index(stop) + 1]
            if not between:
                raise UsageError(f"{place}: layers: {item!r} is empty: {last!r} comes before {first!r}: swap them")
            selected.update(between)
        else:
            selected.update([name for name in names if fnmatchcase(name, item)] or _layers_named(origins, item, place))
    return tuple(layer for layer in origins.layers.layers if layer.name in selected)


def _layers_named(origins: NodeOrigins, name: str, place: str) -> list[str]:
    """Return the names of the layers that contain `name`, which is a layer or a node of the model file.

    A node that passes have removed selects the layers of the first node that reads its output. `place` begins error
    messages.
    """
    layers = origins.layers.layer_by_name
    names = [name] if name in layers else [layer.name for layer in origins.layers_of(name)]
    if not names and name in origins.first_output_by_name:
        raise UsageError(f"{place}: layers: node {name!r} is in no layer, because nothing reads it: omit it")
    if not names:
        raise UsageError(f"{place}: layers: no layer {name!r}{did_you_mean(name, layers)}")
    return names
