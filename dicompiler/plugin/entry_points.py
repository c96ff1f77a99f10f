"""Entry points of plugins: those of installed distributions, and the built-in ones."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from importlib import metadata

from dicompiler.base.errors import describe_exception
from dicompiler.base.version import package_version

ENTRY_POINT_GROUP = "dicompiler"
PLUGINS_VARIABLE = "DICOMPILER_PLUGINS"
"""Environment variable with the names of the third-party plugins to load."""
# These repeat the entry points in pyproject.toml, because a checkout that is not installed has no metadata.
BUILTIN_PLUGINS = (
    ("core", "dicompiler.plugin.builtins"),
    ("passes", "dicompiler_passes"),
    ("strategies", "dicompiler_strategies"),
    ("papers", "dicompiler_strategies.papers"),
    ("targets", "dicompiler_targets.plugin"),
)


@dataclass(frozen=True)
class Plugin:
    """An entry point of a plugin.

    Attributes:
        name: Name of the entry point.
        value: The module that the entry point names.
        distribution: The distribution that declares the entry point.
        version: Version of the distribution.
    """

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"


def find_installed_plugins() -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    """Return the entry points of the group `dicompiler` in all installed distributions, and warnings.

    There is one warning for each distribution with unreadable metadata.
    """
    return _find_on_path(tuple(sys.path))


@functools.lru_cache(1)
def _find_on_path(_path: tuple[str, ...]) -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    plugins: dict[tuple[str, str], Plugin] = {}
    warnings = []
    for distribution in metadata.distributions():
        # `metadata.entry_points` fails for all distributions if the metadata of one is broken, so they are read one by
        # one.
        try:
            # If a plugin is found twice, for example in an older copy on a later path, the first one is used.
            for plugin in _read_entry_points(distribution):
                plugins.setdefault((canonical_name(plugin.distribution), plugin.name), plugin)
        except Exception as error:
            warnings.append(
                f"the entry points of {_distribution_name(distribution)} cannot be read: {describe_exception(error)}"
            )
    return _with_builtins(tuple(plugins.values())), tuple(warnings)


def _distribution_name(distribution: metadata.Distribution) -> str:
    try:
        return str(distribution.metadata["Name"])
    except Exception as error:
        return f"a distribution without metadata ({describe_exception(error)})"


def _read_entry_points(distribution: metadata.Distribution) -> tuple[Plugin, ...]:
    text = distribution.read_text("entry_points.txt") or ""
    if ENTRY_POINT_GROUP not in text:
        return ()
    points = [point for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP]
    name, version = str(distribution.metadata["Name"]), str(distribution.version)
    return tuple(Plugin(point.name, point.value, name, version) for point in points)


def _with_builtins(plugins: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
    """Return the built-in plugins (even if no metadata names them), then the other plugins, without duplicates."""
    ours = {plugin.value: plugin for plugin in plugins if is_builtin_distribution(plugin.distribution)}
    for name, value in BUILTIN_PLUGINS:
        ours.setdefault(value, Plugin(name, value, "dicompiler", package_version()))
    others = [plugin for plugin in plugins if plugin.value not in ours]
    return (*sorted(ours.values(), key=_sort_key), *sorted(others, key=_sort_key))


def is_builtin_distribution(distribution: str) -> bool:
    return canonical_name(distribution) == "dicompiler"


def _sort_key(plugin: Plugin) -> tuple[str, str]:
    return (canonical_name(plugin.distribution), plugin.name)


def top_level_package(module: str) -> str:
    """Return the top-level package of a module or of an entry point's value, such as "acme" for "acme.plugin:hooks"."""
    return re.split("[.:]", module)[0]


def canonical_name(name: str) -> str:
    """Return a distribution name in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
