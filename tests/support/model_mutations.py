"""Seeded mutations of model files: flipped or cut bytes, and changed numbers in messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, 2, 3, 7, 17, 64, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**31), -(2**63))
FLOATS = (0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "y", "a\nb", "\x1b[2J", "n" * 5000, "Conv", "Loop", "ai.onnx.ml", "../x", "\0")


def mutated(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Return the file with one to three mutations."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    if rng.random() < 0.3:
        return _bytes_wrong(bytearray(proto.SerializeToString()), rng)
    for _ in range(rng.randint(1, 3)):
        _field_wrong(*rng.choice([*_fields(proto)]), rng)
    return proto.SerializeToString()


def _bytes_wrong(data: bytearray, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Yield every field that is set, recursively. Of repeated numbers, yield only short lists."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _fields(inner)


def _field_wrong(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    value = getattr(message, field.name)
    if isinstance(value, (str, bytes, int, float)):
        if rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _other(field, rng))
    elif isinstance(value, Message):
        message.ClearField(field.name)
    elif rng.random() < 0.3:
        del value[rng.randrange(len(value))]
    elif field.type != FieldDescriptor.TYPE_MESSAGE:
        value[rng.randrange(len(value))] = _other(field, rng)
    else:  # The field has several messages: they are shuffled, and one may be repeated or removed.
        entries = [*value, value[rng.randrange(len(value))]]
        rng.shuffle(entries)
        copies = [
            type(entry).FromString(entry.SerializeToString()) for entry in entries[: rng.randint(1, len(entries))]
        ]
        del value[:]
        value.extend(copies)


def _other(field: FieldDescriptor, rng: random.Random) -> Any:
    """Return another value of the field's type."""
    kinds = FieldDescriptor
    if field.type == kinds.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == kinds.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 3, 64)))
    if field.type in (kinds.TYPE_FLOAT, kinds.TYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == kinds.TYPE_ENUM:
        return rng.choice(list(field.enum_type.values_by_number))
    number = rng.choice(NUMBERS)
    if field.type == kinds.TYPE_INT32:
        return (number + 2**31) % 2**32 - 2**31
    return number % 2**64 if field.type == kinds.TYPE_UINT64 else number
