"""Tables and JSON for people and programs: drawn with rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import click

from dicompiler.base.errors import escape_unprintable

PAGE_WIDTH, MAX_NAME_WIDTH = 80, 24
"""Columns of a page, and of a name beside a text."""


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    err: bool = False,
    wrap: int | None = None,
) -> None:
    """Prints a table to stdout, or to stderr; `right` are the columns that are set to the right (numbers).

    Elsewhere than on a terminal: columns padded with blanks, two between them, nothing cut off, for grep and diff.
    Columns that find no place in WIDTH stand below the others, beside the first one again. `wrap`: a column of text
    that goes on in further lines instead.
    """
    rows = [[escape_unprintable(cell) for cell in row] for row in rows]
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        _print_rich(headers, rows, right, stream)
    else:
        if wrap is not None:
            rows = [line for row in rows for line in _fold_row(headers, rows, row, wrap)]
        click.echo(_format_plain(headers, rows, right), err=err)


def _fold_row(
    headers: Sequence[str], rows: Sequence[Sequence[str]], row: Sequence[str], wrap: int
) -> Iterator[Sequence[str]]:
    """The row in as many lines as the column takes in what the others leave of WIDTH. A long name stands on a line of
    its own above it."""
    if wrap and len(row[0]) > MAX_NAME_WIDTH:
        yield [row[0], *[""] * (len(row) - 1)]
        row = ["", *row[1:]]
    short = [line for line in (headers, *rows) if wrap == 0 or len(line[0]) <= MAX_NAME_WIDTH]
    others = (max(len(line[i]) for line in short) + 2 for i in range(len(headers)) if i != wrap)
    texts = textwrap.wrap(
        row[wrap], max(MAX_NAME_WIDTH, PAGE_WIDTH - sum(others)), break_long_words=False, break_on_hyphens=False
    )
    yield [*row[:wrap], texts[0] if texts else "", *row[wrap + 1 :]]
    for text in texts[1:]:
        yield [text if i == wrap else "" for i in range(len(row))]


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], stream: TextIO) -> None:
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


def _format_plain(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    lines = [headers, *rows]
    alone = [line for line in lines if any(line[1:])] or lines  # without names on lines of their own
    widths = [max(len(line[column]) for line in (lines if column else alone)) for column in range(len(headers))]
    blocks = [[0]]
    for column in range(1, len(headers)):
        if sum(widths[i] + 2 for i in blocks[-1]) + widths[column] > PAGE_WIDTH and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    return "\n\n".join(_format_block(lines, columns, widths, right) for columns in blocks)


def _format_block(
    lines: Sequence[Sequence[str]], columns: Sequence[int], widths: Sequence[int], right: Sequence[int]
) -> str:
    return "\n".join(
        "  ".join(
            line[column].rjust(widths[column]) if column in right else line[column].ljust(widths[column])
            for column in columns
        ).rstrip()
        for line in lines
    )


def wrap_text(text: str, head: str = "") -> str:
    """The text in lines of WIDTH columns: behind `head` and, from the second line on, below it."""
    return textwrap.fill(
        text, PAGE_WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def print_entries(sentences: Iterable[str]) -> None:
    """Prints "name: what" lines, what is long below itself."""
    for name, _, rest in (line.partition(": ") for line in map(escape_unprintable, sentences)):
        click.echo(wrap_text(rest, f"{name}: "))


def print_json(document: Any) -> None:
    """Prints a JSON document to stdout, in the order in which its keys were made."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))
