"""Reading of JSON files, and validation of documents against the JSON schemas in `schemas/`.

document ⇒ nothing, or an error of one line: file, key path, cause, and the allowed values.
"""

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
"""Maximum number of digits of an integer. Python's own limit has an error message about Python settings."""
# The first error of these kinds is shown: a misspelt key is also a missing key, and the first message helps more.
_VALIDATOR_PRIORITY = ("const", "additionalProperties", "required", "type", "enum")


def read_text(path: str | Path, missing: str = "no such file") -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: The file.
        missing: Error text if there is no such file.

    Returns:
        The text, without a byte order mark.

    Raises:
        DicompilerError: There is no such file, or it is not UTF-8 text.
    """
    try:
        # Some editors open UTF-8 text with a byte order mark.
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DicompilerError(f"{path}: {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: byte {error.start} is not valid"
        more = describe_wrong_path(path) if isinstance(error, IsADirectoryError) else ""
        raise DicompilerError(f"{path}: cannot be read: {reason}{more}") from None


def load_json(path: str | Path) -> Any:
    """Return the document in a JSON file.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        DicompilerError: There is no such file, it is not JSON, or an object contains a key twice.
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
        raise DicompilerError(f"{path}: nested too deeply: it is not a file of dicompiler") from None


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

    # JSON Schema accepts 12.0 as an integer, but Python code needs an int.
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return extend(Draft202012Validator, type_checker=types)(load_schema(name))


def validate(document: Any, name: str, place: str) -> None:
    """Validate a document against a schema.

    Args:
        document: The content of a JSON or TOML file.
        name: Name of the schema: "plan".
        place: The file, as prefix of error messages.

    Raises:
        DicompilerError: The document is of an older version of the format, or violates the schema, for instance
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
    """Raise DicompilerError with a remedy if the document is of another version of the format.

    Args:
        document: The content of a JSON or TOML file.
        name: Name of the schema: "plan".
        place: The file, as prefix of the error message.

    Raises:
        DicompilerError: The document is of another version of the format.
    """
    expected: str = load_schema(name)["$id"]
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, str) or found == expected:
        return
    (family, _, version), (known_family, _, known_version) = found.partition("/"), expected.partition("/")
    if family == known_family:
        is_newer = version.isdigit() and int(version) > int(known_version)
        remedy = "install a newer dicompiler" if is_newer else load_schema(name).get("x-remedy", "write it again")
        raise DicompilerError(f"{place}: format {found} is not supported (this version reads {expected}): {remedy}")


def _error_priority(error: Any) -> tuple[int, int, str]:
    # A wrong format version explains all other errors. Then the kinds above follow, then the order of the file.
    kind = (
        _VALIDATOR_PRIORITY.index(error.validator)
        if error.validator in _VALIDATOR_PRIORITY
        else len(_VALIDATOR_PRIORITY)
    )
    if error.validator == "const" and list(error.absolute_path) != ["format"]:
        kind = len(_VALIDATOR_PRIORITY)
    return kind, len(error.absolute_path), format_key_path(error.absolute_path)


def _most_specific(error: Any) -> Any:
    # Only branches of an anyOf that match the value's type matter: for instance a list with a wrong interval.
    while error.validator == "anyOf":
        fitting = [sub for sub in error.context if len(sub.relative_path) > 0 or sub.validator == "required"]
        if not fitting:
            return error
        error = min(fitting, key=_error_priority)
    return error


def format_key_path(keys: Iterable[str | int]) -> str:
    """Return a key path as text.

    ("layers", "conv1", 0, "device") ⇒ `layers.conv1[0].device`. Names with other characters are quoted:
    `layers['a/b']`.
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
        known = list(error.schema.get("properties", {}))
        key = next(key for key in value if key not in known)
        if new := error.schema.get("x-renamed", {}).get(key):
            return f"unknown key {key!r}: it is now called {new!r}"
        close = did_you_mean(key, known)
        hint = close if "did you mean" in close else ""
        return f"unknown key {key!r}{hint}; allowed: {', '.join(known)}"
    if kind == "required":
        missing = next(key for key in allowed if key not in value)
        return f"missing key {missing!r} (required: {', '.join(allowed)})"
    if kind == "type":
        examples = " or ".join(map(json.dumps, error.schema.get("examples", ())))
        return (
            f"expected {_type_names(allowed)}{f' such as {examples}' if examples else ''}, got {_format_value(value)}"
        )
    if kind == "const":
        return f"{_format_value(value)} is not supported (allowed: {json.dumps(allowed)})"
    if kind == "enum":
        return f"{_format_value(value)} is not allowed (allowed: {', '.join(map(str, allowed))})"
    if kind == "anyOf":
        return (
            f"{_format_value(value)} is not allowed (allowed: {' or '.join(_describe_branch(sub) for sub in allowed)})"
        )
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
        "maxLength": f"a text that is too long (allowed: {allowed} or fewer characters)",
        "minLength": f"an empty text (allowed: {allowed} or more characters)",
        "minProperties": f"too few keys (allowed: {allowed} or more)",
        "uniqueItems": f"{shown} holds an entry twice (allowed: each once)",
        "pattern": f"{shown} has a character that is not allowed here (allowed: texts that match {allowed})",
    }
    return texts.get(kind, f"{shown} does not fit the schema's {kind}")


def _type_names(allowed: str | Sequence[str]) -> str:
    return " or ".join(_TYPE_NAMES[name] for name in ([allowed] if isinstance(allowed, str) else allowed))


def _describe_branch(sub: dict[str, Any]) -> str:
    if "const" in sub:
        return json.dumps(sub["const"])
    if "required" in sub:
        return f"an object with {', '.join(sub['required'])}"
    return _type_names(sub["type"]) if "type" in sub else sub.get("title", "another form")


def _format_value(value: Any) -> str:
    """Return the value on one short line, or the kind of a container."""
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else text[:57] + "…"
    return f"the list {text}" if isinstance(value, list) else text
