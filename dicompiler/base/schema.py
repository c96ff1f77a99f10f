"""Reading of JSON files, and validation of documents against the JSON schemas in `schemas/`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError, describe_wrong_path, did_you_mean

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
_VALIDATOR_PRIORITY = ("const", "additionalProperties", "required", "type", "enum")


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


@cache
def load_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a format, such as "plan", "platform" or "manifest"."""
    file = resources.files("dicompiler.base") / "schemas" / f"{name}.schema.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    # JSON Schema accepts 12.0 as an integer. It is rejected here, because Python code needs an int.
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return extend(Draft202012Validator, type_checker=types)(load_schema(name))


def validate(document: Any, name: str, place: str) -> None:
    """Raise DicompilerError if a document from a JSON or TOML file violates the schema `name`, such as "plan".

    The message begins with `place`, the file's path, for example:
    `plan.json: layers.conv1[0]: unknown key 'devise' (did you mean 'device'?); allowed: …`.
    """
    check_format(document, name, place)
    errors = list(_validator(name).iter_errors(document))
    if not errors:
        return
    error = _most_specific(min(errors, key=_error_priority))
    path = format_key_path(error.absolute_path)
    raise DicompilerError(f"{place}: {path + ': ' if path else ''}{_describe_error(error)}")


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


def _error_priority(error: Any) -> tuple[int, int, str]:
    # A wrong value of the key "format" has the highest priority, because another version of the format explains all
    # other errors. Wrong constants at other keys have the lowest priority.
    is_wrong_value = error.validator == "const" and list(error.absolute_path) != ["format"]
    kinds = [kind for kind in _VALIDATOR_PRIORITY if kind == error.validator and not is_wrong_value]
    priority = _VALIDATOR_PRIORITY.index(kinds[0]) if kinds else len(_VALIDATOR_PRIORITY)
    return priority, len(error.absolute_path), format_key_path(error.absolute_path)


def _most_specific(error: Any) -> Any:
    # An anyOf error contains one error for each allowed type. If the value has one of these types, its error is more
    # helpful: a list with a wrong interval gives "wrong interval", and not "neither a list nor a string".
    while error.validator == "anyOf":
        fitting = [sub for sub in error.context if len(sub.relative_path) > 0 or sub.validator == "required"]
        if not fitting:
            return error
        error = min(fitting, key=_error_priority)
    return error


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


def _describe_error(error: Any) -> str:
    kind, allowed, value = error.validator, error.validator_value, error.instance
    if kind == "additionalProperties":
        keys = list(error.schema.get("properties", {}))
        key = next(key for key in value if key not in keys)
        if new := error.schema.get("x-renamed", {}).get(key):
            return f"unknown key {key!r}: it is now called {new!r}"
        close = did_you_mean(key, keys)
        hint = close if "did you mean" in close else ""
        return f"unknown key {key!r}{hint}; allowed: {', '.join(keys)}"
    if kind == "required":
        missing = next(key for key in allowed if key not in value)
        return f"missing key {missing!r} (required: {', '.join(allowed)})"
    if kind == "type":
        examples = " or ".join(map(json.dumps, error.schema.get("examples", ())))
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
