"""Markup: elements of HTML and SVG as text. Names, attributes and children go in; escaped text comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape, quoteattr


class Markup(str):
    """Text that is markup already; any other text is escaped where it becomes a part of some."""

    __slots__ = ()


VOID_ELEMENTS = frozenset(("br", "meta", "link"))
"""HTML elements without an end tag."""


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """`element("p", "a < b", class_="x")` → `<p class="x">a &lt; b</p>`.

    In attribute names a last underscore falls away (class_) and others become hyphens; None leaves an attribute out;
    floats get two decimals at most. Children: markup, text, numbers, or iterables of them.
    """
    head = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_format_value(value))}"
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID_ELEMENTS:
        return Markup(f"<{name}{head}>")
    return Markup(f"<{name}{head}>{join_markup(children)}</{name}>")


def join_markup(children: Iterable[Any]) -> Markup:
    """The children one after another."""
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, Iterable) and not isinstance(child, str):
            parts.append(join_markup(child))
        else:
            parts.append(Markup(escape(_format_value(child))))
    return Markup("".join(parts))


def svg(title: str, description: str, wide: float, high: float, /, *children: Any, **attributes: Any) -> Markup:
    """An inline SVG with a coordinate system of that size; title and description are read out in its place."""
    head = element("title", title), element("desc", description)
    box = f"0 0 {_format_value(wide)} {_format_value(high)}"
    attributes = {"viewBox": box, "role": "img", "aria_label": f"{title}. {description}", **attributes}
    return element("svg", *head, *children, **attributes)


def html_table(headers: Iterable[Any], rows: Iterable[Iterable[Any]], caption: str = "", **attributes: Any) -> Markup:
    """A table in a box that scrolls by itself; of each row the first cell is its head."""
    head = element("thead", element("tr", [element("th", cell, scope="col") for cell in headers]))
    lines = []
    for row in rows:
        first, *rest = row
        cells = [cell if is_cell(cell) else element("td", cell) for cell in rest]
        lines.append(element("tr", element("th", first, scope="row"), cells))
    title = element("caption", caption) if caption else ""
    body = element("table", title, head, element("tbody", lines), **attributes)
    return element("div", body, class_="wide", tabindex="0", role="region", aria_label=caption or "table")


def is_cell(cell: Any) -> bool:
    """Whether it is a table's cell already."""
    return isinstance(cell, Markup) and cell.startswith("<td")


def _format_value(value: Any) -> str:
    """A number as short as two decimals allow, anything else as it is."""
    if isinstance(value, float):
        text = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text
    return str(value)


def replace_unprintable(text: str) -> str:
    """The text without what XML cannot hold: control characters in the names that models come with."""
    return "".join(c if c in "\n\t" or (c.isprintable() or c == " ") else "�" for c in text)
