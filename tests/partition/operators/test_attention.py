"""Regions of attentions equal those of the whole operator, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.operator_cases import RuleCase, broadcastable, check_cut, integers


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_attention(data: st.DataObject) -> None:
    """Heads as an axis or within the last axis, fewer key heads than query heads, masks, causal or not."""
    draw = data.draw
    batch, shared, heads, rows, columns, depth = (draw(st.integers(1, 3)) for _ in range(6))
    opset = draw(st.sampled_from((23, 24, 25)))
    attributes: dict[str, Any] = {"is_causal": 1} if draw(st.integers(0, 3)) == 0 else {}
    if opset > 24:
        attributes |= {f"{side}_window_size": draw(st.integers(-1, 2)) for side in ("left", "right")}
    shapes = [(batch, heads * n, length, 2 * depth) for n, length in ((shared, rows), (1, columns), (1, columns))]
    if draw(st.booleans()):
        shapes = [(b, length, h * d) for b, h, length, d in shapes]
        attributes |= {"q_num_heads": heads * shared, "kv_num_heads": heads}
    values = [integers(draw, *shape, most=2) for shape in shapes]
    if draw(st.booleans()):
        mask = integers(draw, *broadcastable(draw, (batch, heads * shared, rows, columns))[-4:], most=2)
        assume(mask.ndim >= 2 and mask.shape[-2:] == (rows, columns))
        values.append(mask if draw(st.booleans()) else mask > 0)
    check_cut(RuleCase("Attention", tuple(values), attributes, opset, (0, 1, 2), is_inexact=True), draw)


MS = "com.microsoft"


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_multi_head_attention(data: st.DataObject) -> None:
    draw = data.draw
    batch, heads, rows, columns, size = (draw(st.integers(1, 3)) for _ in range(5))
    values: list[Any] = [integers(draw, batch, n, heads * 2 * size, most=2) for n in (rows, columns, columns)]
    if draw(st.booleans()):
        values.append(None)
        shapes = [(batch,), (batch, columns), (batch, rows, columns)]
        shape = draw(st.sampled_from(shapes))
        values.append(np.full(shape, columns if len(shape) == 1 else 1, np.int32))
    if len(values) == 3 and draw(st.booleans()):
        bias = integers(
            draw, draw(st.sampled_from((1, batch))), draw(st.sampled_from((1, heads))), rows, columns, most=2
        )
        values += [None, None, bias]
    attributes = {"num_heads": heads, "unidirectional": draw(st.integers(0, 1)) if rows == columns else 0}
    check_cut(RuleCase("MultiHeadAttention", tuple(values), attributes, 1, (0, 1, 2), is_inexact=True, domain=MS), draw)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_grouped_query_attention(data: st.DataObject) -> None:
    """Cases have no past, or a past of earlier rows in caches."""
    draw = data.draw
    batch, shared, heads, rows = (draw(st.integers(1, 3)) for _ in range(4))
    past = draw(st.integers(1, 3)) if draw(st.booleans()) else 0
    batch = 1 if past and rows > 1 else batch  # With a past and several rows, onnxruntime supports only batch size 1.
    size, total = 16, past + rows
    values: list[Any] = [integers(draw, batch, rows, n * size, most=2) for n in (heads * shared, heads, heads)]
    values += [integers(draw, batch, heads, past, size, most=2) if past else None for _ in range(2)]
    values += [np.full((batch,), total - 1, np.int32), np.array(total, np.int32)]
    attributes: dict[str, Any] = {"num_heads": heads * shared, "kv_num_heads": heads}
    if draw(st.booleans()):
        angles = np.arange(total * size // 2, dtype=np.float32).reshape(total, size // 2)
        values += [np.cos(angles), np.sin(angles)]
        attributes["do_rotary"] = 1
    case = RuleCase("GroupQueryAttention", tuple(values), attributes, 1, (0, 1, 2), True, ("k", "v"), domain=MS)
    check_cut(case, draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_rotary_embedding(data: st.DataObject) -> None:
    draw = data.draw
    batch, heads, rows = (draw(st.integers(1, 3)) for _ in range(3))
    size, most, flat = 4, 6, draw(st.booleans())
    shape = (batch, rows, heads * size) if flat else (batch, heads, rows, size)
    x, angles = integers(draw, *shape, most=3), np.arange(most * size // 2, dtype=np.float32).reshape(most, -1)
    tables: list[Any] = [np.cos(angles), np.sin(angles)]
    places: Any = np.array(draw(st.lists(st.integers(0, most - 1), min_size=batch * rows, max_size=batch * rows)))
    places = places.reshape(batch, rows).astype(np.int64)
    if draw(st.booleans()):
        attributes = {"num_heads": heads} if flat and draw(st.booleans()) else {}
        places = places if draw(st.booleans()) else np.array([draw(st.integers(0, most - rows))], np.int64)
        case = RuleCase("RotaryEmbedding", (x, places, *tables), attributes, 1, (0, 1), True, domain=MS)
    else:
        attributes = {"num_heads": heads} if flat else {}
        if draw(st.booleans()):
            case = RuleCase(
                "RotaryEmbedding", (x, *(table[places] for table in tables)), attributes, 23, (0, 1, 2), True
            )
        else:
            case = RuleCase("RotaryEmbedding", (x, *tables, places), attributes, 23, (0, 3), True)
    check_cut(case, draw)
