"""The built-in operator rules. They come in by the same hook as a third party's (`dicompiler_operators`)."""

from __future__ import annotations

from collections.abc import Iterable

from dicompiler.ir.operator_rule import OperatorRule


def builtin_rules() -> Iterable[OperatorRule]:
    """All rules of this package, in a fixed order."""
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
