"""Quantities with units: text such as "13.6 GFLOP/s" becomes a number of base units, and numbers become short text.

Parsing is exact decimal arithmetic, rounded once, so that what `write` wrote is read back as the same number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal

from dicompiler.base.errors import DicompilerError, did_you_mean

_EXACT_CONTEXT = Context(prec=400)
_SI_EXPONENTS = {"n": -9, "u": -6, "µ": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY_EXPONENTS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


def _si_units(unit: str, prefixes: str, factor: int = 1) -> dict[str, Decimal]:
    """`_scaled("W", "mk")` → {"W": 1, "mW": 0.001, "kW": 1000}; `prefixes` one character each."""
    return {p + unit: _EXACT_CONTEXT.scaleb(Decimal(factor), _SI_EXPONENTS[p]) for p in ("", *prefixes)}


def _binary_units(unit: str, factor: int = 1) -> dict[str, Decimal]:
    return {p + unit: Decimal(factor * 2**power) for p, power in _BINARY_EXPONENTS.items()}


MIN_QUANTITY, MAX_QUANTITY = 1e-12, 2.0**62
"""What a quantity other than zero may be, in its base unit: sums and quotients of them are finite, counts of bytes
have 64 bits."""


@dataclass(frozen=True)
class Quantity:
    """A kind of quantity. `units`: text → base units; `shown`: the units that messages and `write` use, small to large.

    `zero`: whether nothing at all makes sense.
    """

    name: str
    units: Mapping[str, Decimal]
    display_units: tuple[str, ...]
    allows_zero: bool

    @property
    def base_unit(self) -> str:
        """The base unit."""
        return next(unit for unit, factor in self.units.items() if factor == 1)


COMPUTE_RATE = Quantity(
    "compute rate",
    {**_si_units("FLOP/s", "kMGTP"), **_si_units("FLOPS", "kMGTP")},
    ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"),
    allows_zero=True,
)
MEMORY = Quantity(
    "memory size",
    {**_si_units("B", "kMGT"), "KB": Decimal(1000), **_binary_units("B")},
    ("B", "kB", "KiB", "MB", "MiB", "GB", "GiB"),
    allows_zero=False,
)
BANDWIDTH = Quantity(
    "bandwidth",
    {
        **_si_units("bit/s", "kMGT"),
        **_si_units("bps", "kMGT"),
        **_si_units("B/s", "kMGT", 8),
        **_binary_units("B/s", 8),
    },
    ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"),
    allows_zero=False,
)
TIME = Quantity("time", _si_units("s", "nuµm"), ("ns", "us", "ms", "s"), allows_zero=True)
POWER = Quantity("power", _si_units("W", "mk"), ("mW", "W", "kW"), allows_zero=True)


def parse_quantity(text: object, quantity: Quantity, place: str) -> float:
    """`parse("0.5 ms", TIME, …)` → 0.0005: `text` in the quantity's base unit (FLOP/s, B, bit/s, s, W).

    Raises DicompilerError, opening with `place` (file and key): no text, no unit, an unknown unit, a number below zero,
    zero where that makes no sense, not between LEAST and MOST.
    """
    allowed = f"(allowed units: {', '.join(quantity.display_units)})"
    if not isinstance(text, str):
        example = f'"{text} {quantity.display_units[-1]}"'
        raise DicompilerError(f"{place}: {text!r} has no unit: write a text such as {example} {allowed}")
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([^\s\d].*?)?\s*", text)
    if match is None:
        raise DicompilerError(f"{place}: {text!r} is not a number with a unit {allowed}")
    number, unit = Decimal(match[1]), match[2]
    if unit is None:
        raise DicompilerError(f"{place}: {text!r} has no unit {allowed}")
    if unit not in quantity.units:
        close = did_you_mean(unit, quantity.units)
        hint = close if "did you mean" in close else ""
        raise DicompilerError(f"{place}: unknown unit {unit!r} of a {quantity.name}{hint} {allowed}")
    if number < 0 or (number == 0 and not quantity.allows_zero):
        least = "zero or more" if quantity.allows_zero else "more than zero"
        raise DicompilerError(f"{place}: {text!r}: a {quantity.name} must be {least}")
    value = float(_EXACT_CONTEXT.multiply(number, quantity.units[unit]))
    if value and not MIN_QUANTITY <= value <= MAX_QUANTITY:
        wrong = f"{text!r} is too {'large' if value > MAX_QUANTITY else 'small'} for a {quantity.name}"
        raise DicompilerError(
            f"{place}: {wrong}: in {quantity.base_unit} it must be from {MIN_QUANTITY:g} to {MAX_QUANTITY:g}, or 0"
        )
    return value


def parse_bytes(text: object, place: str) -> int:
    """`parse_bytes("1 GiB", …)` → 1073741824; part of a byte is dropped. Raises as `parse` does."""
    value = int(parse_quantity(text, MEMORY, place))
    if value < 1:
        raise DicompilerError(f"{place}: {text!r}: a memory size must be one byte or more")
    return value


def format_quantity(value: float, quantity: Quantity) -> str:
    """The exact text of `value` (base units) in the unit that makes it shortest; `parse` gives back the same number.

    `write(13.6e9, RATE)` → "13.6 GFLOP/s".
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
    # "4 GiB" rather than "4294967296 B": fewest digits first; of equals the larger unit.
    number, unit = min(texts, key=lambda text: len(text[0]))
    return f"{number} {unit}"


def _format_short(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """`value` with three significant digits in the largest unit of `steps` (large to small) that it reaches."""
    if value == 0:
        return f"0 {steps[-1][1]}"
    scale, unit = next((step for step in steps if abs(value) >= step[0] * 0.9995), steps[-1])
    scaled = value / scale
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def format_bytes(count: float) -> str:
    """For tables: 1234567 → "1.23 MB" (SI prefixes); "17 B" below a kilobyte."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    return _format_short(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def format_seconds(seconds: float) -> str:
    """For tables: 0.0123 → "12.3 ms"; an endless time is "∞"."""
    if seconds == float("inf"):
        return "∞"
    if seconds == 0:
        return "0 s"
    return _format_short(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def format_joules(energy: float) -> str:
    """For tables: 0.0123 → "12.3 mJ"."""
    return _format_short(energy, ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")))


def format_flops(count: float) -> str:
    """For tables: 8.2e9 → "8.20 GFLOP"."""
    return _format_short(count, ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP")))
