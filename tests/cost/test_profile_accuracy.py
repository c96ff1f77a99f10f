"""Errors of models against a profile: exact models have none, and unforeseen pieces have their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.profiles import document, entry, network

from dicompiler.cost import profile_accuracy
from dicompiler.cost.profile import Profile, parse_profile


def profile(seconds: dict[int, float]) -> Profile:
    """Return a profile of one layer with pieces along axis 2 of these times by size."""
    made = document(network())
    pieces = [entry("axis 2", size, one, (1000 * size, 100 * size)) for size, one in seconds.items()]
    made["layers"] = [made["layers"][0] | {"measurements": [entry("whole", 1, 1.6e-2, (16000, 1600)), *pieces]}]
    return parse_profile(made, "p.json")


def test_compares_piece_with_curve_through_others() -> None:
    exact = profile_accuracy.interpolation_error(profile({2: 2e-3, 4: 4e-3, 8: 8e-3}))
    assert exact is not None and exact.count == 1 and exact.worst == pytest.approx(0)
    off = profile_accuracy.interpolation_error(profile({2: 2e-3, 4: 8e-3, 8: 8e-3, 12: 12e-3}))
    assert off is not None and off.count == 2
    assert off.worst == pytest.approx(0.5)  # The piece of 4 rows: 4 ms predicted, 8 ms measured.
    # The piece of 8 rows adds 0.25: 10 ms predicted, 8 ms measured.
    assert off.median == pytest.approx((0.5 + 0.25) / 2)
    assert profile_accuracy.interpolation_error(profile({2: 2e-3, 4: 4e-3})) is None


def test_linear_and_roofline_fit_their_own_law_exactly() -> None:
    given = profile({2: 2e-3, 4: 4e-3, 8: 8e-3})
    linear, roof = profile_accuracy.linear_fit_error(given), profile_accuracy.fit_roofline(given)
    assert linear is not None and linear.count == 4 and linear.worst == pytest.approx(0, abs=1e-9)
    assert roof is not None and roof.error.worst == pytest.approx(0, abs=1e-9)
    assert roof.rate == pytest.approx(1e6) or roof.memory_bandwidth == pytest.approx(1e5)


def test_ignores_pieces_shorter_than_a_call() -> None:
    made = profile({2: 2e-3, 4: 8e-3, 8: 8e-3})
    assert profile_accuracy.interpolation_error(replace(made, call_s=3.9e-3)) is not None
    # Of the 8 ms of a piece, more than half is the cost of the call, so such pieces are ignored.
    for call_s in (4.1e-3, 1.0):
        short = replace(made, call_s=call_s)
        assert profile_accuracy.interpolation_error(short) is None
    assert (
        profile_accuracy.linear_fit_error(replace(made, call_s=1.0))
        is profile_accuracy.fit_roofline(replace(made, call_s=1.0))
        is None
    )
