"""The registry loads plugins and contains everything that they provide.

    entry points ⇒ Registry

A class or rule that cannot be registered is omitted with one warning. If the module of a plugin cannot be imported, the
whole plugin is omitted.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import Any

import pluggy

from dicompiler.base.errors import (
    DicompilerError,
    PluginError,
    UnknownNameError,
    UsageError,
    describe_exception,
    did_you_mean,
    one_line,
)
from dicompiler.base.option_specs import Spec, instantiate, parse_spec
from dicompiler.base.termination import TerminationError
from dicompiler.ir.operator_rule import OperatorRule
from dicompiler.plugin import hookspecs, plugin_wrappers
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
from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS, PluginKind, check_rule_fields, get_valid_name, plugin_kind

log = logging.getLogger("dicompiler")

UNINSTALLED_PLUGIN = "uninstalled"
"""Name of plugin and distribution in entries of things that were registered temporarily, not by a plugin."""


@dataclass(frozen=True)
class RegistryEntry:
    """A class, operator rule or platform family (which finds platforms by name) that a plugin provides.

    Attributes:
        name: Its name, unique within its kind.
        value: The class, rule or family. Third-party ones are wrapped, so that errors name the plugin.
        distribution: Distribution of the plugin.
        version: Version of the distribution.
        plugin: Name of the plugin's entry point.
    """

    name: str
    value: Any
    distribution: str
    version: str
    plugin: str

    @property
    def full_origin(self) -> str:
        """Distribution, version and plugin of the entry: "acme-dicompiler 1.2 (plugin 'acme')"."""
        return f"{self.distribution} {self.version} (plugin {self.plugin!r})"

    @property
    def origin(self) -> str:
        """Origin of the entry in error messages: "of acme-dicompiler 1.2 (plugin 'acme')"."""
        if self.distribution == UNINSTALLED_PLUGIN:
            return f"of module {self.value.__module__}"
        return f"of {self.distribution} {self.version}" + (
            "" if is_builtin_distribution(self.distribution) else f" (plugin {self.plugin!r})"
        )


@dataclass(frozen=True)
class Registry:
    """Everything that the loaded plugins provide, by kind and sorted by name.

    Attributes:
        passes: Transformations of a model or of its plan.
        strategies: Strategies, which make plans.
        targets: Targets, which write and run artifacts.
        engines: Engines, which compute segments (ONNX submodels) on devices.
        operators: Operator rules, which describe how operators can be split.
        cost_models: Cost models, which predict the seconds of computing.
        platforms: Platform families, which find platforms by name (`rpi4x3`), and platform file formats.
        plugins: The plugins that were loaded, in order.
        warnings: Warnings of one line each.
        load_errors: Plugins, hooks and items that could not be loaded, each with the cause.
    """

    passes: Mapping[str, RegistryEntry] = field(default_factory=dict)
    strategies: Mapping[str, RegistryEntry] = field(default_factory=dict)
    targets: Mapping[str, RegistryEntry] = field(default_factory=dict)
    engines: Mapping[str, RegistryEntry] = field(default_factory=dict)
    operators: Mapping[str, RegistryEntry] = field(default_factory=dict)
    cost_models: Mapping[str, RegistryEntry] = field(default_factory=dict)
    platforms: Mapping[str, RegistryEntry] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    warnings: tuple[str, ...] = ()
    load_errors: tuple[str, ...] = ()

    def entries(self, kind: str) -> Mapping[str, RegistryEntry]:
        """Return the registered things of one kind by name.

        Args:
            kind: "passes", "strategies", "targets", "engines", "operators", "cost_models" or "platforms".

        Returns:
            The entries by name.
        """
        entries: Mapping[str, RegistryEntry] = getattr(self, kind)
        return entries

    @property
    def operator_rules(self) -> Mapping[tuple[str, str], OperatorRule]:
        """The operator rules by domain and type of the operator, such as ("", "Conv")."""
        rules = [entry.value for entry in self.operators.values()]
        return {(rule.domain, rule.op): rule for rule in rules}

    def find(self, kind: str, name: str) -> RegistryEntry:
        """Return the entry of a kind with this name.

        Args:
            kind: "passes", "strategies", "targets", "engines", "operators", "cost_models" or "platforms".
            name: Name of the pass, strategy or other thing.

        Returns:
            The entry, with the class, rule or family.

        Raises:
            UsageError: The name is unknown. The message suggests the nearest one.
            PluginError: The name is unknown, and some plugins or items could not be loaded.
        """
        known = self.entries(kind)
        if name not in known:
            hint = did_you_mean(name, known, f"dicompiler list {kind.replace('_', '-')}")
            if self.load_errors and "did you mean" not in hint:
                hint = ""  # The load errors are long, and more likely to help than a list of names.
            with self.naming_load_errors():
                raise UnknownNameError(f"unknown {PLUGIN_KINDS[kind].noun} {name!r}{hint}")
        return known[name]

    @contextmanager
    def naming_load_errors(self) -> Iterator[None]:
        """Add the plugins and items that could not be loaded to an UnknownNameError of the `with` block.

        Raises:
            PluginError: The name is unknown, perhaps because a plugin or item could not be loaded.
        """
        try:
            yield
        except UnknownNameError as error:
            if not self.load_errors:
                raise
            raise PluginError("; ".join((str(error), *self.load_errors))) from error

    def make(self, kind: str, spec: str | Spec) -> Any:
        """Create a pass, strategy, target, engine or cost model from its text or Spec, such as "tile-height{parts=2}".

        Args:
            kind: "passes", "strategies", "targets", "engines" or "cost_models".
            spec: Name and options.

        Returns:
            The instance. If a third-party plugin provides its class, invalid results and exceptions of its methods
            become errors that name the plugin.

        Raises:
            UsageError: The name is unknown, or the text or the Spec is invalid.
            PluginError: The class raised an exception, or the name is unknown and some plugins could not be loaded.
        """
        parsed = parse_spec(spec, PLUGIN_KINDS[kind].noun) if isinstance(spec, str) else spec
        return plugin_wrappers.make_instance(self.find(kind, parsed.name).value, instantiate, parsed)

    def resolve(self, kind: str, given: Any) -> Any:
        """Return an instance of a pass, strategy, target, engine or cost model, given as a text, a Spec or an instance.

        Args:
            kind: "passes", "strategies", "targets", "engines" or "cost_models".
            given: The text, the Spec or the instance.

        Returns:
            The instance. If a third-party plugin provides its class, invalid results and exceptions of its methods
            become errors that name the plugin. Exceptions of classes that no plugin provides are passed on unchanged.

        Raises:
            UsageError: The name is unknown, or the text or the Spec is invalid.
            PluginError: The class raised an exception, or the name is unknown and some plugins could not be loaded.
        """
        if isinstance(given, str | Spec):
            return self.make(kind, given)
        entry = self._find_entry(kind, given)
        guard = plugin_wrappers.CallGuard(PLUGIN_KINDS[kind].noun, entry.origin)
        cls = entry.value if entry.name else plugin_wrappers.wrap_class(entry.value, guard)
        return plugin_wrappers.with_wrapped_class(given, cls)

    def describe(self, kind: str, thing: Any) -> str:
        """Return kind, name and origin of a plugin object: "pass 'acme' of acme 1.2 (plugin 'acme')".

        Args:
            kind: "passes", "strategies", "targets", "engines", "operators", "cost_models" or "platforms".
            thing: An instance of the pass, strategy or other thing.

        Returns:
            The text for error messages.
        """
        return plugin_wrappers.CallGuard(PLUGIN_KINDS[kind].noun, self._find_entry(kind, thing).origin).describe(thing)

    def _find_entry(self, kind: str, thing: Any) -> RegistryEntry:
        """Return the entry of the class of `thing`; an entry with an empty name if no plugin provides it."""
        cls = inspect.unwrap(type(thing))
        unknown = RegistryEntry("", cls, UNINSTALLED_PLUGIN, "0", UNINSTALLED_PLUGIN)
        return next((entry for entry in self.entries(kind).values() if inspect.unwrap(entry.value) is cls), unknown)


_TEMPORARY_REGISTRY: ContextVar[Registry | None] = ContextVar("temporary_registry", default=None)


def registry() -> Registry:
    """Return the registry of all installed plugins, which are loaded at the first call in a process.

    Returns:
        The registry.
    """
    return _TEMPORARY_REGISTRY.get() or load_installed()


@contextmanager
def temporarily_registered(*things: Any) -> Iterator[Registry]:
    """Register classes, operator rules and platform families for this thread while the context is open.

    They replace registered things of the same kind and name. The name of their plugin is "uninstalled".

    Args:
        *things: Classes of passes, strategies, targets, engines and cost models; operator rules; platform families.

    Yields:
        The registry with these things.

    Raises:
        TypeError: A thing is of none of these kinds.
    """
    plugin = Plugin(UNINSTALLED_PLUGIN, UNINSTALLED_PLUGIN, UNINSTALLED_PLUGIN, "0")
    known = registry()
    by_kind = {kind: dict(known.entries(kind)) for kind in PLUGIN_KINDS}
    for value in things:
        kind = plugin_kind(value)
        entry = make_entry(plugin, kind, value)
        by_kind[kind][entry.name] = entry
    token = _TEMPORARY_REGISTRY.set(replace(known, **_sorted_entries(by_kind), plugins=(*known.plugins, plugin)))
    try:
        yield registry()
    finally:
        _TEMPORARY_REGISTRY.reset(token)


@functools.cache
def load_installed() -> Registry:
    """Load all installed plugins, and log the warnings."""
    plugins, broken = find_installed_plugins()
    loaded = load_plugins(os.environ, plugins)
    for warning in (*broken, *loaded.warnings):
        log.warning(warning)
    return loaded


def load_plugins(env: Mapping[str, str], plugins: Iterable[Plugin]) -> Registry:
    """Load plugins in the given order.

    If two plugins provide things of the same kind and name, the one of the first plugin is used, with a warning. An
    operator rule with `replaces=True` is used instead of the rule of an earlier plugin.

    Args:
        env: The environment. `DICOMPILER_PLUGINS` lists the third-party plugins that may be loaded, as names of entry
            points or distributions, separated by commas. If it is not set, all plugins are loaded.
        plugins: The plugins.

    Raises:
        UsageError: `DICOMPILER_PLUGINS` has a name that no third-party plugin has.
    """
    chosen = _select_allowed(env.get(PLUGINS_VARIABLE), tuple(plugins))
    warnings: list[str] = []
    loaded: list[Plugin] = []
    errors: list[str] = []
    by_kind: dict[str, dict[str, RegistryEntry]] = {kind: {} for kind in PLUGIN_KINDS}
    for plugin in chosen:
        with _errors_as_text(plugin, f"{plugin} is left out", errors):
            manager = _import_plugin(plugin, warnings)
            loaded.append(plugin)
            for kind, entry in _find_entries(plugin, manager, errors):
                if (known := _find_conflict(by_kind[kind], kind, entry)) is None:
                    by_kind[kind][entry.name] = entry
                else:
                    warnings.append(_describe_conflict(kind, known, entry))
    return Registry(
        **_sorted_entries(by_kind),
        plugins=tuple(loaded),
        warnings=(*warnings, *errors),
        load_errors=tuple(errors),
    )


@contextmanager
def _errors_as_text(plugin: Plugin, place: str, errors: list[str]) -> Iterator[None]:
    """Catch an exception of the `with` block, and append it to `errors` as a line of text.

    The line starts with `place`, and names the file and line in the plugin's code.
    """
    try:
        yield
    except (KeyboardInterrupt, TerminationError):
        raise
    except BaseException as error:
        # A plugin that calls sys.exit must not end the process, so all exceptions are caught.
        line = plugin_wrappers.format_plugin_error(error, {top_level_package(plugin.value): place})
        errors.append(line or f"{place}: {describe_exception(error)}")


def _sorted_entries(by_kind: Mapping[str, Mapping[str, RegistryEntry]]) -> dict[str, Any]:
    return {kind: MappingProxyType(dict(sorted(entries.items()))) for kind, entries in by_kind.items()}


def _select_allowed(names: str | None, plugins: tuple[Plugin, ...]) -> list[Plugin]:
    """Return the plugins that may be loaded.

    `names` is the value of DICOMPILER_PLUGINS: the allowed third-party plugins, or None to allow all.

    Raises:
        UsageError: A name is unknown. After a mere warning, a build would succeed without the plugin.
    """
    if names is None:
        return list(plugins)
    allowed = {canonical_name(name.strip()) for name in names.split(",") if name.strip()}
    third_party = [plugin for plugin in plugins if plugin.value not in dict(BUILTIN_PLUGINS).values()]
    known = {canonical_name(name) for plugin in third_party for name in (plugin.name, plugin.distribution)}
    if unknown := sorted(allowed - known):
        name = unknown[0]
        raise UsageError(
            f"{PLUGINS_VARIABLE}: {name!r} is not an installed third-party plugin{did_you_mean(name, known)}: correct "
            "the name, or install the plugin"
        )
    excluded = [
        plugin
        for plugin in third_party
        if not allowed & {canonical_name(plugin.name), canonical_name(plugin.distribution)}
    ]
    return [plugin for plugin in plugins if plugin not in excluded]


def _import_plugin(plugin: Plugin, warnings: list[str]) -> pluggy.PluginManager:
    """Import the module of a plugin, and return a manager that calls its hooks.

    A warning about each unknown hook is added to `warnings`.
    """
    module = metadata.EntryPoint(plugin.name, plugin.value, ENTRY_POINT_GROUP).load()
    version = getattr(module, "dicompiler_api", hookspecs.API_VERSION)
    if not isinstance(version, int) or version < 1:
        raise TypeError(f"dicompiler_api is {version!r}, not a version of the hooks: set it to {hookspecs.API_VERSION}")
    if version > hookspecs.API_VERSION:
        raise DicompilerError(
            f"it is written for version {version} of the hooks, newer than {hookspecs.API_VERSION}: install a newer "
            "dicompiler"
        )
    # Each plugin has its own pluggy manager, so that a failing hook does not affect other plugins.
    manager = pluggy.PluginManager(hookspecs.PLUGGY_PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(module, plugin.name)
    hooks = [kind.hook for kind in PLUGIN_KINDS.values()]
    unknown = [caller.name for caller in manager.get_hookcallers(module) or [] if not caller.has_spec()]
    warnings.extend(f"{plugin}: unknown hook {name!r}{did_you_mean(name, hooks)}" for name in unknown)
    return manager


def _find_entries(plugin: Plugin, manager: pluggy.PluginManager, errors: list[str]) -> list[tuple[str, RegistryEntry]]:
    """Return a pair (kind, entry) for each class, operator rule and platform family that a plugin provides.

    A line about each hook that fails, and about each item that cannot be registered, is added to `errors`.
    """
    entries: dict[tuple[str, str], RegistryEntry] = {}
    for name, kind in PLUGIN_KINDS.items():
        for value in _call_hook(plugin, kind.hook, manager, errors):
            item = f"{kind.noun} {_describe_item(kind, value)}"
            with _errors_as_text(plugin, f"{plugin}: {item} is left out", errors):
                entry = make_entry(plugin, name, value)
                if (name, entry.name) in entries:
                    raise DicompilerError(f"the plugin provides {kind.noun} {entry.name!r} twice: rename one")
                entries[name, entry.name] = entry
    return [(name, entry) for (name, _), entry in entries.items()]


def _describe_item(kind: PluginKind, value: Any) -> str:
    """Return the name of an item that a hook yields, or the text of the item if it has no name."""
    if name := getattr(value, "__name__", ""):
        return str(name)
    # The text of a rule or a platform family is long, because it has all fields.
    name = "" if kind.provides_classes else getattr(value, "op", "") or getattr(value, "name", "")
    return one_line(repr(name or value))


def _call_hook(plugin: Plugin, hook: str, manager: pluggy.PluginManager, errors: list[str]) -> list[Any]:
    """Return the items that one hook of a plugin yields.

    If the hook fails, a line is added to `errors`, and the items before the failure are returned.
    """
    items: list[Any] = []
    with _errors_as_text(plugin, f"{plugin}: {hook} fails", errors):
        for values in getattr(manager.hook, hook)():
            items.extend(values)
    return items


def make_entry(plugin: Plugin, kind: str, value: Any) -> RegistryEntry:
    """Return the registry entry of a class, operator rule or platform family that a plugin provides.

    A third-party value is wrapped, so that its exceptions become errors that name the plugin.

    Raises:
        TypeError: The value is not of this kind.
    """
    name = get_valid_name(PLUGIN_KINDS[kind], value)
    is_class = PLUGIN_KINDS[kind].provides_classes
    code = value if is_class else _innermost_function(getattr(value, "piece", None) or value.make)
    entry = RegistryEntry(name, value, plugin.distribution, plugin.version, plugin.name)
    if is_builtin_distribution(plugin.distribution):
        return entry
    packages = {top_level_package(plugin.value), top_level_package(code.__module__)} - {
        top_level_package(module) for _, module in BUILTIN_PLUGINS
    }
    if kind == "operators":
        check_rule_fields(value)
    guard = plugin_wrappers.CallGuard(PLUGIN_KINDS[kind].noun, entry.origin, str(plugin), frozenset(packages))
    return replace(entry, value=plugin_wrappers.wrap_provided(value, name, guard))


def _innermost_function(function: Any) -> Any:
    """Return the plugin's own function inside decorators and partials. Its module shows the plugin."""
    while isinstance(function := inspect.unwrap(function), functools.partial):
        function = function.func
    return function


def _find_conflict(known: Mapping[str, RegistryEntry], kind: str, entry: RegistryEntry) -> RegistryEntry | None:
    """Return the known entry of the same name if `entry` must be left out; None if `entry` can be added.

    Only operator rules can replace known entries, unless these have `replaces=True`. A rule replaces another one if it
    has `replaces=True`, or if only the new rule can split the operator.
    """
    if kind != "operators":
        same_name = (other for other in known.values() if canonical_name(other.name) == canonical_name(entry.name))
        return next(same_name, None)
    # Names of operators conflict only if they are exactly equal, because they are case-sensitive in ONNX.
    rule, other = entry.value, known.get(entry.name)
    if other is None:
        return None
    can_replace = not other.value.replaces and (rule.replaces or rule.can_cut > other.value.can_cut)
    return None if can_replace else other


def _describe_conflict(kind: str, known: RegistryEntry, entry: RegistryEntry) -> str:
    """Return the warning that `entry` is left out because the entry `known` has the same name."""
    left_out = f"{PLUGIN_KINDS[kind].noun} {entry.name!r} of {entry.full_origin} is left out"
    if known.name != entry.name:
        cause = f"its name differs from {known.name!r} of {known.full_origin} only by case, '-', '_' or '.'"
    else:
        cause = f"{known.full_origin} provides it too"
    can_set_replaces = kind == "operators" and not known.value.replaces
    remedy = "set replaces=True in the rule to use it, " if can_set_replaces else ""
    remedy += f"uninstall {entry.distribution}, or name the plugins to load in {PLUGINS_VARIABLE}"
    return f"{left_out}: {cause}: {remedy}"
