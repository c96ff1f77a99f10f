"""A whole plugin: a pass that removes Dropout, a strategy that deals layers out in turn, a rule for one more operator.

A plugin of some size keeps these in modules of their own and imports them inside its hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import ClassVar, Literal

from dicompiler.compilation import Compilation
from dicompiler.hookspecs import hookimpl
from dicompiler.operators.rule import Operation, OperatorRule, Piece
from dicompiler.passes import Pass
from dicompiler.plan import Part, Plan
from dicompiler.problem import Problem, Strategy
from dicompiler.regions import Interval, Region

dicompiler_api = 1


@dataclass(frozen=True)
class DropDropout(Pass):
    """Removes Dropout nodes, which do nothing at inference.

    x → Dropout → y → Relu → z   ⇒   x → Relu → z
    """

    name: ClassVar[str] = "acme-drop-dropout"

    def run(self, compilation: Compilation) -> Compilation:
        """Keeps a Dropout that makes a graph output or whose mask is read."""
        graph = compilation.model.graph()
        kept = {tensor.name for tensor in graph.outputs}
        for node in [node for node in graph.nodes if node.op == "Dropout"]:
            mask_read = any(tensor.outputs for tensor in node.outputs[1:])
            if node.outputs[0].name in kept or mask_read:
                continue
            for reader in list(node.outputs[0].outputs):
                reader.inputs = [node.inputs[0] if i is node.outputs[0] else i for i in reader.inputs]
            graph.nodes.remove(node)
        return replace(compilation, model=compilation.model.with_graph(graph))


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Whole layers, dealt out to the computing devices in turn."""

    name: ClassVar[str] = "acme-round-robin"
    order: Literal["forward", "backward"] = "forward"

    def plan(self, problem: Problem) -> Plan:
        """Layer i goes to device i mod n."""
        devices = problem.platform.computing if self.order == "forward" else problem.platform.computing[::-1]
        turns = cycle(devices)
        return problem.plan({layer.name: (Part(next(turns).name),) for layer in problem.layers.layers})


def quick_gelu(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """x · sigmoid(α x): a region of the output needs the same region of x."""
    return Piece(region, (region,))


@hookimpl
def dicompiler_passes() -> Iterable[type[Pass]]:
    yield DropDropout


@hookimpl
def dicompiler_strategies() -> Iterable[type[Strategy]]:
    yield RoundRobin


@hookimpl
def dicompiler_operators() -> Iterable[OperatorRule]:
    yield OperatorRule("QuickGelu", quick_gelu, domain="com.microsoft", elementwise=True)
