"""Read the tables that commands print without a terminal.

Columns that do not fit form a second table below, with the same first column.
"""

from __future__ import annotations

import re


def column(printed: str, header: str) -> dict[str, str]:
    """Map the first cell of each row to the cell under `header`; raise KeyError if there is no such column."""
    for block in printed.split("\n\n"):
        first, *rows = [re.split(r"  +", line.strip()) for line in block.splitlines()] or [[]]
        if header in first:
            place = first.index(header)
            return {row[0]: row[place] for row in rows if len(row) > place}
    raise KeyError(f"no column {header!r}:\n{printed}")
