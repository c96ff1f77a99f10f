"""Requirements for the registration of plugin classes: methods, names and options."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar

import pytest

from dicompiler.plugin.plugin_kinds import check_registrable
from dicompiler.plugin_api import CostModel, Engine, OperatorRule, Pass, Piece, PlatformFamily, Strategy, Target

METHODS: dict[type, tuple[str, ...]] = {
    CostModel: ("seconds",),
    Engine: ("convert",),
    Pass: ("run",),
    Strategy: ("plan",),
    Target: ("emit", "run"),
}
KINDS = [pytest.param(base, id=base.__name__) for base in METHODS]
REMEDY = (
    "which is not a field of a dataclass: make Acme a frozen dataclass without __init__, whose fields are its options"
)


def make_class(base: type, **attributes: Any) -> Any:
    """Return a complete class of a kind of plugin, except for the given attributes."""
    methods = dict.fromkeys(METHODS[base], lambda *_: None)
    return type("Acme", (base,), {"name": "acme", "__module__": __name__, **methods, **attributes})


def refusal(value: Any) -> str:
    """Return the message with which a class is refused."""
    with pytest.raises(TypeError) as caught:
        check_registrable(value)
    return str(caught.value)


@pytest.mark.parametrize("base", KINDS)
def test_each_missing_method_is_named(base: type) -> None:
    check_registrable(make_class(base))
    methods = " and ".join(f"{name}()" for name in METHODS[base])
    expected = f"Acme has no {methods}, which every {base.__name__} needs: define it"
    assert refusal(type("Acme", (base,), {"name": "acme"})) == expected


@pytest.mark.parametrize("base", KINDS)
def test_options_that_are_not_fields_are_refused(base: type) -> None:
    def initialize(self: Any, depth: int = 3) -> None:
        pass

    assert refusal(make_class(base, __init__=initialize)) == f"Acme has the option 'depth', {REMEDY}"
    assert refusal(dataclass(frozen=True)(make_class(base, __init__=initialize))) == refusal(
        make_class(base, __init__=initialize)
    )
    undecorated = make_class(base, depth=3, __annotations__={"depth": int})
    assert refusal(undecorated) == f"Acme has the option 'depth', {REMEDY}"
    assert refusal(type("Acme", (undecorated,), {})) == f"Acme has the option 'depth', {REMEDY}"
    check_registrable(dataclass(frozen=True)(undecorated))


def test_option_that_only_init_reads_is_refused() -> None:
    @dataclass(frozen=True)
    class Acme(make_class(Pass)):  # type: ignore[misc]
        depth: InitVar[int] = 3

    assert refusal(Acme) == f"Acme has the option 'depth', {REMEDY}"


def test_class_attributes_are_not_options() -> None:
    class Acme(make_class(Pass)):  # type: ignore[misc]
        name: str = "acme"
        limit: ClassVar[int] = 3
        requires: tuple[str, ...] = ("layers",)

    check_registrable(Acme)


@pytest.mark.parametrize(
    ("base", "attributes", "message"),
    [
        (Target, {"can_emulate": "yes"}, "Acme.can_emulate is 'yes': give a value of type bool"),
        (Pass, {"requires": "plan"}, "Acme.requires is 'plan': give a value of type tuple"),
        (Pass, {"requires": (3,)}, "Acme.requires is (3,): give a tuple of texts"),
    ],
)
def test_class_attribute_of_wrong_type_is_refused(base: type, attributes: dict[str, Any], message: str) -> None:
    assert refusal(make_class(base, **attributes)) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_elementwise": 1}, "is_elementwise is 1: give a value of type bool"),
        ({"read_share": 0.5}, "read_share is 0.5: give a function or None"),
        ({"merge_operator": "Mul"}, "merge_operator is 'Mul': expected Add or Max or Min"),
        ({"stand_in": "softmx"}, "stand_in is 'softmx' (did you mean 'softmax'?): expected an operator of ONNX or "),
        ({"constant_stand_ins": "- gian"}, "constant_stand_ins has the unknown kind 'gian' (did you mean 'gain'?)"),
        ({"attribute_stand_ins": "alpha"}, "attribute_stand_ins has the entry 'alpha': expected ATTRIBUTE=VALUE"),
    ],
)
def test_rule_with_wrong_field_is_refused(fields: dict[str, Any], message: str) -> None:
    rule = OperatorRule("Acme", lambda *_: Piece((), ()), stand_in="Abs", constant_stand_ins="- shift")
    check_registrable(rule)
    with pytest.raises((TypeError, ValueError)) as caught:
        check_registrable(replace(rule, **fields))
    assert str(caught.value).startswith(message)


def test_record_without_its_function_is_refused() -> None:
    family = PlatformFamily("badxN", "none", None)  # type: ignore[arg-type]
    assert refusal(family) == "make is None: give a function"
