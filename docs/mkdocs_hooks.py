"""What MkDocs does with these pages beside its own: it takes in those that lie elsewhere, mends their links, and lists
what the public modules offer.

In: the pages of docs/ and those of ELSEWHERE. Out: the same as pages of one site, with links inside of it.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from inspect import isroutine
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "examples/camera.md": "examples/camera/README.md",
    "examples/cmake_mpi.md": "examples/cmake_mpi/README.md",
}
"""Pages of the site that lie outside of docs/, by their place in the repository."""
LINK = re.compile(r"\]\(([^)#:\s]+)(#[\w-]+)?\)")
OFFERED = re.compile(r"<!-- all of (\S+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Takes in the pages that lie elsewhere."""
    for place, source in ELSEWHERE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links of the repository become links of the site; `<!-- all of MODULE -->` becomes its reference."""
    here = page.file.src_uri
    return OFFERED.sub(_reference, LINK.sub(lambda match: _link(match, here), markdown))


def _link(match: re.Match[str], here: str) -> str:
    source = posixpath.dirname(ELSEWHERE.get(here, f"docs/{here}"))
    path = posixpath.normpath(posixpath.join(source, match[1]))
    if not (ROOT / path).exists():
        return match[0]
    if (ROOT / path / "README.md").is_file():
        path += "/README.md"
    place = {source: place for place, source in ELSEWHERE.items()}.get(path, path.removeprefix("docs/"))
    return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{match[2] or ''})"


def _reference(match: re.Match[str]) -> str:
    """A line of mkdocstrings for each class and function that a module offers."""
    module = import_module(match[1])
    offered = [getattr(module, name) for name in module.__all__]
    found = [value for value in offered if isinstance(value, type) or isroutine(value)]
    return "\n\n".join(f"::: {value.__module__}.{value.__qualname__}" for value in found)
