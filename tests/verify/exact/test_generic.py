"""Generic stand-ins: bounded, dependent on each element that the operator reads, and order-independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.exact.function_builder import StandInCall, centred_mod, modulus_for
from dicompiler.verify.exact.generic import BODIES
from dicompiler.verify.executor import run_model

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT = TensorProto.FLOAT


def ran(nodes: Sequence[onnx.NodeProto], opset: int, *arrays: Array) -> Array:
    """Return the results of the nodes for X0, X1, …"""
    kinds = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in arrays]
    values = [helper.make_tensor_value_info(f"X{i}", kinds[i], array.shape) for i, array in enumerate(arrays)]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name="Y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    feed = {f"X{i}": array for i, array in enumerate(arrays)}
    return np.asarray(run_model(Model.load(model), feed, optimization="none")["Y"])


def call(op: str, opset: int, *arrays: Array, shape: tuple[int, ...] = (3, 5)) -> StandInCall:
    kinds = tuple(helper.np_dtype_to_tensor_dtype(array.dtype) for array in arrays)
    node = helper.make_node(op, [f"X{i}" for i in range(len(arrays))], ["Y"])
    return StandInCall(op, opset, len(arrays), kinds[0], frozenset(), "", node, ((FLOAT, shape),), kinds)


@pytest.mark.parametrize("opset", [9, 11, 17])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_centred_mod_is_centred_around_zero(opset: int, dtype: Any) -> None:
    x = np.array([*range(-100, 101), 500, -500, np.inf, -np.inf], dtype)
    modulus = modulus_for(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    got = ran(centred_mod(call("Identity", opset, x), "X0", "Y"), opset, x)
    assert np.array_equal(got, np.rint(got)) and np.abs(got).max() <= modulus // 2
    assert np.array_equal((got[:203] - x[:203]) % modulus, np.zeros(203)) and got[100] == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(2, 9), st.integers(1, 8), st.integers(0, 2**31), st.sampled_from((9, 13, 17)))
def test_partial_sums_of_bounded_products_equal_whole(
    rows: int, inner: int, columns: int, seed: int, opset: int
) -> None:
    random = np.random.default_rng(seed)
    a, b = (random.integers(-(2**20), 2**20, shape).astype(np.float32) for shape in ((rows, inner), (inner, columns)))
    body = BODIES["same_operator"](call("MatMul", opset, a, b))
    whole, order = ran(body, opset, a, b), random.permutation(inner)
    assert np.abs(whole).max() <= 49 * inner
    assert np.array_equal(ran(body, opset, a[:, order], b[order]), whole)
    parts = [ran(body, opset, np.ascontiguousarray(a[:, i]), b[i]) for i in (slice(0, 1), slice(1, None))]
    assert np.array_equal(parts[0] + parts[1], whole)
    place = (int(random.integers(inner)), int(random.integers(columns)))
    b[place] += 1
    changed = (ran(body, opset, a, b) != whole).any(0)
    if (a[:, place[0]] % 15).any():
        assert changed.nonzero()[0].tolist() == [place[1]]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(2, 40), st.integers(0, 2**31), st.sampled_from((9, 13, 17)))
def test_digest_depends_on_every_element_and_its_position(n: int, seed: int, opset: int) -> None:
    random = np.random.default_rng(seed)
    x, w = random.integers(-9, 10, (n, 3)).astype(np.float32), random.standard_normal(7).astype(np.float32)
    body = BODIES["digest"](call("LSTM", opset, x, w))
    before = ran(body, opset, x, w)
    assert before.shape == (3, 5) and np.abs(before).max() <= 7 and np.unique(before).size > 3
    for array in (x, w):
        place = int(random.integers(array.size))
        array.reshape(-1)[place] += 1
        assert not np.array_equal(ran(body, opset, x, w), before)
        array.reshape(-1)[place] -= 1
    i, j = sorted(random.choice(n, 2, replace=False))
    if not np.array_equal(x[i], x[j]):
        x[[i, j]] = x[[j, i]]
        assert not np.array_equal(ran(body, opset, x, w), before)


@pytest.mark.parametrize("opset", [9, 17])
def test_weighted_sum_depends_on_every_operand(opset: int) -> None:
    x, y = (np.arange(12, dtype=np.float32).reshape(3, 4) * k - 9 for k in (3, 5))
    body = BODIES["weighted_sum"](call("BiasGelu", opset, x, y))
    before = ran(body, opset, x, y)
    assert np.array_equal(before, np.rint(before)) and np.abs(before).max() <= 3 * 7
    for changed in ((x + 1, y), (x, y + 1)):
        assert (ran(body, opset, *changed) != before).all()


# The last axis and the channel axis have equal length, so a sum along the wrong axis would raise no error.
@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3), (2, 4, 3, 4)])
def test_weighted_sum_of_batch_normalization_is_along_channels(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(-7, 8, s).astype(np.float32) for s in (shape, (4,), (4,), (4,), (4,))]
    body = BODIES["weighted_sum"](call("BatchNormalization", 17, *arrays, shape=shape))
    before = ran(body, 17, *arrays)
    for place in range(1, 5):
        arrays[place][2] += 1
        changed = np.argwhere(ran(body, 17, *arrays) != before)
        assert set(changed[:, 1]) == {2} and len(changed) == before.size // 4
        arrays[place][2] -= 1
