"""Layers: what a plan speaks of. An anchor operator with the element-wise nodes it absorbs, and the graph of them.

Frozen, without weights and without ONNX objects: routing, costs and strategies need nothing else of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.ir.operator_rule import Node, Operation, OperatorRule, Piece, TensorInfo, whole_tensor
from dicompiler.ir.regions import Interval, Region, full_region


@dataclass(frozen=True, eq=False)  # compared by identity: what follows from a layer is remembered
class Layer:
    """`nodes` in topological order; `inputs` the tensors that come in (no weights), `outputs` those that leave.

    `anchor` is the index in `nodes` of the node whose output region is cut; `reason` says why a layer can only be
    computed whole ('' where it can be cut).
    """

    name: str
    nodes: tuple[Node, ...]
    anchor: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole_reason: str = ""

    @property
    def output(self) -> str:
        """The tensor whose regions a plan names: the one that leaves the layer."""
        return self.outputs[0]


@dataclass(frozen=True, eq=False)
class LayerGraph(Memoizing):
    """`layers` in topological order, all `tensors` by name, the graph's `inputs` and `outputs`, rules, `Wire.types`.

    states: (graph input, graph output) of each state. As weights do, its input lies where it is read: it is neither
    among `inputs` nor among those of layers. sparing: names of nodes that, where all of their output is computed, read
    no more than their rule says. random: names of nodes that draw random numbers.
    """

    layers: tuple[Layer, ...]
    tensors: Mapping[str, TensorInfo]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rules: Mapping[tuple[str, str], OperatorRule] = field(default_factory=dict, repr=False)
    wire_dtypes: tuple[tuple[str, str], ...] = ()
    states: tuple[tuple[str, str], ...] = ()
    rule_bound_nodes: frozenset[str] = frozenset()
    random_nodes: frozenset[str] = frozenset()

    @cached_property
    def delivered_outputs(self) -> tuple[str, ...]:
        """The outputs that sinks want: states stay where they are made."""
        kept = {present for _, present in self.states}
        return tuple(name for name in self.outputs if name not in kept)

    @cached_property
    def state_output_of(self) -> Mapping[str, str]:
        """Graph input of a state → its graph output."""
        return dict(self.states)

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Layer name → its place in layer order."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def producer(self) -> Mapping[str, Layer]:
        """Tensor name → the layer that it leaves (graph inputs have none)."""
        return {tensor: layer for layer in self.layers for tensor in layer.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Layer, ...]]:
        """Tensor name → the layers that read it, in layer order."""
        readers: dict[str, list[Layer]] = {}
        for layer in self.layers:
            for tensor in layer.inputs:
                readers.setdefault(tensor, []).append(layer)
        return {tensor: tuple(layers) for tensor, layers in readers.items()}

    def rule_of(self, node: Node) -> OperatorRule:
        """The node's rule; one that computes it whole where none is registered."""
        return self.rules.get((node.domain, node.op)) or OperatorRule(node.op, whole_tensor, node.domain)

    def cut_output(self, node: Node) -> str:
        """The tensor that the node's rule cuts; '' where the node leaves that output out."""
        return node.outputs[self.rule_of(node).cut_output]

    @memoized
    def operation_of(self, node: Node) -> Operation:
        """The node with its tensors, as its rule wants it."""
        return Operation(
            node,
            tuple(self.tensors[name] if name else None for name in node.inputs),
            tuple(self.tensors[name] if name else None for name in node.outputs),
            self.rule_of(node).cut_output,
        )

    @memoized
    def make_piece(self, node: Node, region: Region, reduce: Interval | None = None) -> Piece:
        """How a region of what the node makes is computed, as its rule says; all of it: by the node as it stands."""
        operation = self.operation_of(node)
        piece = self.rule_of(node).piece(operation, region, reduce)
        everything = (
            reduce is None and piece.out == full_region(operation.out_shape) and node.name not in self.rule_bound_nodes
        )
        return whole_tensor(operation, region, reduce) if everything else piece
