"""The built-in operator rules. They come in by the same hook as a third party's (`dicompiler_operators`)."""

from __future__ import annotations

from collections.abc import Iterable

from dicompiler.ir.rule import OperatorRule


def builtin_rules() -> Iterable[OperatorRule]:
    """All rules of this package, in a fixed order."""
    from dicompiler.operators import (
        attention,
        dense,
        elementwise,
        indexing,
        normalisation,
        quantised,
        reductions,
        resampling,
        shaping,
        slicing,
        windows,
    )

    modules = (elementwise, windows, dense, quantised, normalisation, attention, reductions)
    for module in (*modules, shaping, slicing, indexing, resampling):
        yield from module.RULES
