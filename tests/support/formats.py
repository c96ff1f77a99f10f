"""The key tables of docs/formats.md, made from the schemas. `python tests/support/formats.py` writes them anew.

In: schemas/*.json and the document. Out: the document with its tables as they should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dicompiler.base.schema import load_schema

DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"
# A table stands between these two; what is outside of them is written by hand.
TABLE = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The document's text with every table made anew."""
    return TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def table(name: str) -> str:
    """The Markdown table of the schema `name`: one row for each key, optional ones marked."""
    root = load_schema(name)
    rows = [f"| `{path}`{'' if required else ' (optional)'} | {text} |" for path, required, text in _keys(root, root)]
    return "\n".join(["| key | meaning |", "|---|---|", *rows]) + "\n"


def _keys(root: Mapping[str, Any], node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool, str]]:
    """(key path, whether it is required, description) of every key that has a description, in the schema's order."""
    for key, given in node.get("properties", {}).items():
        own = _resolved(root, given)
        here = f"{path}.{key}" if path else key
        if "description" in own:
            yield here, key in node.get("required", ()), own["description"].replace("|", "\\|")
        yield from _inside(root, own, here)


def _inside(root: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[tuple[str, bool, str]]:
    """The keys below an object or a list."""
    yield from _keys(root, node, path)
    for word, suffix in (("additionalProperties", ".NAME"), ("items", "[]")):
        if isinstance(node.get(word), Mapping):
            yield from _inside(root, _resolved(root, node[word]), path + suffix)


def _resolved(root: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """The node with what its `$ref` points to; its own words win."""
    if "$ref" not in node:
        return node
    found = root["$defs"][node["$ref"].rpartition("/")[2]]
    return {**_resolved(root, found), **{key: value for key, value in node.items() if key != "$ref"}}


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
