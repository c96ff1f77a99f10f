"""How `compare --why` is shown: a line for each layer that stays whole, and for each split that does not pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.units import format_bytes, format_seconds
from dicompiler.cli.table import print_table

if TYPE_CHECKING:
    from dicompiler.analysis.explain import Explanation


def explanation_document(why: Explanation) -> dict[str, Any]:
    """What `why` is in the schema comparison."""
    return asdict(why)


def show_explanation(why: Explanation) -> None:
    """Prints both tables."""
    from dicompiler.analysis.explain import break_even_text

    if why.splits:
        click.echo("\nthe network stays on one device; splitting it by at least 3 % would take\n")
        lines = [(one.strategy, break_even_text(one.break_even_bandwidth, one.wire_dtypes)) for one in why.splits]
        print_table(("plan of", "pays"), lines)
    click.echo("\nlayers that one device computes, and why: as if each were split by itself\n")
    headers = ("layer", "operator", "why", "saves", "sends", "pays")
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
