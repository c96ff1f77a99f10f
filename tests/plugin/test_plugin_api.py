"""The public API of plugin authors is typed and stable, and plugins import nothing else of the core."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from support import public_api, public_types

from dicompiler import plugin_api

ROOT = Path(__file__).parents[2]
MAX_FRONT_NAMES = 50


def test_names_and_signatures_match_the_committed_list() -> None:
    committed = public_api.LIST.read_text(encoding="utf-8")
    hint = "if this is intended: python tests/support/public_api.py, and a line in CHANGELOG.md"
    assert public_api.format_list() == committed, hint


def test_front_is_small() -> None:
    assert len(plugin_api.__all__) <= MAX_FRONT_NAMES


@pytest.mark.parametrize("module", public_api.PLUGIN_API)
def test_names_are_complete_and_unique(module: str) -> None:
    namespace = importlib.import_module(module)
    assert set(namespace.__all__) <= set(dir(namespace))
    assert len(namespace.__all__) == len(set(namespace.__all__))
    declared = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(Path(str(namespace.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dicompiler.")
        for alias in node.names
    }
    assert declared == {*namespace.__all__, "lazy_module"}


def test_name_is_in_one_module() -> None:
    names = [name for module in public_api.PLUGIN_API for name in importlib.import_module(module).__all__]
    assert len(names) == len(set(names))


def test_types_in_public_signatures_and_fields_are_public() -> None:
    hint = "export these types in a topic of plugin_api or in dicompiler, or simplify the signatures"
    assert not public_types.find_unexported_types(public_api.PUBLIC), hint


def test_finds_types_that_are_not_exported() -> None:
    found = public_types.find_unexported_types(["dicompiler.plugin_api"])
    assert "dicompiler.plugin_api.Plan.failures" in found["dicompiler.ir.plan.FailurePlan"]
    assert "dicompiler.plugin_api.registry(return)" in found["dicompiler.plugin.registry.Registry"]
    assert "dicompiler.plugin_api.Problem.program_metrics(memory)" in found["dicompiler.cost.memory.MemoryUse"]
    assert "dicompiler.ir.plan.Plan" not in found


def test_unknown_name_is_an_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match=r"module 'dicompiler\.plugin_api' has no attribute 'Strategie'"):
        getattr(plugin_api, "Strategie")  # noqa: B009


def test_name_imports_only_its_own_module() -> None:
    code = (
        "import sys; from dicompiler.plugin_api import RunOptions, hookimpl;"
        "print({'onnx', 'onnxruntime', 'ortools'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def imports(file: Path) -> set[str]:
    """Return the modules of dicompiler that a file imports, including those for types and in functions."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in names if name.split(".")[0] == "dicompiler"}


@pytest.mark.parametrize("package", ["passes", "targets", "plugins", "tests/plugin_example"])
def test_plugins_import_only_the_public_api(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    internal = {
        str(file.relative_to(ROOT)): names for file in files if (names := imports(file) - set(public_api.PUBLIC))
    }
    assert not internal
