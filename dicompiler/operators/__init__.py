"""The built-in operator rules. They come in by the same hook as a third party's (`dicompiler_operators`)."""

from __future__ import annotations

from collections.abc import Iterable

from dicompiler.ir.rule import OperatorRule


def builtin_rules() -> Iterable[OperatorRule]:
    """All rules of this package, in a fixed order."""
    from dicompiler.operators import (
        attention,
        axes,
        dense,
        elementwise,
        ml,
        quantised,
        resampling,
        shaping,
        slicing,
        windows,
    )

    for module in (elementwise, windows, dense, quantised, axes, attention, shaping, slicing, resampling, ml):
        yield from module.RULES
