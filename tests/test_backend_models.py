"""A sample of the one-operator models of the ONNX backend tests; benchmarks/backend.py runs them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from support.backend_models import Case, cases, node_case, outcome

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
    ("module", "name"),
    [
        ("convtranspose", "test_convtranspose_group_2"),
        ("resize", "test_resize_upsample_scales_nearest"),
        ("reducesum", "test_reduce_sum_keepdims_random"),
        ("slice", "test_slice_default_steps"),
        ("einsum", "test_einsum_batch_matmul"),
        ("qlinearconv", "test_qlinearconv"),
        ("pad", "test_edge_pad"),
        ("splittosequence", "test_split_to_sequence_nokeepdims"),
    ],
)
def test_models_of_operators_with_rule_are_split(module: str, name: str) -> None:
    found = outcome(node_case(module, name))
    assert (found.result, found.why) == ("split", "")
    assert found.plans > 3
