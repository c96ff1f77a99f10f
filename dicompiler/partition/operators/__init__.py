"""Built-in operator rules, one module per family of operators.

A rule has a piece function and a cost function. The arguments of the piece function are a region of the output and a
range of the reduction axis (`reduce`, None for the full sum). Its result is a Piece: the computed region (which
contains the requested one), the region of each input that is read, and changed attributes. The cost function returns
the number of operations of a Piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from dicompiler.ir.operator_rule import OperatorRule

MODULES = "elementwise conv_pool matmul quantized reductions attention data_movement slice_pad resize onnx_ml".split()


def builtin_rules() -> Iterable[OperatorRule]:
    for module in MODULES:
        yield from import_module(f"dicompiler.partition.operators.{module}").RULES
