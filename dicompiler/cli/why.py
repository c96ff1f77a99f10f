"""How `compare --why` is shown: a line for each layer that stays whole, and for each split that does not pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.units import format_bytes, format_seconds
from dicompiler.cli.tables import show

if TYPE_CHECKING:
    from dicompiler.driver.why import Why


def why_document(why: Why) -> dict[str, Any]:
    """What `why` is in the schema comparison."""
    return asdict(why)


def show_why(why: Why) -> None:
    """Prints both tables."""
    from dicompiler.driver.why import pays_from

    if why.splits:
        click.echo("\nthe network stays on one device; splitting it by at least 3 % would take\n")
        lines = [(one.strategy, pays_from(one.bandwidth, one.wire)) for one in why.splits]
        show(("plan of", "pays"), lines)
    click.echo("\nlayers that one device computes, and why: as if each were split by itself\n")
    headers = ("layer", "operator", "why", "saves", "sends", "pays")
    rows = [
        (
            one.layer,
            one.operator,
            one.reason,
            format_seconds(one.saved) if one.saved else "-",
            format_bytes(one.nbytes) if one.nbytes else "-",
            pays_from(one.bandwidth, one.wire) if one.saved else "-",
        )
        for one in why.layers
    ]
    show(headers, rows, right=(3, 4))
