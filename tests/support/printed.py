"""Tables as commands print them where there is no terminal: what finds no place stands below, with the names again."""

from __future__ import annotations

import re


def column(printed: str, header: str) -> dict[str, str]:
    """The first cell of each row → the one under `header`. KeyError where there is no such column."""
    for block in printed.split("\n\n"):
        first, *rows = [re.split(r"  +", line.strip()) for line in block.splitlines()] or [[]]
        if header in first:
            place = first.index(header)
            return {row[0]: row[place] for row in rows if len(row) > place}
    raise KeyError(f"no column {header!r}:\n{printed}")
