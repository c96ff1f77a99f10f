"""Lazy imports for modules that declare their names under `if TYPE_CHECKING:`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def _declared_modules(module: str) -> dict[str, str]:
    """Map each name that a module imports under `if TYPE_CHECKING:` to the module from which it is imported."""
    import ast

    # `inspect.getsource` would look up attributes of the module, and so call this function again.
    source = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    checks = [node for node in source.body if isinstance(node, ast.If)]
    imports = [node for check in checks for node in check.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def lazy_module(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module with names that are imported on first use (PEP 562).

    The names are those that the module imports under `if TYPE_CHECKING:`.
    """
    namespace = vars(sys.modules[module])

    def get_attribute(name: str) -> Any:
        modules = _declared_modules(module)
        if name not in modules:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source = import_module(modules[name])
        # A submodule becomes an attribute of its package only when it is imported, so import it if it is missing.
        value = getattr(source, name) if hasattr(source, name) else import_module(f"{modules[name]}.{name}")
        namespace[name] = value
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *_declared_modules(module), *namespace["__all__"]})

    return get_attribute, list_names
