"""Depfiles: the files that a command reads, as a rule for Make or Ninja."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from dicompiler.base.errors import DicompilerError
from dicompiler.base.option_specs import option_files
from dicompiler.driver.compile_options import CompileOptions
from dicompiler.ir.onnx.loader import external_files
from dicompiler.ir.platform import platform_file
from dicompiler.plugin.entry_points import Plugin, is_builtin_distribution, top_level_package
from dicompiler.plugin.registry import registry

# A pattern of file names that Make or Ninja cannot read, found by trying all characters in GNU Make 4.3 and Ninja 1.11.
_UNSUPPORTED_NAME = re.compile(r"""["&'*;<=>?\[^`|\x00-\x1f\x7f]|^~|[ :\\]$|\\(?=[ #$:])|\(.*\)$""")
_PATTERN_CHARACTER = "%"
"""Make treats a rule with this character in its target as a pattern rule. Prerequisites may contain it."""


def format_rule(target: str, prerequisites: Iterable[str | Path], has_empty_rules: bool = False) -> str:
    """Return a depfile as text: a rule that makes `target` depend on `prerequisites`.

    Args:
        target: The file that the command writes.
        prerequisites: The files that the command reads.
        has_empty_rules: True to add an empty rule for each prerequisite, as gcc's -MP does. Make then does not stop if
            a prerequisite was deleted.

    Raises:
        DicompilerError: Make or Ninja cannot read one of the names.
    """
    if _PATTERN_CHARACTER in target:
        raise _unsupported_name_error(target, _PATTERN_CHARACTER)
    names = [_escape_name(str(path)) for path in prerequisites]
    rule = " \\\n".join([f"{_escape_name(target)}:", *(f" {name}" for name in names)])
    empty_rules = [f"{name}:" for name in names if has_empty_rules and _PATTERN_CHARACTER not in name]
    return "\n".join([rule, *empty_rules]) + "\n"


def _escape_name(name: str) -> str:
    match = _UNSUPPORTED_NAME.search(name)
    if match is not None:
        raise _unsupported_name_error(name, match[0])
    return re.sub(r"[ #:]", r"\\\g<0>", name.replace("$", "$$"))


def _unsupported_name_error(name: str, part: str) -> DicompilerError:
    remedy = "rename the file or its directory"
    return DicompilerError(f"depfile: {name!r}: Make or Ninja cannot read {part!r} in a name: {remedy}")


def find_prerequisites(model: Path, options: CompileOptions, plugins: Iterable[object]) -> tuple[Path, ...]:
    """Return the files that a compilation reads, each once.

    These are the model with its external data, the files that options name, and the modules of third-party plugins.

    Args:
        model: The path of the model.
        options: The options of the compilation.
        plugins: The used passes, strategies, cost models and targets, of which options may name files.

    Raises:
        DicompilerError: The model cannot be read.
    """
    families = [entry.value for entry in registry().platforms.values()]
    platform = options.platform
    cluster_file = platform_file(platform, families) if isinstance(platform, str) else None
    candidates = (cluster_file, options.plan, options.quantize_samples, options.wire_samples)
    option_paths = [Path(path) for path in candidates if isinstance(path, str | Path)]
    plugin_paths = [Path(file) for plugin in plugins for file in option_files(plugin)]
    paths = [model, *external_files(model), *option_paths, *plugin_paths, *plugin_modules(registry().plugins)]
    return tuple(dict.fromkeys(paths))


def plugin_modules(plugins: Iterable[Plugin]) -> list[Path]:
    third_party = [plugin for plugin in plugins if not is_builtin_distribution(plugin.distribution)]
    packages = set[str]().union(*map(_top_level_names, third_party))
    modules = [module for name, module in list(sys.modules.items()) if top_level_package(name) in packages]
    files = [getattr(module, "__file__", None) for module in modules]
    return sorted({Path(file) for file in files if file})


def _top_level_names(plugin: Plugin) -> set[str]:
    """Return the names of the top-level modules and packages of a plugin's distribution."""
    # An editable installation does not list its files, so the package of the plugin's entry point is always added.
    files = metadata.distribution(plugin.distribution).files or ()
    names = {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}
    return {top_level_package(plugin.value), *names}
