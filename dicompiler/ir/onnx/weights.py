"""Weights: raw data of large initializers as views of a mapped file, and the placeholders of such data in a model."""

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
"""External-data location that marks an initializer as a placeholder, whose data is in a mapping of weights by name."""

MIN_WEIGHT_BYTES = 1024
"""Size from which raw data is stored as a Weight, outside of the model. Shape inference reads only smaller data."""

CHUNK_BYTES = 1 << 18
"""Approximate bytes of a chunk that `Weight.chunks` yields; it stays in the CPU cache while it is hashed or written."""

_SUB_BYTE_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}


@cache
def dtype_name(dtype: int) -> str:
    """Return the name of an onnx element type: 1 ⇒ "FLOAT".

    Args:
        dtype: Number of the type, an onnx.TensorProto.DataType.

    Returns:
        Name of the type; the number as text if the type is unknown.
    """
    names: dict[int, str] = {int(value): str(name) for name, value in onnx.TensorProto.DataType.items()}
    return names.get(dtype, str(dtype))


@cache
def _element_bits(dtype: int) -> int:
    return _SUB_BYTE_BITS.get(dtype_name(dtype)) or 8 * int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def is_fixed_size(dtype: int) -> bool:
    """Return True if the size of a value in bytes follows from its element type and shape.

    This is not so for strings, and for values that are not tensors (sequences, maps, optional values). Devices never
    send such values to each other.

    Args:
        dtype: An onnx.TensorProto.DataType; 0 for a value that is not a tensor.

    Returns:
        True if the size is fixed.
    """
    return dtype not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)


def raw_nbytes(dtype: int, shape: Shape) -> int:
    """Return the bytes of a raw tensor. Elements of less than a byte are packed (INT4: two elements per byte).

    Args:
        dtype: Element type, an onnx.TensorProto.DataType.
        shape: Shape of the tensor.

    Returns:
        Number of bytes.
    """
    return (math.prod(shape) * _element_bits(dtype) + 7) // 8


def array_dtype(array: NDArray[Any]) -> int:
    """Return the onnx element type of a numpy array, including the types of ml_dtypes.

    Args:
        array: Array of any numeric type.

    Returns:
        An onnx.TensorProto.DataType.
    """
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("=")))


@dataclass(frozen=True)
class Weight:
    """Raw data of a tensor.

    Attributes:
        dtype: Element type, an onnx.TensorProto.DataType.
        shape: Static shape.
        content: Raw little-endian bytes, usually a read-only view of the mapped model file. It must not be changed. It
            is a view with gaps, of shape (*shape, bytes per element), for some results of `take_region`.
    """

    dtype: int
    shape: Shape
    content: memoryview = field(repr=False)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Weight:
        """Return a weight with the values of an array.

        The data is not copied if the array is contiguous and little-endian, and its elements have one byte or more.

        Args:
            array: The values of the weight.

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
        """Contiguous raw bytes: `content` itself if it has no gaps, else a copy that is made at each access."""
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
        """Return the values of the weight as an array.

        Returns:
            A view of `content` with the shape `shape`. The view may be unaligned, and it is read-only if `content` is.
            Elements of less than a byte are copied into one byte each.
        """
        if dtype_name(self.dtype) in _SUB_BYTE_BITS:
            tensor = onnx.TensorProto(dims=self.shape, data_type=self.dtype, raw_data=bytes(self.data))
            return onnx.numpy_helper.to_array(tensor)
        np_dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.dtype))
        if self.content.ndim > 1:
            return np.asarray(self.content).view(np_dtype)[..., 0]
        return np.frombuffer(self.content, np.uint8).view(np_dtype).reshape(self.shape)

    def take_region(self, region: Region) -> Weight:
        """Return a region of the weight as a view. Only elements of less than a byte are copied.

        Args:
            region: Region of the weight (one half-open interval per axis).

        Returns:
            The weight of this region.
        """
        if dtype_name(self.dtype) in _SUB_BYTE_BITS:
            return Weight.from_array(self.array()[to_slices(region)])
        # Bytes are sliced instead of values, because a memoryview supports neither bfloat16 nor unaligned data.
        array = np.asarray(self.content).reshape((*self.shape, raw_nbytes(self.dtype, (1,))))[to_slices(region)]
        content = array.reshape(-1) if array.flags.c_contiguous else array
        return Weight(self.dtype, array.shape[:-1], content.data)


def _contiguous_chunks(array: NDArray[np.uint8]) -> Iterator[memoryview]:
    """Yield copies of consecutive chunks of an array that is not contiguous, in C order."""
    if array.nbytes <= CHUNK_BYTES or array.ndim == 1:
        yield np.ascontiguousarray(array).reshape(-1).data
        return
    rows = CHUNK_BYTES // array[0].nbytes
    for start in range(0, len(array), max(1, rows)):
        yield from _contiguous_chunks(array[start : start + rows] if rows else array[start])


def to_dense(sparse: onnx.SparseTensorProto) -> NDArray[Any]:
    """Return the values of a sparse tensor as a dense array of the same type.

    Args:
        sparse: The sparse tensor. It has one linear index per value, or one row of indices per value.

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
    """Return True if the data of the tensor is in a separate mapping of weights, under the name of the tensor.

    Args:
        tensor: An initializer of a model.

    Returns:
        True if it is a placeholder.
    """
    return tensor.data_location == onnx.TensorProto.EXTERNAL and any(
        entry.key == "location" and entry.value == PLACEHOLDER_LOCATION for entry in tensor.external_data
    )


def mark_placeholder(tensor: onnx.TensorProto) -> None:
    """Mark a tensor without data as a placeholder: its data is in a mapping of weights, by name."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=PLACEHOLDER_LOCATION)


def make_placeholder(name: str, weight: Weight) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=weight.dtype, dims=weight.shape)
    mark_placeholder(tensor)
    return tensor


def embed_data(tensor: onnx.TensorProto, data: bytes | memoryview) -> None:
    """Store raw data in a tensor that is a placeholder or refers to external data."""
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")
    tensor.raw_data = bytes(data)
