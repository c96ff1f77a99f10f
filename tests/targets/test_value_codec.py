"""Values of unknown size as bytes: decoding returns the encoded value, and rejects all other bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler_targets.sockets.runtime.value_codec import decode_value, encode_value

numbers = st.sampled_from(["<f4", "<f8", "<i8", "|b1", "<f2", "|u1"]).flatmap(
    lambda kind: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, kind))
)
strings = st.lists(st.text(max_size=5), max_size=4).map(lambda texts: np.array([*texts, ""], object)[:-1])
leaves = st.one_of(st.none(), numbers, strings, st.floats(allow_nan=False), st.integers(-(2**60), 2**60), st.text())
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3))
)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b and type(a) is type(b))


@given(values)
def test_decoding_returns_encoded_value(value: Any) -> None:
    assert _same(value, decode_value(encode_value(value)))


@given(values, st.data())
def test_decoding_rejects_truncated_bytes(value: Any, data: st.DataObject) -> None:
    raw = encode_value(value)
    with pytest.raises(ValueError, match="are not a valid encoded value"):
        decode_value(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=40), st.binary(max_size=20))
def test_decoding_accepts_only_values_that_can_be_encoded(head: bytes, rest: bytes) -> None:
    raw = np.frombuffer(len(head).to_bytes(8, "little") + head + rest, np.uint8)
    try:
        value = decode_value(raw)
    except ValueError:
        return
    packed = encode_value(value)
    assert encode_value(decode_value(packed)).tobytes() == packed.tobytes()


@pytest.mark.parametrize(
    "text",
    ['{"tensor": [-1], "type": "<f4"}', '{"tensor": [9], "type": "O"}', '{"words": [1], "lengths": [-1]}', "[[]"],
)
def test_decoding_rejects_invalid_description(text: str) -> None:
    raw = np.frombuffer(len(text).to_bytes(8, "little") + text.encode(), np.uint8)
    with pytest.raises(ValueError, match="not a valid encoded value"):
        decode_value(raw)
