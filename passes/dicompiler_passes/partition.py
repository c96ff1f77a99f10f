"""The pass `partition`, which rewrites the model according to the plan.

Model + LayerGraph + Plan ──route──► Routing ──► placed model: one valid ONNX graph in which every node has a device
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.plugin_api import Pass, PipelineState
from dicompiler.plugin_api.regions import partition


@dataclass(frozen=True)
class PartitionPass(Pass):
    """Rewrite the model by the plan: copies of nodes on devices, with Slices and Concats between them.

    Conv                 ⇒  Slice → Conv@d0 ┐
                            Slice → Conv@d1 ┴→ Concat
    Gemm (partial sums)  ⇒  Gemm@d0 + Gemm@d1 → Add → activation
    """

    name: ClassVar[str] = "partition"
    requires: ClassVar[tuple[str, ...]] = ("layers",)
    provides: ClassVar[tuple[str, ...]] = ("routing",)
    quiet: bool = field(default=False, metadata={"help": "do not warn about parts with results that nothing reads"})

    def run(self, state: PipelineState) -> PipelineState:
        return partition(state, self.quiet)
