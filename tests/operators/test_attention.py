"""Regions of an Attention: each is what the whole has there, in every opset."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.operator_cases import Case, broadcastable, check_cut, integers


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_attention(data: st.DataObject) -> None:
    """With heads as an axis or inside the last one, with fewer heads of keys than of queries, masks, causal or not."""
    draw = data.draw
    batch, shared, heads, rows, columns, depth = (draw(st.integers(1, 3)) for _ in range(6))
    attributes: dict[str, Any] = {"is_causal": 1} if draw(st.integers(0, 3)) == 0 else {}
    shapes = [(batch, heads * n, length, 2 * depth) for n, length in ((shared, rows), (1, columns), (1, columns))]
    if draw(st.booleans()):
        shapes = [(b, length, h * d) for b, h, length, d in shapes]
        attributes |= {"q_num_heads": heads * shared, "kv_num_heads": heads}
    values = [integers(draw, *shape, most=2) for shape in shapes]
    if draw(st.booleans()):
        mask = integers(draw, *broadcastable(draw, (batch, heads * shared, rows, columns))[-4:], most=2)
        assume(mask.ndim >= 2 and mask.shape[-2:] == (rows, columns))
        values.append(mask if draw(st.booleans()) else mask > 0)
    check_cut(
        Case("Attention", tuple(values), attributes, draw(st.sampled_from((23, 24))), (0, 1, 2), close=True), draw
    )
