"""Write the public names into docs/reference/python.md and plugin-api/*.md: `python tests/support/api_pages.py`.

public modules, pages ⇒ pages with a list of names, signatures, summaries and errors of each module

The site replaces these lists by complete descriptions (docs/mkdocs_hooks.py).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.public_api import format_signature, format_type_alias, is_field, is_type_alias, unwrap

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = (REFERENCE / "python.md", *sorted((REFERENCE / "plugin-api").glob("*.md")))
BLOCK = re.compile(r"(<!-- all of (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
ATTRIBUTES = re.compile(r"^Attributes:\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)
ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
RAISES = re.compile(r"^Raises:\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)
ERROR = re.compile(r"^ {4}(\w+):", re.MULTILINE)
HINT = "`help(NAME)` in Python prints the complete description of a name."
SHORT_VALUES = (bool, int, float, str)


def update(text: str) -> str:
    """Return a page's text with the current names of its modules."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{HINT}\n\n{_format_module(match[2])}\n\n{match[3]}", text)


def _format_module(name: str) -> str:
    module = importlib.import_module(name)
    values = {name: getattr(module, name) for name in sorted(module.__all__) if name != "__version__"}
    classes = {name: value for name, value in values.items() if inspect.isclass(value)}
    functions = {name: value for name, value in values.items() if inspect.isroutine(value)}
    others = {name: value for name, value in values.items() if name not in classes and name not in functions}
    sections = (("Functions", functions), ("Classes", classes), ("Constants and modules", others))
    return "\n\n".join(_format_section(title, members) for title, members in sections if members)


def _format_section(title: str, values: dict[str, Any]) -> str:
    lines = (line for name, value in values.items() for line in _format_name(name, value))
    return "\n".join([f"**{title}**", "", *lines])


def _format_name(name: str, value: Any) -> Iterator[str]:
    """Yield a list item for a name, and one for each public member of a class."""
    if isinstance(value, SHORT_VALUES):
        yield f"- `{name} = {value!r}`"
    elif is_type_alias(value):
        yield f"- `{name} = {format_type_alias(value)}`"
    elif not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        yield f"- `{name}`: {type(value).__name__}"
    else:
        yield f"- {_describe(name, value)}"
    if inspect.isclass(value):
        yield from _format_attributes(value)
        for member, attribute in sorted(vars(value).items()):
            if not member.startswith("_") and not is_field(value, member):
                yield f"    - {_describe(member, unwrap(attribute))}"


def _format_attributes(cls: type) -> Iterator[str]:
    """Yield a list item for each annotated attribute of a class that its signature does not include."""
    section = ATTRIBUTES.search(inspect.getdoc(cls) or "")
    summaries = dict(ATTRIBUTE.findall(section[1])) if section else {}
    for member, annotation in sorted(inspect.get_annotations(cls).items()):
        if not (member.startswith("_") or member in vars(cls) or is_field(cls, member)):
            summary = " ".join(summaries.get(member, "").split())
            yield f"    - `{member}: {annotation}`" + (f": {summary}" if summary else "")


def _describe(name: str, value: Any) -> str:
    """Return signature, summary and errors: "`f(a: int) -> str`: Return a text. Raises `UsageError`."."""
    text = f"`{name}{format_signature(value)}`"
    is_documented = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    if not is_documented and not isinstance(value, property):
        return text
    documentation = inspect.getdoc(value) or ""
    summary = " ".join(documentation.split("\n\n")[0].split())
    section = RAISES.search(documentation)
    errors = ERROR.findall(section[1]) if section else []
    raised = f" Raises {', '.join(f'`{error}`' for error in dict.fromkeys(errors))}." if errors else ""
    return f"{text}: {summary}{raised}" if summary else text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
