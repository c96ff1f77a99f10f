"""Functions that create HTML and SVG elements as escaped text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape, quoteattr


class Markup(str):
    """Text that is already markup. Any other text is escaped when it becomes the child of an element."""

    __slots__ = ()


VOID_ELEMENTS = frozenset(("br", "meta", "link"))
"""HTML elements that have no end tag."""


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return an element: `element("p", "a < b", class_="x")` gives `<p class="x">a &lt; b</p>`.

    Args:
        name: The tag.
        *children: Markup, text, numbers, or iterables of them.
        **attributes: Attributes; None omits one. A trailing underscore of a name is removed (`class_`), and other
            underscores become hyphens.
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
    """Return the markup of all children, one after another. Children that are not markup are escaped."""
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, Iterable) and not isinstance(child, str):
            parts.append(join_markup(child))
        else:
            parts.append(Markup(escape(_format_value(child))))
    return Markup("".join(parts))


def svg(title: str, description: str, width: float, height: float, /, *children: Any, **attributes: Any) -> Markup:
    """Return an inline SVG with a size in pixels, and a title and description for screen readers."""
    head = element("title", title), element("desc", description)
    box = f"0 0 {_format_value(width)} {_format_value(height)}"
    attributes = {"viewBox": box, "role": "img", "aria_label": f"{title}. {description}", **attributes}
    return element("svg", *head, *children, **attributes)


def html_table(headers: Iterable[Any], rows: Iterable[Iterable[Any]], caption: str = "", **attributes: Any) -> Markup:
    """Return a table that scrolls horizontally. The first cell of each row is the header of the row."""
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
    return isinstance(cell, Markup) and cell.startswith("<td")


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        text = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text
    return str(value)


def replace_unprintable(text: str) -> str:
    """Replace control characters, which names in models may contain, but XML must not."""
    return "".join(c if c in "\n\t" or (c.isprintable() or c == " ") else "�" for c in text)
