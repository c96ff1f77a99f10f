"""Generate the tables of docs/reference/operators.md, and their summary in README.md: `python
tests/support/operators.py`.

    built-in operator rules, pages ⇒ pages with current tables
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from dicompiler.partition.operators import builtin_rules
from dicompiler.plugin_api import OperatorRule

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "docs" / "reference" / "operators.md", ROOT / "README.md")
DOCSTRING_TO_CELL = (
    (r"^Return (the cost of )?(an operator with )?", ""),
    (r"^Split an? [^:]*: ", ""),
    (r"^a cost of zero, for operators that only move data", "no FLOP: it only moves data"),
    (r"\bonnxruntime's own Attention", "Attention of onnxruntime"),
)
"""Replacements that turn the summary of a rule's or a cost's docstring into the text of a table cell."""
TABLE = re.compile(r"(<!-- operators (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def update(text: str) -> str:
    """Return a page's text with current tables."""
    return TABLE.sub(lambda match: match[1] + _make_block(match[2]) + match[3], text)


def _make_block(kind: str) -> str:
    return summary() if kind == "summary" else table(kind == "cut")


def summary() -> str:
    """Return the numbers of operators of each kind, as text."""
    rules = list(builtin_rules())
    split = [rule for rule in rules if rule.can_cut]
    elementwise = sum(rule.is_elementwise for rule in split)
    partial_sums = sum(rule.reduction_length is not None for rule in rules)
    return (
        f"{len(split)} operators can be split: {elementwise} are element-wise, {len(split) - elementwise} have their"
        f" own rule.\n{partial_sums} of these also allow partial sums. {len(rules) - len(split)} further operators are"
        " computed whole with a\nknown cost. All other operators that onnxruntime runs are computed whole too.\n"
    )


def table(cut: bool) -> str:
    """Return the Markdown table of the operators that can be split, or of those that are computed whole and counted."""
    rules = [rule for rule in builtin_rules() if rule.can_cut == cut]
    head = "| operators | how it is split | partial sums | counted as |" if cut else "| operators | counted as |"
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *_rows(rules, cut)]) + "\n"


def _rows(rules: list[OperatorRule], cut: bool) -> Iterator[str]:
    def cells_of(rule: OperatorRule) -> tuple[str, ...]:
        split = "element-wise" if rule.is_elementwise else _summary(rule.piece)
        return (*((split, "yes" if rule.reduction_length else "") if cut else ()), _summary(rule.cost))

    for cells, group in groupby(sorted(rules, key=lambda rule: (cells_of(rule), _name(rule))), cells_of):
        yield f"| {', '.join(map(_name, group))} | {' | '.join(cells)} |"


def _name(rule: OperatorRule) -> str:
    return f"`{rule.domain}.{rule.op}`" if rule.domain else f"`{rule.op}`"


def _summary(function: Callable[..., Any]) -> str:
    """Return the summary of a function's docstring, as a table cell."""
    function = function.func if isinstance(function, partial) else function
    text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    for pattern, replacement in DOCSTRING_TO_CELL:
        text = re.sub(pattern, replacement, text)
    return text[:1].upper() + text[1:].rstrip(".")


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(update(document.read_text(encoding="utf-8")), encoding="utf-8")
