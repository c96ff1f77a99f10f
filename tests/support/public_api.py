"""Names and signatures of `dicompiler.plugin_api` and its submodules.

    python tests/support/public_api.py    writes tests/plugin/plugin_api.txt again

The list has a line for each name, and for each public member of a class.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler import plugin_api

LIST = Path(__file__).parents[1] / "plugin" / "plugin_api.txt"
TOPICS = sorted(module.name for module in pkgutil.iter_modules(plugin_api.__path__) if not module.name.startswith("_"))
PLUGIN_API = ("dicompiler.plugin_api", *(f"dicompiler.plugin_api.{topic}" for topic in TOPICS))
PUBLIC = ("dicompiler", *PLUGIN_API, "dicompiler.testing", "dicompiler.networks")


def format_list() -> str:
    """Return the current list."""
    return "\n".join(_format_module(name) for name in PLUGIN_API)


def _format_module(module: str) -> str:
    namespace = importlib.import_module(module)
    lines = [line for name in namespace.__all__ for line in _format_name(name, getattr(namespace, name))]
    return "".join(f"{line}\n" for line in (f"# {module}", "", *lines))


def _format_name(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {name}{format_signature(value)}"
        for member, attribute in sorted(vars(value).items()):
            if not member.startswith("_") and not is_field(value, member):
                yield f"    {member}{format_signature(unwrap(attribute))}"
    elif inspect.isroutine(value):
        yield f"{name}{format_signature(value)}"
    elif is_type_alias(value):
        yield f"{name} = {format_type_alias(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def is_field(cls: type, member: str) -> bool:
    """Return True if the signature of the class includes the member."""
    return member in getattr(cls, "__dataclass_fields__", ()) or member in getattr(cls, "_fields", ())


def unwrap(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def is_type_alias(value: Any) -> bool:
    return typing.get_origin(value) is not None


def format_type_alias(alias: Any) -> str:
    """Return the type that an alias stands for, without the names of modules: "Callable[[str], None]"."""
    text = repr(alias).replace(repr(NDArray[Any]), "NDArray[Any]")
    return re.sub(r"\b(?:[a-z]\w*\.)+(?=[A-Z])", "", text)


class _Source(str):
    """Text that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _format_annotation(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Source(text) if isinstance(text, str) else annotation


def _format_default(default: Any) -> Any:
    """Return a function's name, because its representation holds an address."""
    return _Source(default.__name__) if inspect.isfunction(default) else default


def format_signature(value: Any) -> str:
    """Return "(a: int) -> str", or "" if the value cannot be called."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        parameter.replace(
            annotation=_format_annotation(parameter.annotation), default=_format_default(parameter.default)
        )
        for parameter in signature.parameters.values()
    ]
    return str(
        signature.replace(parameters=parameters, return_annotation=_format_annotation(signature.return_annotation))
    )


if __name__ == "__main__":
    LIST.write_text(format_list(), encoding="utf-8")
