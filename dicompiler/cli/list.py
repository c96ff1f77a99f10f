"""`dicompiler list`: what the plugins provide, each with its options and the distribution that it comes from."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import UsageError, nearest
from dicompiler.cli.options import json_option

if TYPE_CHECKING:
    from dicompiler.plugin.registry import Provided, Registry

NAMES = ("passes", "strategies", "targets", "operators", "cost-models", "platforms", "plugins")
NETWORKS = "networks"


@click.command("list")
@click.argument("kind", metavar="KIND")
@json_option
def command(kind: str, as_json: bool) -> None:
    """List what plugins provide, with options and origins, or the networks that come with dicompiler.

    KIND is one of passes, strategies, targets, operators, cost-models, platforms, plugins, networks.
    """
    from dicompiler.cli.tables import show, show_json
    from dicompiler.plugin.registry import registry

    if kind == NETWORKS:
        _show_networks(as_json)
        return
    if kind not in NAMES:
        raise UsageError(f"list: unknown kind {kind!r}{nearest(kind, (*NAMES, NETWORKS))}")
    known = registry()
    records = _plugins(known) if kind == "plugins" else [_record(p) for p in known.of(kind.replace("-", "_")).values()]
    if as_json:
        show_json(records)
        return
    text = "provides" if kind == "plugins" else "summary"
    # Of a long text the first sentence; --json has all of it.
    rows = [(_head(r), r[text].partition(". ")[0], f"{r['distribution']} {r['version']}") for r in records]
    show(("name", text, "from"), rows)


def _show_networks(as_json: bool) -> None:
    """The architectures with seeded weights that `dicompiler.networks.build` makes."""
    from dicompiler import networks
    from dicompiler.cli.tables import show, show_json

    def record(name: str) -> dict[str, Any]:
        known = [{"name": key, "default": value} for key, value in networks.options(name).items()]
        summary, parameters = networks.summary(name), networks.parameters(name)
        return {"name": name, "summary": summary, "parameters": parameters, "options": known}

    records = [record(name) for name in networks.NAMES]
    fixed: dict[str, Any] = {"summary": "comes with the onnx package", "parameters": None, "options": []}
    records += [{"name": f"light/{name}", **fixed} for name in networks.LIGHT_NAMES]
    if as_json:
        show_json(records)
        return
    counted = [f"{r['parameters'] / 1e6:.2f} M" if r["parameters"] else "" for r in records]
    show(
        ("name", "summary", "parameters"), [(r["name"], r["summary"], n) for r, n in zip(records, counted, strict=True)]
    )


def _record(provided: Provided) -> dict[str, Any]:
    """What `--json` prints of one thing: name, summary, options, and whom it comes from."""
    return {
        "name": provided.name,
        "summary": _summary(provided.value),
        "options": _options(provided.value),
        "distribution": provided.distribution,
        "version": provided.version,
        "plugin": provided.plugin,
    }


def _options(value: Any) -> list[dict[str, Any]]:
    from dicompiler.base.specs import options_of

    if not isinstance(value, type):
        return []
    return [{"name": o.name, "type": o.type, "default": o.default, "help": o.help} for o in options_of(value)]


def _summary(value: Any) -> str:
    """A class's first docstring line, a platform's description, how an operator is cut."""
    from dicompiler.ir.rule import OperatorRule

    if isinstance(value, OperatorRule):
        kind = "element-wise" if value.elementwise else _first_line(inspect.unwrap(value.piece).__doc__)
        return kind or "can be cut"
    return _first_line(value.__doc__ if isinstance(value, type) else value.description)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].strip()


def _plugins(known: Registry) -> list[dict[str, Any]]:
    """The loaded plugins with how many things of each kind they provide."""
    records = []
    for plugin in known.plugins:
        counts = {name: _count(known, name, plugin.name, plugin.distribution) for name in NAMES if name != "plugins"}
        records.append(
            {
                "name": plugin.name,
                "module": plugin.value,
                "provides": ", ".join(f"{name}: {count}" for name, count in counts.items() if count) or "nothing",
                "distribution": plugin.distribution,
                "version": plugin.version,
            }
        )
    return records


def _count(known: Registry, name: str, plugin: str, distribution: str) -> int:
    provided = known.of(name.replace("-", "_")).values()
    return sum((one.plugin, one.distribution) == (plugin, distribution) for one in provided)


def _head(record: dict[str, Any]) -> str:
    """The name with its options as they are written in a spec; one that must be given shows its type."""
    options = record.get("options", [])
    written = " ".join(f"{o['name']}={_shown(o)}" for o in options)
    return f"{record['name']}{{{written}}}" if options else str(record["name"])


def _shown(option: dict[str, Any]) -> str:
    return f"<{option['type']}>" if option["default"] is None else str(option["default"])
