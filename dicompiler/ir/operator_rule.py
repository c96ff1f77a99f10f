"""Operator rules: the compiler's knowledge about each operator.

The main function of a rule maps a node, a region of its output and a range of the reduction axis to a Piece. A piece
has the region that is computed, and the regions of the inputs that it needs. The computed region may exceed the
requested one. A Softmax, for example, computes full rows along its axis.

A rule also contains the operator's cost and, for operators that round, an integer replacement for the exact check of
`verify`. An operator without a rule is computed as a whole (see `whole_tensor`).
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
"""Domain of the integer functions that replace rounding operators in the exact check of `verify`.

For an operator outside of the standard domain, its domain is appended: "dicompiler.check.com.microsoft".
"""


@dataclass(frozen=True)
class TensorInfo:
    """Type and shape of a tensor.

    Attributes:
        name: Name of the tensor.
        dtype: Element type, an onnx.TensorProto.DataType; 0 if the value is not a tensor.
        shape: Static shape; None if a dimension is unknown.
        is_constant: True for weights and other initializers.
        value: Value of a small constant (shape of a Reshape, axes of a Slice, scales of a Resize); else None.
    """

    name: str
    dtype: int
    shape: Shape | None
    is_constant: bool = False
    value: NDArray[Any] | None = field(default=None, compare=False)


# With `eq=False`, nodes are compared by identity: they are keys of memoized results and need a fast hash.
@dataclass(frozen=True, eq=False)
class Node:
    """ONNX node in the form that operator rules use.

    Attributes:
        name: Name of the node.
        op: Operator type, such as "Conv".
        domain: Domain of the operator; '' is the standard domain.
        opset: Version of the operator set of the domain.
        attributes: Values by attribute name.
        inputs: Tensor names; '' is an omitted optional input.
        outputs: Tensor names; '' is an omitted optional output.
    """

    name: str
    op: str
    domain: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Operation(Memoizing):
    """Node together with the types and shapes of its tensors: the argument of operator rules.

    Attributes:
        node: The ONNX node.
        inputs: Types and shapes of the input tensors; None for an omitted optional input.
        outputs: Types and shapes of the output tensors; None for an omitted optional output.
        cut_output: Index of the output that the rule divides into regions.
    """

    node: Node
    inputs: tuple[TensorInfo | None, ...]
    outputs: tuple[TensorInfo | None, ...]
    cut_output: int = 0

    def input_shape(self, index: int) -> Shape:
        """Return the static shape of an input, which must be present.

        Args:
            index: Index of the input.

        Returns:
            The shape.
        """
        tensor = self.inputs[index]
        assert tensor is not None and tensor.shape is not None
        return tensor.shape

    @property
    def out_shape(self) -> Shape:
        """Static shape of the output that the rule divides into regions."""
        tensor = self.outputs[self.cut_output]
        assert tensor is not None and tensor.shape is not None
        return tensor.shape

    def has_input(self, index: int) -> bool:
        """Return True if the node has an input with this index and does not omit it.

        Args:
            index: Index of the input.

        Returns:
            True if the input is present.
        """
        return index < len(self.inputs) and self.inputs[index] is not None

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute.

        Args:
            name: Name of the attribute.
            default: Result if the node does not have the attribute.

        Returns:
            The value.
        """
        return self.node.attributes.get(name, default)

    def constant_value(self, index: int) -> NDArray[Any] | None:
        """Return the value of an input that is a small constant, such as the shape of a Reshape.

        Args:
            index: Index of the input.

        Returns:
            The value; None if the input is absent, not constant, or not small.
        """
        tensor = self.inputs[index] if index < len(self.inputs) else None
        return None if tensor is None else tensor.value

    def full_needs(self) -> tuple[Region | None, ...]:
        """Return the full region of each input.

        Returns:
            One region per input; None if the input is absent or has no static shape.
        """
        return tuple(None if t is None or t.shape is None else full_region(t.shape) for t in self.inputs)


@dataclass(frozen=True)
class Piece:
    """Computation of a region of a node's output from regions of its inputs, with changed attributes or inputs.

    Attributes:
        out: Region of the output that the piece computes correctly. It contains the requested region.
        needs: Region of each input that is read; None if the piece omits the input or the node does not have it.
        attributes: Attributes that differ from those of the node. The value None removes an attribute.
        constants: Arrays that replace inputs, by index of the input (for example the shape of a Reshape).
        written_region: Region that the node writes, if it is larger than `out`. Its elements outside of `out` are
            wrong, so the compiler slices `out` from it.
        op: Operator type, if it differs from that of the node.
        table_rows: Rows of the table (the first input) that the piece reads, if it is a partial result of a table
            lookup (Gather). For an index of another row, the piece returns 0, so that partial results can be added.
            None for all other pieces.
    """

    out: Region
    needs: tuple[Region | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    written_region: Region | None = None
    op: str | None = None
    table_rows: Interval | None = None


TABLE_LOOKUP_NODE_COUNT = 14
"""Number of nodes that are added around a Gather that reads only some rows of its table (`Piece.table_rows`)."""


class OpCost(NamedTuple):
    """Number of operations of a piece (the computation of a region of a node's output).

    Attributes:
        multiply_adds: Number of multiply-adds, which are two FLOP each.
        pool_flops: FLOP of pools and reductions.
        other_flops: FLOP of all other operators.
    """

    multiply_adds: int = 0
    pool_flops: int = 0
    other_flops: int = 0


MERGE_OPERATORS = ("Add", "Max", "Min")
"""Operators that can combine the partial results of two ranges of the reduction axis."""
CONSTANT_KINDS = ("factor", "gain", "max", "min", "rounded", "scale", "shift", "slope", "step", "variance")
"""Kinds of integers that replace constants in the exact check of `verify` (`OperatorRule.constant_stand_ins`).

A kind is named after the operator's use of the constant.
"""

PieceFunction = Callable[[Operation, Region, Interval | None], Piece]
CostFunction = Callable[[Operation, Shape, Sequence[Shape]], OpCost]


def cost_per_output(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of an operator with one FLOP per element of the output region.

    Args:
        operation: The operation, which is ignored.
        out: Shape of the output region.
        needs: Shapes of the input regions, which are ignored.

    Returns:
        The cost.
    """
    return OpCost(other_flops=math.prod(out))


def zero_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return a cost of zero, for operators that only move data.

    Args:
        operation: The operation, which is ignored.
        out: Shape of the output region, which is ignored.
        needs: Shapes of the input regions, which are ignored.

    Returns:
        The cost.
    """
    return OpCost()


def cost_per_input(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a reduction: one FLOP per element of the first input's region.

    Args:
        operation: The operation, which is ignored.
        out: Shape of the output region, which is ignored.
        needs: Shapes of the input regions.

    Returns:
        The cost.
    """
    return OpCost(pool_flops=math.prod(needs[0]))


@dataclass(frozen=True)
class OperatorRule:
    """Rule that describes how one operator type can be divided, and its cost.

    Attributes:
        op: Operator type, such as "Conv".
        piece: Function (operation, region of the output, reduce) → Piece. `reduce` is the range of the reduction axis
            for a partial sum. It is None unless `reduction_length` returns a number.
        domain: Domain of the operator.
        is_elementwise: True if each output element depends only on input elements at the same position, with
            broadcasting. Such nodes are fused into the layer of the node before them. `Piece.out` must be the requested
            region or the full region.
        reduction_length: Function that returns the length of the reduction axis (input channels), along which LIP
            (layer input partitioning) cuts. It returns None for a node without such an axis.
        cut_output: Index of the output that the rule divides into regions.
        merge_operator: Binary operator that combines the partial results of two ranges: Add, Max or Min.
        cost: Function (operation, shape of the output region, shapes of the input regions) → OpCost. The shape of an
            omitted input is (). Operators that are only computed as a whole can have a cost too.
        read_share: Function that returns a lower bound of the fraction of the first input that all pieces of a node
            read together, however the node is split. It is below 1 if strides skip elements. None: the fraction is 1.
        rounds_sums: True if the operator rounds its sums, so that partial sums would give another result.
        stand_in: Replacement of the operator in the exact check of `verify`, which computes with small integers: an
            operator with the same inputs, or a function of `dicompiler.verify.exact`. '': the check first computes with
            the operator itself. If the results are not exact, `verify` replaces the operator if it is element-wise or
            never split. Otherwise, it excludes the operator from the check.
        constant_stand_ins: Kinds of integers that replace constant inputs in the exact check, separated by spaces: "-
            gain shift". The i-th kind is for the i-th input, and the last kind also for all further inputs. '-' keeps
            the values. `CONSTANT_KINDS` lists the kinds.
        attribute_stand_ins: Replacements of attributes in the exact check, separated by spaces: "offset=shift scale=one
            post_transform=NONE". A list of weights is replaced by integers of a kind (one, which are all 1, or shift or
            gain), and any other attribute by the value.
        replaces: True if the rule replaces an existing rule for the same operator. False: if there is an existing rule,
            this one is ignored with a warning, unless only this one can split the operator.
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
    replaces: bool = False

    @property
    def can_cut(self) -> bool:
        """True if the rule can compute regions of the output. False if it only describes the cost."""
        return self.piece is not whole_tensor


def whole_tensor(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Return the piece that computes the whole output from all inputs, as for operators without a rule.

    Args:
        operation: Node that is computed, with its tensors.
        region: Requested region, which is ignored.
        reduce: Range of the reduction axis, which is ignored.

    Returns:
        The piece.
    """
    return Piece(full_region(operation.out_shape), operation.full_needs())


ORT_DOMAIN = "com.microsoft"
"""Domain of onnxruntime's own operators."""


def cost_only_rules(cost: CostFunction, ops: str, domain: str = ORT_DOMAIN) -> tuple[OperatorRule, ...]:
    """Return rules for the operators in `ops` (separated by spaces) that only state a cost and cannot be divided."""
    return tuple(OperatorRule(op, whole_tensor, domain, cost=cost) for op in ops.split())
