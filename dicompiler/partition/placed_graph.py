"""The placed graph: which node stands on which device when, what it reads and makes, and what of that must travel.

Names are given here, and how each opset wants a slice or a sum is known here; nothing is known of plans and layers.
Partition writes the graph as ONNX; of a plan that is only evaluated it is cut unwritten.
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

StepKey = tuple[int, int, int, int]  # when a node runs: run, lane (-1: before all lanes), place in layer order, phase
NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
FROM_INPUT = -1  # in the place of a node: what the graph inputs come from, which are there from the start


class WeightSlice(NamedTuple):
    """A region of one of the model's initializers."""

    weight: str
    region: Region


Constant = NDArray[Any] | tuple[int, ...] | WeightSlice
"""An initializer that the model has not; a tuple of numbers is an int64 vector."""


class PlacedTensor(NamedTuple):
    """A tensor of the placed graph: its name there, the region of the original tensor that it holds, and its element
    type (an onnx.TensorProto.DataType)."""

    name: str
    region: Region
    dtype: int


TensorKnowledge = onnx.ValueInfoProto | PlacedTensor
"""What is known of a tensor."""


class NodePlacement(NamedTuple):
    """Where and when nodes are put, and the part that they belong to."""

    device: str
    lane: int
    step_key: StepKey = (0, 0, 0, 0)
    part: TaskId | None = None


class PlacedNode(NamedTuple):
    """A node in its place, and how it is written where it is not yet.

    origin: the model's node or the tensor that it is made for. reads: the tensors that it reads, captured ones too.
    region: of what it makes (None: in layers that stay whole). op: its operator. copied: the node that it is a copy of,
    but for all this; op "" is that one's. attributes: by name, None takes one away.
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
        """Its operator, whether it is a copy or not."""
        return self.op or (self.template.op_type if self.template is not None else "")


@dataclass(frozen=True)
class ModelFacts:
    """What placing asks a model, looked up once.

    opset: of the standard operators (0: none of them is used). nodes: by name; bodied: those with sub-graphs. values:
    value infos by tensor; inputs, outputs: the graph's. whole: the region that each initializer is; sparse: the names
    of sparse ones. taken: the names of tensors. states: see `ir.states`.
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
    """`nodes`: in step order, those alone that lead to an output.

    infos: what is known of tensors by name; a value info may bear another name. inputs: the graph's, without constants;
    source: the devices that hold them. sinks: the graph's outputs → the outputs of the original that they are.
    constants: the initializers that are new. used: the names that are read or kept. pieces: of states; states: their
    graph inputs, whole.
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
        """Tensor → index of the node that makes it."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.outputs if name}

    @cached_property
    def state_reads(self) -> frozenset[str]:
        """The tensors that are kept from the frame before."""
        return frozenset(piece.read_name for piece in self.state_pieces)

    @cached_property
    def state_writes(self) -> frozenset[str]:
        """The tensors that are kept for the next frame."""
        return frozenset(piece.written_name for piece in self.state_pieces)

    @cached_property
    def unsized_inputs(self) -> frozenset[str]:
        """The inputs that do not travel, words and what is no tensor: they are given to each device that reads them."""
        return frozenset(name for name in self.inputs if not is_fixed_size(self.tensor_spec(name).dtype))

    @cached_property
    def node_reads(self) -> Sequence[Sequence[str]]:
        """Of each node the tensors that it reads, constants left out."""
        there = self.producer.keys() | set(self.inputs) | self.state_reads
        return [[name for name in node.reads if name in there] for node in self.nodes]

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Tensor → indices of the nodes that read it, in order."""
        users: dict[str, list[int]] = {}
        for i, names in enumerate(self.node_reads):
            for name in names:
                users.setdefault(name, []).append(i)
        return users

    @cached_property
    def sends(self) -> Sequence[tuple[int, str, int, str]]:
        """What must travel: (node that makes it, tensor, how many devices read it before this one does, the device), in
        order."""
        travels: list[tuple[int, str, int, str]] = []
        devices = [node.placement.device for node in self.nodes]
        for name, indices in self.readers.items():
            if name in self.state_reads or name in self.unsized_inputs:
                continue
            at = self.producer.get(name, FROM_INPUT)
            there = self.source if at == FROM_INPUT else (devices[at],)
            if len(indices) == 1 and devices[indices[0]] in there:  # as it is most often
                continue
            readers = dict.fromkeys([devices[i] for i in indices])
            travels += [(at, name, place, reader) for place, reader in enumerate(readers) if reader not in there]
        return sorted(travels)

    def tensor_spec(self, tensor: str) -> TensorSpec:
        """Its type and shape (no shape where it is not static, or where it is no tensor)."""
        info = self.infos[tensor]
        if isinstance(info, PlacedTensor):
            return TensorSpec(tensor, info.dtype, region_shape(info.region))
        return replace(_tensor_spec(info), name=tensor)


@dataclass
class PlacedGraphBuilder:
    """Collects the nodes of a placed graph. Names are unique and follow from the order of calls alone."""

    facts: ModelFacts
    nodes: list[PlacedNode] = field(default_factory=list)
    tensor_knowledge: dict[str, TensorKnowledge] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    constant_names: dict[object, str] = field(default_factory=dict)
    node_name_counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensor_name_counts = dict.fromkeys(self.facts.tensor_names, 0)

    def unique_tensor_name(self, wanted: str) -> str:
        """`wanted`, or with a number behind it where the graph has that name already."""
        return unique_name(wanted, self.tensor_name_counts)

    def declare(self, name: str, dtype: int, region: Region) -> PlacedTensor:
        """Says what type and shape a new tensor has."""
        held = self.tensor_knowledge[name] = PlacedTensor(name, region, dtype)
        return held

    def add_constant(self, value: Constant, wanted: str = "") -> str:
        """The name of an initializer with this value, which is made once; of arrays, but for vectors of integers, once
        for each wanted name."""
        key: object = value
        if isinstance(value, np.ndarray):
            if value.dtype == np.int64 and value.ndim == 1:
                return self.add_constant(tuple(value.tolist()))
            key = (wanted, str(value.dtype), value.shape, value.tobytes())
        if key not in self.constant_names:
            if isinstance(value, tuple):
                wanted = (
                    value.weight + format_region(value.region)
                    if isinstance(value, WeightSlice)
                    else f"int64{list(value)}"
                )
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
        """The model's node, called `name`, with these inputs and outputs, as the piece says (None: as it stands).
        captured: what its sub-graphs read → the name that it has here."""
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
        called: str,
        table: str,
        numbers: PlacedTensor,
        count: int,
        output: PlacedTensor,
        place: NodePlacement,
        how: Piece,
    ) -> None:
        """What the model's node takes of a table of `count` rows, where `table` has but the piece's; of other rows 0,
        chosen and not multiplied by: there may be NaN. (onnxruntime's Where makes 0.0 of -0.0, which is equal.) What is
        no row of the whole table is none here: the node refuses it and tells it, by a name that says of what it is no
        row. In the exact check it counts round. LOOK_UP nodes stand around it."""
        assert how.table_rows is not None
        (start, stop), kind = how.table_rows, helper.tensor_dtype_to_np_dtype(numbers.dtype)

        def do(op: str, *inputs: str | int, dtype: int = numbers.dtype) -> str:
            names = [one if isinstance(one, str) else self._add_scalar(one, kind) for one in inputs]
            held = PlacedTensor(self.unique_tensor_name(f"{output.name}?"), numbers.region, dtype)
            return self.add_node(op, names, held, place, node).name

        checked = self.facts.nodes[node].domain.startswith(STAND_IN_DOMAIN)
        at = numbers.name
        truth = onnx.TensorProto.BOOL
        at = do("Mod", at, count) if checked else do("Where", do("Less", at, 0, dtype=truth), do("Add", at, count), at)
        other, none = (
            do("Or", do("Less", at, low, dtype=truth), do("Less", high - 1, at, dtype=truth), dtype=truth)
            for low, high in ((start, stop), (0, count))
        )
        local = do("Where", other, do("Where", none, numbers.name, 0), do("Sub", at, start))
        beyond = [(0, 1)] * (len(output.region) - len(numbers.region))
        mask = PlacedTensor(self.unique_tensor_name(f"{output.name}?"), (*numbers.region, *beyond), truth)
        self.add_node("Reshape", [other, self.add_constant(region_shape(mask.region))], mask, place, node)
        found = self.declare(self.unique_tensor_name(f"{output.name}?"), output.dtype, output.region)
        of, by = self.facts.nodes[node].input
        called = f"{called}: rows of {of} that {by} numbers: 0 to {count - 1}, here {start} to {stop - 1}"
        self.copy_node(node, called, [table, local], [found.name], place, how)
        zero = self._add_scalar(0, helper.tensor_dtype_to_np_dtype(output.dtype))
        self.add_node("Where", [mask.name, zero, found.name], output, place, node)

    def _add_scalar(self, value: int, dtype: np.dtype[Any]) -> str:
        """The name of an initializer of rank 0."""
        return self.add_constant(np.array(value, dtype), f"{dtype}{value}")

    def add_slice(self, held: PlacedTensor, region: Region, place: NodePlacement, name: str = "") -> PlacedTensor:
        """held → Slice → region, under this name. Itself where nothing is cut."""
        if held.region == region:
            return held
        pairs = enumerate(zip(region, held.region, strict=True))
        cuts = [(axis, cut[0] - there[0], cut[1] - there[0]) for axis, (cut, there) in pairs if cut != there]
        axes, starts, ends = zip(*cuts, strict=True)
        output = PlacedTensor(name or self.unique_tensor_name(held.name + format_region(region)), region, held.dtype)
        if 0 < self.facts.opset < 10:
            return self.add_node("Slice", [held.name], output, place, held.name, axes=axes, ends=ends, starts=starts)
        inputs = [held.name, *(self.add_constant(numbers) for numbers in (starts, ends, axes))]
        return self.add_node("Slice", inputs, output, place, held.name)

    def add_concat(self, pieces: Sequence[PlacedTensor], axis: int, place: NodePlacement, name: str) -> PlacedTensor:
        """pieces side by side along `axis` → Concat → the region of them all."""
        first = pieces[0].region
        region = with_interval(first, axis, (first[axis][0], pieces[-1].region[axis][1]))
        output = PlacedTensor(name, region, pieces[0].dtype)
        return self.add_node("Concat", [piece.name for piece in pieces], output, place, name, axis=axis)

    def add_merge(self, terms: Sequence[PlacedTensor], op: str, place: NodePlacement, name: str) -> PlacedTensor:
        """terms[0] + terms[1] + …, in this order, as a chain of Adds (or of another `op`); one term: Identity."""
        op = "Sum" if op == "Add" and 0 < self.facts.opset < 7 else op  # onnxruntime has no Add of before opset 7
        total = terms[0]
        if len(terms) == 1:
            return self.add_identity(total, place, name, name)
        for i, term in enumerate(terms[1:], 1):
            output = total._replace(name=name if i == len(terms) - 1 else self.unique_tensor_name(f"{name}+{i}"))
            total = self.add_node(op, [total.name, term.name], output, place, name)
        return total

    def add_identity(self, held: PlacedTensor, place: NodePlacement, name: str, origin: str) -> PlacedTensor:
        """held under another name."""
        return self.add_node("Identity", [held.name], held._replace(name=name), place, origin)

    def add_node(
        self, op: str, inputs: Sequence[str], output: PlacedTensor, place: NodePlacement, origin: str, **attributes: Any
    ) -> PlacedTensor:
        """A node that the model has not, called like what it makes."""
        name = unique_name(output.name, self.node_name_counts)
        self.tensor_knowledge[output.name] = output
        self.nodes.append(
            PlacedNode(place, origin, inputs, (output.name,), inputs, name, output.region, op, None, attributes)
        )
        return output

    def build(
        self, kept: Iterable[str], extra: Mapping[str, str], source: tuple[str, ...], pieces: Sequence[StatePiece] = ()
    ) -> PlacedGraph:
        """The placed graph. kept: initializers that stay though no node's inputs name them; extra: further outputs →
        the outputs that they are. pieces: of states."""
        given, kept = self.facts, frozenset(kept)
        states = dict(given.states)
        sinks = {**{name: name for name in given.outputs if name not in states.values()}, **extra}
        wanted, nodes = {*sinks, *kept, *(piece.written_name for piece in pieces)}, []
        for node in sorted(self.nodes, key=lambda node: node.placement.step_key)[::-1]:
            if not wanted.isdisjoint(node.outputs):  # a copy of what stays whole may have outputs that nobody reads
                wanted.update(node.reads)
                nodes.append(node)
        used = kept.union(*(node.inputs for node in nodes))
        infos = {
            **self.tensor_knowledge,
            **given.inputs,
            **{name: given.outputs[output] for name, output in sinks.items()},
        }
        constants = (given.initializer_regions.keys() & used) | given.sparse_initializers
        inputs = tuple(name for name in given.inputs if name not in constants and name not in states)
        rest = (self.constants, used, pieces, tuple(_tensor_spec(given.inputs[name]) for name in states))
        return PlacedGraph(nodes[::-1], infos, inputs, source, sinks, *rest)


def _tensor_spec(info: onnx.ValueInfoProto) -> TensorSpec:
    kind = info.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return TensorSpec(info.name, kind.elem_type, dims if kind.HasField("shape") and -1 not in dims else None)
