"""Placed graphs: nodes with a device and a position in time, and the tensors between them, before they become ONNX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from dicompiler.ir.onnx.graph_structure import body_names, body_reads, control_flow_bodies, rename_captures
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.names import unique_name
from dicompiler.ir.onnx.weights import is_fixed_size
from dicompiler.ir.operator_rule import STAND_IN_DOMAIN, Piece
from dicompiler.ir.output_names import read_output_names
from dicompiler.ir.program import TensorSpec
from dicompiler.ir.recurrent_states import StatePairs, StatePiece, read_states
from dicompiler.ir.regions import Region, full_region, region_shape, with_interval
from dicompiler.ir.routing import TaskId
from dicompiler.partition.routing import format_region

StepKey = tuple[int, int, int, int]
"""Sort key of a node: (period, lane, position in layer order, phase).

A lane is a group of a device's parts, which the device computes before the next group. A period lasts from one exchange
of tensors between lanes or devices to the next. Slices that are sent have lane -1 and phase 0; all other nodes have
phase 1.
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
"""Type and shape of a tensor: a ValueInfoProto of the original model, or a PlacedTensor for a new tensor."""


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

        # In the exact check of `verify`, small integers replace the indices. They can be beyond the table's end, so
        # they are taken modulo the number of rows.
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
