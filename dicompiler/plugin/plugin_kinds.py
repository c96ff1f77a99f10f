"""Kinds of things that plugins provide, such as passes and targets, and the requirements for their registration.

class, operator rule or platform family ⇒ its kind and its name, or an error with cause and remedy
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import onnx

from dicompiler.base.errors import did_you_mean
from dicompiler.base.option_specs import Spec, options_of
from dicompiler.ir.operator_rule import CONSTANT_KINDS, MERGE_OPERATORS


@dataclass(frozen=True)
class PluginKind:
    """A kind of thing that plugins provide, such as passes or targets.

    Attributes:
        noun: Noun for one thing of the kind, for messages, such as "pass".
        hook: Name of the hook.
        base_class: The base class, as `module:name`.
        provides_classes: True if plugins provide subclasses of the base class; False if they provide instances.
        functions: Fields of an instance that must be functions.
    """

    noun: str
    hook: str
    base_class: str
    provides_classes: bool = True
    functions: tuple[str, ...] = ()


PLUGIN_KINDS: Mapping[str, PluginKind] = MappingProxyType(
    {
        "passes": PluginKind("pass", "dicompiler_passes", "dicompiler.plugin.pass_base:Pass"),
        "strategies": PluginKind("strategy", "dicompiler_strategies", "dicompiler.search.strategy:Strategy"),
        "targets": PluginKind("target", "dicompiler_targets", "dicompiler.target.target_base:Target"),
        "engines": PluginKind("engine", "dicompiler_engines", "dicompiler.target.engine:Engine"),
        "operators": PluginKind(
            "operator rule",
            "dicompiler_operators",
            "dicompiler.ir.operator_rule:OperatorRule",
            False,
            ("piece", "cost"),
        ),
        "cost_models": PluginKind("cost model", "dicompiler_cost_models", "dicompiler.cost.cost_model:CostModel"),
        "platforms": PluginKind(
            "platform", "dicompiler_platforms", "dicompiler.ir.platform:PlatformFamily", False, ("make",)
        ),
    }
)


def plugin_kind(value: Any) -> str:
    """Return the key of PLUGIN_KINDS, such as "passes", for a class, operator rule or platform family."""
    for name, kind in PLUGIN_KINDS.items():
        base = _get_base_class(kind)
        if kind.provides_classes and isinstance(value, type) and issubclass(value, base):
            return name
        if not kind.provides_classes and isinstance(value, base):
            return name
    raise TypeError(
        f"{value!r} is not a Pass, Strategy, Target, Engine, CostModel (class), OperatorRule or PlatformFamily "
        "(instance)"
    )


def check_registrable(value: Any) -> None:
    """Check that a class, operator rule or platform family (which finds platforms by name) could be registered.

    Raises:
        TypeError: The value is not of a kind that plugins provide, lacks a method or a name, has an option or a class
            attribute of a wrong type, or takes options that are not fields of a dataclass.
        ValueError: Its name is invalid, or a field of a rule names something unknown.
    """
    kind = plugin_kind(value)
    get_valid_name(PLUGIN_KINDS[kind], value)
    if kind == "operators":
        check_rule_fields(value)


def check_rule_fields(rule: Any) -> None:
    """Raise TypeError or ValueError if a field of an operator rule has a wrong type or an unknown name."""
    # This import takes time. Built-in rules are not checked, so it is made only here.
    from dicompiler.verify.exact.stand_ins import BODIES

    for field in fields(rule):
        value = getattr(rule, field.name)
        if isinstance(field.default, str | bool | int) and type(value) is not type(field.default):
            raise TypeError(f"{field.name} is {value!r}: give a value of type {type(field.default).__name__}")
        if field.default is None and value is not None and not callable(value):
            raise TypeError(f"{field.name} is {value!r}: give a function or None")
    if rule.merge_operator not in MERGE_OPERATORS:
        raise ValueError(f"merge_operator is {rule.merge_operator!r}: expected {' or '.join(MERGE_OPERATORS)}")
    bodies = sorted(BODIES)
    if rule.stand_in and rule.stand_in not in bodies and not onnx.defs.has(rule.stand_in):
        known = f"an operator of ONNX or one of {', '.join(bodies)}"
        raise ValueError(f"stand_in is {rule.stand_in!r}{did_you_mean(rule.stand_in, bodies)}: expected {known}")
    for kind in rule.constant_stand_ins.split():
        if kind not in ("-", *CONSTANT_KINDS):
            known = f"'-' or one of {', '.join(CONSTANT_KINDS)}"
            hint = did_you_mean(kind, CONSTANT_KINDS)
            raise ValueError(f"constant_stand_ins has the unknown kind {kind!r}{hint}: expected {known}")
    for pair in rule.attribute_stand_ins.split():
        if not all(pair.partition("=")):
            raise ValueError(f"attribute_stand_ins has the entry {pair!r}: expected ATTRIBUTE=VALUE")


def get_valid_name(kind: PluginKind, value: Any) -> str:
    """Return the name of a class, operator rule or platform family.

    Raises:
        TypeError: The value cannot be registered as this kind of thing.
        ValueError: Its name is invalid.
    """
    return _get_class_name(kind, value) if kind.provides_classes else _get_instance_name(kind, value)


def _get_base_class(kind: PluginKind) -> Any:
    module, _, attribute = kind.base_class.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _get_instance_name(kind: PluginKind, value: Any) -> str:
    base = _get_base_class(kind)
    if not isinstance(value, base):
        instance = f": call it, as in {base.__name__}(…)" if value is base else ""
        raise TypeError(f"{kind.hook} yields {value!r}, which is not of type {base.__name__}{instance}")
    for name in kind.functions:
        if not callable(function := getattr(value, name)):
            raise TypeError(f"{name} is {function!r}: give a function")
    if kind.noun != "operator rule":
        return str(value.name)
    return f"{value.domain}::{value.op}" if value.domain else str(value.op)


def _get_class_name(kind: PluginKind, value: Any) -> str:
    base = _get_base_class(kind)
    if isinstance(value, base):
        raise TypeError(f"{kind.hook} yields an object of {type(value).__name__}: yield the class")
    if not isinstance(value, type) or not issubclass(value, base):
        raise TypeError(f"{kind.hook} yields {value!r}, which is not a subclass of {base.__name__}: derive it")
    if missing := sorted(value.__abstractmethods__):  # type: ignore[attr-defined]
        methods = " and ".join(f"{name}()" for name in missing)
        raise TypeError(f"{value.__name__} has no {methods}, which every {base.__name__} needs: define it")
    _check_options(value, base)
    _check_class_attributes(value, base)
    name = getattr(value, "name", None)
    if not isinstance(name, str):
        raise TypeError(f'{value.__name__} has no name: set name = "…" in the class')
    if base.__name__ == "Pass":
        _check_pass_fields(value)
    return Spec(name).name


def _check_options(cls: type, base: type) -> None:
    """Raise TypeError if an option of a class would be ignored, because it is not a field of a dataclass."""
    fields = [option.name for option in options_of(cls)]
    ignored = [name for name in inspect.signature(cls).parameters if name not in fields]
    for ancestor in cls.__mro__[: cls.__mro__.index(base)]:
        if issubclass(ancestor, base) and "__dataclass_fields__" not in vars(ancestor):
            ignored += [
                name
                for name, annotation in inspect.get_annotations(ancestor).items()
                if "ClassVar" not in str(annotation) and name not in (*fields, *base.__annotations__)
            ]
    if ignored:
        raise TypeError(
            f"{cls.__name__} has the option {ignored[0]!r}, which is not a field of a dataclass: make {cls.__name__} a "
            "frozen dataclass without __init__, whose fields are its options"
        )


def _check_class_attributes(cls: type, base: type) -> None:
    """Raise TypeError if a class sets an attribute of its base class to a value of another type."""
    for name, annotation in inspect.get_annotations(base).items():
        default, value = getattr(base, name, None), inspect.getattr_static(cls, name, None)
        if default is None or isinstance(value, property):
            continue
        if type(value) is not type(default):
            raise TypeError(f"{cls.__name__}.{name} is {value!r}: give a value of type {type(default).__name__}")
        if "tuple[str" in annotation and not all(isinstance(item, str) for item in value):
            raise TypeError(f"{cls.__name__}.{name} is {value!r}: give a tuple of texts")


def _check_pass_fields(step: Any) -> None:
    """Raise TypeError if a pass requires or provides an unknown field of PipelineState."""
    from dicompiler.ir.pipeline_state import PipelineState

    for name in (*step.requires, *step.provides):
        if name not in PipelineState.__dataclass_fields__:
            known = did_you_mean(name, PipelineState.__dataclass_fields__)
            raise TypeError(f"{step.__name__} names {name!r}, which is not a field of PipelineState{known}")
