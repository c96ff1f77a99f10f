"""Tables and JSON for people and programs: drawn with rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import click

from dicompiler.base.errors import printable

WIDTH = 80


def show(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    err: bool = False,
    wrap: int | None = None,
) -> None:
    """Prints a table to stdout, or to stderr; `right` are the columns that are set to the right (numbers).

    Elsewhere than on a terminal: columns padded with blanks, two between them, nothing cut off, for grep and diff;
    `wrap`: a column of text that goes on in further lines where the table would be wider than WIDTH.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        _rich(headers, rows, right, stream)
    else:
        if wrap is not None:
            rows = [line for row in rows for line in _folded(headers, rows, row, wrap)]
        click.echo(_plain(headers, rows, right), err=err)


def _folded(
    headers: Sequence[str], rows: Sequence[Sequence[str]], row: Sequence[str], wrap: int
) -> Iterator[Sequence[str]]:
    """The row in as many lines as the column takes in what the others leave of WIDTH."""
    others = (max(len(line[i]) for line in (headers, *rows)) + 2 for i in range(len(headers)) if i != wrap)
    texts = textwrap.wrap(row[wrap], max(24, WIDTH - sum(others)), break_long_words=False, break_on_hyphens=False)
    yield [*row[:wrap], texts[0] if texts else "", *row[wrap + 1 :]]
    for text in texts[1:]:
        yield [text if i == wrap else "" for i in range(len(row))]


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


def wrapped(text: str, head: str = "") -> str:
    """The text in lines of WIDTH columns: behind `head` and, from the second line on, below it."""
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def tell(sentences: Iterable[str]) -> None:
    """Prints "name: what" lines, what is long below itself."""
    for name, _, rest in (line.partition(": ") for line in map(printable, sentences)):
        click.echo(wrapped(rest, f"{name}: "))


def show_json(document: Any) -> None:
    """Prints a JSON document to stdout, in the order in which its keys were made."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))
