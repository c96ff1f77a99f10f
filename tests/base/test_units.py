"""Quantities round-trip exactly, and errors name the key and the allowed units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import (
    BANDWIDTH,
    COMPUTE_RATE,
    MAX_QUANTITY,
    MEMORY,
    MIN_QUANTITY,
    POWER,
    TIME,
    Quantity,
    format_bytes,
    format_flops,
    format_needed_bytes,
    format_quantity,
    format_seconds,
    parse_bytes,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("13.6 GFLOP/s", COMPUTE_RATE, 13.6e9),
        ("0 FLOP/s", COMPUTE_RATE, 0.0),
        ("1e3 MFLOP/s", COMPUTE_RATE, 1e9),
        ("2TFLOPS", COMPUTE_RATE, 2e12),
        ("1 GiB", MEMORY, 2.0**30),
        ("512 MB", MEMORY, 512e6),
        ("64 KB", MEMORY, 64e3),
        ("100 Mbit/s", BANDWIDTH, 1e8),
        ("100 Mbps", BANDWIDTH, 1e8),
        ("12.5 MB/s", BANDWIDTH, 1e8),
        ("1 MiB/s", BANDWIDTH, 8.0 * 2**20),
        ("0.5 ms", TIME, 0.0005),
        ("250 µs", TIME, 0.00025),
        ("  5   W ", POWER, 5.0),
        (".5 kW", POWER, 500.0),
    ],
)
def test_parses_quantities_to_base_units(text: str, quantity: Quantity, value: float) -> None:
    assert parse_quantity(text, quantity, "p") == value


@pytest.mark.parametrize(
    ("text", "quantity", "expected"),
    [
        ("13.6", COMPUTE_RATE, "'13.6' has no unit"),
        (13.6, COMPUTE_RATE, '13.6 has no unit: write a string such as "13.6'),
        (True, COMPUTE_RATE, "True has no unit"),
        ("-1 W", POWER, "'-1 W': a power must be zero or more"),
        ("0 B", MEMORY, "'0 B': a memory size must be more than zero"),
        ("0 bit/s", BANDWIDTH, "'0 bit/s': a bandwidth must be more than zero"),
        ("nan ms", TIME, "'nan ms' is not a number with a unit"),
        ("inf ms", TIME, "'inf ms' is not a number with a unit"),
        ("GFLOP/s", COMPUTE_RATE, "'GFLOP/s' is not a number with a unit"),
        ("", COMPUTE_RATE, "'' is not a number with a unit"),
        ("5 GFLOP/h", COMPUTE_RATE, "unknown unit 'GFLOP/h' for a compute rate (did you mean 'GFLOP/s'?)"),
        ("5 GB", BANDWIDTH, "unknown unit 'GB' for a bandwidth (did you mean 'GB/s'?) (allowed units: bit/s, "),
        ("940 MBps", BANDWIDTH, "(did you mean 'MB/s'?) (allowed units: bit/s, kbit/s, Mbit/s, Gbit/s, kB/s, MB/s, "),
        ("5 Mbi", BANDWIDTH, "unknown unit 'Mbi' for a bandwidth (did you mean 'Mbit/s'?)"),
        ("5 mib", MEMORY, "unknown unit 'mib' for a memory size (did you mean 'MiB'?)"),
        ("5 parsec", TIME, "unknown unit 'parsec' for a time (allowed units: ns, us, ms, s)"),
        ("1e400 W", POWER, "'1e400 W' is too large for a power: in W it must be from 1e-12 to 4.61169e+18, or 0"),
        ("1e-320 FLOP/s", COMPUTE_RATE, "'1e-320 FLOP/s' is too small for a compute rate"),
        ("1e-99 Mbit/s", BANDWIDTH, "'1e-99 Mbit/s' is too small for a bandwidth"),
    ],
)
def test_errors_name_key_cause_and_units(text: object, quantity: Quantity, expected: str) -> None:
    with pytest.raises(DicompilerError) as caught:
        parse_quantity(text, quantity, "p.toml: device[0].rate")
    message = str(caught.value)
    assert message.startswith("p.toml: device[0].rate: ")
    assert expected in message
    assert "\n" not in message


def test_byte_counts_are_integers_of_at_least_one() -> None:
    assert parse_bytes("1.5 KiB", "p") == 1536
    with pytest.raises(DicompilerError, match="one byte or more"):
        parse_bytes("0.5 B", "p")


@pytest.mark.parametrize(
    ("value", "quantity", "text"),
    [
        (13.6e9, COMPUTE_RATE, "13.6 GFLOP/s"),
        (0.0, COMPUTE_RATE, "0 FLOP/s"),
        (4 * 2**30, MEMORY, "4 GiB"),
        (8e9, MEMORY, "8 GB"),
        (1e8, BANDWIDTH, "100 Mbit/s"),
        (0.0, TIME, "0 s"),
        (2.7, POWER, "2.7 W"),
    ],
)
def test_formats_quantities_in_the_shortest_unit(value: float, quantity: Quantity, text: str) -> None:
    assert format_quantity(value, quantity) == text


@given(
    st.floats(MIN_QUANTITY, MAX_QUANTITY) | st.integers(1, 2**62).map(float),
    st.sampled_from([COMPUTE_RATE, BANDWIDTH, TIME, POWER]),
)
def test_quantities_round_trip(value: float, quantity: Quantity) -> None:
    assert parse_quantity(format_quantity(value, quantity), quantity, "p") == value


@given(st.integers(1, 2**52))
def test_byte_counts_round_trip(value: int) -> None:
    assert parse_bytes(format_quantity(value, MEMORY), "p") == value


def test_tables_show_three_digits_and_a_unit() -> None:
    assert [format_bytes(n) for n in (0, 17, 1234567, 999_999, 5e9)] == ["0 B", "17 B", "1.23 MB", "1.00 MB", "5.00 GB"]
    needed = [format_needed_bytes(n) for n in (0, 17, 1234567, 1_230_000, 999_901, 83_412_345)]
    assert needed == ["0 B", "17 B", "1.24 MB", "1.23 MB", "1.00 MB", "83.5 MB"]
    assert [format_seconds(s) for s in (0, 0.0123, 2.5, 1e-5, 0.1499)] == [
        "0 s", "12.3 ms", "2.50 s", "10.0 µs", "150 ms",
    ]  # fmt: skip
    assert format_seconds(float("inf")) == "∞"
    assert format_flops(8.2e9) == "8.20 GFLOP"
