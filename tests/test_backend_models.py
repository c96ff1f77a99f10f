"""A sample of the one-operator models of the ONNX backend tests; benchmarks/backend.py runs them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from support.backend_models import Case, cases, outcome

STRIDE = 6
"""Step in the list of node tests; other tests are all taken."""


@pytest.fixture(scope="module")
def sample() -> list[Case]:
    def chosen() -> Iterator[Case]:
        for number, case in enumerate(cases(("node",))):
            if number % STRIDE == 0 and not case.operator.startswith("("):
                yield case
        yield from cases(("simple", "pytorch-operator"))

    return list(chosen())


@pytest.mark.slow
def test_backend_models_compile_and_verify(sample: list[Case]) -> None:
    found = [outcome(case, randoms=1) for case in sample]
    assert [(item.case.name, item.why) for item in found if item.result in ("wrong", "crash", "refused")] == []
    count = Counter(item.result for item in found)
    assert count["split"] >= 120
    assert count["whole"] < count["split"]


@pytest.mark.parametrize(
    "name",
    [
        "test_convtranspose_group_2",
        "test_resize_upsample_scales_nearest",
        "test_reduce_sum_keepdims_random",
        "test_slice_default_steps",
        "test_einsum_batch_matmul",
        "test_qlinearconv",
        "test_edge_pad",
        "test_split_to_sequence_nokeepdims",
    ],
)
def test_models_of_operators_with_rule_are_split(name: str) -> None:
    case = next(case for case in cases(("node",)) if case.name == name)
    found = outcome(case)
    assert (found.result, found.why) == ("split", "")
    assert found.plans > 3
