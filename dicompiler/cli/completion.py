"""Shell completion of the names of plugins, platforms and networks.

click calls these functions when the user presses the tab key. `docs/use/shell-completion.md` describes the setup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

PLUGIN_KIND_NAMES = ("passes", "strategies", "targets", "engines", "operators", "cost-models", "platforms", "plugins")
NETWORKS_KIND_NAME = "networks"
"""First argument of `dicompiler list` that is not a plugin kind."""
OFFERED_HOST_COUNTS = (1, 2, 3, 4, 8)
"""Values of N for which members of a platform family such as rpi4xN are offered."""


def complete_names(kind: str) -> Completer:
    """Return a click completer for plugin names. `kind` is a key of PLUGIN_KINDS, such as "strategies"."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in _plugin_names(kind) if name.startswith(incomplete)]

    return complete


def complete_name_list(kind: str) -> Completer:
    """Return a click completer for the last name in a comma-separated list. `kind` is a key of PLUGIN_KINDS."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{head}{comma}{name}") for name in _plugin_names(kind) if name.startswith(last)]

    return complete


def complete_platform(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a built-in platform, or a file name if no platform matches."""
    names = [name for name in _platform_names() if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def complete_kind(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the first argument of `dicompiler list`."""
    return [CompletionItem(name) for name in (*PLUGIN_KIND_NAMES, NETWORKS_KIND_NAME) if name.startswith(incomplete)]


def complete_entry(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the second argument of `dicompiler list`. The first one is a kind such as "passes"."""
    kind = str(context.params.get("kind", "")).replace("-", "_")
    if kind == "platforms":
        return complete_platform(context, parameter, incomplete)
    return complete_names(kind)(context, parameter, incomplete)


def complete_network(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from dicompiler import networks

    return [CompletionItem(name) for name in networks.NAMES if name.startswith(incomplete)]


def _plugin_names(kind: str) -> list[str]:
    from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS
    from dicompiler.plugin.registry import registry

    return list(registry().entries(kind)) if kind in PLUGIN_KINDS else []


def _platform_names() -> Iterator[str]:
    from dicompiler.ir.platform import PlatformFormat
    from dicompiler.plugin.registry import registry

    families = [entry.value for entry in registry().platforms.values()]
    for family in families:
        if not isinstance(family, PlatformFormat):
            yield from (f"{family.name.removesuffix('N')}{count}" for count in OFFERED_HOST_COUNTS)
