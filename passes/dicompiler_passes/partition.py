"""Partition, the one pass that rewrites: every part of every layer becomes nodes on its device.

Model + LayerGraph + Plan ──route──► Routing ──► placed Model: one legal ONNX graph, every node on a device
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dicompiler.ir.compilation import Compilation
from dicompiler.ir.plan import Part, Plan
from dicompiler.partition.placed_graph import Given
from dicompiler.partition.placement import place
from dicompiler.partition.routing import route, route_on
from dicompiler.plugin.pass_manager import Pass
from dicompiler_passes.rewriting import write

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class Partition(Pass):
    """Rewrites the model as the plan says: parts on devices, slices and concatenations between them.

    Conv                 ⇒  Slice → Conv@d0 ┐
                            Slice → Conv@d1 ┴→ Concat
    Gemm (reduce ranges) ⇒  Gemm@d0 + Gemm@d1 → Add → activation
    """

    name: ClassVar[str] = "partition"
    requires: ClassVar[tuple[str, ...]] = ("layers",)
    provides: ClassVar[tuple[str, ...]] = ("routing",)
    quiet: bool = field(default=False, metadata={"help": "do not warn of parts that nobody reads"})

    def run(self, compilation: Compilation) -> Compilation:
        layers = compilation.layers
        assert layers is not None
        plan = compilation.plan or Plan({x.name: (Part("d0"),) for x in layers.layers}, ("d0",), ("d0",))
        platform = compilation.platform
        routing = route(layers, plan) if platform is None else route_on(platform, layers, plan)
        for layer, index in () if self.quiet else routing.dropped:
            log.warning("partition: part %d of layer %r is read by nobody and is left out", index, layer)
        placed = place(Given.of(compilation.model), routing, plan)
        return replace(compilation, plan=plan, routing=routing, model=write(compilation.model, placed))
