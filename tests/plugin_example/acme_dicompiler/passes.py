"""A pass that removes Dropout from the network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import Pass, PipelineState


@dataclass(frozen=True)
class DropDropout(Pass):
    """Remove Dropout nodes, which do nothing at inference.

    x → Dropout → y → Relu → z   ⇒   x → Relu → z
    """

    name: ClassVar[str] = "acme-drop-dropout"

    def run(self, state: PipelineState) -> PipelineState:
        """Keep a Dropout if its output is a graph output, or if a node reads its mask."""
        graph = state.model.graph()
        kept = {tensor.name for tensor in graph.outputs}
        for node in [node for node in graph.nodes if node.op == "Dropout"]:
            mask_read = any(tensor.outputs for tensor in node.outputs[1:])
            if node.outputs[0].name not in kept and not mask_read:
                graph.replace_uses(node.outputs[0], node.inputs[0])
                graph.remove_nodes([node])
        return replace(state, model=state.model.with_graph(graph))
