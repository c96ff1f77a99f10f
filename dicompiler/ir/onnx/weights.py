"""Weights: raw data of large initializers as views of a mapped file, and their placeholders."""

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
"""External-data location of placeholders; never a file. Their data is in a `weights` mapping, by name."""

MIN_WEIGHT_BYTES = 1024
"""Raw data of at least this size is a Weight; smaller data stays in the skeleton, where shape inference reads it."""

CHUNK_BYTES = 1 << 18
"""Maximum number of bytes that `Weight.chunks` yields at once, so that hashing and writing work within the CPU cache.
"""

_SUB_BYTE_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}


@cache
def dtype_name(dtype: int) -> str:
    """Return the name of an onnx type: 1 ⇒ "FLOAT".

    Args:
        dtype: An onnx.TensorProto.DataType.

    Returns:
        Its name; the number as text if it is unknown.
    """
    names: dict[int, str] = {int(value): str(name) for name, value in onnx.TensorProto.DataType.items()}
    return names.get(dtype, str(dtype))


@cache
def _element_bits(dtype: int) -> int:
    return _SUB_BYTE_BITS.get(dtype_name(dtype)) or 8 * int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def is_fixed_size(dtype: int) -> bool:
    """Return True if the shape of a value determines its size in bytes.

    False for strings, and for values that are not tensors (sequences, maps, optional values). Such values are never
    sent between devices: they are given to the devices that read them, and delivered by the device that computes them.

    Args:
        dtype: An onnx.TensorProto.DataType.

    Returns:
        True if the size is fixed.
    """
    return dtype not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)


def raw_nbytes(dtype: int, shape: Shape) -> int:
    """Return the bytes of a raw tensor; types below a byte are packed (INT4: two elements per byte).

    Args:
        dtype: An onnx.TensorProto.DataType.
        shape: Shape of the tensor.

    Returns:
        Number of bytes.
    """
    return (math.prod(shape) * _element_bits(dtype) + 7) // 8


def array_dtype(array: NDArray[Any]) -> int:
    """Return the onnx.TensorProto.DataType of a numpy array, including types of ml_dtypes.

    Args:
        array: The array.

    Returns:
        The type.
    """
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("=")))


@dataclass(frozen=True)
class Weight:
    """Raw data of a tensor.

    Attributes:
        dtype: Element type, an onnx.TensorProto.DataType.
        shape: Static shape.
        content: Raw little-endian bytes, usually a read-only view of the mapped model file. For a region of a weight
            (see `take_region`), a view with gaps of shape (*shape, bytes per element). It must not be changed.
    """

    dtype: int
    shape: Shape
    content: memoryview = field(repr=False)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Weight:
        """Return an array as a weight.

        There is no copy if the array is contiguous, little-endian and of a type of whole bytes.

        Args:
            array: The values.

        Returns:
            The weight.
        """
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
        """Contiguous raw bytes: `content` itself if it has no gaps, else a new copy at each access."""
        return self.content if self.content.ndim == 1 else memoryview(self.content.tobytes())

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw bytes in chunks of about CHUNK_BYTES, for a file or a hash.

        Yields:
            Contiguous bytes.
        """
        if self.content.ndim == 1:
            for start in range(0, len(self.content), CHUNK_BYTES):
                yield self.content[start : start + CHUNK_BYTES]
        else:
            yield from _contiguous_chunks(np.asarray(self.content))

    def array(self) -> NDArray[Any]:
        """Return the values, of shape `shape`.

        Returns:
            A view, which is read-only if the file is mapped, and not necessarily aligned. Types below a byte are
            unpacked into one byte each.
        """
        if dtype_name(self.dtype) in _SUB_BYTE_BITS:
            tensor = onnx.TensorProto(dims=self.shape, data_type=self.dtype, raw_data=bytes(self.data))
            return onnx.numpy_helper.to_array(tensor)
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.dtype))
        if self.content.ndim > 1:
            return np.asarray(self.content).view(kind)[..., 0]
        return np.frombuffer(self.content, np.uint8).view(kind).reshape(self.shape)

    def take_region(self, region: Region) -> Weight:
        """Return a region of the weight as a view. Only types below a byte are copied.

        Args:
            region: Region of the weight.

        Returns:
            The weight of this region.
        """
        if dtype_name(self.dtype) in _SUB_BYTE_BITS:
            return Weight.from_array(self.array()[to_slices(region)])
        # A memoryview supports neither bfloat16 nor unaligned data, so this slices bytes instead of values.
        whole = np.asarray(self.content).reshape((*self.shape, raw_nbytes(self.dtype, (1,))))
        part = whole[to_slices(region)]
        content = part.reshape(-1) if part.flags.c_contiguous else part
        return Weight(self.dtype, part.shape[:-1], content.data)


def _contiguous_chunks(part: NDArray[np.uint8]) -> Iterator[memoryview]:
    """Yield a view with gaps in C order, copied block by block."""
    if part.nbytes <= CHUNK_BYTES or part.ndim == 1:
        yield np.ascontiguousarray(part).reshape(-1).data
        return
    rows = CHUNK_BYTES // part[0].nbytes
    for start in range(0, len(part), max(1, rows)):
        yield from _contiguous_chunks(part[start : start + rows] if rows else part[start])


def to_dense(sparse: onnx.SparseTensorProto) -> NDArray[Any]:
    """Return the values of a sparse tensor as a dense array of the same type.

    Args:
        sparse: The sparse tensor. Its indices are linear, or one row per value.

    Returns:
        The array.
    """
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        array.reshape(-1)[indices] = values
    else:
        array[tuple(indices.T)] = values
    return array


def is_placeholder(tensor: onnx.TensorProto) -> bool:
    """Return True if the tensor's data is in a `weights` mapping under its name.

    Args:
        tensor: An initializer.

    Returns:
        True if it is a placeholder.
    """
    return tensor.data_location == onnx.TensorProto.EXTERNAL and any(
        entry.key == "location" and entry.value == PLACEHOLDER_LOCATION for entry in tensor.external_data
    )


def mark_placeholder(tensor: onnx.TensorProto) -> None:
    """Make a tensor without data a placeholder for data in a `weights` mapping."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=PLACEHOLDER_LOCATION)


def make_placeholder(name: str, weight: Weight) -> onnx.TensorProto:
    """Return the placeholder for a weight.

    Args:
        name: Name of the initializer.
        weight: Its data.

    Returns:
        A tensor without data.
    """
    tensor = onnx.TensorProto(name=name, data_type=weight.dtype, dims=weight.shape)
    mark_placeholder(tensor)
    return tensor


def copy_without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a copy of a placeholder without its mark: name, type, shape and documentation."""
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.ClearField("data_location")
    bare.ClearField("external_data")
    return bare
