"""Layers: the units that a plan divides, and their graph.

A layer is an anchor operator with the element-wise nodes that are fused into it. Layers are immutable and contain
neither weights nor ONNX objects; routing, costs and strategies need nothing else of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.ir.operator_rule import Node, Operation, OperatorRule, Piece, TensorInfo, whole_tensor
from dicompiler.ir.regions import Interval, Region, full_region


@dataclass(frozen=True, eq=False)  # Compared by identity, because results are memoized per layer.
class Layer:
    """An anchor operator with absorbed element-wise nodes.

    Attributes:
        name: Name of the layer, which is the name of the anchor node.
        nodes: The nodes, in topological order.
        anchor: Index in `nodes` of the node that is divided by regions of its output.
        inputs: Tensors that the layer reads, without weights.
        outputs: Tensors that other layers, or the model's outputs, read. A layer that can be divided has exactly one.
        whole_reason: Reason why the layer can only be computed as a whole; '' if it can be divided.
    """

    name: str
    nodes: tuple[Node, ...]
    anchor: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole_reason: str = ""

    @property
    def output(self) -> str:
        """The layer's first output; the regions in a plan are regions of this tensor."""
        return self.outputs[0]


@dataclass(frozen=True, eq=False)
class LayerGraph(Memoizing):
    """The layers of a model and their tensors.

    Attributes:
        layers: The layers, in topological order.
        tensors: All tensors, by name.
        inputs: Names of the model's inputs, without states.
        outputs: Names of the model's outputs.
        rules: Operator rules by (domain, operator type).
        wire_dtypes: Pairs of a layer or input and the element type in which its tensor is sent (`WireFormat.dtypes`).
        states: Pairs of the model input and the model output of each state. The input of a state is stored where it is
            read, like a weight, so it is neither in `inputs` nor in the inputs of layers.
        rule_bound_nodes: Names of nodes that read no more than their rule says even if all of their output is computed.
        random_nodes: Names of nodes that draw random numbers.
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
        """Names of the outputs that are sent to the sinks: all but those of states."""
        kept = {present for _, present in self.states}
        return tuple(name for name in self.outputs if name not in kept)

    @cached_property
    def state_output_of(self) -> Mapping[str, str]:
        """Model output of each state, by its model input."""
        return dict(self.states)

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each layer in `layers`, by name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def producer(self) -> Mapping[str, Layer]:
        """Layer that computes a tensor, by tensor name. Model inputs have none."""
        return {tensor: layer for layer in self.layers for tensor in layer.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Layer, ...]]:
        """Layers that read a tensor, by tensor name, in layer order."""
        readers: dict[str, list[Layer]] = {}
        for layer in self.layers:
            for tensor in layer.inputs:
                readers.setdefault(tensor, []).append(layer)
        return {tensor: tuple(layers) for tensor, layers in readers.items()}

    def rule_of(self, node: Node) -> OperatorRule:
        """Return the rule of a node; `whole_tensor` if none is registered.

        Args:
            node: A node of a layer.

        Returns:
            The rule.
        """
        return self.rules.get((node.domain, node.op)) or OperatorRule(node.op, whole_tensor, node.domain)

    def cut_output(self, node: Node) -> str:
        """Return the output of a node that its rule divides.

        Args:
            node: A node of a layer.

        Returns:
            Name of the tensor; '' if the node omits this output.
        """
        return node.outputs[self.rule_of(node).cut_output]

    @memoized
    def operation_of(self, node: Node) -> Operation:
        """Return a node with its tensors, for its rule.

        Args:
            node: A node of a layer.

        Returns:
            The operation.
        """
        return Operation(
            node,
            tuple(self.tensors[name] if name else None for name in node.inputs),
            tuple(self.tensors[name] if name else None for name in node.outputs),
            self.rule_of(node).cut_output,
        )

    @memoized
    def make_piece(self, node: Node, region: Region, reduce: Interval | None = None) -> Piece:
        """Return the piece that computes a region of a node's output.

        A full region is computed by the unchanged node.

        Args:
            node: A node of a layer.
            region: Requested region of its output.
            reduce: Range of the reduction axis for a partial sum.

        Returns:
            The piece.
        """
        operation = self.operation_of(node)
        piece = self.rule_of(node).piece(operation, region, reduce)
        everything = (
            reduce is None and piece.out == full_region(operation.out_shape) and node.name not in self.rule_bound_nodes
        )
        return whole_tensor(operation, region, reduce) if everything else piece
