"""Objectives are parsed into weights, and invalid ones are rejected in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.base.errors import UsageError
from dicompiler.base.objectives import OBJECTIVES, objective_terms

WEIGHTS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_single_objective_has_weight_1(name: str) -> None:
    assert objective_terms(name) == {name: 1.0}


def test_parses_weighted_sums_with_and_without_blanks() -> None:
    assert objective_terms("latency+0.5*energy") == {"latency": 1.0, "energy": 0.5}
    assert objective_terms(" 2 * throughput + 1e-9*memory ") == {"throughput": 2.0, "memory": 1e-9}
    assert objective_terms("1e+3*latency+1E+2*energy") == {"latency": 1000.0, "energy": 100.0}


@given(st.dictionaries(st.sampled_from(OBJECTIVES), WEIGHTS, min_size=1))
def test_weights_round_trip_in_order(weights: dict[str, float]) -> None:
    read = objective_terms("+".join(f"{weight!r}*{name}" for name, weight in weights.items()))
    assert list(read.items()) == list(weights.items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latncy", "unknown objective 'latncy' (did you mean 'latency'?)"),
        ("", "unknown objective ''"),
        ("latency+", "unknown objective ''"),
        ("latency+2", "unknown objective '2'"),
        ("latency,energy", "a sum is written with '+': write latency+energy"),
        ("latency, energy,memory", "write latency+energy+memory"),
        ("latency+energi", "(did you mean 'energy'?)"),
        ("latency+energy+2*latency", "latency appears twice"),
        ("*energy", "weight '' is not a number above 0"),
        ("2*3*energy", "weight '2*3' is not a number above 0"),
        ("0*energy", "weight '0' is not a number above 0"),
        ("-1*energy", "weight '-1' is not a number above 0"),
        ("nan*energy", "weight 'nan' is not a number above 0"),
        ("inf*energy", "weight 'inf' is not a number above 0"),
        ("much*energy", "weight 'much' is not a number above 0"),
    ],
)
def test_rejects_invalid_objectives(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        objective_terms(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
