"""Facts about the graph of a network, gathered once for all of its check models (variants with small integers)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import STAND_IN_DOMAIN, OperatorRule, TensorInfo
from dicompiler.ir.regions import Shape
from dicompiler.partition.operators import builtin_rules

InputPlace = tuple[int, int]
"""Place at which a tensor is read: (index of the node that reads it, index of the node's input)."""
SIGNIFICAND_BITS: Mapping[int, int] = {
    onnx.TensorProto.FLOAT: 24,
    onnx.TensorProto.DOUBLE: 53,
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.BFLOAT16: 8,
}
"""Bits of the significand by floating-point type. Integers below 2^bits are exact."""
FLOAT8_TYPES = frozenset(
    number for name, number in onnx.TensorProto.DataType.items() if name.startswith(("FLOAT8E4", "FLOAT8E5"))
)
"""8-bit floating-point types of stored weights. Integers up to 8 are exact in each of them."""
Rules = Mapping[tuple[str, str], OperatorRule]
"""Operator rules by (domain, operator type). They also name the integers and functions for the exact check."""


@dataclass(frozen=True)
class Relaxation:
    """Changes of a check model (the network with small integers) that make its numbers exact.

    Attributes:
        schedule: Index into SCHEDULES. Later schedules have sparser filters and smaller values.
        bounds_inputs: True if operators that multiply and add take their inputs modulo 15 (3 in 16-bit types).
        generic_ops: (domain, type) of operators that are replaced by an integer function of the module `generic`.
        excluded: By node name, the reason why the check excludes the node.
    """

    schedule: int = 0
    bounds_inputs: bool = False
    generic_ops: frozenset[tuple[str, str]] = frozenset()
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphFacts:
    """Facts about a network's graph that check models (variants with small integers) need.

    Attributes:
        model: The network.
        nodes: Its nodes in graph order.
        constants: (ONNX type, shape) of the initializers by name.
        uses: (node index, input index) pairs of the nodes that read a tensor, by tensor name.
        dtypes: ONNX types by tensor name, if known.
        captured: Names that control-flow bodies (the sub-graphs of If, Loop and Scan) read.
        outputs: The graph outputs.
        opset: Version of the standard operators.
        rules: Operator rules by (domain, operator type).
        tensors: Types, shapes and small constant values of all tensors.
        relaxation: Changes of the check model that make its numbers exact.
        whole_nodes: Names of the nodes in layers that no plan splits; empty if the layers are not known.
    """

    model: Model
    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, tuple[int, Shape]]
    uses: Mapping[str, tuple[InputPlace, ...]]
    dtypes: Mapping[str, int]
    captured: frozenset[str]
    outputs: frozenset[str]
    opset: int
    rules: Rules
    tensors: Mapping[str, TensorInfo]
    relaxation: Relaxation = Relaxation()
    whole_nodes: frozenset[str] = frozenset()

    def rule(self, node: onnx.NodeProto) -> OperatorRule | None:
        """Return the rule of the node's operator, or of the operator that the node's function replaces."""
        return self.rules.get((original_domain(node), node.op_type))

    def is_whole(self, node: onnx.NodeProto) -> bool:
        """Return True if no plan splits the node, because its operator or its layer cannot be split."""
        rule = self.rule(node)
        return rule is None or not rule.can_cut or node.name in self.whole_nodes

    def dtype(self, tensor: str) -> int:
        """Return the ONNX type of a tensor: 0 for the name "", FLOAT if the type could not be inferred."""
        dtype = self.constants[tensor][0] if tensor in self.constants else self.dtypes.get(tensor)
        return 0 if not tensor else dtype or onnx.TensorProto.FLOAT

    def has_float_constant(self, node: onnx.NodeProto, index: int) -> bool:
        name = node.input[index] if index < len(node.input) else ""
        return name in self.constants and self.constants[name][0] in SIGNIFICAND_BITS.keys() | FLOAT8_TYPES

    def computed_input_count(self, node: onnx.NodeProto) -> int:
        return sum(bool(name) and name not in self.constants for name in node.input)

    def is_float(self, tensor: str) -> bool:
        """Return True if the tensor is of a floating-point type, or of unknown type."""
        return self.dtypes.get(tensor, onnx.TensorProto.FLOAT) in SIGNIFICAND_BITS

    def is_tensor(self, tensor: str) -> bool:
        """Return True unless the name is that of a sequence, map or optional value."""
        return not tensor or self.dtypes.get(tensor) != onnx.TensorProto.UNDEFINED

    def is_string(self, tensor: str) -> bool:
        return self.dtypes.get(tensor) == onnx.TensorProto.STRING

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        return self.tensors[tensor].shape if tensor in self.tensors else None

    def ranks(self, node: onnx.NodeProto) -> tuple[int, ...]:
        """Return the ranks of the node's inputs, 0 for omitted inputs and unknown shapes."""
        return tuple(len(self.shape(name) or ()) for name in node.input)

    def readers(self, tensor: str) -> tuple[InputPlace, ...] | None:
        """Return the (node index, input index) pairs at which nodes read a tensor.

        The result is None if a control-flow body reads the tensor or if it is a graph output.
        """
        return None if tensor in self.captured or tensor in self.outputs else self.uses.get(tensor, ())


def gather_facts(model: Model, rules: Rules | None = None, layers: LayerGraph | None = None) -> GraphFacts:
    """Return facts about a model's types, shapes, readers and operator rules.

    `rules` default to the built-in rules. `layers` supply further shapes, and show which nodes no plan splits.
    """
    inferred = onnx.shape_inference.infer_shapes(model.without_weights())
    nodes = tuple(model.proto.graph.node)
    layer_list = () if layers is None else layers.layers
    uses: dict[str, list[InputPlace]] = {}
    for index, node in enumerate(nodes):
        for position, name in enumerate(node.input):
            uses.setdefault(name, []).append((index, position))
    values = (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
    return GraphFacts(
        model,
        nodes,
        model.initializers(),
        {name: tuple(uses_of_tensor) for name, uses_of_tensor in uses.items()},
        {value.name: value.type.tensor_type.elem_type for value in values},
        frozenset(name for node in nodes for graph in control_flow_bodies(node) for name in _names_read(graph)),
        frozenset(value.name for value in model.proto.graph.output),
        next((entry.version for entry in model.proto.opset_import if entry.domain in ("", "ai.onnx")), 1),
        {(rule.domain, rule.op): rule for rule in builtin_rules()} if rules is None else rules,
        {**model.tensors(), **({} if layers is None else layers.tensors)},
        whole_nodes=frozenset(node.name for layer in layer_list if layer.whole_reason for node in layer.nodes),
    )


def facts_for_model(facts: GraphFacts, model: Model) -> GraphFacts:
    return replace(facts, model=model, nodes=tuple(model.proto.graph.node), constants=model.initializers())


def original_domain(node: onnx.NodeProto) -> str:
    """Return the domain of a node's operator, or of the operator that the node's function replaces.

    For example, the domain dicompiler.check.com.microsoft#1 becomes com.microsoft. The number distinguishes several
    functions that replace one operator.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not is_stand_in(node):
        return domain
    return domain.removeprefix(STAND_IN_DOMAIN).partition("#")[0].removeprefix(".")


def is_stand_in(node: onnx.NodeProto) -> bool:
    return node.domain.partition("#")[0] == STAND_IN_DOMAIN or node.domain.startswith(f"{STAND_IN_DOMAIN}.")


def get_attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    for entry in node.attribute:
        if entry.name == name:
            return onnx.helper.get_attribute_value(entry)
    return default


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    attribute = onnx.helper.make_attribute(name, value)
    for entry in node.attribute:
        if entry.name == name:
            entry.CopyFrom(attribute)
            return
    node.attribute.append(attribute)


def control_flow_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for entry in node.attribute:
        if entry.type == onnx.AttributeProto.GRAPH:
            yield entry.g
        yield from entry.graphs


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every name that a control-flow body reads, including names of its own tensors."""
    for node in graph.node:
        yield from node.input
        for inner in control_flow_bodies(node):
            yield from _names_read(inner)
    yield from (value.name for value in graph.output)
