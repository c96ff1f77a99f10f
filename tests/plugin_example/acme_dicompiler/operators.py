"""Operator rules: the region of each input that a region of the output needs."""

from __future__ import annotations

from dicompiler.plugin_api import Interval, Operation, OperatorRule, Piece, Region


def quick_gelu(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Return the piece of x · sigmoid(α x): a region of the output needs the same region of x."""
    return Piece(region, (region,))


RULES = (OperatorRule("QuickGelu", quick_gelu, domain="com.microsoft", is_elementwise=True),)
