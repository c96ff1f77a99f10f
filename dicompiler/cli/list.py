"""`dicompiler list`: the installed passes, strategies, targets and other plugins, with options and origin."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import UnknownNameError, UsageError, did_you_mean
from dicompiler.cli.completion import NETWORKS_KIND_NAME, PLUGIN_KIND_NAMES, complete_entry, complete_kind
from dicompiler.cli.options import json_option

if TYPE_CHECKING:
    from dicompiler.ir.cluster import Device
    from dicompiler.ir.platform import Platform, PlatformFamily
    from dicompiler.plugin.registry import Registry, RegistryEntry


@click.command("list")
@click.argument("kind", metavar="KIND", shell_complete=complete_kind)
@click.argument("name", required=False, shell_complete=complete_entry)
@json_option
def command(kind: str, name: str | None, as_json: bool) -> None:
    """List passes, strategies, targets and other plugins, or the built-in networks.

    KIND is one of passes, strategies, targets, engines, operators, cost-models, platforms, plugins, networks. With a
    NAME of that kind, prints each option with its meaning and default; for a platform, its hosts and network.

    Example: dicompiler list strategies dp
    """
    from dicompiler.cli.table import print_json, print_table
    from dicompiler.plugin.registry import registry

    if name is not None and kind in ("plugins", NETWORKS_KIND_NAME):
        raise UsageError(f"list: {kind} takes no name: remove {name!r}")
    if kind == NETWORKS_KIND_NAME:
        _show_networks(as_json)
        return
    if kind not in PLUGIN_KIND_NAMES:
        raise UsageError(f"list: unknown kind {kind!r}{did_you_mean(kind, (*PLUGIN_KIND_NAMES, NETWORKS_KIND_NAME))}")
    catalogue = registry()
    if name is not None and kind == "platforms" and not as_json:
        _show_platform(catalogue, name)
        return
    records = (
        _plugin_records(catalogue)
        if kind == "plugins"
        else [_entry_record(p) for p in catalogue.entries(kind.replace("-", "_")).values()]
    )
    if name is not None:
        entry = catalogue.find(kind.replace("-", "_"), _family_name(catalogue, name) if kind == "platforms" else name)
        records = [_entry_record(entry)]
    if as_json:
        print_json(records)
        return
    if name is not None:
        _show_entry(records[0])
        return
    text = "provides" if kind == "plugins" else "summary"
    # The table shows only the first sentence; --json has the whole text.
    rows = [(r["name"], r[text].partition(". ")[0], f"{r['distribution']} {r['version']}") for r in records]
    if kind == "platforms":
        rows = [(name, _describe_family(catalogue, name), origin) for name, _, origin in rows]
        text = "host; network"
    print_table(("name", text, "from"), rows, wrap=1)
    if any(record.get("options") for record in records):
        click.echo(f"\nfor the options of an entry: dicompiler list {kind} NAME")


def _show_entry(record: dict[str, Any]) -> None:
    from dicompiler.cli.table import print_table, wrap_text

    click.echo(wrap_text(f"{record['name']}: {record['summary']} ({record['distribution']} {record['version']})"))
    if record["options"]:
        click.echo()
        rows = [(o["name"], o["type"], _format_default(o), o["help"] or "") for o in record["options"]]
        print_table(("option", "type", "default", "meaning"), rows, wrap=3)


def _platform_families(catalogue: Registry) -> list[PlatformFamily]:
    from dicompiler.ir.platform import PlatformFormat

    values = [provided.value for provided in catalogue.platforms.values()]
    return [value for value in values if not isinstance(value, PlatformFormat)]


def _family_name(catalogue: Registry, name: str) -> str:
    """Return the family of a platform ("rpi4x4" → "rpi4xN"), or `name` if it belongs to no family."""
    return next((family.name for family in _platform_families(catalogue) if family.find(name) is not None), name)


def _find_member(catalogue: Registry, name: str) -> Platform | None:
    """Return the built-in platform `name`; for a family ("rpi4xN"), its member with two hosts.

    The result is None for other names, such as a platform file format ("*.txt").
    """
    families = _platform_families(catalogue)
    member_name = f"{name[:-1]}2" if any(family.name == name for family in families) else name
    return next((platform for family in families if (platform := family.find(member_name)) is not None), None)


def _describe_device(device: Device) -> str:
    from dicompiler.base.units import COMPUTE_RATE, format_quantity

    watts = f", {device.power_active:g} W" if device.power_active else ""
    return f"{format_quantity(device.rate, COMPUTE_RATE)}{watts}" if device.can_compute else "no compute"


def _describe_network(platform: Platform) -> str:
    from dicompiler.base.units import BANDWIDTH, format_quantity, format_seconds

    network = platform.network
    latency = f", {format_seconds(network.latency)}" if network.latency else ""
    return f"{network.kind} of {format_quantity(network.bandwidth, BANDWIDTH)}{latency}"


def _describe_family(catalogue: Registry, name: str) -> str:
    from dicompiler.base.units import format_bytes

    platform = _find_member(catalogue, name)
    if platform is None:
        return "described in a file of this format"
    host = platform.hosts[0]
    devices_text = " + ".join(_describe_device(device) for device in platform.devices if device.host == host.name)
    return f"{devices_text}, {format_bytes(host.ram)}; {_describe_network(platform)}"


def _show_platform(catalogue: Registry, name: str) -> None:
    from dicompiler.cli.table import print_table, wrap_text

    platform = _find_member(catalogue, name)
    if platform is None:
        with catalogue.naming_load_errors():
            raise UnknownNameError(f"list: unknown platform {name!r}{did_you_mean(name, catalogue.platforms)}")
    click.echo(wrap_text(f"{platform.name}: {platform.description}"))
    click.echo()
    rows = [(device.name, device.host, str(device.cores), _describe_device(device)) for device in platform.devices]
    print_table(("device", "host", "cores", "rate, power"), rows, right=(2,))
    click.echo(f"\nnetwork: {_describe_network(platform)}")


def _show_networks(as_json: bool) -> None:
    from dicompiler import networks
    from dicompiler.cli.table import print_json, print_table

    def record(name: str) -> dict[str, Any]:
        options = [{"name": key, "default": value} for key, value in networks.network_options(name).items()]
        summary, parameters = networks.describe(name), networks.count_parameters(name)
        return {"name": name, "summary": summary, "parameters": parameters, "options": options}

    records = [record(name) for name in networks.NAMES]
    fixed: dict[str, Any] = {"summary": "from the onnx package", "parameters": None, "options": []}
    records += [{"name": f"light/{name}", **fixed} for name in networks.LIGHT_NAMES]
    if as_json:
        print_json(records)
        return
    counted = [f"{r['parameters'] / 1e6:.2f} M" if r["parameters"] else "" for r in records]
    rows = [(r["name"], r["summary"], n) for r, n in zip(records, counted, strict=True)]
    print_table(("name", "summary", "parameters"), rows, wrap=1)


def _entry_record(provided: RegistryEntry) -> dict[str, Any]:
    return {
        "name": provided.name,
        "summary": _summarize_entry(provided.value),
        "options": _option_records(provided.value),
        "distribution": provided.distribution,
        "version": provided.version,
        "plugin": provided.plugin,
    }


def _option_records(value: Any) -> list[dict[str, Any]]:
    from dicompiler.base.option_specs import options_of

    if not isinstance(value, type):
        return []
    return [{"name": o.name, "type": o.type, "default": o.default, "help": o.help} for o in options_of(value)]


def _summarize_entry(value: Any) -> str:
    """Return the first line of a class's docstring, a platform's description, or how an operator is split."""
    from dicompiler.ir.operator_rule import OperatorRule

    if isinstance(value, OperatorRule):
        kind = "element-wise" if value.is_elementwise else _first_line(inspect.unwrap(value.piece).__doc__)
        return kind or "can be split"
    return _first_line(value.__doc__ if isinstance(value, type) else value.description)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].strip()


def _plugin_records(catalogue: Registry) -> list[dict[str, Any]]:
    records = []
    for plugin in catalogue.plugins:
        counts = {
            name: _count_entries(catalogue, name, plugin.name, plugin.distribution)
            for name in PLUGIN_KIND_NAMES
            if name != "plugins"
        }
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


def _count_entries(catalogue: Registry, name: str, plugin: str, distribution: str) -> int:
    entries = catalogue.entries(name.replace("-", "_")).values()
    return sum((entry.plugin, entry.distribution) == (plugin, distribution) for entry in entries)


def _format_default(option: dict[str, Any]) -> str:
    return "(required)" if option["default"] is None else str(option["default"])
