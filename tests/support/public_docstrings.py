"""pydoclint for the public API: sections of its docstrings are complete and match the signatures.

    python tests/support/public_docstrings.py    prints the violations; exit code 1 if there are any

Public are the names in `__all__` of the packages below, with their public methods. Their definitions are in internal
modules, whose other docstrings need no sections: pydoclint therefore checks single definitions and not whole files.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from pydoclint.utils.violation import Violation
from pydoclint.visitor import Visitor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.public_api import PUBLIC  # noqa: E402

IGNORED = (
    # These rules report only that arguments or attributes differ; DOC103 and DOC603 name them.
    "DOC101", "DOC102", "DOC601", "DOC602",
    "DOC502", "DOC503",  # These rules reject documented errors that only called functions raise.
)  # fmt: skip
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions() -> dict[Any, tuple[Path, str]]:
    """Map each public class and function to its file and qualified name."""
    found = {}
    for module in PUBLIC:
        namespace = importlib.import_module(module)
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                value = inspect.unwrap(value)
                if value.__module__.startswith("dicompiler"):
                    found[value] = Path(inspect.getfile(value)), value.__qualname__
    return found


@cache
def _definitions(path: Path) -> dict[str, Definition]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def violations() -> Iterator[str]:
    """Yield one line for each violation: file, line, name, rule and message."""
    for value, (path, name) in public_definitions().items():
        node = _definitions(path)[name]
        for line, text in sorted({*_missing(value, node), *_pydoclint(value, node)}):
            yield f"{path.relative_to(ROOT)}:{line}: {text}"


def _public_methods(node: Definition) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    functions = [member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function for function in functions if not function.name.startswith("_")]


def _missing(value: Any, node: Definition) -> Iterator[tuple[int, str]]:
    """Yield definitions without a docstring, unless they inherit one."""
    if not ast.get_docstring(node):
        yield node.lineno, f"{node.name}: no docstring"
    if isinstance(node, ast.ClassDef):
        for method in _public_methods(node):
            if not inspect.getdoc(inspect.getattr_static(value, method.name)) and not inspect.getdoc(
                getattr(value, method.name)
            ):
                yield method.lineno, f"{node.name}.{method.name}: no docstring"


def _public_part(node: ast.ClassDef) -> ast.ClassDef:
    """Return the class with its fields, `__init__` and the public methods that do not inherit their docstring."""
    nested = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    fields = [member for member in node.body if not isinstance(member, nested)]
    init = [member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"]
    methods = [method for method in _public_methods(node) if ast.get_docstring(method)]
    part = dict(ast.iter_fields(node)) | {"body": [*fields, *init, *methods]}
    return ast.copy_location(ast.ClassDef(**part), node)


def _is_property(value: Any, node: Definition, violation: Violation) -> bool:
    """Return True if the violation is a missing Returns section of a property; pydoclint knows only `@property`."""
    names = [method.name for method in _public_methods(node) if method.lineno == violation.line]
    attributes = [inspect.getattr_static(value, name) for name in names]
    functions = FunctionType | classmethod | staticmethod
    return violation.fullErrorCode == "DOC201" and any(not isinstance(attribute, functions) for attribute in attributes)


def _pydoclint(value: Any, node: Definition) -> Iterator[tuple[int, str]]:
    visitor = Visitor(
        style="google",
        argTypeHintsInDocstring=False,
        checkReturnTypes=False,
        checkYieldTypes=False,
        skipCheckingShortDocstrings=False,
        allowInitDocstring=True,
    )
    if isinstance(node, ast.ClassDef):
        node = _public_part(node)
    visitor.visit(node)
    for violation in visitor.violations:
        if violation.fullErrorCode not in IGNORED and not _is_property(value, node, violation):
            text = re.sub(r" *\((Please read|Or could be)[^)]*\)\.?", "", violation.msg)
            yield violation.line, f"{violation.fullErrorCode} {text}"


if __name__ == "__main__":
    lines = list(violations())
    print("\n".join(lines))
    sys.exit(bool(lines))
