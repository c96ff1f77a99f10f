"""Comparison of outputs and bytes: equal values pass, and differences are named."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from support.dealing import cluster, lenet
from support.exact_models import from_text

from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program, TensorSpec, Transfer
from dicompiler.partition.lowering import lower
from dicompiler.partition.tiling import single_device_plan
from dicompiler.verify.comparison import (
    Tolerance,
    check_exact,
    check_transfers,
    compare_value,
    graph_inputs,
    random_inputs,
)


def test_exact_check_fails_for_wrong_role() -> None:
    """Spoil the second role of the check model. With correct roles the check passes and gives their number."""
    platform = cluster("a", "b", "c")
    base = lenet(({}, {"b": "c"}), platform)
    assert base.reference is not None and base.plan is not None

    def program(model: Model, spoil: bool = False) -> Program:
        made = lower(replace(prepare(model), plan=base.plan, platform=platform)).program
        assert made is not None
        if not spoil:
            return made
        (segment, *_) = made.other_roles[0].devices[2].segments
        for node in segment.model.graph.node:
            if node.op_type == "MaxPool":
                node.op_type = "AveragePool"
        return made

    good = check_exact(base.reference, program, seeds=(0, 1))
    assert good.passed and good.detail.endswith(", each in 2 replicas")
    bad = check_exact(base.reference, lambda model: program(model, spoil=True), seeds=(0, 1))
    assert not bad.passed and "replica 1: output" in bad.detail


def test_equal_outputs_without_a_finite_value_prove_nothing() -> None:
    for value in (np.nan, -np.inf):
        reference = np.full(3, value, np.float32)
        check = compare_value("y", reference, reference.copy())
        assert check.passed and not check.applies and "prove nothing: give other inputs" in check.detail
        assert not compare_value("y", reference, np.zeros(3, np.float32)).passed
    assert compare_value("y", np.array([np.nan, 1]), np.array([np.nan, 1])).applies
    assert compare_value("y", np.zeros(0), np.zeros(0)).applies


@pytest.mark.parametrize(("dtype", "allowed"), [("float16", 2e-3), ("float32", 1e-5), ("float64", 1e-10)])
def test_floats_may_differ_within_tolerance_of_largest(dtype: str, allowed: float) -> None:
    reference = np.array([0, 100, -1], dtype)
    for share, passed in ((0.0, True), (0.5, True), (2.0, False)):
        got = reference.astype(np.float64)
        got[0] += share * allowed * 100
        check = compare_value("y", reference, got.astype(dtype))
        assert check.passed == passed, check.detail
        assert compare_value("y", reference, got.astype(dtype), exact=True).passed == (share == 0)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool", "uint8"])
def test_requires_equal_integers_and_bools(dtype: str) -> None:
    reference = np.array([0, 1, 1, 0], dtype)
    assert compare_value("y", reference, reference.copy()).passed
    wrong = reference.copy()
    wrong[2] = 0
    check = compare_value("y", reference, wrong)
    assert (check.passed, check.detail) == (False, "1 of 4 elements differ")


def test_requires_nan_and_infinity_at_same_places() -> None:
    reference = np.float32([np.nan, np.inf, -np.inf, 1])
    for bits in (False, True):
        assert compare_value("y", reference, reference.copy(), bits).passed
        for index, value in ((0, 0), (1, -np.inf), (2, np.nan), (3, np.nan)):
            got = reference.copy()
            got[index] = value
            assert not compare_value("y", reference, got, bits).passed


def test_reports_other_type_or_shape() -> None:
    reference = np.zeros((2, 3), np.float32)
    check = compare_value("y", reference, reference.astype(np.float64))
    assert (check.passed, check.detail) == (False, "float64 (2, 3), but onnxruntime computes float32 (2, 3)")
    assert not compare_value("y", reference, reference.T).passed


def test_quantized_output_may_differ_by_its_steps() -> None:
    reference, allowed = np.float32([0, 1, 2]), Tolerance(1, 0.25)
    assert compare_value("y", reference, reference + np.float32(0.25), tolerance=allowed).passed
    check = compare_value("y", reference, reference + np.float32(0.5), tolerance=allowed)
    assert (check.passed, check.detail) == (False, "differs by 2 steps of 0.25 (allowed: 1)")


def test_compares_non_tensors_as_text() -> None:
    assert compare_value("y", [1, "a"], [1, "a"]).passed
    assert not compare_value("y", [1, "a"], [1, "b"]).passed


def test_requires_predicted_bytes_of_each_transfer() -> None:
    sizes = (12, 8)
    predicted = [Transfer(i, "a", "b", TensorSpec(f"t{i}", 1, (size // 4,))) for i, size in enumerate(sizes)]
    assert check_transfers(predicted, {0: 36, 1: 24}, 3).detail == "2 transfers, 20 bytes a frame: as predicted"
    for sent in ({0: 36, 1: 20}, {0: 24, 1: 36}, {0: 36}, {}):
        assert not check_transfers(predicted, sent, 3).passed
    assert check_transfers(predicted, {0: 36}, 3).detail == "'t1' a→b: 0 bytes sent, 24 predicted"


def test_random_inputs_are_seeded_and_have_requested_types_and_shapes() -> None:
    values = [
        TensorSpec("f", 1, (2, 3)),
        TensorSpec("h", 10, (4,)),
        TensorSpec("i", 7, (50,)),
        TensorSpec("b", 9, (50,)),
        TensorSpec("s", 1, ()),
    ]
    one, again, other = random_inputs(values, 1), random_inputs(values, 1), random_inputs(values, 2)
    assert {name: (str(array.dtype), array.shape) for name, array in one.items()} == {
        "f": ("float32", (2, 3)), "h": ("float16", (4,)), "i": ("int64", (50,)), "b": ("bool", (50,)),
        "s": ("float32", ()),
    }  # fmt: skip
    assert set(one["i"]) <= set(range(8))
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in "fib")


def test_listed_initializers_are_not_inputs() -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x, float[2] k) => (float[2] y) { y = Add (x, k) }'
    assert graph_inputs(from_text(text)) == (TensorSpec("x", 1, (2,)), TensorSpec("k", 1, (2,)))
    assert graph_inputs(from_text(text, {"k": np.float32([1, 2])})) == (TensorSpec("x", 1, (2,)),)


def test_keeps_one_check_model_in_memory() -> None:
    """Check models are as large as the network."""
    model = prepare(Model.load(networks.build("lenet", 1))).model
    before: list[weakref.ref[Model]] = []

    def program(variant: Model) -> Program:
        assert all(one() is None for one in before)
        before.append(weakref.ref(variant))
        prepared = replace(prepare(variant), platform=Platform.load("rpi4x2"))
        assert prepared.layers is not None
        lowered = lower(replace(prepared, plan=single_device_plan(prepared.layers, "pi01"))).program
        assert lowered is not None
        return lowered

    assert check_exact(model, program, seeds=range(3)).passed and len(before) == 3
