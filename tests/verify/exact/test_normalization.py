"""Stand-ins of normalizations: regions are correct, wrong slices are caught, and the whole group counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import splits
from support.exact_models import from_text
from support.layer_graphs import rules
from support.operator_cases import Draw, RuleCase, check_stand_in, integers, run_split

from dicompiler.ir.operator_rule import Operation, Piece
from dicompiler.ir.plan import Part
from dicompiler.ir.regions import Interval, Region, full_region
from dicompiler.partition.operators import builtin_rules
from dicompiler.verify.exact import DOMAIN, check_model
from dicompiler.verify.exact.normalization import BODIES
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers

RANKS = {"GroupNormalization": (3, 4), "InstanceNormalization": (3, 4), "MeanVarianceNormalization": (4, 4)}


NORM_OPSETS = {
    "GroupNormalization": (18, 21),
    "InstanceNormalization": (9, 13, 22),
    "LayerNormalization": (17, 21),
    "LpNormalization": (9, 11, 13, 22),
    "MeanVarianceNormalization": (9, 11, 13),
    "RMSNormalization": (23,),
    "SimplifiedLayerNormalization": (17,),
    "Softmax": (9, 11, 13, 17),
    "LogSoftmax": (9, 11, 13, 17),
}
ALONE = ("RMSNormalization", "SimplifiedLayerNormalization")
"""Operators with a scale and no shift."""


def normalisation(draw: Draw, op: str) -> RuleCase:
    """Return a node of the operator, with constant scale and shift."""
    opset = draw(st.sampled_from(NORM_OPSETS[op]))
    low, high = RANKS.get(op, (1, 4))
    shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(low, high)))]
    vectors: list[int] | None = None
    attributes: dict[str, Any] = {}
    if op == "GroupNormalization":
        attributes["num_groups"] = draw(st.integers(1, 4))
        shape[1] = attributes["num_groups"] * draw(st.integers(1, 3))
        vectors = [attributes["num_groups"] if opset < 21 else shape[1]]
    elif op == "InstanceNormalization":
        vectors = [shape[1]]
    elif op == "MeanVarianceNormalization":
        if draw(st.booleans()):
            attributes["axes"] = sorted(draw(st.sets(st.integers(0, 3), min_size=1)))
    elif draw(st.booleans()):
        attributes["axis"] = draw(st.integers(0 if opset < 11 else -len(shape), len(shape) - 1))
    count = 0 if vectors is None else 2
    if op in ("LayerNormalization", *ALONE):
        vectors = shape[attributes.get("axis", -1) % len(shape) :]
        count = 1 if op in ALONE or draw(st.booleans()) else 2
    values = [integers(draw, *shape, most=9), *(integers(draw, *(vectors or ())) for _ in range(count))]
    return RuleCase(op, tuple(values), attributes, opset, shape=tuple(shape))


def test_covers_all_normalization_stand_ins() -> None:
    assert {rule.op for rule in builtin_rules() if rule.stand_in in BODIES and not rule.domain} == {*NORM_OPSETS}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", sorted(NORM_OPSETS))
def test_region_of_stand_in_equals_whole(op: str, data: st.DataObject) -> None:
    case = normalisation(data.draw, op)
    check_stand_in(case, data.draw)
    checked, feed = check_model(case.model(), data.draw(st.integers(0, 3)))
    assert checked.proto.graph.node[0].domain == DOMAIN
    output = run_model(checked, feed)["y"]
    assert np.array_equal(output, np.rint(output))
    assert np.abs(output).max() <= 4 * 15 + 8


NUMBERS = np.random.default_rng(5)


NORM_FAULTS = [
    # Each case: operator, attributes, shape of x, shape of scale and bias, axis and position of the cut, and the fault:
    # index of the wrongly read input, axis and offset.
    ("InstanceNormalization", {}, (1, 6, 5, 4), (6,), 1, 2, (0, 1, 1)),
    ("InstanceNormalization", {}, (1, 6, 5, 4), (6,), 1, 2, (1, 0, 1)),
    ("InstanceNormalization", {}, (1, 6, 5, 4), (6,), 1, 2, (2, 0, 1)),
    ("InstanceNormalization", {}, (4, 3, 5, 4), (3,), 0, 2, (0, 0, 1)),
    ("GroupNormalization", {"num_groups": 3}, (1, 6, 5, 4), (6,), 1, 2, (0, 1, 2)),
    ("GroupNormalization", {"num_groups": 3}, (1, 6, 5, 4), (6,), 1, 2, (1, 0, 1)),
    ("GroupNormalization", {"num_groups": 3}, (1, 6, 5, 4), (6,), 1, 2, (2, 0, 1)),
    ("LayerNormalization", {}, (1, 7, 8), (8,), 1, 3, (0, 1, 1)),
    ("LayerNormalization", {"axis": 2}, (1, 5, 3, 4), (5, 3, 4), 1, 3, (1, 0, 1)),
    ("LayerNormalization", {"axis": 2}, (1, 5, 3, 4), (5, 3, 4), 1, 3, (2, 0, 1)),
    ("RMSNormalization", {}, (1, 7, 8), (8,), 1, 3, (0, 1, 1)),
    ("LpNormalization", {"axis": 1}, (1, 7, 8), None, 2, 3, (0, 2, 1)),
    ("MeanVarianceNormalization", {}, (1, 6, 5, 4), None, 1, 2, (0, 1, 1)),
]


@pytest.mark.parametrize(("op", "attributes", "shape", "vector", "axis", "at", "fault"), NORM_FAULTS)
def test_catches_wrong_slice(
    op: str,
    attributes: dict[str, Any],
    shape: tuple[int, ...],
    vector: tuple[int, ...] | None,
    axis: int,
    at: int,
    fault: tuple[int, int, int],
) -> None:
    """Move a piece of the input, scale or shift some elements up (at the end down)."""
    count = 0 if vector is None else 1 if op == "RMSNormalization" else 2
    values = [NUMBERS.standard_normal(own).astype(np.float32) for own in (shape, *[vector or ()] * count)]
    case = RuleCase(op, tuple(values), attributes, 23 if op == "RMSNormalization" else 21, shape=shape)
    regions = [
        (*full_region(shape)[:axis], cut, *full_region(shape)[axis + 1 :]) for cut in ((0, at), (at, shape[axis]))
    ]
    parts = [Part(device, region) for device, region in zip("ab", regions, strict=True)]
    index, along, by = fault

    def wrong(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
        piece, extent = right.piece(operation, region, reduce), operation.input_shape(index)[along]
        need = piece.needs[index]
        assert need is not None
        start, stop = need[along]
        if stop - start == extent:  # Nothing is cut along this axis, so the input cannot be shifted.
            return piece
        step = by if stop + by <= extent else -by
        moved = (*need[:along], (start + step, stop + step), *need[along + 1 :])
        return replace(piece, needs=(*piece.needs[:index], moved, *piece.needs[index + 1 :]))

    model, feed = check_model(case.model(), 0)
    expected = run_model(model, feed)["y"]
    right = rules()[DOMAIN, op] if (DOMAIN, op) in rules() else rules()["", op]
    assert np.array_equal(run_split(model, form_layers(model, rules()), parts, feed), expected)
    spoiled = form_layers(model, {**rules(), (right.domain, op): replace(right, piece=wrong)})
    assert not np.array_equal(run_split(model, spoiled, parts, feed), expected)


@pytest.mark.parametrize("op", ["InstanceNormalization", "LayerNormalization"])
def test_each_element_changes_its_whole_group(op: str) -> None:
    model = from_text(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) {{
          y = {op} {"<axis = 2>" if op == "LayerNormalization" else ""} (x, s, b) }}""",
        dict.fromkeys("sb", np.ones((4, 5) if op == "LayerNormalization" else 3, np.float32)),
    )
    checked, feed = check_model(model, 0)
    before = run_model(checked, feed)["y"]
    for place in ((0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 2, 3)):
        changed = feed["x"].copy()
        changed[place] += 1
        differs = run_model(checked, {"x": changed})["y"] != before
        expected = np.zeros((2, 3, 4, 5), bool)
        expected[place[:2]] = True
        expected[place] = differs[place]
        assert np.array_equal(differs, expected)


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_proves_every_kind_of_split(dtype: str) -> None:
    model = from_text(
        f"""<ir_version: 8, opset_import: ["": 17]> net ({dtype}[1, 4, 9, 8] x) => ({dtype}[1, 6, 9, 4] y) {{
          ["c1"] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
          ["in"] b = InstanceNormalization (a, s1, b1)
          ["r"] c = Relu (b)
          ["c2"] d = Conv <pads = [1, 1, 1, 1]> (c, w2)
          ["mvn"] e = MeanVarianceNormalization <axes = [2, 3]> (d)
          ["add"] f = Add (e, d)
          ["ln"] g = LayerNormalization (f, s2, b2)
          ["mm"] y = MatMul (g, w3) }}""",
        {
            name: NUMBERS.standard_normal(shape).astype(np.float16 if dtype == "float16" else np.float32)
            for name, shape in {
                "w1": (6, 4, 3, 3), "s1": (6,), "b1": (6,), "w2": (6, 6, 3, 3), "s2": (8,), "b2": (8,), "w3": (8, 4),
            }.items()
        },
    )  # fmt: skip
    case = splits.Case.of(model.to_proto())
    tried = 0
    for split in splits.splits(case.layers, ("pipeline", "height", "lop", "lip"), sets=0):
        check, _, sent = case.verify(split, seeds=[0, 1])
        assert check.passed and check.applies, check.detail
        assert sent.passed
        tried += 1
    assert tried == 4
