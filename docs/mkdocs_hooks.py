"""MkDocs hooks: include pages from outside docs/, adapt their links, and list the members of public modules.

pages of docs/ and OUTSIDE_PAGES ⇒ pages of one site with links inside the site

mkdocstrings loads this file a second time for `KeywordOptions`, which documents the real signature of `compile`.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from inspect import ismodule, isroutine
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
OPTIONS_ARGUMENT = re.compile(r"^    options: .*\n(?: {5,}.*\n)*", re.MULTILINE)
"""The description of the parameter `options` in a docstring, with its continuation lines."""
MEMBERS_BLOCK = re.compile(r"<!-- all of (\S+) -->.*?<!-- end of \1 -->", re.DOTALL)
"""The list of a module's names, which tests/support/api_pages.py writes for readers of the repository."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are outside docs/."""
    for page_path, source_path in OUTSIDE_PAGES.items():
        files.append(File.generated(config, page_path, content=(ROOT / source_path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links into links of the site, and replace the list of a module's names by its complete reference."""
    page_path = page.file.src_uri
    return MEMBERS_BLOCK.sub(_make_reference, LINK.sub(lambda match: _make_link(match, page_path), markdown))


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
    others = [name for name in values if name not in (*functions, *classes) and name != "__version__"]
    return "\n\n".join(_make_directive(f"{match[1]}.{name}", values[name]) for name in (*functions, *classes, *others))


def _make_directive(path: str, value: object) -> str:
    """Return a mkdocstrings directive for a public name.

    Griffe finds a module under the public path of some names: `ssh` is a module of another package, and the function
    `samples` has the name of its module. These names are documented by the path of their definition.
    """
    if ismodule(value):
        source_path = value.__name__
    elif isroutine(value) and path == value.__module__:
        source_path = f"{path}.{value.__name__}"
    else:
        return f"::: {path}"
    return f'<a id="{path}"></a>\n\n::: {source_path}\n    options:\n      heading: {path}\n      toc_label: {path}'


class KeywordOptions(griffe.Extension):
    """Griffe extension: give `compile` one parameter for each field of `CompileOptions`, as its decorator does."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the parameter `options` of `compile`, in the signature and in the docstring."""
        if pkg.name != "dicompiler":
            return
        function, options = pkg["driver.compiler.compile"], pkg["driver.compile_options.CompileOptions"]
        model, _ = function.parameters
        # CompileOptions declares `_: KW_ONLY` before its keyword-only fields.
        names = [name for name, member in options.members.items() if member.is_attribute]
        keyword_only = names[names.index("_") + 1 :]
        parameters = [model]
        for name in names:
            if name != "_":
                kind = griffe.ParameterKind.keyword_only if name in keyword_only else model.kind
                annotation, default = options[name].annotation, options[name].value
                parameters.append(griffe.Parameter(name, annotation=annotation, kind=kind, default=default))
        function.parameters = griffe.Parameters(*parameters)
        descriptions = options.docstring.value.partition("Attributes:\n")[2]
        text = function.docstring.value
        function.docstring.value = OPTIONS_ARGUMENT.sub(lambda _: f"{descriptions}\n", text)
