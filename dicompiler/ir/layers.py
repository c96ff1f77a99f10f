"""Layers, the units that a plan divides among devices, and their graph.

A layer is an anchor (its main operator) with the element-wise nodes that are fused into it. It contains neither weights
nor ONNX objects. Routing, cost models and strategies read only layers, not the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.ir.operator_rule import Node, Operation, OperatorRule, Piece, TensorInfo, whole_tensor
from dicompiler.ir.regions import Interval, Region, full_region


class TensorKey(NamedTuple):
    """Key of a tensor, or of the partial sums of the tensor over one range of the reduction axis.

    Attributes:
        tensor: Name of the tensor.
        reduce: Range of the reduction axis; None for the tensor itself.
    """

    tensor: str
    reduce: Interval | None = None


# With `eq=False`, layers are compared by identity: they are keys of memoized results and need a fast hash.
@dataclass(frozen=True, eq=False)
class Layer:
    """Unit that a plan divides: an anchor node (the main operator) with the element-wise nodes fused into it.

    Attributes:
        name: Name of the layer, which is the name of the anchor node.
        nodes: The nodes, in topological order.
        anchor: Index of the anchor in `nodes`.
        inputs: Names of the tensors that the layer reads, without weights.
        outputs: Names of the tensors that other layers read or that are model outputs. A layer that can be divided has
            exactly one.
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
        """The layer's first output tensor. The regions in a plan are regions of this tensor."""
        return self.outputs[0]


@dataclass(frozen=True, eq=False)
class LayerGraph(Memoizing):
    """The layers of a model and their tensors.

    Attributes:
        layers: The layers, in topological order.
        tensors: All tensors, by name.
        inputs: Names of the model's inputs, without states (outputs of the previous frame).
        outputs: Names of the model's outputs.
        rules: Operator rules by (domain, operator type).
        wire_dtypes: Pairs of a name of a layer or model input ("*": all), and the element type in which its tensor is
            sent between devices.
        states: Pairs of the model input and the model output of each state (an output that is the input of the next
            frame). Devices keep the input like a weight, so it is not listed in `inputs` or `Layer.inputs`.
        rule_bound_nodes: Names of the Slice nodes that the pass `trim` adds. They read only the input regions that
            their operator rule returns, even if they compute their full output.
        random_nodes: Names of the nodes that draw random numbers.
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
        """Names of the model outputs that are sent to the sinks, the devices that receive outputs.

        Outputs that are states stay on their devices, because only the next frame reads them.
        """
        kept = {present for _, present in self.states}
        return tuple(name for name in self.outputs if name not in kept)

    @cached_property
    def state_output_of(self) -> Mapping[str, str]:
        """Name of the output of each state (an output that is an input of the next frame), by the input's name."""
        return dict(self.states)

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        """The layers of the graph, by layer name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each layer in `layers`, by layer name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def producer(self) -> Mapping[str, Layer]:
        """Layer that computes each tensor, by tensor name. Model inputs have no entry."""
        return {tensor: layer for layer in self.layers for tensor in layer.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Layer, ...]]:
        """Layers that read each tensor, in layer order, by tensor name."""
        readers: dict[str, list[Layer]] = {}
        for layer in self.layers:
            for tensor in layer.inputs:
                readers.setdefault(tensor, []).append(layer)
        return {tensor: tuple(layers) for tensor, layers in readers.items()}

    def rule_of(self, node: Node) -> OperatorRule:
        """Return the operator rule of a node. Without a registered rule, the node is computed as a whole.

        Args:
            node: A node of a layer.

        Returns:
            The registered rule, or a rule with the function `whole_tensor`.
        """
        return self.rules.get((node.domain, node.op)) or OperatorRule(node.op, whole_tensor, node.domain)

    def cut_output(self, node: Node) -> str:
        """Return the name of the output tensor that the node's operator rule divides into regions.

        Args:
            node: A node of a layer.

        Returns:
            Name of the tensor; '' if the node omits this output.
        """
        return node.outputs[self.rule_of(node).cut_output]

    @memoized
    def operation_of(self, node: Node) -> Operation:
        """Return a node together with the types and shapes of its tensors, which operator rules need.

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
        """Return the computation of a region of a node's output, as the node's operator rule describes it.

        If the region is the full output, the piece is the unchanged node, which reads its inputs completely.
        (Exception: nodes in `rule_bound_nodes`.)

        Args:
            node: A node of a layer.
            region: Requested region of the output tensor that `cut_output` returns.
            reduce: Range of the reduction axis for a partial sum; None for the complete result.

        Returns:
            The piece: the computed region, the regions of the inputs that it needs, and changed attributes.
        """
        operation = self.operation_of(node)
        piece = self.rule_of(node).piece(operation, region, reduce)
        is_full = reduce is None and piece.out == full_region(operation.out_shape)
        return whole_tensor(operation, region, reduce) if is_full and node.name not in self.rule_bound_nodes else piece
