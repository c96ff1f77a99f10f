"""Regions of products equal those of the whole operator, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.layer_graphs import rules
from support.operator_cases import OPSETS, RuleCase, broadcastable, check_cut, check_stand_in, drawn_computed, integers

from dicompiler.partition.bounds_inference import reduction_length
from dicompiler_passes.form_layers import form_layers


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_gemm(data: st.DataObject) -> None:
    draw = data.draw
    rows, k, columns = (draw(st.integers(1, 6)) for _ in range(3))
    turn_a, turn_b = draw(st.booleans()), draw(st.booleans())
    opset = draw(st.sampled_from(OPSETS))
    a = integers(draw, *((k, rows) if turn_a else (rows, k)))
    b = integers(draw, *((columns, k) if turn_b else (k, columns)))
    values = [a, b]
    if opset < 11 or draw(st.booleans()):  # Gemm needs its third input (C) before opset 11.
        values.append(integers(draw, *broadcastable(draw, (rows, columns))))
    attributes: dict[str, Any] = {"transA": int(turn_a), "transB": int(turn_b)}
    if draw(st.booleans()):
        attributes |= {"alpha": 2.0, "beta": -3.0}
    check_cut(RuleCase("Gemm", tuple(values), attributes, opset, drawn_computed(draw, len(values))), draw)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_matmul(data: st.DataObject) -> None:
    draw = data.draw
    k = draw(st.integers(1, 6))
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    a = integers(draw, *broadcastable(draw, batch), draw(st.integers(1, 5)), k)
    b = integers(draw, *broadcastable(draw, batch), k, draw(st.integers(1, 5)))
    if draw(st.integers(0, 4)) == 0:
        a = a.reshape(-1, k)[0]
    elif draw(st.integers(0, 4)) == 0:
        b = b.reshape(-1, k, b.shape[-1])[0, :, 0]
    check_cut(RuleCase("MatMul", (a, b), {}, draw(st.sampled_from(OPSETS)), drawn_computed(draw, 2)), draw)


EQUATIONS = (
    "ij,jk->ik", "bij,bjk->bik", "...ij,...jk->...ik", "bhid,bhjd->bhij", "bhij,bhjd->bhid", "i,j->ij", "ij->ji",
    "ij->i", "ij,ij->", "bij , bjk", "ij,ij->ij", "ijk->kij", "i,i->", "...i,i->...", "bnd,hde->bhne", "b i j -> b j i",
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_einsum(data: st.DataObject) -> None:
    draw = data.draw
    equation = draw(st.sampled_from(EQUATIONS))
    extents = {letter: draw(st.integers(1, 4)) for letter in "bdehijkn"}
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    values = []
    for term in equation.replace(" ", "").partition("->")[0].split(","):
        own = broadcastable(draw, batch) if "..." in term else ()
        shape = [extents[letter] for letter in term.replace("...", "")]
        values.append(integers(draw, *own, *shape))
    computed = drawn_computed(draw, len(values))
    # onnx infers no shape for batch axes of different rank, so NumPy computes it.
    shape = np.einsum(equation.replace(" ", ""), *values).shape
    opset = draw(st.sampled_from((12, 21)))
    check_cut(RuleCase("Einsum", tuple(values), {"equation": equation}, opset, computed, shape=shape), draw)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_matmul_nbits(data: st.DataObject) -> None:
    """Scales and zero points as vectors and matrices, an incomplete last block, with and without bias."""
    draw = data.draw
    columns, blocks, bits = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.sampled_from((4, 8)))
    random, flat = np.random.default_rng(draw(st.integers(0, 99))), draw(st.booleans())
    features = 16 * blocks - draw(st.sampled_from((0, 4)))
    scales = random.integers(1, 4, (columns, blocks)).astype(np.float32)
    points = [
        None,
        random.integers(0, 256, (columns, -(-blocks * bits // 8))).astype(np.uint8),
        random.integers(0, 16, (columns, blocks)).astype(np.float32),
    ][draw(st.integers(0, 2 if bits == 4 else 1))]
    values: list[Any] = [
        integers(draw, draw(st.integers(1, 3)), features, most=3),
        random.integers(0, 256, (columns, blocks, 2 * bits)).astype(np.uint8),
        *(one.reshape(-1) if flat else one for one in (scales, points) if one is not None),
    ]
    attributes = {"K": features, "N": columns, "bits": bits, "block_size": 16}
    case = RuleCase("MatMulNBits", tuple(values), attributes, 1, domain="com.microsoft")
    check_cut(case, draw)
    check_stand_in(case, draw)


def test_matmul_nbits_sums_are_cut_at_whole_zero_point_bytes() -> None:
    """Five blocks of four bits have three bytes of zero points, and the last byte holds one."""
    random = np.random.default_rng(0)
    weight, scales = random.integers(0, 256, (3, 5, 8)).astype(np.uint8), random.random((3, 5)).astype(np.float32)
    points = random.integers(0, 256, (3, 3)).astype(np.uint8)
    attributes = {"K": 78, "N": 3, "bits": 4, "block_size": 16}

    def length(*values: Any) -> int | None:
        case = RuleCase("MatMulNBits", (np.zeros((2, 78), np.float32), *values), attributes, 1, domain="com.microsoft")
        layers = form_layers(case.model(), rules())
        return reduction_length(layers, layers.layers[0])

    assert (length(weight, scales), length(weight, scales, points)) == (5, 3)
    assert length(weight, scales.reshape(-1)) is None and length(weight, scales, points.reshape(-1)) is None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_recurrent_layers(data: st.DataObject) -> None:
    """Directions and batch can be split, with biases, lengths, initial states and functions."""
    draw = data.draw
    op, gates = draw(st.sampled_from((("LSTM", 4), ("GRU", 3), ("RNN", 1))))
    steps, batch, features, units = (draw(st.integers(1, 3)) for _ in range(4))
    directions = draw(st.integers(1, 2))
    values: list[Any] = [integers(draw, steps, batch, features, most=2)]
    values += [integers(draw, directions, gates * units, n, most=1) for n in (features, units)]
    if draw(st.booleans()):
        values.append(integers(draw, directions, 2 * gates * units, most=1))
        values.append(np.array([draw(st.integers(1, steps)) for _ in range(batch)], np.int32))
        values += [integers(draw, directions, batch, units, most=1) for _ in range(1 + (op == "LSTM"))]
    one = draw(st.sampled_from(("forward", "reverse")))
    attributes: dict[str, Any] = {"hidden_size": units, "direction": "bidirectional" if directions == 2 else one}
    if op == "RNN":
        attributes["activations"] = ["Tanh", "Relu"][:directions]
    case = RuleCase(op, tuple(values), attributes, draw(st.sampled_from((7, 14))), (0,), is_inexact=True)
    check_cut(case, draw)
    check_stand_in(case, draw)
