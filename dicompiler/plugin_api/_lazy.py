"""Lazy imports for modules that declare their names under `if TYPE_CHECKING:`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_module(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module with names that are imported on first use (PEP 562).

    The imports under `if TYPE_CHECKING:` in the module's source state the module of each name. Type checkers and the
    run time therefore read the same declaration.
    """
    source = ast.parse(inspect.getsource(sys.modules[module]))
    checks = [node for node in source.body if isinstance(node, ast.If)]
    imports = [node for check in checks for node in check.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}
    namespace = vars(sys.modules[module])

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = import_module(homes[name])
        # A submodule becomes an attribute of its package only when it is imported.
        value = getattr(home, name) if hasattr(home, name) else import_module(f"{homes[name]}.{name}")
        namespace[name] = value
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *homes})

    return get_attribute, list_names
