"""Operator rules: which region of each input a region of the output needs."""

from __future__ import annotations

from dicompiler.ir.regions import Interval, Region
from dicompiler.ir.rule import Operation, OperatorRule, Piece


def quick_gelu(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """x · sigmoid(α x): a region of the output needs the same region of x."""
    return Piece(region, (region,))


RULES = (OperatorRule("QuickGelu", quick_gelu, domain="com.microsoft", elementwise=True),)
