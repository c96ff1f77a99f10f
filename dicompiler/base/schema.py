"""Reading of JSON files, and validation of documents against the JSON schemas in `schemas/`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time
from functools import cache, reduce
from importlib import resources
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import DicompilerError, describe_wrong_path, did_you_mean

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator, ValidationError

_EXACT_INTEGER = "x-exact-integer"
_TYPE_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_MAX_DIGITS = 100
"""Maximum number of digits of an integer.

Python has a limit too, but the message of its error names settings of Python, which do not help users.
"""
# If a document has several errors, only one is shown: the one with the earliest keyword in this list, because its
# message helps most. A misspelt key (additionalProperties), for example, explains a missing key (required).
_KEYWORD_PRIORITY = ("const", "additionalProperties", "required", "type", "enum")


def read_text(path: str | Path, missing: str = "no such file") -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: The file.
        missing: Error text if the file does not exist.

    Returns:
        The text, without a byte order mark.

    Raises:
        DicompilerError: The file does not exist, or is not UTF-8 text.
    """
    try:
        # Some editors write a byte order mark at the start of UTF-8 text. This encoding removes it.
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DicompilerError(f"{path}: {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: byte {error.start} is not valid"
        hint = describe_wrong_path(path) if isinstance(error, IsADirectoryError) else ""
        if isinstance(error, UnicodeDecodeError) and Path(path).suffix == ".onnx":
            hint = ": this is the name of a model, and a text file is expected"
        raise DicompilerError(f"{path}: cannot be read: {reason}{hint}") from None


def load_json(path: str | Path) -> Any:
    """Return the document in a JSON file.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        DicompilerError: The file does not exist, is not JSON, or has an object with the same key twice.
    """
    text = read_text(path)
    try:
        return json.loads(
            text,
            object_pairs_hook=lambda pairs: _reject_duplicate_keys(pairs, path),
            parse_constant=_reject_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
    except json.JSONDecodeError as error:
        raise DicompilerError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise DicompilerError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise DicompilerError(f"{path}: its objects are nested too deeply: give a file that dicompiler wrote") from None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]], path: str | Path) -> dict[str, Any]:
    # Python's parser silently keeps the last of two equal keys, which would hide a layer of a hand-written plan.
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise DicompilerError(f"{path}: key {key!r} appears twice in one object: remove one")
        entries[key] = value
    return entries


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too long")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is too large")
    return number


@cache
def load_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a format, such as "plan", "platform" or "manifest"."""
    file = resources.files("dicompiler.base") / "schemas" / f"{name}.schema.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


class _RejectFloat:
    """The keyword `_EXACT_INTEGER` of a schema: rejects 12.0, which JSON Schema accepts as an integer."""

    def __init__(self, *_schema: object) -> None:
        pass

    def validate(self, value: object) -> None:
        if isinstance(value, float):
            raise ValueError(f"{value} is not an integer")


@dataclass(frozen=True)
class _Violation:
    """A value of a document that violates a keyword of the schema.

    Attributes:
        path: The keys and indices that lead to the value.
        value: The value.
        keyword: The keyword, such as "minimum".
        schema: The part of the schema that has the keyword.
        branches: Violations of the schemas in the list of `anyOf`, if this is the keyword.
    """

    path: tuple[str | int, ...]
    value: Any
    keyword: str
    schema: dict[str, Any]
    branches: tuple[_Violation, ...]

    @classmethod
    def of(cls, error: ValidationError, document: Any, schema: dict[str, Any]) -> _Violation:
        path = tuple(error.instance_path)
        name = error.kind.name
        branches: list[list[ValidationError]] = getattr(error.kind, "context", [])
        return cls(
            path,
            _entry_at(document, path),
            "type" if name == _EXACT_INTEGER else name,
            _entry_at(schema, error.schema_path[:-1]),
            tuple(cls.of(branch, document, schema) for branch in chain.from_iterable(branches)),
        )


def _entry_at(document: Any, path: Iterable[str | int]) -> Any:
    return reduce(getitem, path, document)


@cache
def _validator(name: str) -> Draft202012Validator:
    from jsonschema_rs import Draft202012Validator

    return Draft202012Validator(_with_exact_integers(load_schema(name)), keywords={_EXACT_INTEGER: _RejectFloat})


def _with_exact_integers(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_exact_integers(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    types = schema.get("type", ())
    keyword = {_EXACT_INTEGER: True} if "integer" in ([types] if isinstance(types, str) else types) else {}
    return {key: _with_exact_integers(entry) for key, entry in schema.items()} | keyword


def validate(document: Any, name: str, place: str) -> None:
    """Raise DicompilerError if a document from a JSON or TOML file violates the schema `name`, such as "plan".

    The message begins with `place`, the file's path, for example:
    `plan.json: layers.conv1[0]: unknown key 'devise' (did you mean 'device'?); allowed: …`.
    """
    check_format(document, name, place)
    try:
        errors = list(_validator(name).iter_errors(document))
    except ValueError:
        for keys, value in _dates(document):
            raise DicompilerError(
                f"{place}: {format_key_path(keys)}: {value} is a date or time: write it in quotes if a text is meant"
            ) from None
        raise
    if not errors:
        return
    violations = [_Violation.of(error, document, load_schema(name)) for error in errors]
    violation = _most_specific(min(violations, key=_priority))
    path = format_key_path(violation.path)
    raise DicompilerError(f"{place}: {path + ': ' if path else ''}{_describe(violation)}")


def _dates(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], date | time]]:
    # TOML has dates and times. The validator accepts values of JSON only.
    if isinstance(document, date | time):
        yield path, document
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, entry in entries:
        yield from _dates(entry, (*path, key))


def check_format(document: Any, name: str, place: str) -> None:
    """Raise DicompilerError if a document has another version of the format than schema `name`.

    The message begins with `place`, the file's path, and ends with a remedy.
    """
    expected: str = load_schema(name)["$id"]
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, str) or found == expected:
        return
    (family, _, version), (expected_family, _, expected_version) = found.partition("/"), expected.partition("/")
    if family == expected_family:
        is_newer = version.isdigit() and int(version) > int(expected_version)
        remedy = "install a newer dicompiler" if is_newer else load_schema(name).get("x-remedy", "write the file again")
        raise DicompilerError(f"{place}: format {found} is not supported (this version reads {expected}): {remedy}")


def _priority(violation: _Violation) -> tuple[int, int, str]:
    # A wrong value of the key "format" has the highest priority, because another version of the format explains all
    # other errors. Wrong constants at other keys have the lowest priority.
    is_wrong_value = violation.keyword == "const" and violation.path != ("format",)
    kinds = [keyword for keyword in _KEYWORD_PRIORITY if keyword == violation.keyword and not is_wrong_value]
    priority = _KEYWORD_PRIORITY.index(kinds[0]) if kinds else len(_KEYWORD_PRIORITY)
    return priority, len(violation.path), format_key_path(violation.path)


def _most_specific(violation: _Violation) -> _Violation:
    # A violation of anyOf has one for each allowed type. If the value has one of these types, its violation is more
    # helpful: a list with a wrong interval gives "wrong interval", and not "neither a list nor a string".
    while violation.branches:
        depth = len(violation.path)
        fitting = [sub for sub in violation.branches if len(sub.path) > depth or sub.keyword == "required"]
        if not fitting:
            return violation
        violation = min(fitting, key=_priority)
    return violation


def format_key_path(keys: Iterable[str | int]) -> str:
    """Return a key path as text: ("layers", "conv1", 0, "device") ⇒ `layers.conv1[0].device`.

    A key with other characters is quoted: `layers['a/b']`.
    """
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        elif re.fullmatch(r"[\w-]+", key):
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text


def _describe(violation: _Violation) -> str:
    kind, schema, value = violation.keyword, violation.schema, violation.value
    allowed = schema[kind]
    if kind == "additionalProperties":
        keys = list(schema.get("properties", {}))
        key = next(key for key in value if key not in keys)
        if new := schema.get("x-renamed", {}).get(key):
            return f"unknown key {key!r}: it is now called {new!r}"
        close = did_you_mean(key, keys)
        hint = close if "did you mean" in close else ""
        return f"unknown key {key!r}{hint}; allowed: {', '.join(keys)}"
    if kind == "required":
        missing = next(key for key in allowed if key not in value)
        return f"missing key {missing!r} (required: {', '.join(allowed)})"
    if kind == "type":
        examples = " or ".join(map(json.dumps, schema.get("examples", ())))
        expected = _type_names(allowed) + (f" such as {examples}" if examples else "")
        return f"expected {expected}, got {_format_value(value)}"
    if kind == "const":
        return f"{_format_value(value)} is not supported (allowed: {json.dumps(allowed)})"
    if kind == "enum":
        return f"{_format_value(value)} is not allowed (allowed: {', '.join(map(str, allowed))})"
    if kind == "anyOf":
        return f"{_format_value(value)} is not allowed (allowed: {' or '.join(map(_describe_branch, allowed))})"
    return _describe_limit_error(kind, allowed, value)


def _describe_limit_error(kind: str, allowed: Any, value: Any) -> str:
    shown = _format_value(value)
    many = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}" if isinstance(value, list) else ""
    texts = {
        "minimum": f"{shown} is too small (allowed: {allowed} or more)",
        "maximum": f"{shown} is too large (allowed: {allowed} or less)",
        "exclusiveMinimum": f"{shown} is too small (allowed: more than {allowed})",
        "minItems": f"a list of {many} is too short (allowed: {allowed} or more entries)",
        "maxItems": f"a list of {many} is too long (allowed: {allowed} or fewer entries)",
        "maxLength": f"the text is too long (allowed: {allowed} or fewer characters)",
        "minLength": f"the text is empty (allowed: {allowed} or more characters)",
        "minProperties": f"too few keys (allowed: {allowed} or more)",
        "uniqueItems": f"{shown} contains an entry twice (allowed: each once)",
        "pattern": f"{shown} has a character that is not allowed here (allowed: texts that match {allowed})",
    }
    return texts.get(kind, f"{shown} violates the keyword {kind!r} of the schema")


def _type_names(allowed: str | Sequence[str]) -> str:
    return " or ".join(_TYPE_NAMES[name] for name in ([allowed] if isinstance(allowed, str) else allowed))


def _describe_branch(branch: dict[str, Any]) -> str:
    if "const" in branch:
        return json.dumps(branch["const"])
    if "required" in branch:
        return f"an object with {', '.join(branch['required'])}"
    return _type_names(branch["type"]) if "type" in branch else branch.get("title", "another form")


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else text[:57] + "…"
    return f"the list {text}" if isinstance(value, list) else text
