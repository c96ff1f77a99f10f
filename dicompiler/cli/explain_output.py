"""Output of `compare --explain`: a line for each layer that is not split, and for each split that does not pay off."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.units import format_bytes, format_seconds
from dicompiler.cli.table import print_table

if TYPE_CHECKING:
    from dicompiler.analysis.explain import Explanation


def explanation_document(why: Explanation) -> dict[str, Any]:
    """Return the entry `explanation` of the schema comparison."""
    return asdict(why)


def show_explanation(why: Explanation) -> None:
    from dicompiler.analysis.explain import break_even_text

    if why.splits:
        click.echo("\nno split is faster than one device; one would be 3 % faster from this bandwidth on\n")
        lines = [(one.strategy, break_even_text(one.break_even_bandwidth, one.wire_dtypes)) for one in why.splits]
        print_table(("strategy", "pays off"), lines)
    click.echo("\nlayers that are not split, each considered on its own\n")
    headers = ("layer", "operator", "reason", "saves", "sends", "pays off")
    rows = [
        (
            one.layer,
            one.operator,
            one.reason,
            format_seconds(one.saved_s) if one.saved_s else "-",
            format_bytes(one.sent_bytes) if one.sent_bytes else "-",
            break_even_text(one.break_even_bandwidth, one.wire_dtypes) if one.saved_s else "-",
        )
        for one in why.layers
    ]
    print_table(headers, rows, right=(3, 4))
