"""The names and signatures of `dicompiler.plugin_api`. `python tests/support/door.py` writes the committed list anew.

In: the module. Out: a line for each name, and for each public member of a class, as tests/plugin/plugin_api.txt has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dicompiler import plugin_api

LIST = Path(__file__).parents[1] / "plugin" / "plugin_api.txt"


def listed() -> str:
    """The list as it should be."""
    return "".join(f"{line}\n" for name in plugin_api.__all__ for line in _lines(name, getattr(plugin_api, name)))


def _lines(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {name}{_signature(value)}"
        for member, thing in sorted(vars(value).items()):
            if not member.startswith("_") and not _is_field(value, member):
                yield f"    {member}{_signature(_function(thing))}"
    elif inspect.isroutine(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _is_field(cls: type, member: str) -> bool:
    """Whether the signature of the class tells it already."""
    return member in getattr(cls, "__dataclass_fields__", ()) or member in getattr(cls, "_fields", ())


def _function(thing: Any) -> Any:
    return thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing


class _Text(str):
    """An annotation that is printed as it was written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _written(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Text(text) if isinstance(text, str) else annotation


def _named(default: Any) -> Any:
    """A function by its name: where it lies in memory is nothing to compare."""
    return _Text(default.__name__) if inspect.isfunction(default) else default


def _signature(value: Any) -> str:
    """ "(a: int) -> str"; '' for what is not called."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    given = [
        parameter.replace(annotation=_written(parameter.annotation), default=_named(parameter.default))
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=given, return_annotation=_written(found.return_annotation)))


if __name__ == "__main__":
    LIST.write_text(listed(), encoding="utf-8")
