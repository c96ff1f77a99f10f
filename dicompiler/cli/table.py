"""Output of tables and JSON. On a terminal, rich draws tables; elsewhere, they are plain columns."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import click

from dicompiler.base.errors import escape_unprintable

PAGE_WIDTH, MAX_NAME_WIDTH = 80, 24
"""Columns of a page, and the longest name next to a text."""


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    err: bool = False,
    wrap: int | None = None,
) -> None:
    """Print a table to stdout or stderr.

    If the stream is not a terminal, columns are padded with blanks and no text is shortened, so that grep and diff
    work. Columns that do not fit into PAGE_WIDTH are printed as a second table below, which begins with the first
    column again.

    Args:
        headers: Header of each column.
        rows: Rows of cells.
        right: Indices of right-aligned columns, such as numbers.
        err: True to print to stderr.
        wrap: Index of a text column that is wrapped to several lines; None if there is none.
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
    """Yield the printed lines of a row, with the text of column `wrap` wrapped to several lines.

    A long name in the first column gets a line of its own. `headers` and `rows` are the whole table, which determines
    the widths of the other columns.
    """
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
    alone = [
        line for line in lines if any(line[1:])
    ] or lines  # Long names on a line of their own do not widen the first column.
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
    """Return the text in lines of at most PAGE_WIDTH columns.

    The first line begins with `head`. The other lines are indented by the length of `head`.
    """
    return textwrap.fill(
        text, PAGE_WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def print_entries(sentences: Iterable[str]) -> None:
    """Print sentences of the form "name: text".

    A text that is too long is wrapped, and its other lines are indented by the length of the name.
    """
    for name, _, rest in (line.partition(": ") for line in map(escape_unprintable, sentences)):
        click.echo(wrap_text(rest, f"{name}: "))


def print_json(document: Any) -> None:
    """Print a JSON document to stdout, with keys in their order of insertion."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))
