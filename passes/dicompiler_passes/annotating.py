"""What the annotating passes share: which layers and devices they speak of, and how their parts enter the plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from dicompiler.compilation import Compilation
from dicompiler.errors import DicompilerError, UsageError, nearest
from dicompiler.layers import Layer, LayerGraph
from dicompiler.passes import Pass
from dicompiler.plan import Part
from dicompiler.tiling import whole_plan


@dataclass(frozen=True)
class Annotation(Pass):
    """Base of the passes that edit the plan of the layers they name and leave the model as it is.

    layers: names, patterns (`conv*`) and ranges in layer order (`conv1..conv4`); default: all that can be cut so.
    devices: where the parts go, in order; default: the platform's computing devices, without a platform d0, d1, ….
    """

    layers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    requires: ClassVar[tuple[str, ...]] = ("layers",)
    provides: ClassVar[tuple[str, ...]] = ("plan",)
    unnamed: ClassVar[str] = ""  # what to say where no layers are named, in a pass that cannot take them all

    @abstractmethod
    def annotate(
        self, graph: LayerGraph, chosen: Sequence[Layer], devices: Sequence[str]
    ) -> Mapping[str, Sequence[Part]]:
        """The new parts, by layer name."""

    @abstractmethod
    def count(self) -> int:
        """How many devices are wanted at most."""

    def run(self, compilation: Compilation) -> Compilation:
        graph, platform = compilation.layers, compilation.platform
        assert graph is not None
        known = [device.name for device in platform.devices] if platform else []
        computing = [device.name for device in platform.devices if device.rate > 0] if platform else []
        for name in self.devices if platform else ():
            if name not in known:
                raise UsageError(f"{self.name}: devices: the platform has no {name!r}{nearest(name, known)}")
        plan = compilation.plan or replace(
            whole_plan(graph, (computing or ["d0"])[0]), source=((known or ["d0"])[0],), sink=((known or ["d0"])[0],)
        )
        devices = self.devices or tuple(computing) or tuple(f"d{i}" for i in range(self.count()))
        chosen = select(graph, self.layers, self.name) if self.layers else self.all_allowed(graph, devices)
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

    def spread(self, parts: int, devices: Sequence[str]) -> list[tuple[str, int]]:
        """(device, lane) for each of `parts` parts in order: neighbours together, one lane per part of a device.

        5 parts on 2 devices ⇒ (d0, 0) (d0, 1) (d0, 2) (d1, 0) (d1, 1)
        """
        used = devices[:parts]
        each, more = divmod(parts, len(used))
        return [(device, lane) for i, device in enumerate(used) for lane in range(each + (i < more))]

    def fail(self, message: str) -> DicompilerError:
        """The error of this pass with that message."""
        return DicompilerError(f"{self.name}: {message}")


def select(graph: LayerGraph, wanted: Sequence[str], place: str) -> tuple[Layer, ...]:
    """The layers that names, patterns and ranges mean, in layer order."""
    names = [layer.name for layer in graph.layers]
    chosen: set[str] = set()
    for item in wanted:
        if item in graph.by_name:
            chosen.add(item)
            continue
        first, dots, last = item.partition("..")
        if dots:
            for end in (first, last):
                if end not in graph.by_name:
                    raise UsageError(f"{place}: layers: no layer {end!r}{nearest(end, names)}")
            chosen.update(names[names.index(first) : names.index(last) + 1])
            continue
        matching = [name for name in names if fnmatchcase(name, item)]
        if not matching:
            raise UsageError(f"{place}: layers: no layer {item!r}{nearest(item, names)}")
        chosen.update(matching)
    return tuple(layer for layer in graph.layers if layer.name in chosen)
