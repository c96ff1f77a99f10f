"""Values of which no plan knows the bytes, as bytes: words, sequences, maps and optional values.

In: what onnxruntime gives to Python (arrays, lists, dicts, numbers, None). Out: an array of bytes, and back: 8 bytes
that tell the length of a JSON text, that text, which says what there is, then the elements of tensors one after
another; words as UTF-8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

STRING_TYPE, NON_TENSOR_TYPE = "STRING", "NESTED"
"""What manifests call tensors of words, and all that is no tensor."""
UNSIZED_TYPES = (STRING_TYPE, NON_TENSOR_TYPE)
"""The types of values that never go from device to device: a device is given them, or delivers them."""
_NUMPY_KINDS = "biufc"
_LENGTH_BYTES = 8


def encode_value(value: Any) -> Any:
    """The value as an array of bytes. ValueError for what cannot be packed."""
    parts: list[bytes] = []
    text = json.dumps(_describe_value(value, parts)).encode()
    return np.frombuffer(b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts]), np.uint8)


def decode_value(payload: Any) -> Any:
    """The value that an array of bytes is. ValueError where it is none."""
    raw = payload.tobytes()
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    try:
        told = json.loads(raw[_LENGTH_BYTES:start])
        value, end = _build_value(told, raw, start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{len(raw)} bytes do not hold what they say: {error}") from None
    if end != len(raw):
        raise ValueError(f"{len(raw)} bytes do not hold what they say: {end} were expected")
    return value


def _describe_value(value: Any, parts: list[bytes]) -> Any:
    """What JSON says of the value; its elements are added to `parts`."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        words = [_encode_string(word) for word in value.ravel().tolist()]
        parts.extend(words)
        return {"words": list(value.shape), "lengths": [len(word) for word in words]}
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMPY_KINDS:
        parts.append(value.tobytes())
        return {"tensor": list(value.shape), "type": value.dtype.str}
    if isinstance(value, list | tuple):
        return [_describe_value(one, parts) for one in value]
    if isinstance(value, Mapping):
        return {"map": [[key, _describe_value(one, parts)] for key, one in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{type(value).__name__} is none of arrays, lists, maps, numbers, words and None")


def _encode_string(word: Any) -> bytes:
    if isinstance(word, bytes):
        return word
    if not isinstance(word, str):
        raise ValueError(f"{word!r} stands among words")
    return word.encode("utf-8", "surrogateescape")


def _build_value(told: Any, raw: bytes, start: int) -> tuple[Any, int]:
    """The value that JSON tells of, whose elements begin at `start`, and where they end."""
    if isinstance(told, list):
        values: list[Any] = []
        for one in told:
            value, start = _build_value(one, raw, start)
            values.append(value)
        return values, start
    if not isinstance(told, dict):
        return told, start
    if "map" in told:
        pairs: dict[Any, Any] = {}
        for key, one in told["map"]:
            pairs[key], start = _build_value(one, raw, start)
        return pairs, start
    if "words" in told:
        return _build_strings(told, raw, start)
    dtype = np.dtype(told["type"])
    count = math.prod(told["tensor"])
    if (
        dtype.kind not in _NUMPY_KINDS
        or min(told["tensor"], default=0) < 0
        or start + count * dtype.itemsize > len(raw)
    ):
        raise ValueError("a tensor is cut off")
    array = np.frombuffer(raw, dtype, count, start).reshape(told["tensor"])
    return array.copy(), start + array.nbytes


def _build_strings(told: Mapping[str, Any], raw: bytes, start: int) -> tuple[Any, int]:
    words = []
    for length in told["lengths"]:
        if length < 0 or start + length > len(raw):
            raise ValueError("a word is cut off")
        words.append(raw[start : start + length].decode("utf-8", "surrogateescape"))
        start += length
    array = np.empty(len(words), object)
    array[:] = words
    return array.reshape(told["words"]), start
