"""The placed graph before it is written: which node stands on which device when, what it reads and makes.

Names are given here, and how each opset wants a slice or a sum is known here; nothing is known of plans and layers.
Partition writes the graph as ONNX; of a plan that is only evaluated it is cut unwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import onnx
from numpy.typing import NDArray

from dicompiler.ir.onnx.importing import unique
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import bodies, body_reads, node_reads, rename_captures
from dicompiler.ir.regions import Region, full, with_interval
from dicompiler.ir.rule import Piece
from dicompiler.ir.tasks import TaskId
from dicompiler.partition.routing import show

Turn = tuple[int, int, int, int]  # when a node runs: run, lane (-1: before all lanes), place in layer order, phase
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Cut(NamedTuple):
    """A region of one of the model's initializers."""

    weight: str
    region: Region


Constant = NDArray[Any] | tuple[int, ...] | Cut
"""An initializer that the model has not; a tuple of numbers is an int64 vector."""


class Held(NamedTuple):
    """A tensor of the placed graph: its name there, the region of the original tensor that it holds, and its element
    type (an onnx.TensorProto.DataType)."""

    name: str
    region: Region
    dtype: int


Known = onnx.ValueInfoProto | Held
"""What is known of a tensor."""


class Place(NamedTuple):
    """Where and when nodes are put, and the part that they belong to."""

    device: str
    lane: int
    turn: Turn
    part: TaskId | None = None


class PlacedNode(NamedTuple):
    """A node that is not written yet.

    op: its operator. origin: the model's node or the tensor that it is made for; region: of what it makes (None: in
    layers that stay whole). attributes: by name, None takes one away. copied: the node that it is a copy of, but for
    all this; op "" is that one's. reads: the tensors that it reads, captured ones included.
    """

    op: str
    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    place: Place
    origin: str
    region: Region | None
    attributes: Mapping[str, Any]
    copied: onnx.NodeProto | None
    reads: Sequence[str]


@dataclass(frozen=True)
class Given:
    """What placing asks a model, looked up once.

    opset: of the standard operators (0: none of them is used). nodes: by name; values: value infos by tensor; whole:
    the region that each initializer is. taken: the names of tensors. inputs, outputs: the graph's, by name.
    initializers, sparse: their names. inner: what the bodies of a node name, where it has any.
    """

    opset: int
    nodes: Mapping[str, onnx.NodeProto]
    values: Mapping[str, onnx.ValueInfoProto]
    whole: Mapping[str, Region]
    taken: frozenset[str]
    inputs: Mapping[str, onnx.ValueInfoProto]
    outputs: Mapping[str, onnx.ValueInfoProto]
    initializers: frozenset[str]
    sparse: frozenset[str]
    inner: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, model: Model) -> Given:
        graph = model.proto.graph
        whole = {name: full(shape) for name, (_, shape) in model.initializers().items()}
        taken = {name for node in graph.node for name in (*node_reads(node), *node.output)}
        return cls(
            next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), 0),
            {node.name: node for node in graph.node},
            {value.name: value for value in graph.value_info},
            whole,
            frozenset(taken | {v.name for v in (*graph.input, *graph.output)} | set(whole)),
            {value.name: value for value in graph.input},
            {value.name: value for value in graph.output},
            frozenset(tensor.name for tensor in graph.initializer),
            frozenset(tensor.values.name for tensor in graph.sparse_initializer),
            {node.name: tuple(body_reads(node)) for node in graph.node if bodies(node)},
        )


@dataclass(frozen=True)
class PlacedGraph:
    """`nodes`: in step order, those alone that lead to an output.

    values: what is known of the tensors that are new, by name; a value info may bear another name. constants: the
    initializers that are new. used: the names that are read or kept. sinks: the graph's outputs → the outputs of the
    original that they are. source: the devices that hold the inputs.
    """

    given: Given
    nodes: Sequence[PlacedNode]
    values: Mapping[str, Known]
    constants: Mapping[str, Constant]
    used: frozenset[str]
    sinks: Mapping[str, str]
    source: tuple[str, ...]


@dataclass
class PlacedGraphBuilder:
    """Collects the nodes of a placed graph. Names are unique and follow from the order of calls alone."""

    given: Given
    nodes: list[PlacedNode] = field(default_factory=list)
    values: dict[str, Known] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    named: dict[object, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.taken = set(self.given.taken)

    def name(self, wanted: str) -> str:
        """`wanted`, or with a number behind it where the graph has that name already."""
        return unique(wanted, self.taken)

    def declare(self, name: str, dtype: int, region: Region) -> Held:
        """Says what type and shape a new tensor has."""
        held = self.values[name] = Held(name, region, dtype)
        return held

    def constant(self, wanted: str, array: NDArray[Any]) -> str:
        """An initializer with these values; the same values under the same wanted name are one."""
        return self._constant((wanted, f"{array.dtype}{array.shape}", array.tobytes()), wanted, array)

    def integers(self, values: tuple[int, ...]) -> str:
        """An int64 vector as initializer."""
        return self.named.get(values) or self._constant(values, f"int64{list(values)}", values)

    def weight(self, name: str, region: Region) -> str:
        """`region` of an initializer of the model: itself where that is all of it, else a cut of it."""
        if region == self.given.whole[name]:
            return name
        cut = Cut(name, region)
        return self.named.get(cut) or self._constant(cut, name + show(region), cut)

    def _constant(self, key: object, wanted: str, value: Constant) -> str:
        name = self.named.get(key)
        if name is None:
            name = self.named[key] = self.name(wanted)
            self.constants[name] = value
        return name

    def copy(
        self, node: str, name: str, tensors: tuple[Sequence[str], Sequence[str]], place: Place, how: Piece
    ) -> None:
        """The model's node, called `name`, with these inputs and outputs, as the piece says."""
        name, (inputs, outputs), copied = unique(name, self.called), tensors, self.given.nodes[node]
        reads = inputs
        if "" in inputs or node in self.given.inner:
            reads = [*filter(None, inputs), *self.given.inner.get(node, ())]
        self.nodes.append(
            PlacedNode(how.op or "", name, inputs, outputs, place, node, how.out, how.attributes, copied, reads)
        )

    def keep(self, node: str, names: Mapping[str, str], place: Place) -> None:
        """The model's node as it stands, its tensors called as `names` says."""
        copied = self.given.nodes[node]
        inputs, outputs = ([names.get(name, name) for name in ends] for ends in (copied.input, copied.output))
        reads = [*filter(None, inputs)]
        if node in self.given.inner:
            original, copied = copied, onnx.NodeProto()
            copied.CopyFrom(original)
            rename_captures(copied, names)
            reads += body_reads(copied)
        name = unique(node, self.called)
        self.nodes.append(PlacedNode("", name, inputs, outputs, place, node, None, NOTHING, copied, reads))

    def slice(self, held: Held, region: Region, place: Place, name: str = "") -> Held:
        """held → Slice → region, under this name. Itself where nothing is cut."""
        if held.region == region:
            return held
        axes, starts, ends = _cuts(held.region, region)
        output = Held(name or self.name(held.name + show(region)), region, held.dtype)
        if 0 < self.given.opset < 10:
            return self._add("Slice", [held.name], output, place, held.name, axes=axes, ends=ends, starts=starts)
        inputs = [held.name, self.integers(starts), self.integers(ends), self.integers(axes)]
        return self._add("Slice", inputs, output, place, held.name)

    def concat(self, pieces: Sequence[Held], axis: int, place: Place, name: str) -> Held:
        """pieces side by side along `axis` → Concat → the region of them all."""
        first = pieces[0].region
        region = with_interval(first, axis, (first[axis][0], pieces[-1].region[axis][1]))
        output = Held(name, region, pieces[0].dtype)
        return self._add("Concat", [piece.name for piece in pieces], output, place, name, axis=axis)

    def merge(self, terms: Sequence[Held], op: str, place: Place, name: str) -> Held:
        """terms[0] + terms[1] + …, in this order, as a chain of Adds (or of another `op`); one term: Identity."""
        op = "Sum" if op == "Add" and 0 < self.given.opset < 7 else op  # onnxruntime has no Add of before opset 7
        total = terms[0]
        if len(terms) == 1:
            return self.identity(total, place, name, name)
        for i, term in enumerate(terms[1:], 1):
            output = total._replace(name=name if i == len(terms) - 1 else self.name(f"{name}+{i}"))
            total = self._add(op, [total.name, term.name], output, place, name)
        return total

    def identity(self, held: Held, place: Place, name: str, origin: str) -> Held:
        """held under another name."""
        return self._add("Identity", [held.name], held._replace(name=name), place, origin)

    def _add(self, op: str, inputs: Sequence[str], output: Held, place: Place, origin: str, **attributes: Any) -> Held:
        """A node that the model has not, called like what it makes."""
        name = unique(output.name, self.called)
        self.values[output.name] = output
        self.nodes.append(
            PlacedNode(op, name, inputs, (output.name,), place, origin, output.region, attributes, None, inputs)
        )
        return output

    def finish(self, kept: Iterable[str], extra: Mapping[str, str], source: tuple[str, ...]) -> PlacedGraph:
        """The placed graph. kept: initializers that stay though no node's inputs name them; extra: further outputs →
        the outputs that they are."""
        sinks = {**{name: name for name in self.given.outputs}, **extra}
        kept = frozenset(kept)
        nodes = _live(sorted(self.nodes, key=lambda node: node.place.turn), {*sinks, *kept})
        used = kept.union(*(node.inputs for node in nodes))
        return PlacedGraph(self.given, nodes, self.values, self.constants, used, sinks, source)


def _cuts(whole: Region, region: Region) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(axes, starts, ends) of the Slice that makes `region` of a tensor that holds `whole`."""
    pairs = enumerate(zip(region, whole, strict=True))
    cuts = [(axis, cut[0] - held[0], cut[1] - held[0]) for axis, (cut, held) in pairs if cut != held]
    axes, starts, ends = zip(*cuts, strict=True)
    return axes, starts, ends


def _live(nodes: Sequence[PlacedNode], wanted: set[str]) -> list[PlacedNode]:
    """The nodes that lead to what is wanted: a copy of a layer that stays whole may have outputs that nobody reads."""
    live = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(node.reads)
            live.append(node)
    return live[::-1]
