"""Finds and loads plugins: installed entry points go in, one registry of all that they provide comes out.

Built-in plugins take the same way. A plugin is loaded whole or left out with one warning; the rest still works.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import Any

import pluggy

from dicompiler.base.errors import DicompilerError, PluginError, UsageError, describe_exception, did_you_mean
from dicompiler.base.option_specs import Spec, instantiate, options_of, parse_spec
from dicompiler.ir.operator_rule import OperatorRule
from dicompiler.plugin import guests, hookspecs, plugin_wrappers
from dicompiler.plugin.entry_points import (
    BUILTIN_PLUGINS,
    ENTRY_POINT_GROUP,
    PLUGINS_VARIABLE,
    Plugin,
    canonical_name,
    find_installed_plugins,
    is_builtin_distribution,
    top_level_package,
)
from dicompiler.plugin.moved import remedy

log = logging.getLogger("dicompiler")

_CONFLICT_REMEDY = f"; uninstall one or name only the other in {PLUGINS_VARIABLE}"
UNINSTALLED_PLUGIN = "uninstalled"
"""The distribution of what `also` puts beside what is installed."""


@dataclass(frozen=True)
class PluginKind:
    """A kind of thing that plugins provide. `one` is the word for a single one; `base` its class as `module:name`;
    `classes`: subclasses of it are provided, not instances."""

    noun: str
    hook: str
    base_class: str
    provides_classes: bool = True


PLUGIN_KINDS: Mapping[str, PluginKind] = MappingProxyType(
    {
        "passes": PluginKind("pass", "dicompiler_passes", "dicompiler.plugin.pass_base:Pass"),
        "strategies": PluginKind("strategy", "dicompiler_strategies", "dicompiler.search.strategy:Strategy"),
        "targets": PluginKind("target", "dicompiler_targets", "dicompiler.target.target_base:Target"),
        "operators": PluginKind(
            "operator rule", "dicompiler_operators", "dicompiler.ir.operator_rule:OperatorRule", False
        ),
        "cost_models": PluginKind("cost model", "dicompiler_cost_models", "dicompiler.cost.cost_model:CostModel"),
        "platforms": PluginKind("platform", "dicompiler_platforms", "dicompiler.ir.platform:PlatformFamily", False),
    }
)


@dataclass(frozen=True)
class RegistryEntry:
    """One thing that a plugin provides: a class, an operator rule or a platform family, and where it comes from. That
    of a third party is guarded."""

    name: str
    value: Any
    distribution: str
    version: str
    plugin: str

    @property
    def full_origin(self) -> str:
        """Where it is from, to be told from others: "acme-dicompiler 1.2 (plugin 'acme')"."""
        return f"{self.distribution} {self.version} (plugin {self.plugin!r})"

    @property
    def origin(self) -> str:
        """How errors say where it is from: "of acme-dicompiler 1.2 (plugin 'acme')"."""
        if self.distribution == UNINSTALLED_PLUGIN:
            return f"of module {self.value.__module__}"
        return f"of {self.distribution} {self.version}" + (
            "" if is_builtin_distribution(self.distribution) else f" (plugin {self.plugin!r})"
        )


@dataclass(frozen=True)
class Registry:
    """All that is provided, by kind and name (sorted), the `plugins` that were loaded and `warnings` of one line.

    left_out: the plugins that could not be loaded, each with the cause.
    """

    passes: Mapping[str, RegistryEntry] = field(default_factory=dict)
    strategies: Mapping[str, RegistryEntry] = field(default_factory=dict)
    targets: Mapping[str, RegistryEntry] = field(default_factory=dict)
    operators: Mapping[str, RegistryEntry] = field(default_factory=dict)
    cost_models: Mapping[str, RegistryEntry] = field(default_factory=dict)
    platforms: Mapping[str, RegistryEntry] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    warnings: tuple[str, ...] = ()
    failed_plugins: tuple[str, ...] = ()

    def entries(self, kind: str) -> Mapping[str, RegistryEntry]:
        """What is provided of a kind, one of KINDS."""
        provided: Mapping[str, RegistryEntry] = getattr(self, kind)
        return provided

    @property
    def operator_rules(self) -> Mapping[tuple[str, str], OperatorRule]:
        """The operator rules by domain and operator type, as a layer graph has them."""
        return {(one.value.domain, one.value.op): one.value for one in self.operators.values()}

    def find(self, kind: str, name: str) -> RegistryEntry:
        """The one of that name. UsageError names the nearest; PluginError names plugins that were left out."""
        known = self.entries(kind)
        if name not in known:
            hint = did_you_mean(name, known)
            if self.failed_plugins and "did you mean" not in hint:
                raise PluginError(f"unknown {PLUGIN_KINDS[kind].noun} {name!r}; {'; '.join(self.failed_plugins)}")
            raise UsageError(f"unknown {PLUGIN_KINDS[kind].noun} {name!r}{hint}")
        return known[name]

    def make(self, kind: str, spec: str | Spec) -> Any:
        """An instance of a pass, strategy, target or cost model from its text or Spec. UsageError as `find` and
        `specs.instantiate`."""
        parsed = parse_spec(spec, PLUGIN_KINDS[kind].noun) if isinstance(spec, str) else spec
        return plugin_wrappers.make_instance(self.find(kind, parsed.name).value, instantiate, parsed)

    def resolve(self, kind: str, given: Any) -> Any:
        """What `make` gives for a text or a Spec; an instance as if it had been made here. Of a class that no plugin
        provides only wrong results are errors that name it, exceptions stay what they are."""
        if isinstance(given, str | Spec):
            return self.make(kind, given)
        one = self._find_entry(kind, given)
        unnamed = plugin_wrappers.CallGuard(PLUGIN_KINDS[kind].noun, one.origin)
        return plugin_wrappers.with_wrapped_class(
            given, one.value if one.name else plugin_wrappers.wrap_class(one.value, unnamed)
        )

    def describe(self, kind: str, thing: Any) -> str:
        """A pass, strategy, target or cost model and where it is from: "pass 'acme' of acme 1.2 (plugin 'acme')"."""
        return plugin_wrappers.CallGuard(PLUGIN_KINDS[kind].noun, self._find_entry(kind, thing).origin).describe(thing)

    def _find_entry(self, kind: str, thing: Any) -> RegistryEntry:
        """What is provided with the thing's class; nameless where no plugin provides it."""
        cls = inspect.unwrap(type(thing))
        unknown = RegistryEntry("", cls, UNINSTALLED_PLUGIN, "0", UNINSTALLED_PLUGIN)
        return next((one for one in self.entries(kind).values() if inspect.unwrap(one.value) is cls), unknown)


_TEMPORARY_REGISTRY: ContextVar[Registry | None] = ContextVar("also", default=None)


def registry() -> Registry:
    """What all installed plugins provide, loaded once for each process; warnings are logged, a line each.

    DicompilerError where two plugins provide things of one kind and name.
    """
    return _TEMPORARY_REGISTRY.get() or load_installed()


@contextmanager
def temporarily_registered(*things: Any) -> Iterator[Registry]:
    """Inside, `registry()` (of this thread) provides these classes, rules and families too, as if a plugin named
    "uninstalled" did; they take the place of what has their names. TypeError for what is of no kind."""
    plugin = Plugin(UNINSTALLED_PLUGIN, UNINSTALLED_PLUGIN, UNINSTALLED_PLUGIN, "0")
    known = registry()
    provided = {kind: dict(known.entries(kind)) for kind in PLUGIN_KINDS}
    for value in things:
        kind = plugin_kind(value)
        one = make_entry(plugin, kind, value)
        provided[kind][one.name] = one
    kept: dict[str, Any] = {kind: MappingProxyType(dict(sorted(named.items()))) for kind, named in provided.items()}
    token = _TEMPORARY_REGISTRY.set(replace(known, **kept, plugins=(*known.plugins, plugin)))
    try:
        yield registry()
    finally:
        _TEMPORARY_REGISTRY.reset(token)


def plugin_kind(value: Any) -> str:
    """The kind, one of KINDS, that a class, a rule or a family is of."""
    for name, kind in PLUGIN_KINDS.items():
        base = _get_base_class(kind)
        if kind.provides_classes and isinstance(value, type) and issubclass(value, base):
            return name
        if not kind.provides_classes and isinstance(value, base):
            return name
    raise TypeError(f"{value!r} is nothing that a plugin provides")


@functools.cache
def load_installed() -> Registry:
    """What `registry` gives where nothing else was put beside it."""
    plugins, broken = find_installed_plugins()
    everything = load_plugins(os.environ, plugins)
    for warning in (*broken, *everything.warnings):
        log.warning(warning)
    return everything


def load_plugins(env: Mapping[str, str], plugins: Iterable[Plugin]) -> Registry:
    """Loads plugins in the given order; touches no other state than imported modules.

    `env[DICOMPILER_PLUGINS]`, where it is set, names the entry points or distributions that may be loaded besides the
    built-in ones, separated by commas. DicompilerError where two provide things of one kind and name.
    """
    chosen, warnings = _select_allowed(env.get(PLUGINS_VARIABLE), tuple(plugins))
    kept: list[Plugin] = []
    left_out: list[str] = []
    by_kind: dict[str, dict[str, RegistryEntry]] = {kind: {} for kind in PLUGIN_KINDS}
    limit = guests.limit_s(env)
    for plugin in chosen:
        try:
            with nullcontext() if is_builtin_distribution(plugin.distribution) else guests.loading(str(plugin), limit):
                provided = _load_plugin(plugin, warnings)
        # A plugin that ends the process while it is imported is broken like any other.
        except BaseException as error:
            if guests.is_ours(error):
                raise
            left_out.append(f"{plugin} is left out: {describe_exception(error)}{remedy(error)}")
            warnings.append(left_out[-1])
            continue
        kept.append(plugin)
        for kind, one in provided:
            _add_entry(by_kind, kind, one)
    return Registry(
        **{kind: MappingProxyType(dict(sorted(named.items()))) for kind, named in by_kind.items()},
        plugins=tuple(kept),
        warnings=tuple(warnings),
        failed_plugins=tuple(left_out),
    )


def _select_allowed(names: str | None, plugins: tuple[Plugin, ...]) -> tuple[list[Plugin], list[str]]:
    """The plugins that may be loaded, and warnings for names that none has."""
    if names is None:
        return list(plugins), []
    allowed = {canonical_name(name.strip()) for name in names.split(",") if name.strip()}
    third = [plugin for plugin in plugins if plugin.value not in dict(BUILTIN_PLUGINS).values()]
    known = {canonical_name(name) for plugin in third for name in (plugin.name, plugin.distribution)}
    warnings = [
        f"{PLUGINS_VARIABLE} names {name!r}, which is no installed plugin{did_you_mean(name, known)}"
        for name in sorted(allowed - known)
    ]
    left_out = [
        plugin for plugin in third if not allowed & {canonical_name(plugin.name), canonical_name(plugin.distribution)}
    ]
    return [plugin for plugin in plugins if plugin not in left_out], warnings


def _load_plugin(plugin: Plugin, warnings: list[str]) -> list[tuple[str, RegistryEntry]]:
    """All that one plugin provides, with its kinds. A misspelt hook is a warning; any error leaves the plugin out."""
    module = metadata.EntryPoint(plugin.name, plugin.value, ENTRY_POINT_GROUP).load()
    version = getattr(module, "dicompiler_api", hookspecs.API_VERSION)
    if not isinstance(version, int) or version < 1:
        raise TypeError(f"dicompiler_api is {version!r}, not a version of the hooks")
    if version > hookspecs.API_VERSION:
        raise DicompilerError(f"it is written for version {version} of the hooks, newer than {hookspecs.API_VERSION}")
    # A manager for each plugin, so that a failing hook is known to be this one's and leaves the others in peace.
    manager = pluggy.PluginManager(hookspecs.PLUGGY_PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(module, plugin.name)
    callers = manager.get_hookcallers(module) or []
    hooks = [kind.hook for kind in PLUGIN_KINDS.values()]
    unknown = [caller.name for caller in callers if not caller.has_spec()]
    provided: dict[tuple[str, str], RegistryEntry] = {}
    for kind in PLUGIN_KINDS:
        for one in _call_hook(plugin, kind, manager):
            if (kind, one.name) in provided:
                raise DicompilerError(f"it provides {PLUGIN_KINDS[kind].noun} {one.name!r} twice")
            provided[kind, one.name] = one
    warnings.extend(f"{plugin}: there is no hook {name!r}{did_you_mean(name, hooks)}" for name in unknown)
    return [(kind, one) for (kind, _), one in provided.items()]


def _call_hook(plugin: Plugin, kind: str, manager: pluggy.PluginManager) -> Iterator[RegistryEntry]:
    """What a plugin's hook of one kind yields, checked. TypeError says what is wrong with it."""
    hook = PLUGIN_KINDS[kind].hook
    for values in getattr(manager.hook, hook)():
        for value in values:
            yield make_entry(plugin, kind, value)


def make_entry(plugin: Plugin, kind: str, value: Any) -> RegistryEntry:
    """One thing that a plugin provides, guarded. TypeError says what is wrong with it."""
    name = _get_valid_name(PLUGIN_KINDS[kind], value)
    code = value if PLUGIN_KINDS[kind].provides_classes else getattr(value, "piece", None) or value.make
    one = RegistryEntry(name, value, plugin.distribution, plugin.version, plugin.name)
    if is_builtin_distribution(plugin.distribution):
        return one
    packages = {top_level_package(plugin.value), top_level_package(code.__module__)} - {
        top_level_package(module) for _, module in BUILTIN_PLUGINS
    }
    watch = plugin_wrappers.CallGuard(PLUGIN_KINDS[kind].noun, one.origin, str(plugin), frozenset(packages))
    return replace(one, value=plugin_wrappers.wrap_provided(value, name, watch))


def _get_base_class(kind: PluginKind) -> Any:
    """The class that is its base."""
    module, _, attribute = kind.base_class.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _get_valid_name(kind: PluginKind, value: Any) -> str:
    """The name of what a hook yields. TypeError where it is not of its kind, ValueError where the name is not one."""
    base, attribute = _get_base_class(kind), kind.base_class.partition(":")[2]
    if not kind.provides_classes:
        if not isinstance(value, base):
            raise TypeError(f"{kind.hook} yields {value!r}, which is not of type {attribute}")
        if attribute != "OperatorRule":
            return str(value.name)
        return f"{value.domain}::{value.op}" if value.domain else str(value.op)
    if not isinstance(value, type) or not issubclass(value, base) or inspect.isabstract(value):
        raise TypeError(f"{kind.hook} yields {value!r}, which is not a class that implements {attribute}")
    options_of(value)
    name = getattr(value, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{value.__name__} has no name")
    if attribute == "Pass":
        _check_pass_fields(value)
    return Spec(name).name


def _check_pass_fields(step: Any) -> None:
    """TypeError where a pass requires or provides what a Compilation does not have."""
    from dicompiler.ir.pipeline_state import PipelineState

    for name in (*step.requires, *step.provides):
        if name not in PipelineState.__dataclass_fields__:
            known = did_you_mean(name, PipelineState.__dataclass_fields__)
            raise TypeError(f"{step.__name__} names {name!r}, which is no field of a Compilation{known}")


def _add_entry(by_kind: dict[str, dict[str, RegistryEntry]], kind: str, one: RegistryEntry) -> None:
    if kind != "operators":  # whose names are those of ONNX
        for other in by_kind[kind].values():
            if canonical_name(other.name) == canonical_name(one.name) and other.name != one.name:
                both = f"{other.name!r} of {other.full_origin} and {one.name!r} of {one.full_origin}"
                raise DicompilerError(
                    f"{PLUGIN_KINDS[kind].noun} {both} differ only by case, '-', '_' or '.'{_CONFLICT_REMEDY}"
                )
    other = by_kind[kind].setdefault(one.name, one)
    if (
        kind == "operators" and not other.value.can_cut and one.value.can_cut
    ):  # a rule that cuts what another just counts
        by_kind[kind][one.name] = one
    elif other is not one:
        raise DicompilerError(
            f"{PLUGIN_KINDS[kind].noun} {one.name!r} comes from two plugins: {other.full_origin} and {one.full_origin}{_CONFLICT_REMEDY}"
        )
