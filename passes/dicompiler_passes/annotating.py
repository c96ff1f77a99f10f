"""What the annotating passes share: which layers and devices they speak of, and how their parts enter the plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from dicompiler.plugin_api import (
    Compilation,
    DicompilerError,
    Label,
    Layer,
    LayerGraph,
    Lineage,
    Part,
    Pass,
    Region,
    UsageError,
    axis_of,
    cut_axis,
    full,
    nearest,
    output_shape,
    whole_plan,
    with_interval,
)

MOST = 1 << 16  # parts of a layer


@dataclass(frozen=True)
class Annotation(Pass):
    """Base of the passes that edit the plan of the layers they name and leave the model as it is.

    layers: names, patterns (`conv*`) and ranges in layer order (`conv1..conv4`); default: all that can be cut so. The
    name of any other node of the model file stands for the layer that it went into.
    devices: where the parts go, in order; default: the platform's computing devices, without a platform d0, d1, ….
    """

    layers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    requires: ClassVar[tuple[str, ...]] = ("layers",)
    provides: ClassVar[tuple[str, ...]] = ("plan",)
    unnamed: ClassVar[str] = ""  # what to say where no layers are named, in a pass that cannot take them all

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in ("parts", "rows", "columns") and value != option.default and value < 1:
                raise ValueError(f"{option.name}: expected a number from 1 on, got {value}")
        if self.count() > MOST:
            raise ValueError(f"{self.count()} parts are too many (allowed: {MOST})")

    @property
    def named(self) -> tuple[str, ...]:
        """Every device that the options name."""
        return self.devices

    @abstractmethod
    def annotate(
        self, graph: LayerGraph, chosen: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        """The new parts, by layer name."""

    def count(self) -> int:
        """How many devices are wanted at most: the option `parts`, where there is one."""
        return int(getattr(self, "parts", 1))

    def run(self, compilation: Compilation) -> Compilation:
        graph, platform = compilation.layers, compilation.platform
        assert graph is not None
        known = [device.name for device in platform.devices] if platform else []
        computing = [device.name for device in platform.devices if device.rate > 0] if platform else []
        for name in self.named if platform else ():
            if name not in known:
                raise UsageError(f"{self.name}: the platform has no device {name!r}{nearest(name, known)}")
        plan = compilation.plan or replace(
            whole_plan(graph, (computing or ["d0"])[0]), source=((known or ["d0"])[0],), sink=((known or ["d0"])[0],)
        )
        devices = self.devices or tuple(computing) or tuple(f"d{i}" for i in range(self.count()))
        lineage = Lineage(graph, compilation.loaded)
        chosen = select(lineage, self.layers, self.name) if self.layers else self.all_allowed(graph, devices)
        parts = self.annotate(graph, chosen, devices)
        new = {name: tuple(own) for name, own in parts.items()}
        return replace(compilation, plan=replace(plan, layers={**plan.layers, **new}))

    def all_allowed(self, graph: LayerGraph, devices: Sequence[str]) -> tuple[Layer, ...]:
        """The layers that this pass can annotate, one by one: what it takes where none is named."""
        if self.unnamed:
            raise UsageError(f"{self.name}: {self.unnamed}")
        return tuple(layer for layer in graph.layers if self._allows(graph, layer, devices))

    def _allows(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> bool:
        try:
            self.annotate(graph, (layer,), devices)
        except UsageError:
            raise
        except DicompilerError:
            return False
        return True

    def strips(
        self, graph: LayerGraph, layer: Layer, label: Label, parts: int, shares: Sequence[float] = ()
    ) -> tuple[Region, ...]:
        """The layer's output in `parts` strips along an axis; raises where it has too few rows or channels."""
        axis = axis_of(graph, layer, label)
        whole = full(output_shape(graph, layer))
        intervals = cut_axis(graph, layer, axis, shares or [1.0] * parts)
        if any(start >= stop for start, stop in intervals):
            what = {"height": "rows", "width": "columns", "channel": "output channels"}[label]
            raise self.fail(f"layer {layer.name!r} has {whole[axis][1]} {what}, too few for {parts} parts")
        return tuple(with_interval(whole, axis, interval) for interval in intervals)

    def spread(self, parts: int, devices: Sequence[str]) -> list[tuple[str, int]]:
        """(device, lane) for each of `parts` parts in order: neighbours together, one lane per part of a device.

        5 parts on 2 devices ⇒ (d0, 0) (d0, 1) (d0, 2) (d1, 0) (d1, 1)
        """
        used = devices[:parts]
        each, more = divmod(parts, len(used))
        return [(device, lane) for i, device in enumerate(used) for lane in range(each + (i < more))]

    def tiles(self, regions: Sequence[Region], devices: Sequence[str]) -> list[Part]:
        """A part for each region, spread over the devices."""
        homes = self.spread(len(regions), devices)
        return [Part(device, region, lane=lane) for (device, lane), region in zip(homes, regions, strict=True)]

    def fail(self, message: str) -> DicompilerError:
        """The error of this pass with that message."""
        return DicompilerError(f"{self.name}: {message}")


@dataclass(frozen=True)
class LayerAnnotation(Annotation):
    """Base of the annotations that take each layer by itself."""

    @abstractmethod
    def parts_of(self, graph: LayerGraph, layer: Layer, devices: Sequence[str]) -> Sequence[Part]:
        """The new parts of one layer."""

    def annotate(
        self, graph: LayerGraph, chosen: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        return {layer.name: self.parts_of(graph, layer, devices) for layer in chosen}


def select(lineage: Lineage, wanted: Sequence[str], place: str) -> tuple[Layer, ...]:
    """The layers that names, patterns and ranges mean, in layer order."""
    names = [layer.name for layer in lineage.layers.layers]
    chosen: set[str] = set()
    for item in wanted:
        first, dots, last = item.partition("..")
        if item in names:
            chosen.add(item)
        elif dots:
            start, stop = _called(lineage, first, place)[0], _called(lineage, last, place)[-1]
            between = names[names.index(start) : names.index(stop) + 1]
            if not between:
                raise UsageError(f"{place}: layers: {item!r} is empty: {last!r} comes before {first!r}: turn it round")
            chosen.update(between)
        else:
            chosen.update([name for name in names if fnmatchcase(name, item)] or _called(lineage, item, place))
    return tuple(layer for layer in lineage.layers.layers if layer.name in chosen)


def _called(lineage: Lineage, name: str, place: str) -> list[str]:
    """The layer of that name, else those that the model file's node of that name is in or has become a part of."""
    known = lineage.layers.by_name
    called = [name] if name in known else [layer.name for layer in lineage.layers_of(name)]
    if not called and name in lineage.names:
        raise UsageError(f"{place}: layers: node {name!r} is in no layer, because nothing reads it: leave it out")
    if not called:
        raise UsageError(f"{place}: layers: no layer {name!r}{nearest(name, known)}")
    return called
