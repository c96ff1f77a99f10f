"""TFLite flatbuffers: write a graph of tensors and operations as a .tflite file, and read the operators of a file.

The package `tflite` contains the schema, with functions that write every table.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Shape

CONSTANT_ALIGNMENT_BYTES = 16
"""Alignment of the data of constants in the file."""
TFLITE_TYPES = {"float32": "FLOAT32", "int8": "INT8", "int32": "INT32", "bool": "BOOL"}
"""TFLite's names of element types, by numpy's name. Networks on microcontrollers can use only these types."""


@dataclass(frozen=True)
class QuantizationParams:
    """Quantization of a tensor: value = scale * (number - zero_point).

    Attributes:
        scale: One scale, or one for each index of `axis`.
        zero_point: One zero point, or one for each index of `axis`.
        axis: The tensor's axis that has a scale for each index; not used if there is only one scale.
    """

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True)
class TfliteTensor:
    """A tensor of a TFLite graph.

    Attributes:
        name: Name of the tensor, only for debugging; it is not written to the file.
        dtype: NumPy's name of the element type.
        shape: The shape, in the axis order of the TFLite graph.
        data: Data of a constant; None for any other tensor.
        quantization: Scale and zero point; None for a tensor that is not quantized.
    """

    name: str
    dtype: str
    shape: Shape
    data: NDArray[Any] | None = field(default=None, repr=False)
    quantization: QuantizationParams | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TfliteOperation:
    """An operation of a TFLite graph.

    Attributes:
        code: Name of the operator, such as CONV_2D.
        inputs: Indices of the input tensors; -1 for an omitted input.
        outputs: Indices of the output tensors.
        options: Name of the operator's options table without "Options", such as Conv2D; empty if there is no table.
        values: Fields of the options table.
    """

    code: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def import_optional(module: str) -> Any:
    """Import a package that only target `tflm` needs; raise DicompilerError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DicompilerError(
            f"target tflm: {error.name or module} is not installed: pip install 'dicompiler[tflm]'"
        ) from None


def serialize_model(
    tensors: Sequence[TfliteTensor],
    operations: Sequence[TfliteOperation],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> bytes:
    """Return the .tflite file of a graph; `inputs` and `outputs` are indices in `tensors`."""
    schema, flatbuffers = import_optional("tflite"), import_optional("flatbuffers")
    builder = flatbuffers.Builder(1024)
    constants = [tensor.data for tensor in tensors if tensor.data is not None]
    # Buffer 0 is the empty buffer of all tensors without data. A flatbuffer is built from its end to its beginning, so
    # each table is written before the tables that refer to it.
    buffers = [_write_table(schema, builder, "Buffer")]
    buffers += [_write_table(schema, builder, "Buffer", Data=_write_bytes(builder, data)) for data in constants]
    buffer_indices = iter(range(1, len(buffers)))
    offsets = [
        _write_tensor(schema, builder, tensor, next(buffer_indices) if tensor.data is not None else 0)
        for tensor in tensors
    ]
    codes = collect_operator_codes(operations)
    nodes = [_write_operation(schema, builder, operation, codes.index(operation.code)) for operation in operations]
    graph = _write_table(
        schema,
        builder,
        "SubGraph",
        Tensors=_write_offsets(builder, offsets),
        Inputs=_write_integers(builder, inputs),
        Outputs=_write_integers(builder, outputs),
        Operators=_write_offsets(builder, nodes),
    )
    entries = [_write_operator_code(schema, builder, code) for code in codes]
    root = _write_table(
        schema,
        builder,
        "Model",
        Version=3,
        OperatorCodes=_write_offsets(builder, entries),
        Subgraphs=_write_offsets(builder, [graph]),
        Buffers=_write_offsets(builder, buffers),
    )
    builder.Finish(root, b"TFL3")
    return bytes(builder.Output())


def collect_operator_codes(operations: Sequence[TfliteOperation]) -> tuple[str, ...]:
    return tuple(sorted({operation.code for operation in operations}))


def read_operator_codes(data: bytes) -> tuple[str, ...]:
    schema = import_optional("tflite")
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    model = schema.Model.GetRootAs(data, 0)
    codes = [model.OperatorCodes(i) for i in range(model.OperatorCodesLength())]
    return tuple(sorted(names[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())] for code in codes))


def _write_table(schema: Any, builder: Any, name: str, **values: Any) -> int:
    getattr(schema, f"{name}Start")(builder)
    for key, value in values.items():
        getattr(schema, f"{name}Add{key}")(builder, value)
    return int(getattr(schema, f"{name}End")(builder))


def _write_bytes(builder: Any, data: NDArray[Any]) -> int:
    raw = np.ascontiguousarray(data).astype(data.dtype.newbyteorder("<"), copy=False).tobytes()
    builder.StartVector(1, len(raw), CONSTANT_ALIGNMENT_BYTES)
    builder.head -= len(raw)
    builder.Bytes[builder.head : builder.head + len(raw)] = raw
    return int(builder.EndVector())


def _write_integers(builder: Any, values: Sequence[int]) -> int:
    return int(builder.CreateNumpyVector(np.asarray(values, np.int32)))


def _write_offsets(builder: Any, values: Sequence[int]) -> int:
    builder.StartVector(4, len(values), 4)
    for value in reversed(values):
        builder.PrependUOffsetTRelative(value)
    return int(builder.EndVector())


def _write_tensor(schema: Any, builder: Any, tensor: TfliteTensor, buffer: int) -> int:
    # Without the tensor's name, the models of two equal tiles are equal files, which a device stores once.
    values: dict[str, Any] = {"Shape": _write_integers(builder, tensor.shape)}
    if tensor.quantization is not None:
        quantization = tensor.quantization
        scale = int(builder.CreateNumpyVector(np.asarray(quantization.scale, np.float32)))
        zero = int(builder.CreateNumpyVector(np.asarray(quantization.zero_point, np.int64)))
        values["Quantization"] = _write_table(
            schema, builder, "QuantizationParameters", Scale=scale, ZeroPoint=zero, QuantizedDimension=quantization.axis
        )
    kind = getattr(schema.TensorType, TFLITE_TYPES[tensor.dtype])
    return _write_table(schema, builder, "Tensor", **values, Type=kind, Buffer=buffer)


def _write_operator_code(schema: Any, builder: Any, code: str) -> int:
    number = getattr(schema.BuiltinOperator, code)
    # Old readers know only the field DeprecatedBuiltinCode, which has one byte. New readers use the larger field.
    return _write_table(
        schema, builder, "OperatorCode", DeprecatedBuiltinCode=min(number, 127), Version=1, BuiltinCode=number
    )


def _write_operation(schema: Any, builder: Any, operation: TfliteOperation, code: int) -> int:
    values: dict[str, Any] = {
        "Inputs": _write_integers(builder, operation.inputs),
        "Outputs": _write_integers(builder, operation.outputs),
    }
    if operation.options:
        name = f"{operation.options}Options"
        fields = dict(operation.values)
        if "NewShape" in fields:
            fields["NewShape"] = _write_integers(builder, fields["NewShape"])
        values["BuiltinOptionsType"] = getattr(schema.BuiltinOptions, name)
        values["BuiltinOptions"] = _write_table(schema, builder, name, **fields)
    return _write_table(schema, builder, "Operator", OpcodeIndex=code, **values)
