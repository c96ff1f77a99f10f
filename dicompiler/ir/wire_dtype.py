"""Wire format: the element types in which tensors are sent between devices, for example float16 for float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import LayerGraph, TensorKey
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.regions import Shape

ALL_TENSORS, UNCHANGED, EXACT_STAND_IN = "*", "float32", "exact"
"""Name that means all tensors, and two wire types: of unchanged tensors, and of the exact check of `verify`.

EXACT_STAND_IN replaces all narrow types in this check, which computes with small integers.
"""

INT8_BLOCK = "int8-block"
"""Wire type of 8-bit integers with one scale per block of values, which the sender computes from these values."""
BLOCK_SIZE = 32
"""Number of consecutive values that share a scale in INT8_BLOCK."""

_FLOAT_DTYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE})
_ALL_FLOAT_DTYPES = _FLOAT_DTYPES | {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
_NARROWABLE_DTYPES: Mapping[str, frozenset[int]] = {
    "float16": _FLOAT_DTYPES,
    "bfloat16": _FLOAT_DTYPES,
    "int8": frozenset({onnx.TensorProto.FLOAT}),
    INT8_BLOCK: _ALL_FLOAT_DTYPES,
    EXACT_STAND_IN: _ALL_FLOAT_DTYPES,
}
"""Element types that can be converted to each wire type. Tensors of other element types are sent unchanged."""
_SENT_DTYPES = {
    "float16": int(onnx.TensorProto.FLOAT16),
    "bfloat16": int(onnx.TensorProto.BFLOAT16),
    "int8": int(onnx.TensorProto.INT8),
    INT8_BLOCK: int(onnx.TensorProto.INT8),
}
WIRE_DTYPE_NAMES = (*_SENT_DTYPES, UNCHANGED)
_MIN_SCALE = 1.2e-38
"""Smallest scale of int8 values: the smallest normal number of float32. Smaller scales are replaced by 1."""

ValueRange = tuple[float, float]
WireDtypes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WireFormat:
    """Element types in which tensors are sent.

    Attributes:
        dtypes: Pairs of the name of a layer or model input ("*": all tensors) and the name of an element type. Tensors
            without a pair are sent unchanged.
        ranges: Smallest and largest value of each tensor that is sent as int8, by the key that `range_name` returns.
    """

    dtypes: WireDtypes = ()
    ranges: Mapping[str, ValueRange] = field(default_factory=dict)

    @property
    def with_exact_stand_ins(self) -> WireFormat:
        """The wire format for the exact check of `verify`, in which models compute with integers.

        Narrow types, such as float16, cannot represent all of these integers, so a wide type replaces them.
        """
        return WireFormat(tuple((name, kind if kind == UNCHANGED else EXACT_STAND_IN) for name, kind in self.dtypes))

    def __str__(self) -> str:
        """Return the text for option `--wire-dtype`: "float16,conv1=float32"; "" if all tensors are sent unchanged."""
        return ",".join(kind if name == ALL_TENSORS else f"{name}={kind}" for name, kind in self.dtypes)


def parse_wire_format(source: str | Mapping[str, str] | WireFormat | None) -> WireFormat | None:
    """Return the wire format (element types in which tensors are sent) that a text or a mapping describes.

    Args:
        source: "float16,conv1=float32", or {"*": "float16", "conv1": "float32"}: a type by layer name. The name "*", or
            a type without a name, means all tensors. None and a WireFormat are returned unchanged.

    Raises:
        UsageError: A type is unknown, or a name has two types.
    """
    if source is None or isinstance(source, WireFormat):
        return source
    if isinstance(source, str):
        items = [item.rpartition("=") for item in source.split(",")]
        pairs = [(name.strip() if equals else ALL_TENSORS, kind.strip()) for name, equals, kind in items]
    else:
        pairs = list(source.items())
    for name, kind in pairs:
        if kind not in WIRE_DTYPE_NAMES:
            close = did_you_mean(kind, WIRE_DTYPE_NAMES)
            raise UsageError(f"wire: unknown type {kind!r}{close}: use one of {', '.join(WIRE_DTYPE_NAMES)}")
        if [other for other, _ in pairs].count(name) > 1:
            subject = "all layers have" if name == ALL_TENSORS else f"{name!r} has"
            raise UsageError(f"wire: {subject} two types: give one type")
    return WireFormat(tuple(sorted(pairs)))


def wire_format_to_json(wire: WireFormat) -> dict[str, Any]:
    """Return the entries of a plan file for the types of sent tensors; {} if all tensors are sent unchanged."""
    types = dict(wire.dtypes)
    entries = {
        "wire_dtype": types[ALL_TENSORS] if types.keys() == {ALL_TENSORS} else types,
        "wire_ranges": {k: list(v) for k, v in wire.ranges.items()},
    }
    return {key: value for key, value in entries.items() if value}


def wire_format_from_json(document: Mapping[str, Any]) -> WireFormat:
    """Return the wire format (element types of sent tensors) in the JSON of a plan, which must match the schema."""
    wire = parse_wire_format(document["wire_dtype"]) if "wire_dtype" in document else WireFormat()
    assert wire is not None
    return replace(wire, ranges={name: (low, high) for name, (low, high) in document.get("wire_ranges", {}).items()})


def range_name(key: TensorKey) -> str:
    """Return the key of a tensor in `WireFormat.ranges`; for partial sums over channels 0 to 7: `NAME+0:8`."""
    return key.tensor if key.reduce is None else "{}+{}:{}".format(key.tensor, *key.reduce)


@memoized
def with_wire_dtypes(layers: LayerGraph, types: WireDtypes, place: str = "wire") -> LayerGraph:
    """Return the layers with other wire types (element types in which tensors are sent).

    Args:
        layers: The layers.
        types: Pairs of a layer's or model input's name and its wire type.
        place: Beginning of the error message.

    Raises:
        UsageError: A name is neither a layer nor a model input.
    """
    names = [ALL_TENSORS, *layers.layer_by_name, *layers.inputs]
    for name, _ in types:
        if name not in names:
            raise UsageError(f"{place}: the network has no layer and no input {name!r}{did_you_mean(name, names)}")
    return replace(layers, wire_dtypes=types)


@memoized
def wire_name_by_tensor(layers: LayerGraph) -> Mapping[str, str]:
    """Return the name under which a wire format (element types of sent tensors) lists each tensor, by tensor name.

    This is the name of the layer that computes the tensor, or of the model input.
    """
    wire_names = {name: name for name in layers.inputs}
    wire_names |= {name: layer.name for layer in layers.layers for node in layer.nodes for name in node.outputs if name}
    return wire_names


@memoized
def requested_wire_dtypes(layers: LayerGraph) -> Mapping[str, str]:
    """Return the element type that the plan requests for each tensor when it is sent, by tensor name.

    Tensors that are to be sent unchanged are omitted.
    """
    types = dict(layers.wire_dtypes)
    default = types.get(ALL_TENSORS, UNCHANGED)
    kinds = {tensor: types.get(name, default) for tensor, name in wire_name_by_tensor(layers).items()}
    return {tensor: kind for tensor, kind in kinds.items() if kind != UNCHANGED}


@memoized
def effective_wire_dtypes(layers: LayerGraph) -> Mapping[str, str]:
    """Return the element type in which each tensor is sent, by tensor name.

    Tensors that are sent unchanged are omitted, including those that cannot be converted to the requested type.
    """
    return {
        name: kind
        for name, kind in requested_wire_dtypes(layers).items()
        if layers.tensors[name].dtype in _NARROWABLE_DTYPES[kind]
    }


def sent_dtype(layers: LayerGraph, tensor: str) -> int:
    """Return the element type in which a tensor, or a partial sum of it, is sent.

    Args:
        layers: The layers, with the wire types (element types for sending) that the plan requests.
        tensor: Name of the tensor.

    Returns:
        The element type, an onnx.TensorProto.DataType.
    """
    dtype = layers.tensors[tensor].dtype
    return _SENT_DTYPES.get(effective_wire_dtypes(layers).get(tensor, ""), dtype) if layers.wire_dtypes else dtype


def sent_nbytes(layers: LayerGraph, tensor: str, shape: Shape) -> int:
    """Return the number of bytes that are sent for a region of a tensor, or for a partial sum of it.

    Args:
        layers: The layers, with the wire types (element types for sending) that the plan requests.
        tensor: Name of the tensor.
        shape: Shape of the region.

    Returns:
        Number of bytes.
    """
    nbytes = raw_nbytes(sent_dtype(layers, tensor), shape)
    if layers.wire_dtypes and effective_wire_dtypes(layers).get(tensor) == INT8_BLOCK:
        nbytes += block_count(math.prod(shape))
    return nbytes


def block_count(value_count: int) -> int:
    """Return the number of blocks in which `value_count` values are sent, if they are sent as `int8-block`."""
    return -(-value_count // BLOCK_SIZE)


def int8_scale_and_zero_point(measured: ValueRange) -> tuple[float, int]:
    """Return the int8 scale and zero point for values in a measured range. 0 is represented exactly."""
    low, high = min(measured[0], 0.0), max(measured[1], 0.0)
    scale = (high - low) / 255
    scale = scale if scale >= _MIN_SCALE else 1.0
    return scale, max(-128, min(127, math.floor(-128 - low / scale + 0.5)))
