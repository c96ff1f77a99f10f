"""How the checks of this package fail: by an AssertionError that says what was checked, on what, and what was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dicompiler.base.errors import describe_exception
from dicompiler.plugin.registry import plugin_kind
from dicompiler.plugin_api import registry


def require(holds: Any, what: str) -> None:
    """AssertionError with `what` unless it holds; also where Python runs without assertions."""
    if not holds:
        raise AssertionError(what)


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """Whatever is raised inside becomes an AssertionError that begins with `place`: "strategy 'x' on lenet: …"."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else describe_exception(error)
        raise AssertionError(f"{place}: {text}") from error


def describe(thing: Any) -> str:
    """A pass, strategy, target or cost model and where it is from: "strategy 'x' of module my_module"."""
    return registry().describe(plugin_kind(type(thing)), thing)


def as_instance(thing: Any) -> Any:
    """An instance: `thing` itself, or one of that class with the default of every option."""
    return thing() if isinstance(thing, type) else thing
