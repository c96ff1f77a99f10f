"""Depfiles: the files that a command reads, as a rule in the syntax that Make and Ninja share.

arguments of a command ──find_prerequisites──► paths ──format_rule──► text of a depfile
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from dicompiler.base.errors import DicompilerError
from dicompiler.base.option_specs import option_files
from dicompiler.ir.onnx.loader import external_files
from dicompiler.ir.platform import platform_file
from dicompiler.plugin.entry_points import Plugin, is_builtin_distribution, top_level_package
from dicompiler.plugin.registry import registry

# The names for which no escape serves both programs; found by trying all characters in GNU Make 4.3 and Ninja 1.11.
_UNSUPPORTED_NAME = re.compile(r"""["&'*;<=>?\[^`|\x00-\x1f\x7f]|^~|[ :\\]$|\\(?=[ #$:])|\(.*\)$""")
_PATTERN_CHARACTER = "%"
"""Turns a rule into a pattern rule if it is in the target. It is allowed in prerequisites."""


def format_rule(target: str, prerequisites: Iterable[str | Path]) -> str:
    """Return the depfile of a target.

    Raises:
        DicompilerError: Make or Ninja cannot read one of the names.
    """
    if _PATTERN_CHARACTER in target:
        raise _unsupported_name_error(target, _PATTERN_CHARACTER)
    lines = [f"{_escape_name(target)}:", *(f" {_escape_name(str(path))}" for path in prerequisites)]
    return " \\\n".join(lines) + "\n"


def _escape_name(name: str) -> str:
    match = _UNSUPPORTED_NAME.search(name)
    if match is not None:
        raise _unsupported_name_error(name, match[0])
    return re.sub(r"[ #:]", r"\\\g<0>", name.replace("$", "$$"))


def _unsupported_name_error(name: str, part: str) -> DicompilerError:
    return DicompilerError(f"depfile: {name!r}: Make or Ninja cannot read {part!r} in it: rename the file")


def find_prerequisites(
    model: Path, platform: str | None, other_files: Iterable[Path | None], plugins: Iterable[object]
) -> tuple[Path, ...]:
    """Return the files that a command reads, each once.

    These are the model, its external data, the platform's file, the other files, the files that options of plugins
    name, and the modules of third-party plugins that are loaded.

    Args:
        model: The model.
        platform: A TOML file or the name of a built-in platform.
        other_files: A plan and samples; None: not given.
        plugins: Passes, strategies, cost models and targets.

    Raises:
        DicompilerError: The model cannot be read.
    """
    known = registry()
    families = [entry.value for entry in known.platforms.values()]
    cluster = None if platform is None else platform_file(platform, families)
    option_paths = [Path(file) for plugin in plugins for file in option_files(plugin)]
    given = [path for path in (cluster, *other_files) if path is not None]
    paths = [model, *external_files(model), *given, *option_paths, *plugin_modules(known.plugins)]
    return tuple(dict.fromkeys(paths))


def plugin_modules(plugins: Iterable[Plugin]) -> list[Path]:
    """Return the files of all loaded modules of third-party plugins' distributions, sorted."""
    packages: set[str] = set()
    for plugin in plugins:
        if not is_builtin_distribution(plugin.distribution):
            packages |= _top_level_names(plugin)
    modules = [module for name, module in list(sys.modules.items()) if top_level_package(name) in packages]
    files = [getattr(module, "__file__", None) for module in modules]
    return sorted({Path(file) for file in files if file})


def _top_level_names(plugin: Plugin) -> set[str]:
    """Return the modules and packages of a plugin's distribution; if it is editable, only the plugin's own."""
    files = metadata.distribution(plugin.distribution).files or ()
    names = {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}
    return {top_level_package(plugin.value), *names}
