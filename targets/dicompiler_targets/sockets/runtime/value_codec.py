"""Encoding of values of unknown size as bytes: strings, sequences, maps and optional values.

The encoding has three parts:

1. 8 bytes with the length of part 2.
2. A JSON text that describes the structure of the value.
3. The elements of all tensors in the value. Strings are UTF-8.

Values are the Python objects that onnxruntime returns: arrays, lists, dicts, numbers, strings and None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

STRING_TYPE, NON_TENSOR_TYPE = "STRING", "NESTED"
"""Names in manifests for the types of tensors of strings, and of all values that are not tensors."""
UNSIZED_TYPES = (STRING_TYPE, NON_TENSOR_TYPE)
"""Types of values whose size the plan does not know.

Such values are only sent between a device and the coordinator, never between devices.
"""
_NUMPY_KINDS = "biufc"
_LENGTH_BYTES = 8


def encode_value(value: Any) -> Any:
    """Return the encoding of a value as an array of bytes; raise ValueError for an unsupported type."""
    parts: list[bytes] = []
    text = json.dumps(_describe_value(value, parts)).encode()
    return np.frombuffer(b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts]), np.uint8)


def decode_value(payload: Any) -> Any:
    """Return the value that is encoded in an array of bytes; raise ValueError for an invalid encoding."""
    raw = payload.tobytes()
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    try:
        description = json.loads(raw[_LENGTH_BYTES:start])
        value, end = _build_value(description, raw, start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{len(raw)} bytes are not a valid encoded value: {error}") from None
    if end != len(raw):
        raise ValueError(f"{len(raw)} bytes are not a valid encoded value: expected {end} bytes")
    return value


def _describe_value(value: Any, parts: list[bytes]) -> Any:
    """Return the JSON description of a value's structure, and append the bytes of its elements to `parts`."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        strings = [_encode_string(string) for string in value.ravel().tolist()]
        parts.extend(strings)
        return {"words": list(value.shape), "lengths": [len(string) for string in strings]}
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMPY_KINDS:
        parts.append(value.tobytes())
        return {"tensor": list(value.shape), "type": value.dtype.str}
    if isinstance(value, list | tuple):
        return [_describe_value(element, parts) for element in value]
    if isinstance(value, Mapping):
        return {"map": [[key, _describe_value(element, parts)] for key, element in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{type(value).__name__} is not an array, list, map, number, string or None")


def _encode_string(string: Any) -> bytes:
    if isinstance(string, bytes):
        return string
    if not isinstance(string, str):
        raise ValueError(f"{string!r} is not a string, but is in an array of strings")
    return string.encode("utf-8", "surrogateescape")


def _build_value(description: Any, raw: bytes, start: int) -> tuple[Any, int]:
    """Decode a value whose elements begin at offset `start` of `raw`; return it and the offset after its elements.

    `description` is the JSON description of its structure.
    """
    if isinstance(description, list):
        values: list[Any] = []
        for element in description:
            value, start = _build_value(element, raw, start)
            values.append(value)
        return values, start
    if not isinstance(description, dict):
        return description, start
    if "map" in description:
        pairs: dict[Any, Any] = {}
        for key, element in description["map"]:
            pairs[key], start = _build_value(element, raw, start)
        return pairs, start
    if "words" in description:
        return _build_strings(description, raw, start)
    dtype, shape = np.dtype(description["type"]), description["tensor"]
    count = math.prod(shape)
    if dtype.kind not in _NUMPY_KINDS or min(shape, default=0) < 0 or start + count * dtype.itemsize > len(raw):
        raise ValueError("a tensor is truncated")
    array = np.frombuffer(raw, dtype, count, start).reshape(shape)
    return array.copy(), start + array.nbytes


def _build_strings(description: Mapping[str, Any], raw: bytes, start: int) -> tuple[Any, int]:
    strings = []
    for length in description["lengths"]:
        if length < 0 or start + length > len(raw):
            raise ValueError("a string is truncated")
        strings.append(raw[start : start + length].decode("utf-8", "surrogateescape"))
        start += length
    array = np.empty(len(strings), object)
    array[:] = strings
    return array.reshape(description["words"]), start
