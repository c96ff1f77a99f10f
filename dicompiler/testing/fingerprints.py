"""Fingerprints of the arguments of plugins, which show whether a plugin changed an argument.

    arguments by name ⇒ digests by name and field

Equal content gives equal fingerprints. The content of a dataclass is its fields, without memoized results in other
attributes. Functions and objects of other classes are represented only by their class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from google.protobuf.message import Message


def field_fingerprints(arguments: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the fingerprint of each argument by name; for a dataclass, one per field ("problem.platform")."""
    digest = _Fingerprinter().digest
    fingerprints: dict[str, bytes] = {}
    for name, value in arguments.items():
        if is_dataclass(value) and not isinstance(value, type):
            fingerprints |= {f"{name}.{field.name}": digest(getattr(value, field.name)) for field in fields(value)}
        else:
            fingerprints[name] = digest(value)
    return fingerprints


class _Fingerprinter:
    """Computes fingerprints, and reads an object that occurs several times only once."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        # The keys of `_known` are ids of objects. Keep the objects alive, because Python reuses the ids of freed ones.
        self._kept_alive: list[Any] = []

    def digest(self, value: Any) -> bytes:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | PurePath | np.generic):
            return _hash(type(value).__name__.encode(), repr(value).encode())
        if id(value) not in self._known:
            self._known[id(value)] = b"cycle"
            self._kept_alive.append(value)
            self._known[id(value)] = _hash(type(value).__name__.encode(), *self._contents(value))
        return self._known[id(value)]

    def _contents(self, value: Any) -> Iterable[bytes]:
        if isinstance(value, np.ndarray):
            data = repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
            return str((value.dtype, value.shape)).encode(), data
        if isinstance(value, Message):
            return (value.SerializeToString(deterministic=True),)
        if is_dataclass(value) and not isinstance(value, type):
            return [self.digest(getattr(value, field.name)) for field in fields(value)]
        if isinstance(value, Mapping):
            return [self.digest(item) for pair in value.items() for item in pair]
        if isinstance(value, set | frozenset):
            return sorted(self.digest(item) for item in value)
        if isinstance(value, bytearray | memoryview):
            # Weights can be views of files of many megabytes, which would take minutes as a sequence of integers.
            return (bytes(value),)
        if isinstance(value, list | tuple):
            return [self.digest(item) for item in value]
        return ()


def _hash(*parts: bytes) -> bytes:
    # Hash each part separately, so that ("a", "bc") and ("ab", "c") have different digests.
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
