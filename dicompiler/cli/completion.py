"""Completion of names in a shell: strategies, passes, targets, cost models, platforms and networks.

click calls these functions when the user presses the tab key; `docs/use/shell-completion.md` says how to set it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

PLUGIN_KIND_NAMES = ("passes", "strategies", "targets", "engines", "operators", "cost-models", "platforms", "plugins")
NETWORKS_KIND_NAME = "networks"
"""Value of the first argument of `dicompiler list` in addition to PLUGIN_KIND_NAMES."""
OFFERED_HOST_COUNTS = (1, 2, 3, 4, 8)
"""Numbers of hosts N for which the platforms of a family (such as rpi4xN) are offered."""


def complete_names(kind: str) -> Completer:
    """Return a function with which click completes a plugin's name. `kind` is a key of PLUGIN_KINDS ("strategies")."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in _plugin_names(kind) if name.startswith(incomplete)]

    return complete


def complete_name_list(kind: str) -> Completer:
    """Return a function with which click completes the last name in a list of plugins' names, such as "a,b"."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{head}{comma}{name}") for name in _plugin_names(kind) if name.startswith(last)]

    return complete


def complete_platform(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a built-in platform; if there is no such name, the name of a file."""
    names = [name for name in _platform_names() if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def complete_kind(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the first argument of `dicompiler list`."""
    return [CompletionItem(name) for name in (*PLUGIN_KIND_NAMES, NETWORKS_KIND_NAME) if name.startswith(incomplete)]


def complete_entry(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the second argument of `dicompiler list`: a name of the kind that the first argument gives."""
    kind = str(context.params.get("kind", "")).replace("-", "_")
    if kind == "platforms":
        return complete_platform(context, parameter, incomplete)
    return complete_names(kind)(context, parameter, incomplete)


def complete_network(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a built-in network."""
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
