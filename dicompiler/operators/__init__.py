"""Built-in operator rules, one module per family of operators.

A rule defines the regions of the inputs that a region of the output needs, and the cost of computing it.

    (Operation, region of the output, range of the reduction axis) ⇒ Piece
    (Operation, shape of the output region, shapes of the input regions) ⇒ OpCost

The docstrings of piece functions write the needs as `y[output region] ← x[input region], …`, in elements of whole
tensors. Plugins add rules through the same hook, `dicompiler_operators`.
"""

from __future__ import annotations

from collections.abc import Iterable

from dicompiler.ir.operator_rule import OperatorRule


def builtin_rules() -> Iterable[OperatorRule]:
    """Return all built-in rules in a fixed order."""
    from dicompiler.operators import (
        attention,
        conv_pool,
        data_movement,
        elementwise,
        matmul,
        onnx_ml,
        quantized,
        reductions,
        resize,
        slice_pad,
    )

    for module in (
        elementwise,
        conv_pool,
        matmul,
        quantized,
        reductions,
        attention,
        data_movement,
        slice_pad,
        resize,
        onnx_ml,
    ):
        yield from module.RULES
