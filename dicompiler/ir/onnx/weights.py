"""Weights: the raw data of large initializers, as views of a mapped file, and the tensors that stand for them.

In: buffers of little-endian data. Out: numpy views, cuts that are views too, their bytes in chunks for a file, and the
data-less TensorProto that a skeleton model holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16, float8, int4 … with numpy
import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.ir.regions import Region, Shape, to_slices

PLACEHOLDER_LOCATION = "*dicompiler.weights*"
"""The external-data location of a tensor whose data is in a `weights` mapping under its name; never a file."""

MIN_WEIGHT_BYTES = 1024
"""From so many bytes on, raw data is a Weight; less stays in the skeleton, where shape inference reads it."""

CHUNK_BYTES = 1 << 18
"""Bytes that `Weight.chunks` yields at most at once: what is hashed and written fits the processor's cache."""

_SUB_BYTE_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}


@cache
def dtype_name(dtype: int) -> str:
    """1 → "FLOAT"; an unknown number comes back as text."""
    names: dict[int, str] = {int(value): str(name) for name, value in onnx.TensorProto.DataType.items()}
    return names.get(dtype, str(dtype))


@cache
def _element_bits(dtype: int) -> int:
    """Bits of an element of onnx type `dtype`. KeyError for a number that is no type."""
    return _SUB_BYTE_BITS.get(dtype_name(dtype)) or 8 * int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def is_fixed_size(dtype: int) -> bool:
    """Whether the shape of a value of that onnx type tells its bytes: not those of words, nor of what is no tensor (a
    sequence, a map or an optional value). What is not sized never goes from device to device: it is given to the
    devices that read it, and delivered by the one that makes it."""
    return dtype not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)


def raw_nbytes(dtype: int, shape: Shape) -> int:
    """Bytes of a raw tensor of onnx type `dtype`: types below a byte are packed (INT4: two elements a byte)."""
    return (math.prod(shape) * _element_bits(dtype) + 7) // 8


def array_dtype(array: NDArray[Any]) -> int:
    """The onnx.TensorProto.DataType of a numpy array, ml_dtypes included."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("=")))


@dataclass(frozen=True)
class Weight:
    """A tensor of onnx type `dtype` (onnx.TensorProto.DataType) and static `shape`.

    content: its raw little-endian bytes, usually a read-only view of the mapped model file; for a part that was cut out
    (see `cut`) a view with gaps, of shape (*shape, bytes of an element). It must not change afterwards.
    """

    dtype: int
    shape: Shape
    content: memoryview = field(repr=False)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Weight:
        """The array as a weight: no copy where it is contiguous, little-endian and of a type of whole bytes."""
        dtype = array_dtype(array)
        if dtype_name(dtype) in _SUB_BYTE_BITS:
            packed = onnx.numpy_helper.from_array(array).raw_data
            return cls(dtype, array.shape, memoryview(packed))
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(dtype, array.shape, little.reshape(-1).view(np.uint8).data)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return raw_nbytes(self.dtype, self.shape)

    @property
    def data(self) -> memoryview:
        """The raw bytes in one piece: `content` itself where that has no gaps, else a new copy at every call."""
        return self.content if self.content.ndim == 1 else memoryview(self.content.tobytes())

    def chunks(self) -> Iterator[memoryview]:
        """The raw bytes in pieces of at most about CHUNK, for a file or a hash: a weight with gaps is never held."""
        if self.content.ndim == 1:
            for start in range(0, len(self.content), CHUNK_BYTES):
                yield self.content[start : start + CHUNK_BYTES]
        else:
            yield from _contiguous_chunks(np.asarray(self.content))

    def array(self) -> NDArray[Any]:
        """The values, of shape `shape`: a view (read-only where the file is mapped, and perhaps not aligned, because
        protobuf aligns nothing), except for types below a byte, which are unpacked into one byte each.
        """
        if dtype_name(self.dtype) in _SUB_BYTE_BITS:
            tensor = onnx.TensorProto(dims=self.shape, data_type=self.dtype, raw_data=bytes(self.data))
            return onnx.numpy_helper.to_array(tensor)
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.dtype))
        if self.content.ndim > 1:
            return np.asarray(self.content).view(kind)[..., 0]
        return np.frombuffer(self.content, np.uint8).view(kind).reshape(self.shape)

    def take_region(self, region: Region) -> Weight:
        """The part of it that `region` holds, as a view: nothing is copied (but for types below a byte)."""
        if dtype_name(self.dtype) in _SUB_BYTE_BITS:
            return Weight.from_array(self.array()[to_slices(region)])
        # Bytes and not values, because a memoryview knows neither bfloat16 nor data that is not aligned.
        whole = np.asarray(self.content).reshape((*self.shape, raw_nbytes(self.dtype, (1,))))
        part = whole[to_slices(region)]
        content = part.reshape(-1) if part.flags.c_contiguous else part
        return Weight(self.dtype, part.shape[:-1], content.data)


def _contiguous_chunks(part: NDArray[np.uint8]) -> Iterator[memoryview]:
    """A view with gaps in C order, copied block by block."""
    if part.nbytes <= CHUNK_BYTES or part.ndim == 1:
        yield np.ascontiguousarray(part).reshape(-1).data
        return
    rows = CHUNK_BYTES // part[0].nbytes
    for start in range(0, len(part), max(1, rows)):
        yield from _contiguous_chunks(part[start : start + rows] if rows else part[start])


def to_dense(sparse: onnx.SparseTensorProto) -> NDArray[Any]:
    """A sparse tensor's values as a dense array of the same type. Indices are linear, or one row for each value."""
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        array.reshape(-1)[indices] = values
    else:
        array[tuple(indices.T)] = values
    return array


def is_placeholder(tensor: onnx.TensorProto) -> bool:
    """Whether the tensor's data is in a `weights` mapping under its name."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL and any(
        entry.key == "location" and entry.value == PLACEHOLDER_LOCATION for entry in tensor.external_data
    )


def mark_placeholder(tensor: onnx.TensorProto) -> None:
    """Makes `tensor`, which has no data, one whose data is in a `weights` mapping under its name."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=PLACEHOLDER_LOCATION)


def make_placeholder(name: str, weight: Weight) -> onnx.TensorProto:
    """The data-less tensor that stands for `weight` in a skeleton model."""
    tensor = onnx.TensorProto(name=name, data_type=weight.dtype, dims=weight.shape)
    mark_placeholder(tensor)
    return tensor


def copy_without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A copy of `tensor` without the mark and without data: name, type, shape and documentation."""
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.ClearField("data_location")
    bare.ClearField("external_data")
    return bare
