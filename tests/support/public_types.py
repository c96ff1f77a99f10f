"""Classes of dicompiler in signatures and fields of the public API that no public module exports."""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from support.public_api import unwrap

PACKAGE = "dicompiler"


def find_unexported_types(modules: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Map each class that is not in `__all__` of a module to the public signatures and fields that contain it.

    Args:
        modules: Names of the public modules.
    """
    namespaces = [importlib.import_module(module) for module in modules]
    values = {f"{space.__name__}.{name}": getattr(space, name) for space in namespaces for name in space.__all__}
    exported = {value for value in values.values() if inspect.isclass(value)}
    places = defaultdict(list)
    for name, value in values.items():
        for place, classes in _annotated_places(name, value):
            for cls in filter(_is_in_package, classes - exported):
                places[f"{cls.__module__}.{cls.__qualname__}"].append(place)
    return places


def _is_in_package(value: Any) -> bool:
    return bool(value.__module__.split(".")[0] == PACKAGE)


def _annotated_places(name: str, value: Any) -> Iterator[tuple[str, set[type]]]:
    """Yield each parameter, result and field of a public name, with the classes in its annotation."""
    if inspect.isclass(value):
        for cls in filter(_is_in_package, value.__mro__):
            yield from _class_places(name, cls)
    elif inspect.isroutine(value):
        yield from _function_places(name, value)
    elif typing.get_origin(value):
        yield name, {*_find_classes(value, "")}


def _class_places(name: str, cls: type) -> Iterator[tuple[str, set[type]]]:
    for field, annotation in inspect.get_annotations(cls).items():
        if not field.startswith("_"):
            yield f"{name}.{field}", {*_find_classes(annotation, cls.__module__)}
    for member, attribute in vars(cls).items():
        if not member.startswith("_") or (member.startswith("__") and not _is_generated(attribute)):
            yield from _function_places(f"{name}.{member}", _function_of(attribute))


def _function_of(attribute: Any) -> Any:
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.func if isinstance(attribute, cached_property) else unwrap(attribute)


def _is_generated(attribute: Any) -> bool:
    """Return True for methods made by `dataclass` and `NamedTuple`, whose types are those of the fields."""
    return inspect.isfunction(attribute) and attribute.__code__.co_filename.startswith("<")


def _function_places(name: str, function: Any) -> Iterator[tuple[str, set[type]]]:
    if inspect.isroutine(function) and _is_in_package(inspect.unwrap(function)):
        original = inspect.unwrap(function)
        for parameter, annotation in inspect.get_annotations(original).items():
            yield f"{name}({parameter})", {*_find_classes(annotation, original.__module__)}


@cache
def _namespace(module: str) -> dict[str, Any]:
    """Return the names of a module, including those that it imports only for type checkers."""
    loaded = importlib.import_module(module)
    namespace = dict(vars(loaded))
    for node in ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module, "exec"), namespace)
    return namespace


def _find_classes(annotation: Any, module: str) -> Iterator[type]:
    """Yield the classes in an annotation, including those in type aliases and in bounds of type variables.

    Args:
        annotation: A type, or the text of one.
        module: Name of the module in which the text is written.
    """
    if isinstance(annotation, str):
        annotation = eval(annotation, _namespace(module))
    origin = typing.get_origin(annotation)
    if inspect.isclass(annotation) and origin is None:
        yield annotation
    elif origin is not typing.Literal:
        for element in _elements(annotation, origin):
            yield from _find_classes(element, module)


def _elements(annotation: Any, origin: Any) -> Iterable[Any]:
    """Return the types from which a type is made."""
    match annotation:
        case list():
            return annotation
        case typing.ForwardRef():
            return (annotation.__forward_arg__,)
        case typing.TypeVar():
            return (*annotation.__constraints__, annotation.__bound__)
        case InitVar():
            return (annotation.type,)
        case _:
            return (origin, *typing.get_args(annotation)) if origin else ()
