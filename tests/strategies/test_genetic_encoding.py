"""Chromosomes: they decode as in the paper's figure, stay valid and round-trip."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dicompiler_strategies.genetic.encoding import ChoiceEncoding, NaiveEncoding, SplitPointEncoding


def test_split_points_decode_as_in_the_paper() -> None:
    encoding = SplitPointEncoding(8, (1, 2, 3, 4), 4)
    genes = np.array([[0, 2, 4, 5, 1, 2, 3, 4]])
    assert encoding.decode(genes).tolist() == [[1, 1, 2, 2, 3, 4, 4, 4]]
    assert encoding.encode(encoding.decode(genes)).tolist() == genes.tolist()


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_chromosomes_stay_valid_and_round_trip(layers: int, devices: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = tuple(range(3, 3 + devices))
    for encoding in (NaiveEncoding(layers, names), SplitPointEncoding(layers, names, devices)):
        genes = encoding.sample(rng, 9)
        genes = encoding.mutate(rng, encoding.cross(rng, genes, genes[::-1]))
        rows = encoding.decode(genes)
        assert rows.shape == (9, layers)
        assert set(rows.ravel()) <= set(names)
        assert np.array_equal(encoding.decode(encoding.encode(rows)), rows)
        if isinstance(encoding, SplitPointEncoding):
            assert max(np.count_nonzero(np.diff(row)) for row in rows) < devices


def test_plan_with_too_many_runs_keeps_the_longest() -> None:
    encoding = SplitPointEncoding(8, (0, 1), 3)
    assert encoding.decode(encoding.encode(np.array([[0, 0, 1, 0, 0, 0, 1, 1]]))).tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]


def test_runs_of_layers_use_choices_with_one_label() -> None:
    labels = (("whole", "rows"), ("whole",), ("whole", "lop", "rows"))
    encoding = ChoiceEncoding(3, labels, ((0, 1), (0,), (0, 2)))
    assert encoding.uniform_plans().tolist() == [[0, 0, 0], [1, 0, 2]]
    rows = encoding.mutate(np.random.default_rng(0), encoding.sample(np.random.default_rng(0), 50))
    assert {tuple(row) for row in rows} == {(a, 0, b) for a in (0, 1) for b in (0, 2)}
