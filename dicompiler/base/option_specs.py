"""Text form of passes, strategies and targets with their options, such as `lop{layers=fc6,fc7 parts=4}`.

The options are the fields of a frozen dataclass. Each form converts into the next one and back without loss:

    text ⇒ Spec: `parse_spec`           Spec ⇒ text: `str`
    Spec ⇒ instance: `instantiate`      instance ⇒ Spec: `spec_of`

A pipeline is a list of such texts, joined by commas.
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
# Values with '=' must be quoted. Otherwise `{layers=a,parts=4}`, a typo for `{layers=a parts=4}`, would silently mean
# the two layers `a` and `parts=4`.
_UNQUOTED_VALUE = re.compile(r"[A-Za-z0-9_/.:+*@-]+")
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class Spec:
    """Name of a pass, strategy or target, with its options. `parse_spec(str(spec))` equals `spec`.

    Attributes:
        name: Name of the pass, strategy or target.
        options: Pairs of an option's name and its values. The text `key=` gives no value, and `key=""` gives one empty
            value.

    Raises:
        ValueError: A name contains a character that the text form does not allow, or an option appears twice.
    """

    name: str
    options: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        keys = [key for key, _ in self.options]
        if not _NAME.fullmatch(self.name) or not all(_KEY.fullmatch(key) for key in keys) or len({*keys}) < len(keys):
            raise ValueError(f"not a spec: name {self.name!r}, options {keys!r}")

    @classmethod
    def from_mapping(cls, name: str, options: Mapping[str, str | tuple[str, ...]]) -> Spec:
        """Return a Spec from the value or values of each option, by option name.

        `Spec.from_mapping("lop", {"layers": ("fc6", "fc7"), "parts": "4"})` is `lop{layers=fc6,fc7 parts=4}`.

        Args:
            name: Name of the pass, strategy or target.
            options: One value, or several values, of each option, as texts.

        Returns:
            The Spec, with the options in the order of the mapping.

        Raises:
            ValueError: A name contains a character that the text form does not allow.
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
    """Recursive-descent parser of one text with specs, such as `lop{layers=fc6},dp`.

    Args:
        text: The text.
        label: Beginning of error messages: "spec", "pipeline" or "strategies".
    """

    def __init__(self, text: str, label: str) -> None:
        self.text, self.label, self.position = text, label, 0
        # Error messages name a column of the text. Escapes would shift the columns, so they are used only if needed.
        self.shown_text = f"'{text}'" if text.isprintable() else repr(text)

    def syntax_error(self, expected: str, note: str = "") -> UsageError:
        found = repr(self.text[self.position]) if self.position < len(self.text) else "the end"
        place = f"at column {self.position + 1}"
        return UsageError(f"{self.label} {self.shown_text}: expected {expected} {place}, found {found}{note}")

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self.text, self.position)
        if not match:
            raise self.syntax_error(expected)
        self.position = match.end()
        return match.group()

    def skip_blanks(self) -> None:
        self.match(_BLANK, "a blank")

    def accept(self, character: str) -> bool:
        """Move past `character` if it is next, and return True if it is."""
        is_next = self.text.startswith(character, self.position)
        self.position += is_next
        return is_next

    def is_at_end(self) -> bool:
        return self.position == len(self.text)

    def is_after_values(self) -> bool:
        return self.is_at_end() or self.text[self.position] == "}" or self.text[self.position].isspace()

    def parse_value(self) -> str:
        if not self.text.startswith('"', self.position):
            return self.match(_UNQUOTED_VALUE, "a value, plain or in double quotes")
        try:
            value, self.position = json.JSONDecoder().raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            self.position = min(error.pos, len(self.text))
            raise self.syntax_error("a value in double quotes, written like a JSON string") from None
        return str(value)

    def parse_values(self) -> tuple[str, ...]:
        if self.is_after_values():
            return ()
        if self.text.startswith(("(", "["), self.position):
            raise self.syntax_error("values without brackets, such as a,b")
        values = [self.parse_value()]
        while self.accept(","):
            values.append(self.parse_value())
        return tuple(values)

    def parse_options(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        options: dict[str, tuple[str, ...]] = {}
        self.skip_blanks()
        while not self.accept("}"):
            key = self.match(_KEY, "an option or '}'")
            if key in options:
                raise UsageError(f"{self.label} {self.shown_text}: option {key!r} is given twice: remove one")
            if not self.accept("="):
                note = f" (if {key!r} is a value of the option before it, write ',' between values)" if options else ""
                raise self.syntax_error(f"'=' after option {key!r}", note)
            options[key] = self.parse_values()
            if not self.is_after_values():
                expected = "',' between values, a blank between options or '}'"
                raise self.syntax_error(expected, ' (put a value with other characters in quotes: "…")')
            self.skip_blanks()
        return tuple(options.items())

    def parse_spec(self) -> Spec:
        name = self.match(_NAME, "a name")
        return Spec(name, self.parse_options() if self.accept("{") else ())


def parse_spec(text: str, label: str = "spec") -> Spec:
    """Parse the text of one spec, such as `modnn{axis=height}`.

    Raises:
        UsageError: The syntax is wrong. The message begins with `label`, and names the column and the expected text.
    """
    parser = _SpecParser(text, label)
    parser.skip_blanks()
    spec = parser.parse_spec()
    parser.skip_blanks()
    if not parser.is_at_end():
        raise parser.syntax_error("the end" if "{" in text[: parser.position] else "'{' or the end")
    return spec


def parse_pipeline(text: str, label: str = "pipeline", item: str = "pass") -> tuple[Spec, ...]:
    """Parse one or more specs that are separated by commas, such as `infer-shapes,lop{layers=fc6 parts=4}`.

    Args:
        text: The specs.
        label: Beginning of error messages.
        item: Word for one spec in error messages.

    Raises:
        UsageError: The syntax is wrong.
    """
    parser = _SpecParser(text, label)
    specs: list[Spec] = []
    while not specs or parser.accept(","):
        parser.skip_blanks()
        specs.append(parser.parse_spec())
        parser.skip_blanks()
    if not parser.is_at_end():
        raise parser.syntax_error(f"the end, or ',' and another {item}")
    return tuple(specs)


@dataclass(frozen=True)
class Option:
    """Option of a pass, strategy or target, as `dicompiler list` shows it.

    Attributes:
        name: Name of the option.
        type: Type as text, for example `int`, `str,…` or `latency|energy`.
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
        text: Type as text, for example `int` or `true|false`.
        parse: Function that converts the text of one value, or raises ValueError.
        takes_many: True if the option takes any number of values.
        is_optional: True if the option can be None, which is written `key=`.
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
    """Return the option type for the annotation of a dataclass field.

    Raises:
        TypeError: An option cannot have this type.
    """
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
    allowed = "int, float, bool, str, Literal, tuple[…, ...] or … | None"
    raise TypeError(f"{annotation} is not a type that an option can have: use {allowed}")


def _option_types(cls: type) -> dict[str, tuple[dataclasses.Field[Any], _OptionType]]:
    """Return each field that a dataclass's constructor accepts, with its option type, by field name.

    Raises:
        TypeError: An option cannot have the type of a field. The message names the field.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = typing.get_type_hints(cls)
    types = {}
    for field in [field for field in dataclasses.fields(cls) if field.init]:
        try:
            types[field.name] = (field, _option_type(hints[field.name]))
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.{field.name}: {error}") from None
    return types


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _format_values(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, tuple | list):
        return tuple(text for item in value for text in _format_values(item))
    return (str(value).lower() if isinstance(value, bool) else str(value),)


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options of a pass, strategy or target class, in field order.

    The help text of an option is in the field's `metadata={"help": "…"}`.

    Raises:
        TypeError: A field has a type that cannot be written as text.
    """
    options = []
    for name, (field, kind) in _option_types(cls).items():
        default = _default(field)
        default_text = None if default is dataclasses.MISSING else ",".join(map(_quote, _format_values(default)))
        options.append(Option(name, kind.text, default_text, str(field.metadata.get("help", ""))))
    return tuple(options)


def option_files(instance: Any) -> tuple[str, ...]:
    """Return the files that an instance's options name: the values of its fields with `metadata={"file": True}`."""
    fields = [name for name, (field, _) in _option_types(type(instance)).items() if field.metadata.get("file")]
    return tuple(text for name in fields for text in _format_values(getattr(instance, name)) if text)


def _convert_values(kind: _OptionType, values: tuple[str, ...], place: str) -> Any:
    if kind.is_optional and not kind.takes_many and not values:
        return None
    if not kind.takes_many and len(values) != 1:
        raise UsageError(f"{place}: expected one value ({kind.text}), got {len(values)}")
    try:
        converted = tuple(map(kind.parse, values))
    except ValueError:
        raise UsageError(f"{place}: expected {kind.text}, got {','.join(map(_quote, values))}") from None
    return converted if kind.takes_many else converted[0]


def instantiate(cls: type[T], spec: Spec) -> T:
    """Return an instance of the dataclass `cls` with the spec's options as fields.

    Raises:
        UsageError: An option is unknown or missing, a value has the wrong type, or `cls` rejects a value.
    """
    types = _option_types(cls)
    arguments = {}
    for key, values in spec.options:
        if key not in types:
            raise UsageError(f"unknown option {key!r} of {spec.name!r}{did_you_mean(key, types)}")
        arguments[key] = _convert_values(types[key][1], values, f"option {key!r} of {spec.name!r}")
    for key, (field, kind) in types.items():
        if key not in arguments and _default(field) is dataclasses.MISSING:
            raise UsageError(f"{spec.name!r} needs option {key!r} ({kind.text})")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise UsageError(f"{spec.name!r}: {error}") from error


def spec_of(instance: Any) -> Spec:
    """Return the spec of an instance: its name and all options that differ from their defaults.

    Raises:
        DicompilerError: An option that takes several values is None, but its default is not None. None cannot be
            written as text for such an option, because `key=` is the empty tuple.
    """
    options = []
    for name, (field, kind) in _option_types(type(instance)).items():
        value = getattr(instance, name)
        if value != _default(field):
            if value is None and kind.takes_many:
                raise DicompilerError(
                    f"option {name!r} of {instance.name!r}: None cannot be written as text: use a tuple, such as ()"
                )
            options.append((name, _format_values(value)))
    return Spec(instance.name, tuple(options))
