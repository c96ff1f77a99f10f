"""Depfiles: what a command read, as a rule in the syntax that Make and Ninja share.

In: what the command was given. Out: the paths of the files that it reads, as they were given; the text of a depfile.
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

# Found by trying every character with GNU Make 4.3 and Ninja 1.11: neither's escapes help with these in the other.
_UNSUPPORTED_NAME = re.compile(r"""["&'*;<=>?\[^`|\x00-\x1f\x7f]|^~|[ :\\]$|\\(?=[ #$:])|\(.*\)$""")
_PATTERN_CHARACTER = "%"
"""Makes a pattern rule of a target; a prerequisite may hold it."""


def format_rule(target: str, prerequisites: Iterable[str | Path]) -> str:
    """The depfile of a rule that makes `target`. DicompilerError for a name that Make or Ninja cannot read there."""
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
    """The files that compiling `model` reads: the model, its external data, the platform's file, `read` (a plan,
    samples; None: not given), those that options of `parts` name, and the modules of third-party plugins that are
    loaded by now. Each once.

    parts: passes, strategies, cost models and targets. DicompilerError for a model that cannot be read.
    """
    known = registry()
    families = [provided.value for provided in known.platforms.values()]
    cluster = None if platform is None else platform_file(platform, families)
    named = [Path(file) for part in plugins for file in option_files(part)]
    given = [path for path in (cluster, *other_files) if path is not None]
    return tuple(dict.fromkeys([model, *external_files(model), *given, *named, *plugin_modules(known.plugins)]))


def plugin_modules(plugins: Iterable[Plugin]) -> list[Path]:
    """The files of all loaded modules of third-party plugins' distributions, sorted."""
    tops = {
        top
        for plugin in plugins
        if not is_builtin_distribution(plugin.distribution)
        for top in _top_level_names(plugin)
    }
    files = [
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if top_level_package(name) in tops
    ]
    return sorted({Path(file) for file in files if file})


def _top_level_names(plugin: Plugin) -> set[str]:
    """The names of the modules and packages that come with a plugin; of an editable install only the plugin's own."""
    files = metadata.distribution(plugin.distribution).files or ()
    return {
        top_level_package(plugin.value),
        *(file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"),
    }
