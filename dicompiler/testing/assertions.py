"""Assertions of the checks: errors name the plugin, the sample and the cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dicompiler.base.errors import describe_exception
from dicompiler.plugin.registry import plugin_kind
from dicompiler.plugin_api import registry


def require(condition: Any, message: str) -> None:
    """Raise AssertionError with a message if a condition is false, even if Python runs with -O."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """Turn any exception in the block into an AssertionError, with `place` and a colon before its message."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else describe_exception(error)
        raise AssertionError(f"{place}: {text}") from error


def describe(plugin: Any) -> str:
    """Return the kind, name and origin of a plugin object, such as "strategy 'x' of module my_module"."""
    return registry().describe(plugin_kind(type(plugin)), plugin)


def as_instance(plugin: Any) -> Any:
    """Return the object, or an instance with the default options if the object is a class."""
    return plugin() if isinstance(plugin, type) else plugin
