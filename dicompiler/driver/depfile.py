"""Depfiles: the files that a command reads, as a rule in the syntax that Make and Ninja share."""

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

# This pattern matches the file names that cannot be written such that both Make and Ninja read them. All characters
# were tried in GNU Make 4.3 and Ninja 1.11.
_UNSUPPORTED_NAME = re.compile(r"""["&'*;<=>?\[^`|\x00-\x1f\x7f]|^~|[ :\\]$|\\(?=[ #$:])|\(.*\)$""")
_PATTERN_CHARACTER = "%"
"""A rule with this character in its target is a pattern rule for Make. Prerequisites may contain the character."""


def format_rule(target: str, prerequisites: Iterable[str | Path], has_empty_rules: bool = False) -> str:
    """Return the text of a depfile; raise DicompilerError if Make or Ninja cannot read one of the names.

    With `has_empty_rules`, each prerequisite has an empty rule, as with gcc's -MP, so that Make does not stop if a
    prerequisite was deleted. Omit these rules for CMake 4. It does not rebuild a file that one depfile describes if
    another depfile has an empty rule for this file.
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

    These are:

    - the model and its external data;
    - the files that the options name: platform, plan, and samples for quantization and for the value ranges of sent
      tensors;
    - the files that the options of `plugins` (passes, strategies, cost models and targets) name;
    - the loaded modules of third-party plugins.

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
    """Return the files of all loaded modules of third-party plugins, sorted."""
    third_party = [plugin for plugin in plugins if not is_builtin_distribution(plugin.distribution)]
    packages = set[str]().union(*map(_top_level_names, third_party))
    modules = [module for name, module in list(sys.modules.items()) if top_level_package(name) in packages]
    files = [getattr(module, "__file__", None) for module in modules]
    return sorted({Path(file) for file in files if file})


def _top_level_names(plugin: Plugin) -> set[str]:
    """Return the top-level modules and packages of a plugin's distribution.

    An editable installation does not list its files. In this case, only the package of the module that the entry point
    names is returned.
    """
    files = metadata.distribution(plugin.distribution).files or ()
    names = {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}
    return {top_level_package(plugin.value), *names}
