"""Text form of passes, strategies and targets: `name{key=value key=a,b}`.

A pipeline is such texts joined by commas.

text ⇔ Spec (`parse_spec`, `str`) ⇔ instance of a frozen dataclass (`instantiate`, `spec_of`), without loss. The
fields of the dataclass are the options.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# '=' must be quoted in values: otherwise the typo `{layers=a,parts=4}` would silently name two layers.
_UNQUOTED_VALUE = re.compile(r"[A-Za-z0-9_/.:+*@-]+")
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class Spec:
    """Name with options. `str(spec)` is text that `parse_spec` turns into an equal Spec.

    Attributes:
        name: Name of a pass, strategy or target.
        options: Pairs of a key and its values, in the order of the text. Each key appears once. `key=` has no value,
            and `key=""` has one empty value.

    Raises:
        ValueError: The name or a key contains characters that cannot be written.
    """

    name: str
    options: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        keys = [key for key, _ in self.options]
        if not _NAME.fullmatch(self.name) or not all(_KEY.fullmatch(key) for key in keys) or len({*keys}) < len(keys):
            raise ValueError(f"not a spec: name {self.name!r}, options {keys!r}")

    @classmethod
    def from_mapping(cls, name: str, options: Mapping[str, str | tuple[str, ...]]) -> Spec:
        """Return a Spec with one value or several values per option.

        `Spec.from_mapping("lop", {"layers": ("fc6", "fc7"), "parts": "4"})` is `lop{layers=fc6,fc7 parts=4}`.

        Args:
            name: Name of a pass, strategy or target.
            options: Value or values by key.

        Returns:
            The Spec.
        """
        return cls(name, tuple((key, (v,) if isinstance(v, str) else tuple(v)) for key, v in options.items()))

    def __str__(self) -> str:
        if not self.options:
            return self.name
        written = (f"{key}={','.join(map(_quote, values))}" for key, values in self.options)
        return f"{self.name}{{{' '.join(written)}}}"


def _quote(value: str) -> str:
    return value if _UNQUOTED_VALUE.fullmatch(value) else json.dumps(value, ensure_ascii=False)


class _SpecParser:
    """Recursive-descent parser of one text; error messages count columns from 1."""

    def __init__(self, text: str, label: str) -> None:
        self.text, self.label, self.position = text, label, 0

    def syntax_error(self, expected: str, note: str = "") -> UsageError:
        found = repr(self.text[self.position]) if self.position < len(self.text) else "the end"
        # Printable text is shown without escapes, so that users can count the column.
        shown = f"'{self.text}'" if self.text.isprintable() else repr(self.text)
        return UsageError(
            f"{self.label} {shown}: expected {expected} at column {self.position + 1}, found {found}{note}"
        )

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self.text, self.position)
        if not match:
            raise self.syntax_error(expected)
        self.position = match.end()
        return match.group()

    def skip_blanks(self) -> None:
        self.match(_BLANK, "a blank")

    def accept(self, character: str) -> bool:
        """Advance if the next character is `character`, and return whether it was."""
        taken = self.text.startswith(character, self.position)
        self.position += taken
        return taken

    def is_at_end(self) -> bool:
        return self.position == len(self.text)

    def parse_value(self) -> str:
        if not self.text.startswith('"', self.position):
            return self.match(_UNQUOTED_VALUE, "a value, plain or in double quotes")
        try:
            value, self.position = json.JSONDecoder().raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            self.position = min(error.pos, len(self.text))
            raise self.syntax_error("a whole quoted value", " (escapes are those of JSON)") from None
        return str(value)

    def parse_values(self) -> tuple[str, ...]:
        """Parse the values after `key=`: none, or several joined by commas."""
        if self.is_at_end() or self.text[self.position] == "}" or self.text[self.position].isspace():
            return ()
        values = [self.parse_value()]
        while self.accept(","):
            values.append(self.parse_value())
        return tuple(values)

    def parse_options(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Parse the options between the braces, including the closing brace."""
        options: dict[str, tuple[str, ...]] = {}
        self.skip_blanks()
        while not self.accept("}"):
            start = self.position
            key = self.match(_KEY, "an option or '}'")
            if key in options:
                self.position = start
                raise self.syntax_error(f"another option than {key!r}, which is given already")
            if not self.accept("="):
                raise self.syntax_error(f"'=' after option {key!r}")
            options[key] = self.parse_values()
            if not self.is_at_end() and self.text[self.position] != "}" and not self.text[self.position].isspace():
                raise self.syntax_error(
                    "',' between values, a blank between options or '}'", ' (quote other values: "…")'
                )
            self.skip_blanks()
        return tuple(options.items())

    def parse_spec(self) -> Spec:
        name = self.match(_NAME, "a name")
        return Spec(name, self.parse_options() if self.accept("{") else ())


def parse_spec(text: str, label: str = "spec") -> Spec:
    """Parse one spec, such as `modnn{axis=height}`.

    Raises:
        UsageError: Syntax error. The message names `label`, the column and the expected text.
    """
    parser = _SpecParser(text, label)
    parser.skip_blanks()
    spec = parser.parse_spec()
    parser.skip_blanks()
    if not parser.is_at_end():
        raise parser.syntax_error("the end" if "{" in text[: parser.position] else "'{' or the end")
    return spec


def parse_pipeline(text: str) -> tuple[Spec, ...]:
    """Parse specs joined by commas, such as `infer-shapes,lop{layers=fc6 parts=4}`; at least one."""
    parser = _SpecParser(text, "pipeline")
    specs: list[Spec] = []
    while not specs or parser.accept(","):
        parser.skip_blanks()
        specs.append(parser.parse_spec())
        parser.skip_blanks()
    if not parser.is_at_end():
        raise parser.syntax_error("',' before the next pass or the end")
    return tuple(specs)


@dataclass(frozen=True)
class Option:
    """Option of a pass, strategy or target, as `dicompiler list` shows it.

    Attributes:
        name: Name of the option.
        type: Type in words: `int`, `str,…`, `latency|energy`.
        default: Text of the default value; None if the option is required.
        help: Description.
    """

    name: str
    type: str
    default: str | None
    help: str = ""


@dataclass(frozen=True)
class _OptionType:
    """Type of an option.

    Attributes:
        text: Type in words.
        parse: Conversion of one value; raises ValueError.
        takes_many: True if there can be any number of values.
        is_optional: True if no value means None.
    """

    text: str
    parse: Callable[[str], Any]
    takes_many: bool = False
    is_optional: bool = False


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(text)
    return value


def _parse_choice(choices: Mapping[str, Any], text: str) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


_SCALAR_TYPES = {
    bool: _OptionType("true|false", functools.partial(_parse_choice, {"true": True, "false": False})),
    int: _OptionType("int", _parse_int),
    float: _OptionType("float", _parse_float),
    str: _OptionType("str", str),
}


def _option_type(annotation: Any) -> _OptionType:
    """Return the option type of a field's annotation; raise TypeError if it has no text form."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SCALAR_TYPES:
        return _SCALAR_TYPES[annotation]
    if origin is Literal and all(isinstance(choice, str) for choice in arguments):
        return _OptionType(
            "|".join(arguments), functools.partial(_parse_choice, {choice: choice for choice in arguments})
        )
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        element = _option_type(arguments[0])
        if not element.takes_many and not element.is_optional:
            return _OptionType(f"{element.text},…", element.parse, takes_many=True)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        element = _option_type(next(a for a in arguments if a is not type(None)))
        return dataclasses.replace(element, is_optional=True)
    raise TypeError(
        f"{annotation} is not a type of options: use int, float, bool, str, Literal, tuple[…, ...], … | None"
    )


def _option_types(cls: type) -> dict[str, tuple[dataclasses.Field[Any], _OptionType]]:
    """Return the init fields of a dataclass with their option types; a TypeError names the field."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = typing.get_type_hints(cls)
    types = {}
    for field in dataclasses.fields(cls):
        if field.init:
            try:
                types[field.name] = (field, _option_type(hints[field.name]))
            except TypeError as error:
                raise TypeError(f"{cls.__name__}.{field.name}: {error}") from None
    return types


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _format_values(value: Any) -> tuple[str, ...]:
    """Return the texts of a field's value, as `_OptionType.parse` reads them."""
    if value is None:
        return ()
    if isinstance(value, tuple | list):
        return tuple(text for item in value for text in _format_values(item))
    return (str(value).lower() if isinstance(value, bool) else str(value),)


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options of a pass, strategy or target class, in field order.

    The `help` of an option comes from the field's `metadata={"help": "…"}`. A field type without text form raises
    TypeError when the plugin is loaded, because it is a mistake of the plugin's author.
    """
    options = []
    for name, (field, kind) in _option_types(cls).items():
        default = _default(field)
        written = None if default is dataclasses.MISSING else ",".join(map(_quote, _format_values(default)))
        options.append(Option(name, kind.text, written, str(field.metadata.get("help", ""))))
    return tuple(options)


def option_files(instance: Any) -> tuple[str, ...]:
    """Return the files that an instance's options name (fields with `metadata={"file": True}`)."""
    named = [
        getattr(instance, name)
        for name, (field, _) in _option_types(type(instance)).items()
        if field.metadata.get("file")
    ]
    return tuple(text for value in named for text in _format_values(value) if text)


def _convert_values(kind: _OptionType, values: tuple[str, ...], place: str) -> Any:
    if kind.is_optional and not kind.takes_many and not values:
        return None
    if not kind.takes_many and len(values) != 1:
        raise UsageError(f"{place}: expected one value ({kind.text}), got {len(values)}")
    try:
        converted = tuple(map(kind.parse, values))
    except ValueError:
        shown = ",".join(map(_quote, values))
        raise UsageError(f"{place}: expected {kind.text}, got {shown}") from None
    return converted if kind.takes_many else converted[0]


def instantiate(cls: type[T], spec: Spec) -> T:
    """Return an instance of `cls` with the spec's options as fields.

    Supported types: int, float, bool (true|false), str, Literal of str, tuples of those (`a,b`, or `key=` for an empty
    one), and `… | None`, for which `key=` is None unless the rest is a tuple.

    Raises:
        UsageError: An option is unknown or missing, a value has the wrong type, or `__post_init__` raised a ValueError.
    """
    known = _option_types(cls)
    arguments = {}
    for key, values in spec.options:
        if key not in known:
            raise UsageError(f"unknown option {key!r} of {spec.name!r}{did_you_mean(key, known)}")
        arguments[key] = _convert_values(known[key][1], values, f"option {key!r} of {spec.name!r}")
    missing = [n for n, (field, _) in known.items() if n not in arguments and _default(field) is dataclasses.MISSING]
    if missing:
        raise UsageError(f"{spec.name!r} needs option {missing[0]!r} ({known[missing[0]][1].text})")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise UsageError(f"{spec.name!r}: {error}") from error


def spec_of(instance: Any) -> Spec:
    """Return the spec that `instantiate` turns into `instance`.

    It contains the options that differ from their defaults, in field order.

    Raises:
        DicompilerError: An option with several values is None and its default is not, which has no text form.
    """
    options = []
    for name, (field, kind) in _option_types(type(instance)).items():
        value = getattr(instance, name)
        if value != _default(field):
            if value is None and kind.takes_many:
                raise DicompilerError(f"option {name!r} of {instance.name!r}: None cannot be written")
            options.append((name, _format_values(value)))
    return Spec(instance.name, tuple(options))
