"""Placed graph: nodes with a device and a step, their tensors, and the tensors that must be sent.

The builder names tensors, and knows how each opset writes slices and sums. It knows nothing of plans and layers.
`onnx_writer` writes the graph as ONNX; for plans that are only simulated, it is segmented without being written.
"""

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
from dicompiler.ir.program import TensorSpec
from dicompiler.ir.recurrent_states import StatePairs, StatePiece, read_states
from dicompiler.ir.regions import Region, full_region, region_shape, with_interval
from dicompiler.ir.tasks import TaskId
from dicompiler.partition.routing import format_region

StepKey = tuple[int, int, int, int]  # run, lane (-1: before all lanes), position in layer order, phase
NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
FROM_INPUT = -1  # stands for the producer of graph inputs, which are available from the start


class WeightSlice(NamedTuple):
    """Region of an initializer of the model.

    Attributes:
        weight: Name of the initializer.
        region: The region.
    """

    weight: str
    region: Region


Constant = NDArray[Any] | tuple[int, ...] | WeightSlice
"""New initializer; a tuple of numbers is an int64 vector."""


class PlacedTensor(NamedTuple):
    """Tensor of the placed graph.

    Attributes:
        name: Name in the placed graph.
        region: Region of the original tensor that it contains.
        dtype: Element type, an onnx.TensorProto.DataType.
    """

    name: str
    region: Region
    dtype: int


TensorKnowledge = onnx.ValueInfoProto | PlacedTensor
"""Type and shape of a tensor."""


class NodePlacement(NamedTuple):
    """Device and time of nodes.

    Attributes:
        device: Name of the device.
        lane: Lane of the device.
        step_key: Sort key of the step.
        part: Part to which the nodes belong.
    """

    device: str
    lane: int
    step_key: StepKey = (0, 0, 0, 0)
    part: TaskId | None = None


class PlacedNode(NamedTuple):
    """Node of the placed graph.

    Attributes:
        placement: Device and step.
        origin: The model's node or the tensor for which it is made.
        reads: Tensors that it reads, including captured ones.
        outputs: Names of its outputs.
        inputs: Names of its inputs.
        name: Name of the node.
        region: Region that it computes; None in layers that stay whole.
        op: Operator; "": that of `template`.
        template: Model node of which it is a copy with other names and attributes.
        attributes: Attributes to set, by name; None removes one.
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
        """The operator type."""
        return self.op or (self.template.op_type if self.template is not None else "")


@dataclass(frozen=True)
class ModelFacts:
    """Data of a model for placement, looked up once.

    Attributes:
        opset: Opset of the standard operators; 0: the model uses none.
        nodes: Nodes by name.
        control_flow_nodes: Names of nodes with bodies.
        value_infos: Value infos by tensor.
        inputs: Value infos of the model's inputs.
        outputs: Value infos of the model's outputs.
        initializer_regions: Full region of each initializer.
        sparse_initializers: Names of sparse initializers.
        tensor_names: All tensor names.
        states: States of the model (see `ir.recurrent_states`).
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

    @classmethod
    def from_model(cls, model: Model) -> ModelFacts:
        graph = model.proto.graph
        values, inputs, outputs = ({v.name: v for v in of} for of in (graph.value_info, graph.input, graph.output))
        whole = {name: full_region(shape) for name, (_, shape) in model.initializers().items()}
        taken = {name for node in graph.node for name in (*node.input, *node.output, *body_names(node))}
        return cls(
            next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), 0),
            {node.name: node for node in graph.node},
            frozenset(node.name for node in graph.node if control_flow_bodies(node)),
            values,
            inputs,
            outputs,
            whole,
            frozenset(tensor.values.name for tensor in graph.sparse_initializer),
            frozenset({*taken, *inputs, *outputs, *whole}),
            read_states(model.proto) or (),
        )


@dataclass(frozen=True)
class PlacedGraph:
    """Nodes in step order, without nodes that do not lead to an output.

    Attributes:
        nodes: The nodes.
        infos: Types and shapes of tensors; a value info may contain another name.
        inputs: Model inputs, without constants.
        source: Devices that hold the inputs.
        sinks: Outputs of the graph, and the model output that each of them is.
        constants: New initializers.
        used_names: Names of initializers that are read or kept.
        state_pieces: Pieces of states.
        states: Model inputs that are states.
    """

    nodes: Sequence[PlacedNode]
    infos: Mapping[str, TensorKnowledge]
    inputs: tuple[str, ...]
    source: tuple[str, ...]
    sinks: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    used_names: frozenset[str] = frozenset()
    state_pieces: Sequence[StatePiece] = ()
    states: tuple[TensorSpec, ...] = ()

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that computes a tensor, by tensor."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.outputs if name}

    @cached_property
    def state_reads(self) -> frozenset[str]:
        """Tensors that are kept from the previous frame."""
        return frozenset(piece.read_name for piece in self.state_pieces)

    @cached_property
    def state_writes(self) -> frozenset[str]:
        """Tensors that are kept for the next frame."""
        return frozenset(piece.written_name for piece in self.state_pieces)

    @cached_property
    def unsized_inputs(self) -> frozenset[str]:
        """Inputs that are never sent: strings, and values that are not tensors.

        They are given to each device that reads them.
        """
        return frozenset(name for name in self.inputs if not is_fixed_size(self.tensor_spec(name).dtype))

    @cached_property
    def node_reads(self) -> Sequence[Sequence[str]]:
        """Tensors that each node reads, without constants."""
        available = self.producer.keys() | set(self.inputs) | self.state_reads
        return [[name for name in node.reads if name in available] for node in self.nodes]

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Indices of the nodes that read a tensor, in order, by tensor."""
        users: dict[str, list[int]] = {}
        for i, names in enumerate(self.node_reads):
            for name in names:
                users.setdefault(name, []).append(i)
        return users

    @cached_property
    def sends(self) -> Sequence[tuple[int, str, int, str]]:
        """Tensors to send, sorted.

        Each is (index of the producing node, tensor, number of devices that read it earlier, device).
        """
        sends: list[tuple[int, str, int, str]] = []
        devices = [node.placement.device for node in self.nodes]
        for name, indices in self.readers.items():
            if name in self.state_reads or name in self.unsized_inputs:
                continue
            producer = self.producer.get(name, FROM_INPUT)
            available = self.source if producer == FROM_INPUT else (devices[producer],)
            if len(indices) == 1 and devices[indices[0]] in available:  # the usual case
                continue
            readers = dict.fromkeys([devices[i] for i in indices])
            sends += [
                (producer, name, order, reader) for order, reader in enumerate(readers) if reader not in available
            ]
        return sorted(sends)

    def tensor_spec(self, tensor: str) -> TensorSpec:
        """Return type and shape of a tensor; no shape if it is not static or the value is not a tensor."""
        info = self.infos[tensor]
        if isinstance(info, PlacedTensor):
            return TensorSpec(tensor, info.dtype, region_shape(info.region))
        return replace(_tensor_spec(info), name=tensor)


@dataclass
class PlacedGraphBuilder:
    """Builder of a placed graph. Names are unique, and depend only on the order of calls."""

    facts: ModelFacts
    nodes: list[PlacedNode] = field(default_factory=list)
    tensor_knowledge: dict[str, TensorKnowledge] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    constant_names: dict[object, str] = field(default_factory=dict)
    node_name_counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensor_name_counts = dict.fromkeys(self.facts.tensor_names, 0)

    def unique_tensor_name(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if the name is taken."""
        return unique_name(wanted, self.tensor_name_counts)

    def declare(self, name: str, dtype: int, region: Region) -> PlacedTensor:
        """Declare type and region of a new tensor."""
        tensor = self.tensor_knowledge[name] = PlacedTensor(name, region, dtype)
        return tensor

    def add_constant(self, value: Constant, wanted: str = "") -> str:
        """Return the name of an initializer with this value.

        Equal values share one, except arrays with different `wanted` names.
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
        how: Piece | None = None,
        captured: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> None:
        """Add a copy of a model node.

        Args:
            node: Name of the model node.
            name: Name of the copy.
            inputs: Names of its inputs.
            outputs: Names of its outputs.
            place: Device and step.
            how: Piece that it computes; None: the whole node, unchanged.
            captured: Names on this device of tensors that its bodies capture.
        """
        copied, reads = self.facts.nodes[node], [*filter(None, inputs)] if "" in inputs else inputs
        if node in self.facts.control_flow_nodes:
            original, copied = copied, onnx.NodeProto()
            copied.CopyFrom(original)
            rename_captures(copied, captured)
            reads = [*reads, *body_reads(copied)]
        region, op, attributes = (None, "", NO_ATTRIBUTES) if how is None else (how.out, how.op or "", how.attributes)
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
        how: Piece,
    ) -> None:
        """Add a table lookup with only some rows of the table.

        Indices of other rows give 0, which partial sums ignore.

        The result is selected by Where instead of a multiplication, because rows can contain NaN. (Where turns -0.0
        into 0.0, which is equal.) An index outside of the whole table is also outside of the piece, so the node reports
        it; its name says which table and indices are meant. In the exact check, indices wrap around. It adds
        TABLE_LOOKUP_NODE_COUNT nodes.

        Args:
            node: Name of the model node.
            name: Name of the lookup's node.
            table: Name of the table's rows on this device.
            indices: The indices.
            row_count: Number of rows of the whole table.
            output: Result.
            place: Device and step.
            how: Piece of the lookup, with `table_rows`.
        """
        assert how.table_rows is not None
        (start, stop), kind = how.table_rows, helper.tensor_dtype_to_np_dtype(indices.dtype)

        def add(op: str, *inputs: str | int, dtype: int = indices.dtype) -> str:
            names = [name if isinstance(name, str) else self._add_scalar(name, kind) for name in inputs]
            result = PlacedTensor(self.unique_tensor_name(f"{output.name}?"), indices.region, dtype)
            return self.add_node(op, names, result, place, node).name

        is_exact_check = self.facts.nodes[node].domain.startswith(STAND_IN_DOMAIN)
        raw, boolean = indices.name, onnx.TensorProto.BOOL
        if is_exact_check:
            index = add("Mod", raw, row_count)
        else:
            index = add("Where", add("Less", raw, 0, dtype=boolean), add("Add", raw, row_count), raw)
        is_elsewhere, is_invalid = (
            add(
                "Or", add("Less", index, low, dtype=boolean), add("Less", high - 1, index, dtype=boolean), dtype=boolean
            )
            for low, high in ((start, stop), (0, row_count))
        )
        local = add("Where", is_elsewhere, add("Where", is_invalid, indices.name, 0), add("Sub", index, start))
        row_axes = [(0, 1)] * (len(output.region) - len(indices.region))
        mask = PlacedTensor(self.unique_tensor_name(f"{output.name}?"), (*indices.region, *row_axes), boolean)
        self.add_node("Reshape", [is_elsewhere, self.add_constant(region_shape(mask.region))], mask, place, node)
        found = self.declare(self.unique_tensor_name(f"{output.name}?"), output.dtype, output.region)
        of, by = self.facts.nodes[node].input
        name = f"{name}: rows of {of} that {by} numbers: 0 to {row_count - 1}, here {start} to {stop - 1}"
        self.copy_node(node, name, [table, local], [found.name], place, how)
        zero = self._add_scalar(0, helper.tensor_dtype_to_np_dtype(output.dtype))
        self.add_node("Where", [mask.name, zero, found.name], output, place, node)

    def _add_scalar(self, value: int, dtype: np.dtype[Any]) -> str:
        return self.add_constant(np.array(value, dtype), f"{dtype}{value}")

    def add_slice(self, tensor: PlacedTensor, region: Region, place: NodePlacement, name: str = "") -> PlacedTensor:
        """Return a region of a tensor, by a Slice if it is not the whole tensor."""
        if tensor.region == region:
            return tensor
        pairs = enumerate(zip(region, tensor.region, strict=True))
        cuts = [
            (axis, wanted[0] - available[0], wanted[1] - available[0])
            for axis, (wanted, available) in pairs
            if wanted != available
        ]
        axes, starts, ends = zip(*cuts, strict=True)
        output = PlacedTensor(
            name or self.unique_tensor_name(tensor.name + format_region(region)), region, tensor.dtype
        )
        if 0 < self.facts.opset < 10:
            return self.add_node(
                "Slice", [tensor.name], output, place, tensor.name, axes=axes, ends=ends, starts=starts
            )
        inputs = [tensor.name, *(self.add_constant(numbers) for numbers in (starts, ends, axes))]
        return self.add_node("Slice", inputs, output, place, tensor.name)

    def add_concat(self, pieces: Sequence[PlacedTensor], axis: int, place: NodePlacement, name: str) -> PlacedTensor:
        """Concatenate pieces along an axis."""
        first = pieces[0].region
        region = with_interval(first, axis, (first[axis][0], pieces[-1].region[axis][1]))
        output = PlacedTensor(name, region, pieces[0].dtype)
        return self.add_node("Concat", [piece.name for piece in pieces], output, place, name, axis=axis)

    def add_merge(self, terms: Sequence[PlacedTensor], op: str, place: NodePlacement, name: str) -> PlacedTensor:
        """Combine `terms` in order by a chain of binary operators `op`.

        A single term is renamed by Identity.
        """
        op = "Sum" if op == "Add" and 0 < self.facts.opset < 7 else op  # onnxruntime has no Add before opset 7
        total = terms[0]
        if len(terms) == 1:
            return self.add_identity(total, place, name, name)
        for i, term in enumerate(terms[1:], 1):
            output = total._replace(name=name if i == len(terms) - 1 else self.unique_tensor_name(f"{name}+{i}"))
            total = self.add_node(op, [total.name, term.name], output, place, name)
        return total

    def add_identity(self, tensor: PlacedTensor, place: NodePlacement, name: str, origin: str) -> PlacedTensor:
        """Return a tensor under another name."""
        return self.add_node("Identity", [tensor.name], tensor._replace(name=name), place, origin)

    def add_node(
        self, op: str, inputs: Sequence[str], output: PlacedTensor, place: NodePlacement, origin: str, **attributes: Any
    ) -> PlacedTensor:
        """Add a new node, named like its output."""
        name = unique_name(output.name, self.node_name_counts)
        self.tensor_knowledge[output.name] = output
        self.nodes.append(
            PlacedNode(place, origin, inputs, (output.name,), inputs, name, output.region, op, None, attributes)
        )
        return output

    def build(
        self, kept: Iterable[str], extra: Mapping[str, str], source: tuple[str, ...], pieces: Sequence[StatePiece] = ()
    ) -> PlacedGraph:
        """Return the placed graph.

        Args:
            kept: Initializers to keep although no node names them as inputs.
            extra: Additional outputs, and the model output that each of them is.
            source: Devices that hold the inputs.
            pieces: Pieces of states.
        """
        facts, kept = self.facts, frozenset(kept)
        states = dict(facts.states)
        sinks = {**{name: name for name in facts.outputs if name not in states.values()}, **extra}
        wanted, nodes = {*sinks, *kept, *(piece.written_name for piece in pieces)}, []
        for node in sorted(self.nodes, key=lambda node: node.placement.step_key)[::-1]:
            if not wanted.isdisjoint(node.outputs):  # copies of whole layers may have unused outputs
                wanted.update(node.reads)
                nodes.append(node)
        used = kept.union(*(node.inputs for node in nodes))
        infos = {
            **self.tensor_knowledge,
            **facts.inputs,
            **{name: facts.outputs[output] for name, output in sinks.items()},
        }
        constants = (facts.initializer_regions.keys() & used) | facts.sparse_initializers
        inputs = tuple(name for name in facts.inputs if name not in constants and name not in states)
        rest = (self.constants, used, pieces, tuple(_tensor_spec(facts.inputs[name]) for name in states))
        return PlacedGraph(nodes[::-1], infos, inputs, source, sinks, *rest)


def _tensor_spec(info: onnx.ValueInfoProto) -> TensorSpec:
    kind = info.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return TensorSpec(info.name, kind.elem_type, dims if kind.HasField("shape") and -1 not in dims else None)
