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

from dicompiler.base.errors import DicompilerError, PluginError, UsageError, cause, nearest
from dicompiler.base.specs import Spec, instantiate, options_of, parse
from dicompiler.ir.rule import OperatorRule
from dicompiler.plugin import guard, guests, hookspecs
from dicompiler.plugin.entry_points import BUILTINS, GROUP, RESTRICT, Plugin, canonical, installed, is_ours, top
from dicompiler.plugin.moved import remedy

log = logging.getLogger("dicompiler")

_ONE = f"; uninstall one or name only the other in {RESTRICT}"
UNINSTALLED = "uninstalled"
"""The distribution of what `also` puts beside what is installed."""


@dataclass(frozen=True)
class Kind:
    """A kind of thing that plugins provide. `one` is the word for a single one; `base` its class as `module:name`;
    `classes`: subclasses of it are provided, not instances."""

    one: str
    hook: str
    base: str
    classes: bool = True


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "passes": Kind("pass", "dicompiler_passes", "dicompiler.plugin.passes:Pass"),
        "strategies": Kind("strategy", "dicompiler_strategies", "dicompiler.search.strategy:Strategy"),
        "targets": Kind("target", "dicompiler_targets", "dicompiler.target.interface:Target"),
        "operators": Kind("operator rule", "dicompiler_operators", "dicompiler.ir.rule:OperatorRule", False),
        "cost_models": Kind("cost model", "dicompiler_cost_models", "dicompiler.cost.model:CostModel"),
        "platforms": Kind("platform", "dicompiler_platforms", "dicompiler.ir.platform:PlatformFamily", False),
    }
)


@dataclass(frozen=True)
class Provided:
    """One thing that a plugin provides: a class, an operator rule or a platform family, and where it comes from. That
    of a third party is guarded."""

    name: str
    value: Any
    distribution: str
    version: str
    plugin: str

    @property
    def whole(self) -> str:
        """Where it is from, to be told from others: "acme-dicompiler 1.2 (plugin 'acme')"."""
        return f"{self.distribution} {self.version} (plugin {self.plugin!r})"

    @property
    def origin(self) -> str:
        """How errors say where it is from: "of acme-dicompiler 1.2 (plugin 'acme')"."""
        if self.distribution == UNINSTALLED:
            return f"of module {self.value.__module__}"
        return f"of {self.distribution} {self.version}" + (
            "" if is_ours(self.distribution) else f" (plugin {self.plugin!r})"
        )


@dataclass(frozen=True)
class Registry:
    """All that is provided, by kind and name (sorted), the `plugins` that were loaded and `warnings` of one line.

    left_out: the plugins that could not be loaded, each with the cause.
    """

    passes: Mapping[str, Provided] = field(default_factory=dict)
    strategies: Mapping[str, Provided] = field(default_factory=dict)
    targets: Mapping[str, Provided] = field(default_factory=dict)
    operators: Mapping[str, Provided] = field(default_factory=dict)
    cost_models: Mapping[str, Provided] = field(default_factory=dict)
    platforms: Mapping[str, Provided] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def of(self, kind: str) -> Mapping[str, Provided]:
        """What is provided of a kind, one of KINDS."""
        provided: Mapping[str, Provided] = getattr(self, kind)
        return provided

    @property
    def rules(self) -> Mapping[tuple[str, str], OperatorRule]:
        """The operator rules by domain and operator type, as a layer graph has them."""
        return {(one.value.domain, one.value.op): one.value for one in self.operators.values()}

    def find(self, kind: str, name: str) -> Provided:
        """The one of that name. UsageError names the nearest; PluginError names plugins that were left out."""
        known = self.of(kind)
        if name not in known:
            hint = nearest(name, known)
            if self.left_out and "did you mean" not in hint:
                raise PluginError(f"unknown {KINDS[kind].one} {name!r}; {'; '.join(self.left_out)}")
            raise UsageError(f"unknown {KINDS[kind].one} {name!r}{hint}")
        return known[name]

    def make(self, kind: str, spec: str | Spec) -> Any:
        """An instance of a pass, strategy, target or cost model from its text or Spec. UsageError as `find` and
        `specs.instantiate`."""
        parsed = parse(spec, KINDS[kind].one) if isinstance(spec, str) else spec
        return guard.instance(self.find(kind, parsed.name).value, instantiate, parsed)

    def adopt(self, kind: str, given: Any) -> Any:
        """What `make` gives for a text or a Spec; an instance as if it had been made here. Of a class that no plugin
        provides only wrong results are errors that name it, exceptions stay what they are."""
        if isinstance(given, str | Spec):
            return self.make(kind, given)
        one = self._provider(kind, given)
        unnamed = guard.Guard(KINDS[kind].one, one.origin)
        return guard.adopted(given, one.value if one.name else guard.guarded_class(one.value, unnamed))

    def named(self, kind: str, thing: Any) -> str:
        """A pass, strategy, target or cost model and where it is from: "pass 'acme' of acme 1.2 (plugin 'acme')"."""
        return guard.Guard(KINDS[kind].one, self._provider(kind, thing).origin).named(thing)

    def _provider(self, kind: str, thing: Any) -> Provided:
        """What is provided with the thing's class; nameless where no plugin provides it."""
        cls = inspect.unwrap(type(thing))
        unknown = Provided("", cls, UNINSTALLED, "0", UNINSTALLED)
        return next((one for one in self.of(kind).values() if inspect.unwrap(one.value) is cls), unknown)


_ALSO: ContextVar[Registry | None] = ContextVar("also", default=None)


def registry() -> Registry:
    """What all installed plugins provide, loaded once for each process; warnings are logged, a line each.

    DicompilerError where two plugins provide things of one kind and name.
    """
    return _ALSO.get() or loaded()


@contextmanager
def also(*things: Any) -> Iterator[Registry]:
    """Inside, `registry()` (of this thread) provides these classes, rules and families too, as if a plugin named
    "uninstalled" did; they take the place of what has their names. TypeError for what is of no kind."""
    plugin = Plugin(UNINSTALLED, UNINSTALLED, UNINSTALLED, "0")
    known = registry()
    provided = {kind: dict(known.of(kind)) for kind in KINDS}
    for value in things:
        kind = kind_of(value)
        one = checked(plugin, kind, value)
        provided[kind][one.name] = one
    kept: dict[str, Any] = {kind: MappingProxyType(dict(sorted(named.items()))) for kind, named in provided.items()}
    token = _ALSO.set(replace(known, **kept, plugins=(*known.plugins, plugin)))
    try:
        yield registry()
    finally:
        _ALSO.reset(token)


def kind_of(value: Any) -> str:
    """The kind, one of KINDS, that a class, a rule or a family is of."""
    for name, kind in KINDS.items():
        base = _base(kind)
        if kind.classes and isinstance(value, type) and issubclass(value, base):
            return name
        if not kind.classes and isinstance(value, base):
            return name
    raise TypeError(f"{value!r} is nothing that a plugin provides")


@functools.cache
def loaded() -> Registry:
    """What `registry` gives where nothing else was put beside it."""
    plugins, broken = installed()
    everything = load(os.environ, plugins)
    for warning in (*broken, *everything.warnings):
        log.warning(warning)
    return everything


def load(env: Mapping[str, str], plugins: Iterable[Plugin]) -> Registry:
    """Loads plugins in the given order; touches no other state than imported modules.

    `env[DICOMPILER_PLUGINS]`, where it is set, names the entry points or distributions that may be loaded besides the
    built-in ones, separated by commas. DicompilerError where two provide things of one kind and name.
    """
    chosen, warnings = _restrict(env.get(RESTRICT), tuple(plugins))
    kept: list[Plugin] = []
    left_out: list[str] = []
    by_kind: dict[str, dict[str, Provided]] = {kind: {} for kind in KINDS}
    limit = guests.limit_s(env)
    for plugin in chosen:
        try:
            with nullcontext() if is_ours(plugin.distribution) else guests.loading(str(plugin), limit):
                provided = _load_one(plugin, warnings)
        # A plugin that ends the process while it is imported is broken like any other.
        except BaseException as error:
            if guests.is_ours(error):
                raise
            left_out.append(f"{plugin} is left out: {cause(error)}{remedy(error)}")
            warnings.append(left_out[-1])
            continue
        kept.append(plugin)
        for kind, one in provided:
            _add(by_kind, kind, one)
    return Registry(
        **{kind: MappingProxyType(dict(sorted(named.items()))) for kind, named in by_kind.items()},
        plugins=tuple(kept),
        warnings=tuple(warnings),
        left_out=tuple(left_out),
    )


def _restrict(names: str | None, plugins: tuple[Plugin, ...]) -> tuple[list[Plugin], list[str]]:
    """The plugins that may be loaded, and warnings for names that none has."""
    if names is None:
        return list(plugins), []
    allowed = {canonical(name.strip()) for name in names.split(",") if name.strip()}
    third = [plugin for plugin in plugins if plugin.value not in dict(BUILTINS).values()]
    known = {canonical(name) for plugin in third for name in (plugin.name, plugin.distribution)}
    warnings = [
        f"{RESTRICT} names {name!r}, which is no installed plugin{nearest(name, known)}"
        for name in sorted(allowed - known)
    ]
    left_out = [plugin for plugin in third if not allowed & {canonical(plugin.name), canonical(plugin.distribution)}]
    return [plugin for plugin in plugins if plugin not in left_out], warnings


def _load_one(plugin: Plugin, warnings: list[str]) -> list[tuple[str, Provided]]:
    """All that one plugin provides, with its kinds. A misspelt hook is a warning; any error leaves the plugin out."""
    module = metadata.EntryPoint(plugin.name, plugin.value, GROUP).load()
    version = getattr(module, "dicompiler_api", hookspecs.API_VERSION)
    if not isinstance(version, int) or version < 1:
        raise TypeError(f"dicompiler_api is {version!r}, not a version of the hooks")
    if version > hookspecs.API_VERSION:
        raise DicompilerError(f"it is written for version {version} of the hooks, newer than {hookspecs.API_VERSION}")
    # A manager for each plugin, so that a failing hook is known to be this one's and leaves the others in peace.
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(module, plugin.name)
    callers = manager.get_hookcallers(module) or []
    hooks = [kind.hook for kind in KINDS.values()]
    unknown = [caller.name for caller in callers if not caller.has_spec()]
    provided: dict[tuple[str, str], Provided] = {}
    for kind in KINDS:
        for one in _provided(plugin, kind, manager):
            if (kind, one.name) in provided:
                raise DicompilerError(f"it provides {KINDS[kind].one} {one.name!r} twice")
            provided[kind, one.name] = one
    warnings.extend(f"{plugin}: there is no hook {name!r}{nearest(name, hooks)}" for name in unknown)
    return [(kind, one) for (kind, _), one in provided.items()]


def _provided(plugin: Plugin, kind: str, manager: pluggy.PluginManager) -> Iterator[Provided]:
    """What a plugin's hook of one kind yields, checked. TypeError says what is wrong with it."""
    hook = KINDS[kind].hook
    for values in getattr(manager.hook, hook)():
        for value in values:
            yield checked(plugin, kind, value)


def checked(plugin: Plugin, kind: str, value: Any) -> Provided:
    """One thing that a plugin provides, guarded. TypeError says what is wrong with it."""
    name = _name(KINDS[kind], value)
    code = value if KINDS[kind].classes else getattr(value, "piece", None) or value.make
    one = Provided(name, value, plugin.distribution, plugin.version, plugin.name)
    if is_ours(plugin.distribution):
        return one
    packages = {top(plugin.value), top(code.__module__)} - {top(module) for _, module in BUILTINS}
    watch = guard.Guard(KINDS[kind].one, one.origin, str(plugin), frozenset(packages))
    return replace(one, value=guard.guarded(value, name, watch))


def _base(kind: Kind) -> Any:
    """The class that is its base."""
    module, _, attribute = kind.base.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _name(kind: Kind, value: Any) -> str:
    """The name of what a hook yields. TypeError where it is not of its kind, ValueError where the name is not one."""
    base, attribute = _base(kind), kind.base.partition(":")[2]
    if not kind.classes:
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
        _check_fields(value)
    return Spec(name).name


def _check_fields(step: Any) -> None:
    """TypeError where a pass requires or provides what a Compilation does not have."""
    from dicompiler.ir.compilation import Compilation

    for name in (*step.requires, *step.provides):
        if name not in Compilation.__dataclass_fields__:
            known = nearest(name, Compilation.__dataclass_fields__)
            raise TypeError(f"{step.__name__} names {name!r}, which is no field of a Compilation{known}")


def _add(by_kind: dict[str, dict[str, Provided]], kind: str, one: Provided) -> None:
    if kind != "operators":  # whose names are those of ONNX
        for other in by_kind[kind].values():
            if canonical(other.name) == canonical(one.name) and other.name != one.name:
                both = f"{other.name!r} of {other.whole} and {one.name!r} of {one.whole}"
                raise DicompilerError(f"{KINDS[kind].one} {both} differ only by case, '-', '_' or '.'{_ONE}")
    other = by_kind[kind].setdefault(one.name, one)
    if kind == "operators" and not other.value.cuts and one.value.cuts:  # a rule that cuts what another just counts
        by_kind[kind][one.name] = one
    elif other is not one:
        raise DicompilerError(
            f"{KINDS[kind].one} {one.name!r} comes from two plugins: {other.whole} and {one.whole}{_ONE}"
        )
