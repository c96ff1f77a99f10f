"""Regions of an Einsum: each is what the whole has there, in every opset."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator_cases import Case, broadcastable, check_cut, drawn_computed, integers

EQUATIONS = (
    "ij,jk->ik", "bij,bjk->bik", "...ij,...jk->...ik", "bhid,bhjd->bhij", "bhij,bhjd->bhid", "i,j->ij", "ij->ji",
    "ij->i", "ij,ij->", "bij , bjk", "ij,ij->ij", "ijk->kij", "i,i->", "...i,i->...", "bnd,hde->bhne", "b i j -> b j i",
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_einsum(data: st.DataObject) -> None:
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
    shape = np.einsum(equation.replace(" ", ""), *values).shape  # onnx infers none where batches differ in rank
    opset = draw(st.sampled_from((12, 21)))
    check_cut(Case("Einsum", tuple(values), {"equation": equation}, opset, computed, shape=shape), draw)
