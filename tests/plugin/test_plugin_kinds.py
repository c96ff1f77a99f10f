"""Requirements for the registration of plugin classes: methods, names and options."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import pytest

from dicompiler.plugin.plugin_kinds import check_registrable
from dicompiler.plugin_api import CostModel, Engine, Pass, PlatformFamily, Strategy, Target

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


def test_record_without_its_function_is_refused() -> None:
    family = PlatformFamily("badxN", "none", None)  # type: ignore[arg-type]
    assert refusal(family) == "its make is None: give a function"
