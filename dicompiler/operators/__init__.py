"""The built-in operator rules. They come in by the same hook as a third party's (`dicompiler_operators`)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from dicompiler.ir.rule import Effort, Node, Operation, OperatorRule, Piece, Tensor, whole

__all__ = ["Effort", "Node", "Operation", "OperatorRule", "Piece", "Tensor", "builtin_rules", "whole"]

MODULES = (
    "elementwise windows transposed dense einsum quantised normalisation attention reductions shaping slicing "
    "indexing resampling"
).split()


def builtin_rules() -> Iterable[OperatorRule]:
    """All rules of this package, in a fixed order."""
    for module in MODULES:
        yield from import_module(f"{__name__}.{module}").RULES
