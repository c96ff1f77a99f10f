"""MkDocs hooks: include pages from outside docs/, adapt their links, and list the members of public modules.

pages of docs/ and OUTSIDE_PAGES ⇒ pages of one site with links inside the site
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from importlib import import_module
from inspect import isroutine
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE_PAGES = {
    "index.md": "README.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "use/examples/index.md": "examples/README.md",
    "use/examples/camera.md": "examples/camera/README.md",
    "use/examples/cmake_mpi.md": "examples/cmake_mpi/README.md",
    "reference/benchmarks.md": "benchmarks/README.md",
}
"""Source file of each page that is outside docs/, by its path in the site."""
LINK = re.compile(r"\]\(([^)#:\s]+)(#[\w-]+)?\)")
MEMBERS_MARK = re.compile(r"<!-- all of (\S+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are outside docs/."""
    for page_path, source_path in OUTSIDE_PAGES.items():
        files.append(File.generated(config, page_path, content=(ROOT / source_path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links into links of the site, and replace `<!-- all of MODULE -->` by the module's reference."""
    page_path = page.file.src_uri
    return MEMBERS_MARK.sub(_make_reference, LINK.sub(lambda match: _make_link(match, page_path), markdown))


def _make_link(match: re.Match[str], page_path: str) -> str:
    source_directory = posixpath.dirname(OUTSIDE_PAGES.get(page_path, f"docs/{page_path}"))
    path = posixpath.normpath(posixpath.join(source_directory, match[1]))
    if not (ROOT / path).exists():
        return match[0]
    if (ROOT / path / "README.md").is_file():
        path += "/README.md"
    pages_by_source = {source_path: site_path for site_path, source_path in OUTSIDE_PAGES.items()}
    target_path = pages_by_source.get(path, path.removeprefix("docs/"))
    return f"]({posixpath.relpath(target_path, posixpath.dirname(page_path) or '.')}{match[2] or ''})"


def _make_reference(match: re.Match[str]) -> str:
    """Return a mkdocstrings directive for each public name of a module: functions, classes, then others."""
    module = import_module(match[1])
    values = {name: getattr(module, name) for name in module.__all__}
    functions = [name for name, value in values.items() if isroutine(value)]
    classes = [name for name, value in values.items() if isinstance(value, type)]
    others = [name for name in values if name not in (*functions, *classes) and _has_source(f"{match[1]}.{name}")]
    return "\n\n".join(f"::: {match[1]}.{name}" for name in (*functions, *classes, *others))


def _has_source(path: str) -> bool:
    """Return True if the definition of a public name can be found in the source."""
    try:
        source = _load_package()[path.partition(".")[2]]
        return not (source.final_target if source.is_alias else source).is_module
    except (griffe.AliasResolutionError, KeyError):
        return False


@cache
def _load_package() -> griffe.Object | griffe.Alias:
    return griffe.load("dicompiler", search_paths=[ROOT], resolve_aliases=True)
