"""What an operator rule is: all that is known of an operator. Given a region of a node's output, which region of every
input makes it, and how; what that costs; and how the exact check computes in its place.

Weights are inputs like any other. `out` may exceed the request: groups, Reshape, Softmax and LRN align themselves so.
An operator without a rule is `whole`: asking for any part of it computes all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from dicompiler.base.memoize import Memoizing
from dicompiler.ir.regions import Interval, Region, Shape, full_region

STAND_IN_DOMAIN = "dicompiler.check"
"""Where the exact check (see dicompiler.verify.exact) puts a node whose operator rounds: there a function computes
something exact from the same inputs, and the operator's own rule holds. Below it are the domains of other operators
than the standard's: dicompiler.check.com.microsoft."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without its data. `dtype` is an onnx.TensorProto.DataType; `shape` None: not static.

    `value` is set for small constants only (the shape of a Reshape, the axes of a Slice, the scales of a Resize).
    """

    name: str
    dtype: int
    shape: Shape | None
    is_constant: bool = False
    value: NDArray[Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)  # compared by identity: what follows from a node is remembered
class Node:
    """An ONNX node as rules see it; '' in `inputs` or `outputs` is an omitted optional one. `opset` is its domain's."""

    name: str
    op: str
    domain: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Operation(Memoizing):
    """A node together with its tensors: what a rule is given. `None` stands for an omitted optional input."""

    node: Node
    inputs: tuple[TensorInfo | None, ...]
    outputs: tuple[TensorInfo | None, ...]
    cut_output: int = 0

    def input_shape(self, index: int) -> Shape:
        """The static shape of input `index`, which must be present."""
        tensor = self.inputs[index]
        assert tensor is not None and tensor.shape is not None
        return tensor.shape

    @property
    def out_shape(self) -> Shape:
        """The static shape of the output that is cut."""
        tensor = self.outputs[self.cut_output]
        assert tensor is not None and tensor.shape is not None
        return tensor.shape

    def has_input(self, index: int) -> bool:
        """Whether input `index` is present."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attributes.get(name, default)

    def constant_value(self, index: int) -> NDArray[Any] | None:
        """The constant value of input `index`, or None where it is absent, not constant, or not small."""
        tensor = self.inputs[index] if index < len(self.inputs) else None
        return None if tensor is None else tensor.value

    def full_needs(self) -> tuple[Region | None, ...]:
        """All of every input; None where an input is absent or has no static shape."""
        return tuple(None if t is None or t.shape is None else full_region(t.shape) for t in self.inputs)


@dataclass(frozen=True)
class Piece:
    """How to compute a region: run the node on `needs` of its inputs, with `attributes` and `constants` replaced.

    out: the region of the output that comes out, a superset of the one asked for.
    needs: per input the region it reads; None: this piece leaves that input away (or it is absent).
    attributes: attributes that differ from the node's; a value None removes the attribute.
    constants: input index → array that takes the place of that input (a Reshape's shape).
    raw: the region that the node writes where that is more than `out`; the rest is wrong and is sliced away.
    op: the operator type, where it differs from the node's.
    rows: of a partial result of what looks rows of its first input up by the numbers in its second: the rows that it
        has. Of the numbers of other rows comes what changes no sum: LOOK_UP small nodes see to that.
    """

    out: Region
    needs: tuple[Region | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    written_region: Region | None = None
    op: str | None = None
    table_rows: Interval | None = None


TABLE_LOOKUP_NODE_COUNT = 14
"""So many nodes stand around one that looks up the numbers of its own `Piece.rows` and passes over others."""


class OpCost(NamedTuple):
    """What a piece costs. `multiply`: multiplications, each with its addition (two FLOP); `pool`: FLOP of pools and
    reductions; `other`: FLOP of all else."""

    multiply_adds: int = 0
    pool_flops: int = 0
    other_flops: int = 0


PieceFunction = Callable[[Operation, Region, Interval | None], Piece]
CostFunction = Callable[[Operation, Shape, Sequence[Shape]], OpCost]


def cost_per_output(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """One FLOP for each element of the output."""
    return OpCost(other_flops=math.prod(out))


def zero_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Nothing: it only moves data, or does nothing at inference."""
    return OpCost()


def cost_per_input(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """One FLOP for each element of the first input: a reduction, a pool of everything."""
    return OpCost(pool_flops=math.prod(needs[0]))


@dataclass(frozen=True)
class OperatorRule:
    """A rule for one operator type.

    piece: `(operation, region of output, reduce) → Piece`; `reduce` is None unless `reduction` gives a length.
    elementwise: out == region for every region (or the whole), and the output's elements come from the same place of
        the inputs (broadcasting allowed), so that a layer can absorb such a node.
    reduction: gives the length of the axis that LIP cuts, or None where this node has none (grouped convolutions).
    merge: the operator of two inputs that puts the partial results over two ranges together: Add, Max or Min.
    output: which of several outputs the rule cuts.
    cost: `(operation, shape of the output's region, shapes of what is read of the inputs) → Effort`; () is the shape of
        an input that is left out. An operator that cannot be cut can have one: its piece is `whole`.
    reads: the least share of the first input that is read however finely the output is cut: under 1 where strides skip
        some of it. None: all of it.
    rounds: whether it rounds its sums to few bits, so that partial sums would add up to something else.
    stand_in: what the exact check computes in its place where it rounds even small integers: an operator with the same
        inputs, or a body of dicompiler.verify.exact.stand_ins. '': it is exact.
    constants: what its constant inputs become in the exact check, one word for each (the last one for all that follow),
        of those of dicompiler.verify.exact.integer_values; '-': it stays.
    numbers: what its attributes that hold weights become there: "offset=shift scale=one post_transform=NONE".
    """

    op: str
    piece: PieceFunction
    domain: str = ""
    is_elementwise: bool = False
    reduction_length: Callable[[Operation], int | None] | None = None
    cut_output: int = 0
    merge_operator: str = "Add"
    cost: CostFunction = cost_per_output
    read_share: Callable[[Operation], float] | None = None
    rounds_sums: bool = False
    stand_in: str = ""
    constant_stand_ins: str = ""
    attribute_stand_ins: str = ""

    @property
    def can_cut(self) -> bool:
        """Whether parts of the operator's output can be computed; else the rule says what the whole costs."""
        return self.piece is not whole_tensor


def whole_tensor(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Computed whole: any part → all of it, as for every operator without a rule."""
    return Piece(full_region(operation.out_shape), operation.full_needs())


ORT_DOMAIN = "com.microsoft"
"""That of onnxruntime's own operators."""


def counted_rules(cost: CostFunction, ops: str, domain: str = ORT_DOMAIN) -> tuple[OperatorRule, ...]:
    """Rules of operators that are computed whole, at that cost. `ops`: their names, separated by spaces."""
    return tuple(OperatorRule(op, whole_tensor, domain, cost=cost) for op in ops.split())
