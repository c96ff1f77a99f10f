"""Facts: what the check model needs to know of a model's graph, gathered once.

In: a Model whose weights are initializers. Out: who makes and who reads each tensor, and which operands are constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import STAND_IN_DOMAIN, OperatorRule, TensorInfo
from dicompiler.ir.regions import Shape
from dicompiler.operators import builtin_rules

#: (index of the node, index of its input): the place where a tensor is read.
InputPlace = tuple[int, int]
SIGNIFICAND_BITS: Mapping[int, int] = {
    onnx.TensorProto.FLOAT: 24,
    onnx.TensorProto.DOUBLE: 53,
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.BFLOAT16: 8,
}
"""The floating-point types of the check model, with the bits of their significands: integers below 2^bits are exact."""
FLOAT8_TYPES = frozenset(
    number for name, number in onnx.TensorProto.DataType.items() if name.startswith(("FLOAT8E4", "FLOAT8E5"))
)
"""Floating-point types in which weights are kept: whole numbers up to 8 are exact in each."""
Rules = Mapping[tuple[str, str], OperatorRule]
"""(domain, operator type) → the rule, which says what stands in for the operator and what its constants become."""


@dataclass(frozen=True)
class Relaxation:
    """How a check model is made; each try adds to that of the one before. schedule: which one of SCHEDULES. bounded:
    whether what multiplies and adds takes its inputs modulo an odd number. replaced: operators, by (domain, type), in
    whose place something general stands. left: name of a node → why a new input stands in its place."""

    schedule: int = 0
    bounds_inputs: bool = False
    generic_ops: frozenset[tuple[str, str]] = frozenset()
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphFacts:
    """`constants`: (dtype, shape) by name; `uses`: where a tensor is read; `dtypes`: of all tensors where it is known;
    `captured`: names that a control-flow body reads; `outputs`: the graph's; `opset`: of the standard operators;
    `rules`: of all operators; `tensors`: what is known of each; `treatment`: how the check model is made; `uncut`: the
    names of nodes whose layers stay whole under every plan.
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
        """The rule of the node's operator, or of the one that it stands for, if it has one."""
        return self.rules.get((original_domain(node), node.op_type))

    def is_whole(self, node: onnx.NodeProto) -> bool:
        """Whether the node is computed whole under every plan: its operator, or its layer, cannot be cut."""
        rule = self.rule(node)
        return rule is None or not rule.can_cut or node.name in self.whole_nodes

    def dtype(self, tensor: str) -> int:
        """The type of a tensor; 0 where there is none, FLOAT where it could not be inferred."""
        known = self.constants[tensor][0] if tensor in self.constants else self.dtypes.get(tensor)
        return 0 if not tensor else known or onnx.TensorProto.FLOAT

    def has_float_constant(self, node: onnx.NodeProto, index: int) -> bool:
        """Whether input `index` of `node` is there and is a constant of a floating-point type."""
        name = node.input[index] if index < len(node.input) else ""
        return name in self.constants and self.constants[name][0] in SIGNIFICAND_BITS.keys() | FLOAT8_TYPES

    def computed_input_count(self, node: onnx.NodeProto) -> int:
        """How many inputs of `node` are computed."""
        return sum(bool(name) and name not in self.constants for name in node.input)

    def is_float(self, tensor: str) -> bool:
        """Whether `tensor` is of a floating-point type; a type that could not be inferred counts as one."""
        return self.dtypes.get(tensor, onnx.TensorProto.FLOAT) in SIGNIFICAND_BITS

    def is_tensor(self, tensor: str) -> bool:
        """Whether `tensor` is one, and no sequence, map or optional value; what could not be inferred counts as one."""
        return not tensor or self.dtypes.get(tensor) != onnx.TensorProto.UNDEFINED

    def is_string(self, tensor: str) -> bool:
        """Whether `tensor` holds strings."""
        return self.dtypes.get(tensor) == onnx.TensorProto.STRING

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """The static shape of a tensor; None where it has none or is not known."""
        return self.tensors[tensor].shape if tensor in self.tensors else None

    def ranks(self, node: onnx.NodeProto) -> tuple[int, ...]:
        """The ranks of the node's inputs; 0 of one that is left out or not known."""
        return tuple(len(self.shape(name) or ()) for name in node.input)

    def readers(self, tensor: str) -> tuple[InputPlace, ...] | None:
        """Where `tensor` is read; None where a control-flow body or the graph's output reads it too."""
        return None if tensor in self.captured or tensor in self.outputs else self.uses.get(tensor, ())


def gather_facts(model: Model, rules: Rules | None = None, layers: LayerGraph | None = None) -> GraphFacts:
    """The facts of `model`. Types are inferred on the copy without weights. rules: the built-in ones by default.
    layers: those of the model, which say what stays whole and what shapes were inferred."""
    light = onnx.shape_inference.infer_shapes(model.without_weights())
    nodes = tuple(model.proto.graph.node)
    own = () if layers is None else layers.layers
    uses: dict[str, list[InputPlace]] = {}
    for index, node in enumerate(nodes):
        for position, name in enumerate(node.input):
            uses.setdefault(name, []).append((index, position))
    values = (*light.graph.input, *light.graph.value_info, *light.graph.output)
    return GraphFacts(
        model,
        nodes,
        model.initializers(),
        {name: tuple(places) for name, places in uses.items()},
        {value.name: value.type.tensor_type.elem_type for value in values},
        frozenset(name for node in nodes for graph in control_flow_bodies(node) for name in _names_read(graph)),
        frozenset(value.name for value in model.proto.graph.output),
        next((entry.version for entry in model.proto.opset_import if entry.domain in ("", "ai.onnx")), 1),
        {(rule.domain, rule.op): rule for rule in builtin_rules()} if rules is None else rules,
        {**model.tensors(), **({} if layers is None else layers.tensors)},
        whole_nodes=frozenset(node.name for layer in own if layer.whole_reason for node in layer.nodes),
    )


def facts_for_model(known: GraphFacts, model: Model) -> GraphFacts:
    """The facts of `model`, which has the graph of the model that `known` is about, and perhaps other constants."""
    return replace(known, model=model, nodes=tuple(model.proto.graph.node), constants=model.initializers())


def original_domain(node: onnx.NodeProto) -> str:
    """The domain of the node's operator, or of the one that it stands for: dicompiler.check.com.microsoft#1 is of
    com.microsoft. A number tells the functions of one operator apart."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not is_stand_in(node):
        return domain
    return domain.removeprefix(STAND_IN_DOMAIN).partition("#")[0].removeprefix(".")


def is_stand_in(node: onnx.NodeProto) -> bool:
    """Whether a function stands in for the node's operator."""
    return node.domain.partition("#")[0] == STAND_IN_DOMAIN or node.domain.startswith(f"{STAND_IN_DOMAIN}.")


def get_attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute, or `default`."""
    for entry in node.attribute:
        if entry.name == name:
            return onnx.helper.get_attribute_value(entry)
    return default


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Gives `node`, which is changed, the attribute; one of that name is replaced in its place."""
    attribute = onnx.helper.make_attribute(name, value)
    for entry in node.attribute:
        if entry.name == name:
            entry.CopyFrom(attribute)
            return
    node.attribute.append(attribute)


def control_flow_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a control flow's node."""
    for entry in node.attribute:
        if entry.type == onnx.AttributeProto.GRAPH:
            yield entry.g
        yield from entry.graphs


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that a body reads, its own tensors included."""
    for node in graph.node:
        yield from node.input
        for inner in control_flow_bodies(node):
            yield from _names_read(inner)
    yield from (value.name for value in graph.output)
