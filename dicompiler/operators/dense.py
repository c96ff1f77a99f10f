"""Gemm and MatMul: rows from the left operand, columns from the right, and the axis that they sum over.

RNN, GRU and LSTM, whose steps follow one on another, are computed whole: what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from dicompiler.ir.regions import Interval, Region, Shape
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted
from dicompiler.operators.elementwise import broadcast_need


def gemm(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Gemm: y[rows, columns] ← a[rows, k], b[k, columns], c broadcast. c rides in the range of k that starts at 0."""
    rows, columns = region
    k = reduce if reduce is not None else (0, gemm_reduction(operation))
    a = (k, rows) if operation.attribute("transA", 0) else (rows, k)
    b = (columns, k) if operation.attribute("transB", 0) else (k, columns)
    needs: list[Region | None] = [a, b]
    constants: dict[int, NDArray[Any]] = {}
    if operation.has(2):
        needs.append(broadcast_need(operation.shape(2), region) if k[0] == 0 else None)
        if k[0] != 0 and operation.node.opset < 11:
            # Before opset 11 the third input of Gemm is not optional: a zero stands for it.
            tensor = operation.inputs[2]
            assert tensor is not None
            constants[2] = np.zeros((1,), helper.tensor_dtype_to_np_dtype(tensor.dtype))
    return Piece(region, tuple(needs), {}, constants)


def gemm_reduction(operation: Operation) -> int:
    """K, the extent that both operands share."""
    return operation.shape(0)[0 if operation.attribute("transA", 0) else 1]


def matmul(operation: Operation, region: Region, reduce: Interval | None, right: int = 1) -> Piece:
    """MatMul: y[batch, rows, columns] ← a[batch, rows, k], b[batch, k, columns]; b is input `right`. A vector has
    neither batch nor rows (columns)."""
    a, b = operation.shape(0), operation.shape(right)
    k = reduce if reduce is not None else (0, a[-1])
    batch = region[: len(region) - (len(a) > 1) - (len(b) > 1)]
    left = (*broadcast_need(a[:-2], batch), region[len(batch)], k) if len(a) > 1 else (k,)
    return Piece(region, (left, (*broadcast_need(b[:-2], batch), k, region[-1]) if len(b) > 1 else (k,)))


def matmul_reduction(operation: Operation) -> int:
    """K, the extent that both operands share."""
    return operation.shape(0)[-1]


def product(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """Each output element sums over k, which the first operand has."""
    axis = 0 if operation.attribute("transBatchA", 0) else -2
    return Effort(math.prod(out) * needs[0][axis if operation.attribute("transA", 0) else -1])


def activated(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """A product with its activation."""
    return product(operation, out, needs)._replace(other=math.prod(out))


def stepped(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:  # noqa: ARG001
    """Each step of x (steps, batch, features) meets all of w (directions, gates, features) and of r; one FLOP for each
    element of each gate."""
    x, w, r = needs[:3]
    steps = x[0] * x[1]
    return Effort(steps * (math.prod(w) + math.prod(r)), other=steps * math.prod(w) // x[2])


RULES = (
    OperatorRule("Gemm", gemm, reduction=gemm_reduction, cost=product),
    OperatorRule("MatMul", matmul, reduction=matmul_reduction, cost=product),
    *counted(product, "FusedMatMul TransposeMatMul QGemm DynamicQuantizeMatMul MatMulIntegerToFloat MatMulInteger16"),
    *counted(product, "MatMulNBits MatMulBnb4 MatMulFpQ4 GemmFloat8 CDist"),
    *counted(activated, "FusedGemm FusedMatMulActivation GemmFastGelu"),
    *counted(stepped, "RNN GRU LSTM", ""),
    *counted(stepped, "DynamicQuantizeLSTM"),
)
