"""The one door of plugins: what it offers is documented, typed, and changes only where somebody means it to."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from support import door

from dicompiler import plugin_api

ROOT = Path(__file__).parents[2]
PUBLIC = ("dicompiler", "dicompiler.plugin_api", "dicompiler.testing", "dicompiler.networks")


def test_names_and_signatures_are_those_of_the_committed_list() -> None:
    committed = door.LIST.read_text(encoding="utf-8")
    assert door.listed() == committed, "if this is meant: python tests/support/door.py, and a line in CHANGELOG.md"


def test_what_type_checkers_see_is_what_is_offered() -> None:
    assert set(plugin_api._HOMES) == set(plugin_api.__all__) <= set(dir(plugin_api))
    assert len(plugin_api.__all__) == len(set(plugin_api.__all__))


@pytest.mark.parametrize("name", plugin_api.__all__)
def test_every_class_and_function_has_a_docstring(name: str) -> None:
    value = getattr(plugin_api, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Strategie'"):
        plugin_api.Strategie  # noqa: B018


def test_a_name_imports_no_more_than_its_own_module_needs() -> None:
    code = (
        "import sys; from dicompiler.plugin_api import RunOptions, hookimpl;"
        "print({'onnx', 'onnxruntime', 'ortools'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def imports(file: Path) -> set[str]:
    """The modules of dicompiler that a file imports, in functions and for types as well."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in names if name.split(".")[0] == "dicompiler"}


@pytest.mark.parametrize("package", ["passes", "targets", "plugins", "tests/plugin_example"])
def test_plugins_built_in_or_not_use_the_door_and_nothing_else(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(file.relative_to(ROOT)): inside for file in files if (inside := imports(file) - set(PUBLIC))}
    assert not wrong
