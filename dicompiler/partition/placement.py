"""Placement: conversion of the parts of a plan to nodes on devices, connected by slices and concatenations.

    Routing ⇒ PlacedGraph: nodes with a device and a position in time, and the tensors that devices send

A sent tensor can be narrowed to a smaller wire type. It passes Cast (float16, bfloat16) or QuantizeLinear (int8), the
transfer, and Cast or DequantizeLinear. For `int8-block` (8-bit integers with a scale per block), several standard ONNX
nodes encode and decode the tensor:

    x (float) ⇒ values (int8), scale indices (int8) ⇒ values · table[index] (float)

- The values of a region, in row-major order, form blocks of BLOCK_SIZE values; the last block can be shorter.
- The values of a block are divided by its scale: the smallest entry of a table for which all quotients fit into 8 bits.
  The index of the entry is sent instead of the scale.
- A sent tensor has one axis, which contains the values of all blocks, then the indices.
- The table has four scales per factor of two, for blocks with largest magnitudes from 2^-40 to 2^23.9. A 16-bit scale
  instead of the 8-bit index would reduce the mean error by only a tenth.
- If a block contains NaN or infinity, the encoder looks up an index that the table does not have. The run then ends
  with an error.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph, TensorKey
from dicompiler.ir.onnx.graph_structure import body_names, body_reads, control_flow_bodies, rename_captures
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.names import unique_name
from dicompiler.ir.onnx.weights import is_fixed_size
from dicompiler.ir.operator_rule import STAND_IN_DOMAIN, Node, Piece
from dicompiler.ir.output_names import read_output_names
from dicompiler.ir.plan import Plan
from dicompiler.ir.program import TensorSpec
from dicompiler.ir.recurrent_states import StatePairs, StatePiece, read_states
from dicompiler.ir.regions import Region, full_region, region_shape, volume, with_interval
from dicompiler.ir.routing import Assembly, AssemblyLeaf, Box, Routing, Task, TaskId, task_id
from dicompiler.ir.wire_dtype import (
    BLOCK_SIZE,
    INT8_BLOCK,
    UNCHANGED,
    WireFormat,
    block_count,
    effective_wire_dtypes,
    int8_scale_and_zero_point,
    range_name,
    sent_dtype,
    wire_name_by_tensor,
)
from dicompiler.partition.routing import format_region

StepKey = tuple[int, int, int, int]
"""Sort key of a node: (period, lane, position in layer order, phase).

A lane is a group of a device's parts, which the device computes before the next group. A period lasts from one exchange
of tensors between lanes or devices to the next. The phase is 0 for slices that are sent, whose lane is -1, and else 1.
"""
NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
FROM_INPUT = -1
"""Index of the producer node of a tensor that no node produces, because it is a graph input."""


class WeightSlice(NamedTuple):
    """Region of an initializer of the model, used as a new initializer.

    Attributes:
        weight: Name of the model's initializer.
        region: Region of this initializer that the new one contains.
    """

    weight: str
    region: Region


Constant = NDArray[Any] | tuple[int, ...] | WeightSlice
"""Value of a new initializer: an array, integers (for an int64 vector), or a region of an existing initializer."""


class PlacedTensor(NamedTuple):
    """Tensor of the placed graph (the partitioned model: nodes with a device and a position in time).

    Attributes:
        name: Name in the placed graph.
        region: Region of the model's tensor that it contains.
        dtype: Element type, an onnx.TensorProto.DataType.
    """

    name: str
    region: Region
    dtype: int


TensorDescription = onnx.ValueInfoProto | PlacedTensor
"""Type and shape of a tensor. They are a ValueInfoProto if they are the same as in the original model."""


class NodePlacement(NamedTuple):
    """Device and position in time of a node.

    Attributes:
        device: Name of the device.
        lane: Number of a group of the device's parts. The device computes one group (lane) after another.
        step_key: Key that sorts the nodes of all devices in the order of execution.
        part: Part of a layer (its share on one device) to which the node belongs.
    """

    device: str
    lane: int
    step_key: StepKey = (0, 0, 0, 0)
    part: TaskId | None = None


class PlacedNode(NamedTuple):
    """Node of the placed graph (the partitioned model), with its device and its position in time.

    Attributes:
        placement: Device and position in time.
        origin: Name of the model's node or tensor for which the node was added.
        reads: Names of the tensors that the node and its subgraphs read.
        outputs: Names of its outputs.
        inputs: Names of its inputs.
        name: Name of the node.
        region: Region that the node computes; None in a layer that stays whole.
        op: Operator type; "" if it is the operator type of `template`.
        template: Node of the model that is copied with other names and attributes.
        attributes: Values of attributes that differ from those of `template`. None removes an attribute.
    """

    placement: NodePlacement
    origin: str
    reads: Sequence[str]
    outputs: Sequence[str]
    inputs: Sequence[str] = ()
    name: str = ""
    region: Region | None = None
    op: str = ""
    template: onnx.NodeProto | None = None
    attributes: Mapping[str, Any] = NO_ATTRIBUTES

    @property
    def operator(self) -> str:
        return self.op or (self.template.op_type if self.template is not None else "")


class TensorSend(NamedTuple):
    """A tensor that one device sends to another.

    Attributes:
        producer: Index of the node that computes the tensor; FROM_INPUT for a model input.
        tensor: Name of the tensor.
        rank: Position of the receiver among the devices that read the tensor, in the order of their first reads.
        receiver: Name of the receiving device.
    """

    producer: int
    tensor: str
    rank: int
    receiver: str


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that placement needs, computed once per model.

    Attributes:
        opset: Version of the standard operators; 0 if the model has none.
        nodes: Nodes by name.
        control_flow_nodes: Names of nodes with subgraphs.
        value_infos: Type and shape of the tensors between nodes, by name.
        inputs: Type and shape of the model's inputs, by name.
        outputs: Type and shape of the model's outputs, by name.
        initializer_regions: Full region of each initializer.
        sparse_initializers: Names of sparse initializers.
        tensor_names: Names of all tensors.
        states: Pairs (model input, model output) of each state. The output is the input of the next frame.
        user_names: Names of outputs in the user's file, by their name in the model, if the two names differ.
    """

    opset: int
    nodes: Mapping[str, onnx.NodeProto]
    control_flow_nodes: frozenset[str]
    value_infos: Mapping[str, onnx.ValueInfoProto]
    inputs: Mapping[str, onnx.ValueInfoProto]
    outputs: Mapping[str, onnx.ValueInfoProto]
    initializer_regions: Mapping[str, Region]
    sparse_initializers: frozenset[str]
    tensor_names: frozenset[str]
    states: StatePairs = ()
    user_names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_model(cls, model: Model) -> ModelFacts:
        graph = model.proto.graph
        inputs, outputs = {v.name: v for v in graph.input}, {v.name: v for v in graph.output}
        regions = {name: full_region(shape) for name, (_, shape) in model.initializers().items()}
        names = {name for node in graph.node for name in (*node.input, *node.output, *body_names(node))}
        return cls(
            next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), 0),
            {node.name: node for node in graph.node},
            frozenset(node.name for node in graph.node if control_flow_bodies(node)),
            {value.name: value for value in graph.value_info},
            inputs,
            outputs,
            regions,
            frozenset(tensor.values.name for tensor in graph.sparse_initializer),
            frozenset({*names, *inputs, *outputs, *regions}),
            read_states(model.proto) or (),
            read_output_names(model.proto),
        )


@dataclass(frozen=True)
class PlacedGraph:
    """Partitioned model before it is written as ONNX: nodes with devices, in the order of execution.

    Attributes:
        nodes: Nodes with their devices and positions in time, without those that do not contribute to an output.
        infos: Type and shape of tensors, by the tensor's name in the graph. A ValueInfoProto may contain another name.
        inputs: Model inputs, without constants and states.
        source: Devices that have the inputs.
        model_outputs: Name of the model output, by the name of the output of this graph. A model output with several
            sinks (devices that receive the outputs) is one output of the graph for each of them.
        constants: Initializers that the model does not have, by name.
        used_names: Names of the tensors that nodes read, and of the initializers that only subgraphs of nodes read.
        state_pieces: Regions of states (outputs that are inputs of the next frame) that devices keep between frames.
        states: Model inputs that are states.
    """

    nodes: Sequence[PlacedNode]
    infos: Mapping[str, TensorDescription]
    inputs: tuple[str, ...]
    source: tuple[str, ...]
    model_outputs: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    used_names: frozenset[str] = frozenset()
    state_pieces: Sequence[StatePiece] = ()
    states: tuple[TensorSpec, ...] = ()

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index (in `nodes`) of the node that computes each tensor, by the name of the tensor."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.outputs if name}

    @cached_property
    def state_reads(self) -> frozenset[str]:
        """Tensors that contain states: outputs of the previous frame that are inputs of this one."""
        return frozenset(piece.read_name for piece in self.state_pieces)

    @cached_property
    def state_writes(self) -> frozenset[str]:
        """Tensors that contain states: outputs of this frame that are inputs of the next one."""
        return frozenset(piece.written_name for piece in self.state_pieces)

    @cached_property
    def unsized_inputs(self) -> frozenset[str]:
        """Inputs without a fixed size, such as strings. The process that supplies the frames sends them to readers."""
        return frozenset(name for name in self.inputs if not is_fixed_size(self.tensor_spec(name).dtype))

    @cached_property
    def node_reads(self) -> Sequence[Sequence[str]]:
        """Names of the tensors that each node reads, without constants, by the index of the node."""
        available = self.producer.keys() | set(self.inputs) | self.state_reads
        return [[name for name in node.reads if name in available] for node in self.nodes]

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Indices (in `nodes`) of the nodes that read each tensor, in ascending order, by the name of the tensor."""
        users: dict[str, list[int]] = {}
        for i, names in enumerate(self.node_reads):
            for name in names:
                users.setdefault(name, []).append(i)
        return users

    @cached_property
    def sends(self) -> Sequence[TensorSend]:
        """Tensors that one device sends to another, sorted by the index of the node that computes them."""
        sends: list[TensorSend] = []
        devices = [node.placement.device for node in self.nodes]
        for name, indices in self.readers.items():
            if name in self.state_reads or name in self.unsized_inputs:
                continue
            producer = self.producer.get(name, FROM_INPUT)
            available = self.source if producer == FROM_INPUT else (devices[producer],)
            # Fast path for the most frequent case: the only reader is on a device that has the tensor.
            if len(indices) == 1 and devices[indices[0]] in available:
                continue
            readers = dict.fromkeys([devices[i] for i in indices])
            sends += [
                TensorSend(producer, name, rank, reader)
                for rank, reader in enumerate(readers)
                if reader not in available
            ]
        return sorted(sends)

    def tensor_spec(self, tensor: str) -> TensorSpec:
        """Return name, type and shape of a tensor.

        The shape is None if it is not static, or if the value is not a tensor.
        """
        info = self.infos[tensor]
        if isinstance(info, PlacedTensor):
            return TensorSpec(tensor, info.dtype, region_shape(info.region))
        return replace(_tensor_spec(info), name=tensor)


@dataclass
class PlacedGraphBuilder:
    """Builder of a placed graph (the partitioned model: nodes with a device and a position in time).

    Attributes:
        facts: Properties of the model.
        nodes: Nodes that were added, in any order.
        tensor_descriptions: Type and shape of the new tensors, by name.
        constants: New initializers, by name.
        constant_names: Names of the new initializers by a hashable key of their values, so that equal values share one.
        node_name_counts: Names of nodes in use, each with the last number that was appended to it.
    """

    facts: ModelFacts
    nodes: list[PlacedNode] = field(default_factory=list)
    tensor_descriptions: dict[str, TensorDescription] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    constant_names: dict[object, str] = field(default_factory=dict)
    node_name_counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensor_name_counts = dict.fromkeys(self.facts.tensor_names, 0)

    def unique_tensor_name(self, wanted: str) -> str:
        return unique_name(wanted, self.tensor_name_counts)

    def declare(self, name: str, dtype: int, region: Region) -> PlacedTensor:
        tensor = self.tensor_descriptions[name] = PlacedTensor(name, region, dtype)
        return tensor

    def add_constant(self, value: Constant, wanted: str = "") -> str:
        """Return the name of a new initializer with the given value. Equal values share one initializer.

        `wanted` is the preferred name of an array's initializer. Arrays share one only if they have the same preferred
        name.
        """
        key: object = value
        if isinstance(value, np.ndarray):
            if value.dtype == np.int64 and value.ndim == 1:
                return self.add_constant(tuple(value.tolist()))
            key = (wanted, str(value.dtype), value.shape, value.tobytes())
        if key not in self.constant_names:
            if isinstance(value, WeightSlice):
                wanted = value.weight + format_region(value.region)
            elif isinstance(value, tuple):
                wanted = f"int64{list(value)}"
            name = self.constant_names[key] = self.unique_tensor_name(wanted)
            self.constants[name] = value
        return self.constant_names[key]

    def copy_node(
        self,
        node: str,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        place: NodePlacement,
        piece: Piece | None = None,
        captured: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> None:
        """Add a copy of a node of the model.

        Args:
            node: Name of the node in the model.
            name: Name of the copy.
            inputs: Names of the tensors that the copy reads.
            outputs: Names of the tensors that the copy computes.
            place: Device and position in time.
            piece: Region that the copy computes; None: the full outputs.
            captured: For a node with subgraphs: the name on this device of each tensor that a subgraph reads, by its
                name in the model.
        """
        copied, reads = self.facts.nodes[node], [*filter(None, inputs)] if "" in inputs else inputs
        if node in self.facts.control_flow_nodes:
            original, copied = copied, onnx.NodeProto()
            copied.CopyFrom(original)
            rename_captures(copied, captured)
            reads = [*reads, *body_reads(copied)]
        region, op, attributes = None, "", NO_ATTRIBUTES
        if piece is not None:
            region, op, attributes = piece.out, piece.op or "", piece.attributes
        name = unique_name(name, self.node_name_counts)
        self.nodes.append(PlacedNode(place, node, reads, outputs, inputs, name, region, op, copied, attributes))

    def add_table_lookup(
        self,
        node: str,
        name: str,
        table: str,
        indices: PlacedTensor,
        row_count: int,
        output: PlacedTensor,
        place: NodePlacement,
        piece: Piece,
    ) -> None:
        """Add the lookup (a Gather) of a device that has only some rows of a table; the result is 0 for other rows.

        The sum of the results of all devices is the result of the whole lookup.

        Args:
            node: Name of the Gather in the model.
            name: Beginning of the name of the new Gather.
            table: Tensor with the rows of the device, `piece.table_rows`.
            indices: Indices into the whole table.
            row_count: Number of rows of the whole table.
            output: Tensor that gets the result of the device.
            place: Device and position in time of the new nodes.
            piece: The piece of the Gather that the device computes.
        """
        assert piece.table_rows is not None
        (start, stop), kind = piece.table_rows, helper.tensor_dtype_to_np_dtype(indices.dtype)

        def add(op: str, *inputs: str | int, dtype: int = indices.dtype) -> str:
            names = [name if isinstance(name, str) else self._add_scalar(name, kind) for name in inputs]
            result = PlacedTensor(self.unique_tensor_name(f"{output.name}?"), indices.region, dtype)
            return self.add_node(op, names, result, place, node).name

        # In the exact check of `verify`, small integers replace the indices, so they wrap around at the table's end.
        is_exact_check = self.facts.nodes[node].domain.startswith(STAND_IN_DOMAIN)
        raw, boolean = indices.name, onnx.TensorProto.BOOL
        if is_exact_check:
            index = add("Mod", raw, row_count)
        else:
            index = add("Where", add("Less", raw, 0, dtype=boolean), add("Add", raw, row_count), raw)

        def is_outside(low: int, high: int) -> str:
            is_below, is_above = add("Less", index, low, dtype=boolean), add("Less", high - 1, index, dtype=boolean)
            return add("Or", is_below, is_above, dtype=boolean)

        # An index outside of the whole table reaches the Gather unchanged, so that onnxruntime reports an error.
        is_elsewhere, is_invalid = is_outside(start, stop), is_outside(0, row_count)
        local = add("Where", is_elsewhere, add("Where", is_invalid, indices.name, 0), add("Sub", index, start))
        row_axes = [(0, 1)] * (len(output.region) - len(indices.region))
        mask = PlacedTensor(self.unique_tensor_name(f"{output.name}?"), (*indices.region, *row_axes), boolean)
        self.add_node("Reshape", [is_elsewhere, self.add_constant(region_shape(mask.region))], mask, place, node)
        found = self.declare(self.unique_tensor_name(f"{output.name}?"), output.dtype, output.region)
        # onnxruntime's error shows only the name of the Gather, so the name says which table and indices it reads.
        of, by = self.facts.nodes[node].input
        name = f"{name}: rows of {of} that {by} numbers: 0 to {row_count - 1}, here {start} to {stop - 1}"
        self.copy_node(node, name, [table, local], [found.name], place, piece)
        # A multiplication by 0 would keep NaN, so a Where selects the zeros.
        zero = self._add_scalar(0, helper.tensor_dtype_to_np_dtype(output.dtype))
        self.add_node("Where", [mask.name, zero, found.name], output, place, node)

    def _add_scalar(self, value: int, dtype: np.dtype[Any]) -> str:
        return self.add_constant(np.array(value, dtype), f"{dtype}{value}")

    def add_slice(self, tensor: PlacedTensor, region: Region, place: NodePlacement, name: str = "") -> PlacedTensor:
        """Return a region of `tensor`: `tensor` itself if it has this region, else the output of a new Slice.

        `name` is the name of this output; "": a name derived from that of `tensor`.
        """
        if tensor.region == region:
            return tensor
        pairs = enumerate(zip(region, tensor.region, strict=True))
        cuts = [(axis, cut[0] - whole[0], cut[1] - whole[0]) for axis, (cut, whole) in pairs if cut != whole]
        axes, starts, ends = zip(*cuts, strict=True)
        name = name or self.unique_tensor_name(tensor.name + format_region(region))
        output = PlacedTensor(name, region, tensor.dtype)
        if 0 < self.facts.opset < 10:  # Before opset 10, starts, ends and axes are attributes of a Slice.
            numbers = {"axes": axes, "ends": ends, "starts": starts}
            return self.add_node("Slice", [tensor.name], output, place, tensor.name, **numbers)
        inputs = [tensor.name, *(self.add_constant(numbers) for numbers in (starts, ends, axes))]
        return self.add_node("Slice", inputs, output, place, tensor.name)

    def add_concat(self, pieces: Sequence[PlacedTensor], axis: int, place: NodePlacement, name: str) -> PlacedTensor:
        first = pieces[0].region
        region = with_interval(first, axis, (first[axis][0], pieces[-1].region[axis][1]))
        output = PlacedTensor(name, region, pieces[0].dtype)
        return self.add_node("Concat", [piece.name for piece in pieces], output, place, name, axis=axis)

    def add_merge(self, terms: Sequence[PlacedTensor], op: str, place: NodePlacement, name: str) -> PlacedTensor:
        """Add nodes that combine `terms`, in order, by the binary operator `op`; return the result, called `name`."""
        # onnxruntime has no Add before opset 7, so Sum is used, which computes the same.
        op = "Sum" if op == "Add" and 0 < self.facts.opset < 7 else op
        total = terms[0]
        if len(terms) == 1:
            return self.add_identity(total, place, name, name)
        for i, term in enumerate(terms[1:], 1):
            output = total._replace(name=name if i == len(terms) - 1 else self.unique_tensor_name(f"{name}+{i}"))
            total = self.add_node(op, [total.name, term.name], output, place, name)
        return total

    def add_identity(self, tensor: PlacedTensor, place: NodePlacement, name: str, origin: str) -> PlacedTensor:
        return self.add_node("Identity", [tensor.name], tensor._replace(name=name), place, origin)

    def add_node(
        self, op: str, inputs: Sequence[str], output: PlacedTensor, place: NodePlacement, origin: str, **attributes: Any
    ) -> PlacedTensor:
        """Add a node that computes `output` and has the same name, and return `output`."""
        name = unique_name(output.name, self.node_name_counts)
        self.tensor_descriptions[output.name] = output
        self.nodes.append(
            PlacedNode(place, origin, inputs, (output.name,), inputs, name, output.region, op, None, attributes)
        )
        return output

    def build(
        self, kept: Iterable[str], copies: Mapping[str, str], source: tuple[str, ...], pieces: Sequence[StatePiece] = ()
    ) -> PlacedGraph:
        """Return the placed graph of the nodes that were added.

        Args:
            kept: Names of initializers that only subgraphs read. They are kept although no node has them as an input.
            copies: Model output that is copied, by the name of each additional output of the graph.
            source: Devices that have the model inputs.
            pieces: Regions of states (outputs that are inputs of the next frame) that devices keep between frames.
        """
        facts, kept = self.facts, frozenset(kept)
        states = dict(facts.states)
        copied = {**{name: name for name in facts.outputs if name not in states.values()}, **copies}
        needed, nodes = {*copied, *kept, *(piece.written_name for piece in pieces)}, []
        for node in sorted(self.nodes, key=lambda node: node.placement.step_key)[::-1]:
            if not needed.isdisjoint(node.outputs):  # A node is kept if at least one of its outputs is needed.
                needed.update(node.reads)
                nodes.append(node)
        used = kept.union(*(node.inputs for node in nodes))
        outputs = {name: facts.outputs[output] for name, output in copied.items()}
        model_outputs = {name: facts.user_names.get(output, output) for name, output in copied.items()}
        infos = {**self.tensor_descriptions, **facts.inputs, **outputs}
        constants = (facts.initializer_regions.keys() & used) | facts.sparse_initializers
        inputs = tuple(name for name in facts.inputs if name not in constants and name not in states)
        state_specs = tuple(_tensor_spec(facts.inputs[name]) for name in states)
        return PlacedGraph(nodes[::-1], infos, inputs, source, model_outputs, self.constants, used, pieces, state_specs)


def _tensor_spec(info: onnx.ValueInfoProto) -> TensorSpec:
    kind = info.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return TensorSpec(info.name, kind.elem_type, dims if kind.HasField("shape") and -1 not in dims else None)


def place_parts(facts: ModelFacts, routing: Routing, plan: Plan) -> PlacedGraph:
    """Return the placed graph (nodes with devices) for the routing of a plan.

    `plan` is the plan for which the routing was made: the main plan, a replica of it on other devices, or a failure
    plan.
    """
    return _Placer(facts, routing, plan).make_graph()


class _Placer:
    """Converter of tasks (computations of parts of layers on devices) to nodes."""

    def __init__(self, facts: ModelFacts, routing: Routing, plan: Plan) -> None:
        self.facts, self.routing, self.plan = facts, routing, plan
        self.layers = routing.layers
        self.builder = PlacedGraphBuilder(facts)
        self.tensor_of_task: dict[tuple[TensorKey, TaskId], PlacedTensor] = {}
        # Outputs of Slices, Concats and transfers, by a key of their contents, so that several readers share them.
        self.shared_tensors: dict[object, PlacedTensor] = {}
        self.captured_names: set[str] = set()
        self.task_count_by_layer = Counter(task.layer for task in routing.tasks)
        self.first_delivery_of = {delivery.output: delivery for delivery in reversed(routing.deliveries)}
        self.output_name_of_task = self._find_direct_outputs()
        self.state_tensors = self._declare_state_tensors()
        self.placement_of_task: dict[TaskId | None, NodePlacement] = {}
        self.wire_casts = WireCasts(self.builder, self.layers, plan.wire_format)

    def make_graph(self) -> PlacedGraph:
        for task in self.routing.tasks:
            self._place_task(task)
        copies = self._add_deliveries()
        return self.builder.build(self.captured_names, copies, self.plan.source, self._add_state_outputs())

    def _declare_state_tensors(self) -> dict[tuple[str, str], PlacedTensor]:
        """Declare a tensor for each region of a state (an output of the previous frame) that a device keeps.

        The result has the tensor by (model input of the state, device).
        """
        tensors = dict[tuple[str, str], PlacedTensor]()
        piece_count = Counter(retention.past for retention in self.routing.state_retentions)
        for retention in self.routing.state_retentions:
            past, device = retention.past, retention.device
            is_whole = retention.region == full_region(self.layers.tensors[past].shape or ())
            # If one device keeps the whole state, the tensor has the name of the model input.
            keeps_name = is_whole and piece_count[past] == 1
            name = past if keeps_name else self.builder.unique_tensor_name(f"{past}@{device}")
            tensors[past, device] = self.builder.declare(name, self._dtype(past), retention.region)
        return tensors

    def _add_state_outputs(self) -> list[StatePiece]:
        """Add nodes that assemble the region of each state that each device keeps, and return these regions.

        A state is a model output that is a model input of the next frame.
        """
        last, pieces = 1 + max(self.routing.periods.values(), default=0), list[StatePiece]()
        for retention in self.routing.state_retentions:
            device, past, present, assembly = retention.device, retention.past, retention.present, retention.assembly
            place = NodePlacement(device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            tensor = self._add_assembly(assembly, TensorKey(present), place)
            box = assembly.box if isinstance(assembly, AssemblyLeaf) else None
            if box is not None and box.origin is not None and box.region == tensor.region:
                name = self.builder.unique_tensor_name(f"{present}@{device}=")
                tensor = self.builder.add_identity(tensor, place, name, tensor.name)
            read_name = self.state_tensors[past, device].name
            pieces.append(StatePiece(device, past, present, retention.region, read_name, tensor.name))
        return pieces

    def _dtype(self, tensor: str) -> int:
        return self.layers.tensors[tensor].dtype

    def _find_direct_outputs(self) -> dict[tuple[TensorKey, TaskId], str]:
        """Return the names of the model outputs that a single task computes whole, by tensor and task.

        A task computes one part of a layer, here on the output's first sink (a device that receives outputs). Its
        tensor gets the name of the output, so that no copy is needed.
        """
        names: dict[tuple[TensorKey, TaskId], str] = {}
        for output, delivery in self.first_delivery_of.items():
            tree = delivery.assembly
            if tree is None:
                layer = self.layers.producer[output].name
                makers = (t for t in self.routing.tasks if t.layer == layer and t.device == delivery.device)
                names[TensorKey(output), task_id(next(makers))] = output
            elif isinstance(tree, AssemblyLeaf) and tree.box.task is not None and tree.region == tree.box.region:
                names[tree.box.key, tree.box.task] = output
        return names

    def _tensor_name(self, key: TensorKey, task: Task) -> str:
        """Return the name of a tensor that a task (the computation of one part of a layer) computes."""
        if (key, task_id(task)) in self.output_name_of_task:
            return self.output_name_of_task[key, task_id(task)]
        # A tensor that only one task computes keeps its name, unless it is a model output.
        if self.task_count_by_layer[task.layer] == 1 and key.tensor not in self.first_delivery_of:
            return key.tensor
        lane = f"#{task.lane}" if task.lane else ""
        reduce = f"+{key.reduce[0]}:{key.reduce[1]}" if key.reduce else ""
        return self.builder.unique_tensor_name(f"{key.tensor}@{task.device}{lane}{reduce}")

    def _add_assembly(self, tree: Assembly, key: TensorKey, place: NodePlacement, name: str = "") -> PlacedTensor:
        """Return a region of a tensor, which slices and concatenations on the reader's device assemble.

        Readers in the same lane (group of the device's parts) share these nodes, which are added for the first of them.
        """
        if isinstance(tree, AssemblyLeaf):
            return self._add_local_slice(self._tensor_of_box(tree.box, place), tree.region, place)
        cache_key = (tree, place.device, place.lane)
        if cache_key not in self.shared_tensors:
            pieces = [self._add_assembly(child, key, place) for child in tree.children]
            name = name or self.builder.unique_tensor_name(f"{key.tensor}@{place.device}&")
            self.shared_tensors[cache_key] = self.builder.add_concat(pieces, tree.axis, place, name)
        return self.shared_tensors[cache_key]

    def _add_local_slice(self, tensor: PlacedTensor, region: Region, place: NodePlacement) -> PlacedTensor:
        """Return a region of `tensor`, from a Slice on the reader's device if it is not the whole tensor.

        Readers in the same lane (group of the device's parts) share the Slice, which is added for the first of them.
        """
        if tensor.region == region:
            return tensor
        cache_key = (tensor.name, region, place.device, place.lane)
        if cache_key not in self.shared_tensors:
            self.shared_tensors[cache_key] = self.builder.add_slice(tensor, region, place)
        return self.shared_tensors[cache_key]

    def _tensor_of_box(self, box: Box, place: NodePlacement) -> PlacedTensor:
        """Return the tensor of a box (a region of a tensor on a device).

        If the box is received, the nodes that slice and convert it are added at the first call.
        """
        assert box.region is not None
        if box.origin is None:
            if box.task is None:
                return self.state_tensors.get((box.key.tensor, box.device)) or PlacedTensor(
                    box.key.tensor, box.region, self._dtype(box.key.tensor)
                )
            return self.tensor_of_task[box.key, box.task]
        cache_key = (box.origin, box.region)
        if cache_key not in self.shared_tensors:
            # The sender's Slice has the position of the layer that reads the box. The lane -1 puts it before all lanes
            # (groups of parts) of the sender, so that the receiver does not wait for them.
            period, _, position, _ = place.step_key
            slice_placement = NodePlacement(box.origin.device, box.origin.lane, (period, -1, position, 0))
            whole = self._tensor_of_box(box.origin, place)
            piece = self.builder.add_slice(whole, box.region, slice_placement)
            # The cast of an uncut tensor directly follows the node that computes the tensor.
            is_cut = piece is not whole
            maker = slice_placement if is_cut else self.placement_of_task.get(box.origin.task, slice_placement)
            self.shared_tensors[cache_key] = self.wire_casts.narrow(piece, box, slice_placement, maker)
        return self.wire_casts.widen(self.shared_tensors[cache_key], box, place)

    def _place_task(self, task: Task) -> None:
        """Add the nodes of a task (the computation of one part of a layer), and those that assemble its inputs."""
        # Each layer has two positions in the order of execution: the first for computing partial sums, and the second
        # for adding them. Tasks without partial sums also have the second one.
        position = 2 * self.layers.position[task.layer] + (task.kind != "partial")
        step_key = (self.routing.periods[task_id(task)], task.lane, position, 1)
        place = NodePlacement(task.device, task.lane, step_key, task_id(task))
        self.placement_of_task[task_id(task)] = place
        reads = self.routing.reads.get(task_id(task), {})
        tensors = {
            key.tensor: self._add_assembly(tree, key, place) for key, tree in reads.items() if key.reduce is None
        }
        if task.kind == "merger":
            layer = self.layers.layer_by_name[task.layer]
            anchor = layer.nodes[layer.anchor]
            tensor, operator = self.layers.cut_output(anchor), self.layers.rule_of(anchor).merge_operator
            partials = sorted((key for key in reads if key.reduce is not None), key=lambda key: key.reduce or (0, 0))
            terms = [self._add_assembly(reads[key], key, place) for key in partials]
            tensors[tensor] = self.builder.add_merge(terms, operator, place, self._tensor_name(TensorKey(tensor), task))
        for task_node in task.nodes:
            if task_node.piece is None:
                self._place_whole_node(task_node.node, tensors, task, place)
            else:
                self._place_node(task_node.node, task_node.piece, tensors, task, place)
        self.tensor_of_task |= {(key, task_id(task)): tensors[key.tensor] for key in task.outputs}

    def _place_node(
        self, node: Node, piece: Piece, tensors: dict[str, PlacedTensor], task: Task, place: NodePlacement
    ) -> None:
        """Add a node that computes a piece: a region of its output, from regions of its inputs."""
        output, (target,) = self.layers.cut_output(node), task.outputs
        name = self._tensor_name(target if output == target.tensor else TensorKey(output), task)
        inputs = self._node_inputs(node, piece, tensors, place)
        written_name = name
        # Some operators, for example LRN, write a larger region than the task must compute. It is sliced at the end.
        if piece.written_region is not None and piece.written_region != piece.out:
            written_name = self.builder.unique_tensor_name(f"{name}{format_region(piece.written_region)}")
        outputs = [written_name if o == output else self._unread_output(o, place) for o in node.outputs]
        node_name = node.name if name in node.outputs else f"{node.name}@{place.device}"
        written = self.builder.declare(written_name, self._dtype(output), piece.written_region or piece.out)
        if piece.table_rows is None:
            self.builder.copy_node(node.name, node_name, inputs, outputs, place, piece)
        else:
            table, indices = (self.layers.tensors[tensor] for tensor in node.inputs)
            read = PlacedTensor(inputs[1], piece.needs[1] or (), indices.dtype)
            row_count = (table.shape or ())[0]
            self.builder.add_table_lookup(node.name, node_name, inputs[0], read, row_count, written, place, piece)
        tensors[output] = self.builder.add_slice(written, piece.out, place, name)

    def _unread_output(self, output: str, place: NodePlacement) -> str:
        return output and self.builder.unique_tensor_name(f"{output}@{place.device}")

    def _node_inputs(
        self, node: Node, piece: Piece, tensors: dict[str, PlacedTensor], place: NodePlacement
    ) -> list[str]:
        """Return the input names of a node that computes a piece (a region of its output); "" for an omitted input."""
        inputs: list[str] = []
        omitted = [("", None)] * (max(piece.constants, default=-1) + 1 - len(node.inputs))
        for i, (tensor, need) in enumerate((*zip(node.inputs, piece.needs, strict=True), *omitted)):
            if i in piece.constants:
                array = piece.constants[i]
                inputs.append(self.builder.add_constant(array, f"{node.name}.{i}{array.tolist()}"))
            elif not tensor:
                inputs.append("")
            elif need is not None and self.layers.tensors[tensor].is_constant:
                whole = need == self.facts.initializer_regions[tensor]
                inputs.append(tensor if whole else self.builder.add_constant(WeightSlice(tensor, need)))
            elif need is not None:
                inputs.append(self._add_local_slice(tensors[tensor], need, place).name)
        while inputs and not inputs[-1]:
            inputs.pop()
        return inputs

    def _place_whole_node(self, node: Node, tensors: dict[str, PlacedTensor], task: Task, place: NodePlacement) -> None:
        """Add an unchanged node of a layer that stays whole, with the names that its inputs have on this device."""
        for tensor in filter(None, node.outputs):
            # A tensor without a static shape gets the region of a scalar. The region is never used, because only this
            # device reads the tensor.
            shape, name = self.layers.tensors[tensor].shape, self._tensor_name(TensorKey(tensor), task)
            tensors[tensor] = PlacedTensor(name, full_region(shape or ()), self._dtype(tensor))
            info = tensors[tensor] if shape is not None else self.facts.value_infos.get(tensor)
            if info is not None:
                self.builder.tensor_descriptions[name] = info
        # `node.inputs` includes initializers that only subgraphs of the node read. They must not be removed as unread.
        self.captured_names.update(node.inputs)
        names, proto = {tensor: placed.name for tensor, placed in tensors.items()}, self.facts.nodes[node.name]
        inputs, outputs = ([names.get(name, name) for name in ends] for ends in (proto.input, proto.output))
        self.builder.copy_node(node.name, node.name, inputs, outputs, place, captured=names)

    def _add_deliveries(self) -> dict[str, str]:
        """Add the nodes that assemble the model's outputs on the sinks (the devices that receive them).

        Returns:
            The model output of each copy, by the name of the copy. If an output has several sinks, all but the first
            get copies.
        """
        last = 1 + max(self.routing.periods.values(), default=0)
        copies: dict[str, str] = {}
        delivered = set(self.output_name_of_task.values())
        for delivery in self.routing.deliveries:
            output, first = delivery.output, self.first_delivery_of[delivery.output] is delivery
            if delivery.assembly is None or (first and output in delivered):
                continue
            place = NodePlacement(delivery.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            name = output if first else self.builder.unique_tensor_name(f"{output}@{delivery.device}")
            tensor = self._add_assembly(delivery.assembly, TensorKey(output), place, name)
            if tensor.name != name:
                self.builder.add_identity(tensor, place, name, tensor.name)
            if not first:
                copies[name] = output
        return copies


MIN_OPSET = 13
"""First opset that can encode int8-block, because its QuantizeLinear can have a scale for each row of a matrix."""
SCALES_PER_OCTAVE = 4
"""Number of scales per factor of two in the scale table of the wire type int8-block."""
SCALE_MARGIN = 2.0**-10
"""Fraction by which the scales of int8-block are reduced, so that decoded values get the same scale when sent again.

It exceeds the rounding errors of the operator Log. Half a quantization step, 1/254 of the largest value, is far larger.
"""
ZERO_INDEX = 32
"""Index of the int8-block scale for blocks in which the largest magnitude is 1."""
MAX_INT8_BLOCK = float(2.0 ** ((127 - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE))
"""Largest magnitude that the wire type int8-block can represent. Larger finite values are clipped."""
MAX_ROUNDING_ERROR = 2.0 ** (1 / SCALES_PER_OCTAVE) / 254
"""Largest rounding error of a value sent as int8-block, as a share of the largest magnitude in its block."""
_LOG_STEP = np.float32(math.log(2) / SCALES_PER_OCTAVE)
_INVALID_INDEX = np.int32(256)
"""Index beyond the end of the table of int8-block scales, so that a Gather with it fails and ends the run."""


@functools.cache
def make_scale_table() -> NDArray[np.float32]:
    """Return the scales of the wire type int8-block, for the indices 0 to 127 and then -128 to -1.

    Index i is for blocks with a largest magnitude up to 2^((i - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE). The 0.5 is
    added because the sender rounds the logarithm of the largest magnitude to the nearest index.
    """
    indices = np.roll(np.arange(-128, 128), 128)  # ONNX counts negative indices from the end of a table.
    largest = 2.0 ** ((indices - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE)
    return (largest * (1 - SCALE_MARGIN) / 127).astype(np.float32)


class BlockQuantizer:
    """Builder of encoders and decoders of the wire type int8-block in a placed graph (nodes with devices).

    Outputs of an encoder's nodes are named SENT.SUFFIX, except the last one, which is the sent tensor SENT.
    """

    def __init__(self, builder: PlacedGraphBuilder) -> None:
        self.builder = builder

    def encode(
        self, tensor: PlacedTensor, name: str, place: NodePlacement, origin: str, wire_name: str
    ) -> PlacedTensor:
        """Add nodes that encode a tensor for the wire type int8-block; return the encoded tensor, called `name`.

        Args:
            tensor: Tensor with at least one value.
            name: Name of the encoded tensor.
            place: Device and position in time of the nodes.
            origin: Name of the model's tensor for which the nodes are added.
            wire_name: Layer or model input of which the tensor is an output, for error messages.
        """
        count = volume(tensor.region)
        blocks, rows = block_count(count), min(BLOCK_SIZE, count)
        steps = _NodeChain(self.builder, name, place, origin)
        values = steps.cast(tensor, onnx.TensorProto.FLOAT)
        if blocks * rows != count:
            flat = steps.reshape(values, (count,))
            zeros = self._zeros(np.float32, blocks * rows - count)
            values = steps.add("Concat", [flat.name, zeros], (blocks * rows,), flat.dtype, axis=0)
        matrix = steps.reshape(values, (blocks, rows))
        magnitudes = steps.add("Abs", [matrix.name], (blocks, rows), matrix.dtype)
        opset = self.builder.facts.opset
        axes: dict[str, Any] = {"axes": (1,)} if opset < 18 else {}
        inputs = [magnitudes.name] if axes else [magnitudes.name, self.builder.add_constant((1,))]
        largest = steps.add("ReduceMax", inputs, (blocks,), matrix.dtype, keepdims=0, **axes)
        mean = steps.add("ReduceMean", inputs, (blocks,), matrix.dtype, keepdims=0, **axes)
        logarithm = steps.add("Log", [largest.name], (blocks,), matrix.dtype)
        step = self.builder.add_constant(np.array(_LOG_STEP), "int8-block~step")
        zero_index = self.builder.add_constant(np.array(ZERO_INDEX, np.int8), "int8-block~zero")
        index = steps.add("QuantizeLinear", [logarithm.name, step, zero_index], (blocks,), onnx.TensorProto.INT8)
        scale = self._add_checked_scales(steps, index, (largest, mean), wire_name)
        parameters = [scale.name, self._zeros(np.int8, blocks)]
        matrix = steps.add("QuantizeLinear", [matrix.name, *parameters], (blocks, rows), index.dtype, axis=0)
        flat = steps.cut(steps.reshape(matrix, (blocks * rows,)), 0, count)
        sent = PlacedTensor(name, ((0, count + blocks),), index.dtype)
        return self.builder.add_node("Concat", [flat.name, index.name], sent, place, origin, axis=0)

    def decode(
        self, sent: PlacedTensor, region: Region, dtype: int, name: str, place: NodePlacement, origin: str
    ) -> PlacedTensor:
        """Add nodes that decode the received tensor `sent` (int8-block); return the decoded tensor, called `name`.

        The decoded tensor contains `region` of the model's tensor, and has the element type `dtype`.
        """
        count = volume(region)
        blocks, rows = block_count(count), min(BLOCK_SIZE, count)
        steps = _NodeChain(self.builder, name, place, origin)
        values, index = steps.cut(sent, 0, count), steps.cut(sent, count, count + blocks)
        if blocks * rows != count:
            inputs = [values.name, self._zeros(np.int8, blocks * rows - count)]
            values = steps.add("Concat", inputs, (blocks * rows,), values.dtype, axis=0)
        matrix = steps.reshape(values, (blocks, rows))
        scale = self._add_scales(steps, index)
        inputs = [matrix.name, scale.name]
        matrix = steps.add("DequantizeLinear", inputs, (blocks, rows), scale.dtype, axis=0)
        if blocks * rows != count:
            matrix = steps.cut(steps.reshape(matrix, (blocks * rows,)), 0, count)
        matrix = steps.cast(matrix, dtype)
        shape = self.builder.add_constant(region_shape(region))
        return self.builder.add_node("Reshape", [matrix.name, shape], PlacedTensor(name, region, dtype), place, origin)

    def _add_scales(self, steps: _NodeChain, index: PlacedTensor) -> PlacedTensor:
        return self._add_lookup(steps, steps.cast(index, onnx.TensorProto.INT32), "gather")

    def _add_checked_scales(
        self, steps: _NodeChain, index: PlacedTensor, statistics: tuple[PlacedTensor, PlacedTensor], wire_name: str
    ) -> PlacedTensor:
        """Add nodes that look up the scale of each block, and that fail if a block contains NaN or infinity.

        Args:
            steps: Adds the nodes.
            index: Index of the scale of each block.
            statistics: Largest and mean magnitude of each block.
            wire_name: The layer or model input that the error proposes to send unchanged.
        """
        shape, wide = region_shape(index.region), steps.cast(index, onnx.TensorProto.INT32)
        # The largest magnitude can ignore NaN, and the mean of finite values can overflow. The smaller one of the two
        # is finite exactly if all values of the block are finite.
        magnitude = steps.add("Min", [tensor.name for tensor in statistics], shape, onnx.TensorProto.FLOAT)
        limit = self.builder.add_constant(np.array(np.finfo(np.float32).max), "int8-block~limit")
        is_finite = steps.add("LessOrEqual", [magnitude.name, limit], shape, onnx.TensorProto.BOOL)
        invalid = self.builder.add_constant(np.array(_INVALID_INDEX), "int8-block~invalid")
        checked = steps.add("Where", [is_finite.name, wide.name, invalid], shape, wide.dtype)
        # The name of the failing node is the error message, because onnxruntime's error contains only this name.
        error = (
            f"error: tensor {steps.origin} contains NaN or infinity, which {INT8_BLOCK} cannot represent: "
            f"add {wire_name}={UNCHANGED} to --wire-dtype"
        )
        return self._add_lookup(steps, checked, error)

    def _add_lookup(self, steps: _NodeChain, index: PlacedTensor, name: str) -> PlacedTensor:
        table = self.builder.add_constant(make_scale_table(), "int8-block~table")
        shape = region_shape(index.region)
        return steps.add("Gather", [table, index.name], shape, onnx.TensorProto.FLOAT, name)

    def _zeros(self, dtype: type[np.generic], count: int) -> str:
        return self.builder.add_constant(np.zeros(count, dtype), f"int8-block~{np.dtype(dtype)}zeros{count}")


class _NodeChain:
    """Builder of nodes with the same device and position in time. Their outputs are named after the tensor `name`."""

    def __init__(self, builder: PlacedGraphBuilder, name: str, place: NodePlacement, origin: str) -> None:
        self.builder, self.name, self.place, self.origin = builder, name, place, origin

    def add(
        self, op: str, inputs: Sequence[str], shape: Sequence[int], dtype: int, suffix: str = "", **attributes: Any
    ) -> PlacedTensor:
        name = self.builder.unique_tensor_name(f"{self.name}.{suffix or op.lower()}")
        output = PlacedTensor(name, tuple((0, extent) for extent in shape), dtype)
        return self.builder.add_node(op, inputs, output, self.place, self.origin, **attributes)

    def cast(self, tensor: PlacedTensor, dtype: int) -> PlacedTensor:
        shape = region_shape(tensor.region)
        return tensor if tensor.dtype == dtype else self.add("Cast", [tensor.name], shape, dtype, to=dtype)

    def reshape(self, tensor: PlacedTensor, shape: tuple[int, ...]) -> PlacedTensor:
        return self.add("Reshape", [tensor.name, self.builder.add_constant(shape)], shape, tensor.dtype)

    def cut(self, tensor: PlacedTensor, start: int, stop: int) -> PlacedTensor:
        if tensor.region == ((start, stop),):
            return tensor
        bounds = [self.builder.add_constant((number,)) for number in (start, stop, 0)]
        return self.add("Slice", [tensor.name, *bounds], (stop - start,), tensor.dtype)


def is_encoder_tensor(output: str, sent: str) -> bool:
    """Return True if `output` is an intermediate tensor of the encoder that computes the sent tensor `sent`."""
    return output.startswith(f"{sent}.")


LAST_POSITION = 1 << 31
"""Position in the order of execution after all layers, for casts of sent slices, so that they follow all slices."""
MIN_OPSET_BY_DTYPE = {"float16": 6, "bfloat16": 13, "int8": 10, INT8_BLOCK: MIN_OPSET}
"""First opset with the operators that convert a tensor to a wire type (a type in which it is sent), by wire type."""
PLACEHOLDER_RANGE = (-1.0, 1.0)
"""Value range of tensors sent as int8 in programs that are only simulated, for which no samples have been run."""


class WireCasts:
    """Builder of the casts of tensors that are sent in a smaller element type (wire type) than their own."""

    def __init__(self, builder: PlacedGraphBuilder, layers: LayerGraph, wire: WireFormat) -> None:
        self.builder, self.layers, self.wire = builder, layers, wire
        self.kinds = effective_wire_dtypes(layers)
        self.quantizer = BlockQuantizer(builder)
        # Received tensors after the cast to their original type, by the name of the received tensor, the device and the
        # lane (number of a group of the device's parts).
        self.wide: dict[tuple[str, str, int], PlacedTensor] = {}

    def narrow(
        self, piece: PlacedTensor, box: Box, slice_placement: NodePlacement, maker: NodePlacement
    ) -> PlacedTensor:
        """Return the tensor `piece` in the element type in which it is sent. A cast is added if it is needed.

        Args:
            piece: Tensor that contains `box`.
            box: Region of a tensor that is sent.
            slice_placement: Placement of the Slice that may cut the box.
            maker: Placement of the node that computes `piece`: this Slice, or a node of a layer.
        """
        kind = self.kinds.get(box.key.tensor)
        if kind is None or (kind == INT8_BLOCK and not volume(piece.region)):
            return piece
        # The cast of a slice follows all slices. Between two slices, it would end the segment (the submodel that a
        # device runs at once), and the tensors would not be sent together.
        period, lane, position, phase = maker.step_key
        placement = slice_placement._replace(step_key=(period, lane, LAST_POSITION if lane < 0 else position, phase))
        name = self.builder.unique_tensor_name(f"{piece.name}~{kind}")
        if kind == INT8_BLOCK:
            wire_name = wire_name_by_tensor(self.layers)[box.key.tensor]
            return self.quantizer.encode(piece, name, placement, range_name(box.key), wire_name)
        narrowed = PlacedTensor(name, piece.region, sent_dtype(self.layers, box.key.tensor))
        return self._convert(piece, narrowed, placement, box.key, "QuantizeLinear")

    def widen(self, sent: PlacedTensor, box: Box, place: NodePlacement) -> PlacedTensor:
        """Return a received box (region of a tensor), cast back from the wire type to its original type.

        All parts of a device with the same lane (number of a group of parts) share the cast.
        """
        assert box.region is not None
        key, kind = box.key, self.kinds.get(box.key.tensor)
        if kind is None or (kind == INT8_BLOCK and not volume(box.region)):
            return sent
        cache_key = (sent.name, place.device, place.lane)
        if cache_key not in self.wide:
            name = self.builder.unique_tensor_name(f"{sent.name}@{place.device}")
            widened = PlacedTensor(name, box.region, self.layers.tensors[key.tensor].dtype)
            if kind == INT8_BLOCK:
                origin = range_name(key)
                self.wide[cache_key] = self.quantizer.decode(sent, box.region, widened.dtype, name, place, origin)
            else:
                self.wide[cache_key] = self._convert(sent, widened, place, key, "DequantizeLinear")
        return self.wide[cache_key]

    def _convert(
        self, tensor: PlacedTensor, converted: PlacedTensor, placement: NodePlacement, key: TensorKey, quantize_op: str
    ) -> PlacedTensor:
        origin = range_name(key)
        if self.kinds[key.tensor] != "int8":
            return self.builder.add_node("Cast", [tensor.name], converted, placement, origin, to=converted.dtype)
        scale, zero = int8_scale_and_zero_point(self.wire.ranges.get(origin, PLACEHOLDER_RANGE))
        names = (
            self.builder.add_constant(np.array(scale, np.float32), f"{origin}~scale"),
            self.builder.add_constant(np.array(zero, np.int8), f"{origin}~zero"),
        )
        return self.builder.add_node(quantize_op, [tensor.name, *names], converted, placement, origin)


def check_wire_dtypes(routing: Routing, wire: WireFormat, opset: int) -> None:
    """Raise DicompilerError if the opset is too old for a wire type, or the value range of an int8 tensor is unknown.

    A wire type is the element type in which a tensor is sent. `opset` is the version of the model's standard operators;
    0: it uses none.
    """
    dtypes = effective_wire_dtypes(routing.layers)
    keys = dict.fromkeys(box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in dtypes)
    for key in keys:
        kind, name = dtypes[key.tensor], range_name(key)
        if 0 < opset < MIN_OPSET_BY_DTYPE.get(kind, 0):
            raise DicompilerError(
                f"wire: {kind} needs opset {MIN_OPSET_BY_DTYPE[kind]}, but the model has {opset}: convert it "
                "(onnx.version_converter), or use another type"
            )
        if kind == "int8" and name not in wire.ranges:
            raise DicompilerError(
                f"wire: the value range of {name!r}, which is sent as int8, is unknown: "
                "give sample inputs (--wire-samples)"
            )


def max_narrowings_on_path(routing: Routing) -> int:
    """Return how often a value is converted to a smaller wire type on a path from a model input to a model output.

    The result is the maximum over all paths.
    """
    layers = routing.layers
    dtypes = effective_wire_dtypes(layers)
    sent_keys = {box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in dtypes}
    whole = {key.tensor for key in sent_keys if key.reduce is None}
    partial = {key.tensor for key in sent_keys if key.reduce is not None}
    count = dict.fromkeys(layers.inputs, 0)
    for layer in layers.layers:
        largest = max((count.get(name, 0) + (name in whole) for name in layer.inputs), default=0)
        has_sent_sums = any(name in partial for node in layer.nodes for name in node.outputs)
        count |= dict.fromkeys(layer.outputs, largest + has_sent_sums)
    return max((count.get(name, 0) + (name in whole) for name in layers.outputs), default=0)
