"""Partition, the one pass that rewrites: every part of every layer becomes nodes on its device.

Model + LayerGraph + Plan ──route──► Routing ──► placed Model: one legal ONNX graph, every node on a device
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import Pass, PipelineState
from dicompiler.plugin_api.regions import partition


@dataclass(frozen=True)
class PartitionPass(Pass):
    """Rewrites the model as the plan says: parts on devices, slices and concatenations between them.

    Conv                 ⇒  Slice → Conv@d0 ┐
                            Slice → Conv@d1 ┴→ Concat
    Gemm (reduce ranges) ⇒  Gemm@d0 + Gemm@d1 → Add → activation
    """

    name: ClassVar[str] = "partition"
    requires: ClassVar[tuple[str, ...]] = ("layers",)
    provides: ClassVar[tuple[str, ...]] = ("routing",)
    quiet: bool = field(default=False, metadata={"help": "do not warn of parts that nobody reads"})

    def run(self, compilation: PipelineState) -> PipelineState:
        return partition(compilation, self.quiet)
