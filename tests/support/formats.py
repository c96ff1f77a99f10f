"""Generate the key tables of docs/reference/formats: `python tests/support/formats.py`.

JSON Schemas, pages ⇒ pages with current tables
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dicompiler.base.schema import load_schema

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "formats"
TABLE = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A generated table between its two marks; the rest of a page is written by hand."""


def update(text: str) -> str:
    """Return a page's text with current tables."""
    return TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def table(name: str) -> str:
    """Return the Markdown table of the schema `name`: a row per key, with optional keys marked."""
    root = load_schema(name)
    rows = [f"| `{path}`{'' if required else ' (optional)'} | {text} |" for path, required, text in _keys(root, root)]
    return "\n".join(["| key | meaning |", "|---|---|", *rows]) + "\n"


def _keys(root: Mapping[str, Any], node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool, str]]:
    """Yield (key path, is required, description) of every described key, in the schema's order."""
    for key, property_schema in node.get("properties", {}).items():
        key_schema = _resolve(root, property_schema)
        key_path = f"{path}.{key}" if path else key
        if "description" in key_schema:
            yield key_path, key in node.get("required", ()), key_schema["description"].replace("|", "\\|")
        yield from _nested_keys(root, key_schema, key_path)


def _nested_keys(root: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[tuple[str, bool, str]]:
    """Yield the keys of an object, or of the entries of a list."""
    yield from _keys(root, node, path)
    for keyword, suffix in (("additionalProperties", ".NAME"), ("items", "[]")):
        if isinstance(node.get(keyword), Mapping):
            yield from _nested_keys(root, _resolve(root, node[keyword]), path + suffix)


def _resolve(root: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the node merged with the target of its `$ref`; the node's own keys take precedence."""
    if "$ref" not in node:
        return node
    definition = root["$defs"][node["$ref"].rpartition("/")[2]]
    return {**_resolve(root, definition), **{key: value for key, value in node.items() if key != "$ref"}}


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
