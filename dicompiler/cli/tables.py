"""Tables and JSON for people and programs: drawn with rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

from dicompiler.base.errors import printable


def show(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), err: bool = False) -> None:
    """Prints a table to stdout, or to stderr; `right` are the columns that are set to the right (numbers).

    Elsewhere than on a terminal: columns padded with blanks, two between them, nothing cut off, for grep and diff.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        _rich(headers, rows, right, stream)
    else:
        click.echo(_plain(headers, rows, right), err=err)


def _rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=stream).print(table)


def _plain(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def show_json(document: Any) -> None:
    """Prints a JSON document to stdout, in the order in which its keys were made."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))
