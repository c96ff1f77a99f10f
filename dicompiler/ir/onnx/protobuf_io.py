"""Reading and writing of ONNX files without copies of their weights.

The protobuf library copies every byte, so this module parses the wire format itself. Reading returns a skeleton (a
ModelProto without the data of large initializers) and views of the large data in the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TypeVar

import onnx
from google.protobuf.message import DecodeError, Message

from dicompiler.base.errors import DicompilerError, describe_wrong_path
from dicompiler.ir.onnx.weights import MIN_WEIGHT_BYTES, Weight, is_placeholder, mark_placeholder

Buffer = bytes | memoryview
MessageType = TypeVar("MessageType", bound=Message)
Views = dict[int, memoryview]
"""Raw data of large initializers, by index in `graph.initializer`."""

MAX_PROTOBUF_BYTES = 2**31 - 1
"""Maximum size of a protobuf message, and therefore of an ONNX file."""

_EXTERNAL_ALIGNMENT = 64
"""Alignment in bytes of weights in external files, so that they can be mapped and used in place."""

_GRAPH, _INITIALIZER, _RAW_DATA, _DATA_LOCATION = 7, 5, 9, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _ProtobufError(Exception):
    pass


def map_file(path: Path, description: str) -> memoryview:
    """Return a read-only view of a file. `description` is the word for it in error messages, such as "the model"."""
    try:
        with path.open("rb") as file:
            if path.is_fifo():  # A pipe cannot be mapped, and its size is 0.
                return memoryview(file.read())
            if path.stat().st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        hint = describe_wrong_path(path, "reference/model.onnx") if isinstance(error, IsADirectoryError) else ""
        raise DicompilerError(f"{path}: cannot read {description}: {error.strerror or error}{hint}") from error


def _read_varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """Return the varint (variable-length integer) that starts at `position`, and the position after it."""
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise _ProtobufError


def _iterate_fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of the protobuf message in data[start:end].

    Each field is a tuple of the field number, the wire type, and the positions at which its tag starts, its value
    starts, and its value ends.
    """
    position = start
    while position < end:
        tag, value = _read_varint(data, position, end)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, stop = _read_varint(data, value, end)
        elif wire == _BYTES:
            length, value = _read_varint(data, value, end)
            stop = value + length
        elif wire in (_FIXED32, _FIXED64):
            stop = value + (4 if wire == _FIXED32 else 8)
        else:
            raise _ProtobufError
        if number == 0 or stop > end:
            raise _ProtobufError
        yield number, wire, position, value, stop
        position = stop


def encode_varint(value: int) -> bytes:
    r"""Return a number as a varint (seven bits per byte, lowest first): 300 ⇒ b"\xac\x02"."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field_header(number: int, length: int) -> bytes:
    return encode_varint(number << 3 | _BYTES) + encode_varint(length)


def _split_tensor(data: memoryview, start: int, end: int) -> tuple[bytes | None, memoryview]:
    """Return the protobuf message of the tensor in data[start:end] without its raw data, and a view of the raw data.

    The message is None if the data is small or in an external file, because the tensor then stays as it is.
    """
    kept, raw, external = bytearray(), data[:0], False
    for number, wire, tag, value, stop in _iterate_fields(data, start, end):
        if number == _RAW_DATA and wire == _BYTES:
            raw = data[value:stop]
        else:
            external |= number == _DATA_LOCATION and data[value] == onnx.TensorProto.EXTERNAL
            kept += data[tag:stop]
    return (None if external or len(raw) < MIN_WEIGHT_BYTES else bytes(kept)), raw


def _split_graph(data: memoryview, start: int, end: int, views: Views, initializer_count: int) -> tuple[bytes, int]:
    """Return the message of the graph in data[start:end] without large raw data, and the new number of initializers.

    A file may contain the graph in several messages, so initializers are counted over all of them.

    Args:
        data: Content of the file.
        start: Position at which the message starts.
        end: Position after the message.
        views: Receives views of the raw data, by index of the initializer.
        initializer_count: Number of initializers in earlier messages.
    """
    kept, index = bytearray(), initializer_count
    for number, wire, tag, value, stop in _iterate_fields(data, start, end):
        if number == _INITIALIZER and wire == _BYTES:
            bare, raw = _split_tensor(data, value, stop)
            if bare is None:
                kept += data[tag:stop]
            else:
                views[index] = raw
                kept += _field_header(_INITIALIZER, len(bare)) + bare
            index += 1
        else:
            kept += data[tag:stop]
    return bytes(kept), index


def read_skeleton(buffer: Buffer, place: str) -> tuple[onnx.ModelProto, Views]:
    """Return the model without the raw data of its large initializers, and views of this data in `buffer`.

    `buffer` is the content of an ONNX file, and error messages start with `place`.

    Raises:
        DicompilerError: The buffer is truncated or not an ONNX model.
    """
    data = memoryview(buffer)
    kept, views, count = bytearray(), Views(), 0
    try:
        for number, wire, tag, value, stop in _iterate_fields(data, 0, len(data)):
            if number == _GRAPH and wire == _BYTES:
                graph, count = _split_graph(data, value, stop, views, count)
                kept += _field_header(_GRAPH, len(graph)) + graph
            else:
                kept += data[tag:stop]
        skeleton = onnx.ModelProto.FromString(bytes(kept))
    except (_ProtobufError, DecodeError) as error:
        raise DicompilerError(f"{place}: truncated, or not an ONNX model: export it again") from error
    if not skeleton.HasField("graph") or not skeleton.opset_import:
        raise DicompilerError(f"{place}: not an ONNX model (it has no graph or no opset): export it again")
    for index in views:
        mark_placeholder(skeleton.graph.initializer[index])
    return skeleton, views


def copy_without(message: MessageType, *skipped: str) -> MessageType:
    """Return a copy of a protobuf message without some fields. These fields are never read, because they may be large.

    Args:
        message: Message that is copied.
        *skipped: Names of the fields that are not copied.

    Returns:
        The copy.
    """
    copy: MessageType = type(message)()
    for descriptor, value in message.ListFields():
        if descriptor.name in skipped:
            continue
        if isinstance(value, (str, bytes, int, float)):
            setattr(copy, descriptor.name, value)
        else:
            getattr(copy, descriptor.name).MergeFrom(value)
    return copy


def make_skeleton(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Views]:
    """Return a copy of the model without the raw data of its large initializers, and views of this data."""
    skeleton = copy_without(proto, "graph")
    skeleton.graph.CopyFrom(copy_without(proto.graph, "initializer"))
    views = Views()
    for index, tensor in enumerate(proto.graph.initializer):
        raw = tensor.raw_data  # The protobuf library copies the bytes once, at this access.
        added = skeleton.graph.initializer.add()
        if tensor.data_location == onnx.TensorProto.EXTERNAL or len(raw) < MIN_WEIGHT_BYTES:
            added.CopyFrom(tensor)
            continue
        added.MergeFrom(onnx.TensorProto(dims=tensor.dims, data_type=tensor.data_type, name=tensor.name))
        added.metadata_props.extend(tensor.metadata_props)
        if tensor.HasField("doc_string"):
            added.doc_string = tensor.doc_string
        mark_placeholder(added)
        views[index] = memoryview(raw)
    return skeleton, views


def write_inline(proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> Iterator[Buffer]:
    """Return the chunks of bytes of an ONNX file that contains the weights.

    Raises:
        DicompilerError: The file would exceed 2 GB.
    """
    tensors: list[tuple[bytes, Weight | None]] = []
    for tensor in proto.graph.initializer:
        if is_placeholder(tensor):
            weight = weights[tensor.name]
            bare = copy_without(tensor, "data_location", "external_data").SerializeToString(deterministic=True)
            bare += _field_header(_RAW_DATA, weight.nbytes)
            tensors.append((_field_header(_INITIALIZER, len(bare) + weight.nbytes) + bare, weight))
        else:
            message = tensor.SerializeToString(deterministic=True)
            tensors.append((_field_header(_INITIALIZER, len(message)) + message, None))
    rest = copy_without(proto.graph, "initializer").SerializeToString(deterministic=True)
    length = len(rest) + sum(len(text) + (weight.nbytes if weight else 0) for text, weight in tensors)
    head = copy_without(proto, "graph").SerializeToString(deterministic=True)
    if len(head) + length + 16 > MAX_PROTOBUF_BYTES:
        raise DicompilerError(
            f"the model has {length} bytes, more than the limit of a protobuf file (2 GB): save it with external data"
        )
    return chain([head, _field_header(_GRAPH, length), rest], _interleave(tensors))


def _interleave(items: Iterable[tuple[bytes, Weight | None]]) -> Iterator[Buffer]:
    for head, weight in items:
        yield head
        if weight is not None:
            yield from weight.chunks()


def write_external(
    proto: onnx.ModelProto, weights: Mapping[str, Weight], location: str
) -> tuple[bytes, Iterator[Buffer]]:
    """Return the content of the model file, and the chunks of the file `location` with its external data."""
    model, padded_weights, offset = onnx.ModelProto(), list[tuple[bytes, Weight]](), 0
    model.CopyFrom(proto)
    for tensor in model.graph.initializer:
        if not is_placeholder(tensor):
            continue
        weight = weights[tensor.name]
        padding = -offset % _EXTERNAL_ALIGNMENT
        offset += padding
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", offset), ("length", weight.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        padded_weights.append((bytes(padding), weight))
        offset += weight.nbytes
    return model.SerializeToString(deterministic=True), _interleave(padded_weights)
