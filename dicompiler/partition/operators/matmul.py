"""Rules of tensor products (Gemm, MatMul, Einsum), of RNN, GRU and LSTM, and costs of MoE and DFT.

An Einsum equation describes each product, with one letter per axis. A part of the product computes an interval along
each output axis. It reads the same interval of each operand along the axis with the same letter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from onnx import TensorProto, helper

from dicompiler.base.memoize import memoized
from dicompiler.ir.operator_rule import (
    ORT_DOMAIN,
    OpCost,
    Operation,
    OperatorRule,
    Piece,
    cost_only_rules,
    cost_per_input,
    cost_per_output,
    whole_tensor,
)
from dicompiler.ir.regions import Interval, Region, Shape, with_interval
from dicompiler.partition.operators.elementwise import broadcast_need


@dataclass(frozen=True)
class Equation:
    """Einsum equation with one letter per axis.

    Attributes:
        inputs: Letters of each operand.
        output: Letters of the output.
    """

    inputs: tuple[str, ...]
    output: str

    @property
    def summed(self) -> str:
        """Letters over which the products are summed, in order of first appearance."""
        return "".join(dict.fromkeys(letter for term in self.inputs for letter in term if letter not in self.output))

    def extent(self, letter: str, shapes: Sequence[Shape]) -> int:
        """Return the extent of the axis with the letter `letter`, for operands of the shapes `shapes`."""
        terms = zip(self.inputs, shapes, strict=False)
        return max(shape[term.index(letter)] for term, shape in terms if letter in term)


def parse_equation(text: str, ranks: Sequence[int]) -> Equation:
    """Parse an Einsum equation, such as "bij, bjk -> bik", for operands with the ranks `ranks`.

    Each axis of an ellipsis gets its own letter, counted from the last axis.
    """
    left, arrow, right = text.replace(" ", "").replace("...", ".").partition("->")
    # Without an arrow, the output has the axes of the ellipsis, then the letters that appear exactly once, sorted.
    counts = Counter(left.replace(",", "").replace(".", ""))
    implicit = "." * ("." in left) + "".join(sorted(letter for letter in counts if counts[letter] == 1))
    terms = left.split(",")
    ellipsis_ranks = [rank - len(term.replace(".", "")) for term, rank in zip(terms, ranks, strict=True)]
    batch = "".join(map(chr, reversed(range(max(ellipsis_ranks)))))
    inputs = (term.replace(".", batch[len(batch) - n :]) for term, n in zip(terms, ellipsis_ranks, strict=True))
    return Equation(tuple(inputs), (right if arrow else implicit).replace(".", batch))


@memoized
def equation_of(operation: Operation) -> Equation:
    """Return the equation of an Einsum, of a MatMul, or of a Gemm without its third input."""
    ranks = [len(need or ()) for need in operation.full_needs()]
    if operation.node.op == "Einsum":
        return parse_equation(operation.attribute("equation"), ranks)
    if operation.node.op == "Gemm":
        is_transposed = operation.attribute("transA", 0), operation.attribute("transB", 0)
        return Equation(("ki" if is_transposed[0] else "ik", "jk" if is_transposed[1] else "kj"), "ij")
    # An operand of a MatMul can be a vector. It has only the summed axis, with the letter k.
    a, b = ("...ik", "i") if ranks[0] > 1 else ("k", ""), ("...kj", "j") if ranks[1] > 1 else ("k", "")
    return parse_equation(f"{a[0]},{b[0]}->...{a[1]}{b[1]}", ranks[:2])


def contraction(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a MatMul or Einsum: along the axes that an operand shares with the output, each part reads its interval.

    A partial sum reads only the range `reduce` of the first summed axis. All other summed axes are read completely.
    """
    terms = equation_of(operation)
    intervals = dict(zip(terms.output, region, strict=True))
    if reduce is not None:
        intervals[terms.summed[0]] = reduce
    needs = []
    for index, term in enumerate(terms.inputs):
        axes = zip(term, operation.input_shape(index), strict=True)
        # An axis of one element may be broadcast to a longer output axis, so it is read whole.
        needs.append(tuple((0, 1) if extent == 1 else intervals.get(letter, (0, extent)) for letter, extent in axes))
    return Piece(region, tuple(needs))


def gemm(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Gemm: the first two inputs are split as in a MatMul, and the third one as in an element-wise Add.

    A partial sum adds the third input only if its range starts at 0.
    """
    piece, tensor = contraction(operation, region, reduce), operation.inputs[2] if operation.has_input(2) else None
    if tensor is None:
        return piece
    if reduce is None or reduce[0] == 0:
        return replace(piece, needs=(*piece.needs, broadcast_need(operation.input_shape(2), region)))
    # Before opset 11 the third input is required, so a partial sum that must not add it gets a zero instead.
    zero = {2: np.zeros((1,), helper.tensor_dtype_to_np_dtype(tensor.dtype))} if operation.node.opset < 11 else {}
    return replace(piece, needs=(*piece.needs, None), constants=zero)


def matmul_nbits_reduction(operation: Operation) -> int | None:
    """Return the number of groups of quantization blocks of a MatMulNBits; None if partial sums are not possible.

    A group has the blocks with zero points in the same byte, and cannot be divided.
    """
    # Partial sums are not possible with the input g_idx (index 4), which assigns weights to blocks in another order, or
    # with a vector of scales or zero points, in which the values for a range of blocks are not a region.
    ranks = [len(operation.input_shape(index)) for index in (1, 2, 3) if operation.has_input(index)]
    if operation.has_input(4) or ranks not in ([3, 2], [3, 2, 2]):
        return None
    return -(-operation.input_shape(1)[1] // _blocks_per_zero_point_byte(operation))


def _blocks_per_zero_point_byte(operation: Operation) -> int:
    """Return the number of quantization blocks with zero points in the same byte, which cannot be divided."""
    points = operation.inputs[3] if operation.has_input(3) else None
    return 8 // operation.attribute("bits", 4) if points and points.dtype == TensorProto.UINT8 else 1


def matmul_nbits(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a MatMulNBits: each part reads its input rows, and its columns of weights, scales and zero points.

    Partial sums are sums over whole quantization blocks. The partial sum that starts at block 0 adds the bias.
    """
    count, columns = operation.attribute("N"), region[-1]
    attributes = {"N": columns[1] - columns[0]}
    needs: list[Region | None] = [(*region[:-1], (0, operation.input_shape(0)[-1]))]
    for index, need in enumerate(operation.full_needs()[1:], 1):
        extent = 0 if need is None or index == 4 else need[0][1]
        cut = (columns[0] * extent // count, columns[1] * extent // count)
        needs.append((cut, *need[1:]) if need and extent else need)
    if reduce is not None:
        together, size = _blocks_per_zero_point_byte(operation), operation.attribute("block_size")
        blocks = reduce[0] * together, min(reduce[1] * together, operation.input_shape(1)[1])
        features = blocks[0] * size, min(blocks[1] * size, operation.input_shape(0)[-1])
        attributes["K"] = features[1] - features[0]
        for index, interval in enumerate((features, blocks, blocks, reduce)[: len(needs)]):
            need = needs[index]
            needs[index] = need and with_interval(need, 1 if index else len(need) - 1, interval)
        if reduce[0]:
            needs[5:] = [None] * len(needs[5:])
    return Piece(region, tuple(needs), {name: n for name, n in attributes.items() if n != operation.attribute(name)})


def contraction_length(operation: Operation) -> int | None:
    """Return the number of elements of the first summed axis; None if no axis is summed."""
    terms = equation_of(operation)
    shapes = [operation.input_shape(index) for index in range(len(terms.inputs))]
    return terms.extent(terms.summed[0], shapes) if terms.summed else None


def einsum_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of an Einsum: one multiply-add for each combination of indices of all axes in the equation."""
    terms = equation_of(operation)
    if len(needs) == 1:  # An Einsum of one tensor only sums or moves elements.
        return cost_per_input(operation, out, needs) if terms.summed else OpCost()
    if not terms.summed:
        return cost_per_output(operation, out, needs)
    return OpCost(math.prod(out) * math.prod(terms.extent(letter, needs) for letter in terms.summed))


def matmul_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of a matrix product: one multiply-add per output element and position of the summed axis."""
    axis = 0 if operation.attribute("transBatchA", 0) else -2
    return OpCost(math.prod(out) * needs[0][axis if operation.attribute("transA", 0) else -1])


def activated_matmul_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of a matrix product with an activation, which needs one FLOP per output element."""
    return matmul_cost(operation, out, needs)._replace(other_flops=math.prod(out))


def recurrent_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of an RNN, GRU or LSTM: per step, one multiply-add per weight and one FLOP per gate element."""
    x, w, r = needs[:3]  # The input x has the shape (steps, batch, features).
    steps = x[0] * x[1]
    return OpCost(steps * (math.prod(w) + math.prod(r)), other_flops=steps * math.prod(w) // max(1, x[2]))


def recurrent(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split an RNN, GRU or LSTM: by batch and directions; each part reads its own sequences, and its own weights.

    Hidden units stay together, because each step needs all units of the previous step.
    """
    if any(operation.attribute(name) for name in ("layout", "activation_alpha", "activation_beta")):
        return whole_tensor(operation, region, reduce)
    (steps, direction_count, _, units), (_, directions, batch, _) = operation.out_shape, region
    needs: list[Region | None] = []
    for index, need in enumerate(operation.full_needs()):
        if need is None or index == 0:
            needs.append(None if need is None else ((0, steps), batch, need[2]))
        elif index == 4:
            needs.append((batch,))
        else:
            # Weights and initial states have an axis for the direction, and initial states also one for the batch.
            needs.append((directions, batch, *need[2:]) if index in (5, 6) else (directions, *need[1:]))
    attributes: dict[str, object] = {}
    if directions != (0, direction_count):
        attributes["direction"] = "reverse" if directions[0] else "forward"
        if functions := operation.attribute("activations"):
            count = len(functions) // direction_count
            attributes["activations"] = functions[directions[0] * count : directions[1] * count]
    return Piece(((0, steps), directions, batch, (0, units)), tuple(needs), attributes)


def moe_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a MoE: per token, one multiply-add for each weight of the `k` experts that compute it."""
    weights = sum(math.prod(needs[index][1:]) for index in (2, 4, 6) if operation.has_input(index))
    return OpCost(math.prod(needs[0][:-1]) * operation.attribute("k", 1) * weights)


def fft_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of a DFT or STFT: 5 log2 N FLOP per complex number of a transform of length N."""
    axis_input = operation.constant_value(2) if operation.node.op == "DFT" else None
    axis = operation.attribute("axis", -2) if axis_input is None else int(axis_input)
    return OpCost(other_flops=math.prod(out) // 2 * 5 * (out[axis] - 1).bit_length())


_QUANTIZED_PRODUCTS = "QGemm DynamicQuantizeMatMul MatMulIntegerToFloat MatMulInteger16"
_product = partial(OperatorRule, reduction_length=contraction_length, stand_in="same_operator")
RULES = (
    _product("Gemm", gemm, cost=matmul_cost, constant_stand_ins="- - shift"),
    _product("MatMul", contraction, cost=matmul_cost),
    _product("Einsum", contraction, cost=einsum_cost, constant_stand_ins="gain"),
    *cost_only_rules(matmul_cost, f"FusedMatMul TransposeMatMul {_QUANTIZED_PRODUCTS}"),
    OperatorRule(
        "MatMulNBits",
        matmul_nbits,
        ORT_DOMAIN,
        reduction_length=matmul_nbits_reduction,
        cost=matmul_cost,
        stand_in="bounded_input",
        constant_stand_ins="- - step shift",
        attribute_stand_ins="accuracy_level=0",
    ),
    *cost_only_rules(matmul_cost, "MatMulBnb4 MatMulFpQ4 GemmFloat8 CDist"),
    *cost_only_rules(activated_matmul_cost, "FusedGemm FusedMatMulActivation GemmFastGelu"),
    *cost_only_rules(moe_cost, "MoE"),
    *cost_only_rules(fft_cost, "DFT STFT", ""),
    *(
        OperatorRule(op, recurrent, cost=recurrent_cost, stand_in="recurrent", constant_stand_ins="- gain gain shift")
        for op in ("RNN", "GRU", "LSTM")
    ),
    *cost_only_rules(recurrent_cost, "DynamicQuantizeLSTM"),
)
