"""Conversion between texts with units and numbers: "13.6 GFLOP/s" ⇔ 13.6e9.

A number that is written by `format_quantity` and parsed by `parse_quantity` is exactly the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal

from dicompiler.base.errors import DicompilerError, did_you_mean

_EXACT_CONTEXT = Context(prec=400)
_SI_EXPONENTS = {"n": -9, "u": -6, "µ": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY_EXPONENTS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


def _si_units(unit: str, prefixes: str, factor: int = 1) -> dict[str, Decimal]:
    """Return the factor of a unit with each SI prefix: `_si_units("W", "mk")` is {"W": 1, "mW": 0.001, "kW": 1000}.

    Args:
        unit: The unit's name.
        prefixes: One letter per prefix.
        factor: Factor of the unit without a prefix.
    """
    return {p + unit: _EXACT_CONTEXT.scaleb(Decimal(factor), _SI_EXPONENTS[p]) for p in ("", *prefixes)}


def _binary_units(unit: str, factor: int = 1) -> dict[str, Decimal]:
    return {p + unit: Decimal(factor * 2**power) for p, power in _BINARY_EXPONENTS.items()}


MIN_QUANTITY, MAX_QUANTITY = 1e-12, 2.0**62
"""Limits of quantities other than zero, in base units: sums and quotients stay finite, and bytes fit 64 bits."""


@dataclass(frozen=True)
class Quantity:
    """Kind of quantity, such as a bandwidth.

    Attributes:
        name: Name in error messages.
        units: Factor from each accepted unit to the base unit, by unit name.
        display_units: Units in which values are written, from small to large.
        allows_zero: True if zero is a valid value.
        further_units: Other accepted units that error messages name.
    """

    name: str
    units: Mapping[str, Decimal]
    display_units: tuple[str, ...]
    allows_zero: bool
    further_units: tuple[str, ...] = ()

    @property
    def base_unit(self) -> str:
        return next(unit for unit, factor in self.units.items() if factor == 1)

    @property
    def named_units(self) -> tuple[str, ...]:
        """The accepted units that error messages name."""
        return (*self.display_units, *self.further_units)


_RATE_UNITS = _si_units("FLOP/s", "kMGTP") | _si_units("FLOPS", "kMGTP")
_MEMORY_UNITS = _si_units("B", "kMGT") | {"KB": Decimal(1000)} | _binary_units("B")
_BIT_UNITS = _si_units("bit/s", "kMGT") | _si_units("bps", "kMGT")
_BANDWIDTH_UNITS = _BIT_UNITS | _si_units("B/s", "kMGT", 8) | _binary_units("B/s", 8)
COMPUTE_RATE = Quantity(
    "compute rate", _RATE_UNITS, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"), allows_zero=True
)
MEMORY = Quantity("memory size", _MEMORY_UNITS, ("B", "kB", "KiB", "MB", "MiB", "GB", "GiB"), allows_zero=False)
BANDWIDTH = Quantity(
    "bandwidth", _BANDWIDTH_UNITS, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"), False, ("kB/s", "MB/s", "GB/s")
)
TIME = Quantity("time", _si_units("s", "nuµm"), ("ns", "us", "ms", "s"), allows_zero=True)
POWER = Quantity("power", _si_units("W", "mk"), ("mW", "W", "kW"), allows_zero=True)


def parse_period(text: str, place: str) -> tuple[float, float] | None:
    """Return the start and end of a period such as "2.5s-6s" in seconds; None if the text has another form.

    The text "2.5s" is a period with an infinite end.

    Args:
        text: The period.
        place: Beginning of error messages: the option's name.

    Raises:
        DicompilerError: A time is invalid.
    """
    match = re.fullmatch(r"(.+?s)(?:-(.+))?", text)
    if re.fullmatch(r"[\d.]+(-[\d.]+)?", text):
        raise DicompilerError(f"{place}: {text!r} has no unit: write {text.replace('-', 's-')}s for seconds")
    if match is None:
        return None
    start, end = (math.inf if time is None else parse_quantity(time, TIME, place) for time in match.groups())
    return start, end


def parse_quantity(text: object, quantity: Quantity, place: str) -> float:
    """Return the value of a text with a number and a unit, in the base unit of `quantity`.

    `parse_quantity("0.5 ms", TIME, "a.toml: latency")` is 0.0005. Base units are FLOP/s, B, bit/s, s and W.

    Args:
        text: The number and the unit.
        quantity: Kind of quantity, which determines the allowed units.
        place: Beginning of error messages: file and key.

    Raises:
        DicompilerError: The text is invalid, its unit is unknown, or the value is out of range.
    """
    allowed = f"(allowed units: {', '.join(quantity.named_units)})"
    if not isinstance(text, str):
        example = f'"{text} {quantity.display_units[-1]}"'
        raise DicompilerError(f"{place}: {text!r} has no unit: write a string such as {example} {allowed}")
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([^\s\d].*?)?\s*", text)
    if match is None:
        raise DicompilerError(f"{place}: {text!r} is not a number with a unit {allowed}")
    number, unit = Decimal(match[1]), match[2]
    if unit is None:
        raise DicompilerError(f"{place}: {text!r} has no unit {allowed}")
    if unit not in quantity.units:
        hint = _suggest_unit(unit, quantity)
        raise DicompilerError(f"{place}: unknown unit {unit!r} for a {quantity.name}{hint} {allowed}")
    if number < 0 or (number == 0 and not quantity.allows_zero):
        least = "zero or more" if quantity.allows_zero else "more than zero"
        raise DicompilerError(f"{place}: {text!r}: a {quantity.name} must be {least}")
    value = float(_EXACT_CONTEXT.multiply(number, quantity.units[unit]))
    if value and not MIN_QUANTITY <= value <= MAX_QUANTITY:
        wrong = f"{text!r} is too {'large' if value > MAX_QUANTITY else 'small'} for a {quantity.name}"
        limits = f"from {MIN_QUANTITY:g} to {MAX_QUANTITY:g}, or 0"
        raise DicompilerError(f"{place}: {wrong}: in {quantity.base_unit} it must be {limits}")
    return value


def _suggest_unit(unit: str, quantity: Quantity) -> str:
    # "MB" must not become "Mbit/s", nor "Mb" become "MB/s": a suggested unit has the same "b" or "B".
    same_case = [name for name in quantity.named_units if ("B" in name) == ("B" in unit)]
    close = did_you_mean(unit, same_case or quantity.named_units)
    return close if "did you mean" in close else ""


def parse_bytes(text: object, place: str) -> int:
    """Return a memory size in bytes, rounded down to an integer: `parse_bytes("1 GiB", place)` is 1073741824.

    Args:
        text: The number and the unit.
        place: Beginning of error messages: file and key.

    Raises:
        DicompilerError: The size is invalid, or below one byte.
    """
    value = int(parse_quantity(text, MEMORY, place))
    if value < 1:
        raise DicompilerError(f"{place}: {text!r}: a memory size must be one byte or more")
    return value


def format_quantity(value: float, quantity: Quantity) -> str:
    """Return the exact text of a value in base units: `format_quantity(13.6e9, COMPUTE_RATE)` is "13.6 GFLOP/s".

    The text has the unit that makes it shortest.
    """
    exact = Decimal(repr(value))
    if not exact:
        return f"0 {quantity.base_unit}"
    texts = []
    for unit in reversed(quantity.display_units):
        scaled = _EXACT_CONTEXT.divide(exact, quantity.units[unit])
        whole_or_more = scaled >= 1 or unit == quantity.display_units[0]
        if whole_or_more and _EXACT_CONTEXT.multiply(scaled, quantity.units[unit]) == exact:
            texts.append((f"{_EXACT_CONTEXT.normalize(scaled):f}", unit))
    # The shortest number is best ("4 GiB", not "4294967296 B"). Among equally short numbers, the larger unit is best.
    number, unit = min(texts, key=lambda text: len(text[0]))
    return f"{number} {unit}"


def format_number(value: float, digits: int = 4) -> str:
    """Return a number with significant digits and without an exponent: 4416.2 ⇒ "4416", 0.0000125 ⇒ "0.0000125".

    All digits of the integer part are shown, even if they are more than `digits`.
    """
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    return f"{value:.0f}" if abs(value) >= 1 else f"{Decimal(text):f}"


def _format_short(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a value with three significant digits, in the largest unit that it reaches.

    Args:
        value: The value in the base unit.
        units: Pairs of a unit's factor and name, from large to small.
    """
    if value == 0:
        return f"0 {units[-1][1]}"
    scale, unit = next((entry for entry in units if abs(value) >= entry[0] * 0.9995), units[-1])
    scaled = value / scale
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def format_bytes(count: float) -> str:
    """Return a number of bytes as short text with an SI prefix: 1234567 ⇒ "1.23 MB".

    Args:
        count: Number of bytes.

    Returns:
        The text.
    """
    if abs(count) < 1000:
        return f"{count:.0f} B"
    return _format_short(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def format_needed_bytes(count: int) -> str:
    """Return a needed number of bytes as short text, rounded up so that the shown number suffices: 1230001 ⇒ "1.24 MB".

    Args:
        count: Number of bytes.

    Returns:
        The text.
    """
    step = 10 ** max(0, len(str(count)) - 3)
    return format_bytes(-(-count // step) * step)


def format_seconds(seconds: float) -> str:
    """Return a duration as short text: 0.0123 ⇒ "12.3 ms", and "∞" for infinity."""
    if seconds == float("inf"):
        return "∞"
    if seconds == 0:
        return "0 s"
    return _format_short(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def format_joules(energy: float) -> str:
    return _format_short(energy, ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")))


def format_flops(count: float) -> str:
    """Return a number of floating-point operations as short text: 8.2e9 ⇒ "8.20 GFLOP"."""
    return _format_short(count, ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP")))
