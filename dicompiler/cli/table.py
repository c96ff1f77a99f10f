"""Output of tables, texts and JSON.

Tables have the same layout on terminals and in pipes. No word or number is broken or cut off.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import click

from dicompiler.base.errors import escape_unprintable
from dicompiler.cli.result_stream import echo_document

PAGE_WIDTH, MAX_NAME_WIDTH = 80, 24
"""Width of a page, and of the first column in a table that is too wide, in characters."""
GAP = "  "


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    err: bool = False,
    wrap: int | None = None,
) -> None:
    """Print a table in the width of the terminal, or of PAGE_WIDTH if the stream is not a terminal.

    A table that is too wide is changed in this order, until it fits:

    - Names of more than MAX_NAME_WIDTH characters in the first column are printed on separate lines.
    - The column `wrap` is wrapped.
    - Columns that do not fit are printed as a second table below, which repeats the first column.
    - Cells that are wider than the terminal are wrapped.

    Args:
        headers: Header of each column.
        rows: Rows of cells.
        right: Indices of right-aligned columns, such as numbers.
        err: True to print to stderr.
        wrap: Index of the column that is wrapped, not 0; None for no column.
    """
    width = _page_width(sys.stderr if err else sys.stdout)
    table = _Table(tuple(headers), [tuple(map(escape_unprintable, row)) for row in rows], frozenset(right), width)
    blocks = [
        [click.style(line, bold=True) if number == 0 else line for number, line in enumerate(block)]
        for block in table.format_blocks(wrap)
    ]
    click.echo("\n\n".join("\n".join(block) for block in blocks), err=err)


def _page_width(stream: TextIO) -> int:
    """Return the columns of the terminal; PAGE_WIDTH if the stream is not a terminal or has no size."""
    return (os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0) or PAGE_WIDTH


@dataclass(frozen=True)
class _Table:
    """A table of texts.

    Attributes:
        headers: Header of each column.
        rows: Rows of cells.
        right: Indices of right-aligned columns.
        width: Width of the page in characters.
    """

    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: frozenset[int]
    width: int

    def format_blocks(self, wrap: int | None) -> Iterator[list[str]]:
        """Yield the lines of each block: a table of columns that fit next to each other on the page.

        The first line has the headers. `wrap` is the index of the column that may be wrapped; None for no column.
        """
        lines = (self.headers, *self.rows)
        widths = [max(_count_columns(line[column]) for line in lines) for column in range(len(self.headers))]
        if _sum_widths(widths) > self.width and widths[1:]:
            widths[0] = max(n for line in lines if (n := _count_columns(line[0])) <= MAX_NAME_WIDTH or line is lines[0])
        text_width = 0
        if wrap is not None and _sum_widths(widths) > self.width:
            text_width = widths[wrap]
            words = (word for line in lines for word in line[wrap].split())
            widths[wrap] = min(text_width, max(MAX_NAME_WIDTH, *map(_count_columns, words)))
        for columns in self._group_columns(widths):
            room = self.width - _sum_widths([widths[column] for column in columns])
            # Only a block of one or two columns can be wider than the page. Then make its last column narrower.
            if room < 0:
                widths[columns[-1]] = max(MAX_NAME_WIDTH, widths[columns[-1]] + room)
            elif wrap in columns and text_width:
                widths[wrap] = min(text_width, widths[wrap] + room)
            yield [line for row in lines for line in self._format_row(row, columns, widths)]

    def _group_columns(self, widths: Sequence[int]) -> list[list[int]]:
        """Return the column indices of each block. Every block begins with column 0, which has the names."""
        blocks = [[0]]
        for column in range(1, len(widths)):
            wider = _sum_widths([widths[i] for i in (*blocks[-1], column)])
            if wider > self.width and len(blocks[-1]) > 1:
                blocks.append([0])
            blocks[-1].append(column)
        return blocks

    def _format_row(self, row: Sequence[str], columns: Sequence[int], widths: Sequence[int]) -> Iterator[str]:
        if columns[1:] and _count_columns(row[0]) > widths[0]:
            yield from fold_text(row[0], self.width)
            row = ("", *row[1:])
        cells = {column: fold_text(row[column], widths[column]) for column in columns}
        for number in range(max(map(len, cells.values()))):
            texts = {column: cell[number] if number < len(cell) else "" for column, cell in cells.items()}
            padded = (self._pad(text, column, widths[column]) for column, text in texts.items())
            yield GAP.join(padded).rstrip()

    def _pad(self, text: str, column: int, width: int) -> str:
        blanks = " " * (width - _count_columns(text))
        return blanks + text if column in self.right else text + blanks


def _sum_widths(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _count_columns(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fold_text(text: str, width: int) -> list[str]:
    """Split a text into lines of at most `width` terminal columns. Only a wider word gives a wider line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and _count_columns(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def wrap_text(text: str, head: str = "") -> str:
    """Return the text in lines of at most PAGE_WIDTH columns, as a hanging paragraph.

    `head` begins the first line. Its length is the indent of the other lines.
    """
    return textwrap.fill(
        text,
        PAGE_WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_entries(sentences: Iterable[str]) -> None:
    """Print sentences "name: text". Further lines of a long text are indented by the length of the name."""
    for name, _, rest in (line.partition(": ") for line in map(escape_unprintable, sentences)):
        click.echo(wrap_text(rest, f"{name}: "))


def print_json(document: Any) -> None:
    echo_document(json.dumps(document, indent=1, ensure_ascii=False))
