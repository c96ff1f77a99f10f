"""The tables of docs/operators.md and their summary in README.md, made from the rules. `python
tests/support/operators.py` writes them anew.

In: the built-in rules and a document. Out: the document with its tables as they should be.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from dicompiler.operators import builtin_rules
from dicompiler.plugin_api import OperatorRule

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "docs" / "operators.md", ROOT / "README.md")
TABLE = re.compile(r"(<!-- operators (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The document's text with every table made anew."""
    return TABLE.sub(lambda match: match[1] + _made(match[2]) + match[3], text)


def _made(what: str) -> str:
    return summary() if what == "summary" else table(what == "cut")


def summary() -> str:
    """How many there are of each kind."""
    rules = list(builtin_rules())
    kinds = {
        "element by element": sum(rule.is_elementwise for rule in rules),
        "by a rule of their own": sum(rule.can_cut and not rule.is_elementwise for rule in rules),
        "by partial sums as well": sum(rule.reduction_length is not None for rule in rules),
    }
    cut = sum(rule.can_cut for rule in rules)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (
        f"{cut} operators are cut ({told}); {len(rules) - cut} more are\ncomputed whole and counted. Any other that"
        " onnxruntime runs is computed whole, on one device.\n"
    )


def table(cut: bool) -> str:
    """The Markdown table of the operators that can be cut, or of those that are computed whole but counted: a row for
    each way."""
    rules = [rule for rule in builtin_rules() if rule.can_cut == cut]
    head = "| operators | how it is cut | partial sums | counted as |" if cut else "| operators | counted as |"
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *_rows(rules, cut)]) + "\n"


def _rows(rules: list[OperatorRule], cut: bool) -> Iterator[str]:
    def way(rule: OperatorRule) -> tuple[str, ...]:
        sums = (
            "element by element" if rule.is_elementwise else _said(rule.piece),
            "yes" if rule.reduction_length else "",
        )
        return (*(sums if cut else ()), _said(rule.cost))

    for cells, group in groupby(sorted(rules, key=lambda rule: (way(rule), _name(rule))), way):
        yield f"| {', '.join(map(_name, group))} | {' | '.join(cells)} |"


def _name(rule: OperatorRule) -> str:
    return f"`{rule.domain}.{rule.op}`" if rule.domain else f"`{rule.op}`"


def _said(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring on one line."""
    function = function.func if isinstance(function, partial) else function
    text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return text.rstrip(".")


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(written(document.read_text(encoding="utf-8")), encoding="utf-8")
