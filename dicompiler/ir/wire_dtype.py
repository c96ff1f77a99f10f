"""Wire format: the element types in which tensors are sent between devices, if a plan narrows them.

text or JSON ⇔ WireFormat. All code that counts sent bytes asks this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.regions import Shape
from dicompiler.ir.tasks import TensorKey

ALL_TENSORS, UNCHANGED, EXACT_STAND_IN = "*", "float32", "exact"

_FLOAT_DTYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE})
_NARROWABLE_DTYPES: Mapping[str, frozenset[int]] = {
    "float16": _FLOAT_DTYPES,
    "bfloat16": _FLOAT_DTYPES,
    "int8": frozenset({onnx.TensorProto.FLOAT}),
    EXACT_STAND_IN: _FLOAT_DTYPES,
}
"""Element types of tensors that each wire type can narrow. All others are sent unchanged."""
_SENT_DTYPES = {
    "float16": int(onnx.TensorProto.FLOAT16),
    "bfloat16": int(onnx.TensorProto.BFLOAT16),
    "int8": int(onnx.TensorProto.INT8),
}
WIRE_DTYPE_NAMES = (*_SENT_DTYPES, UNCHANGED)
_MIN_SCALE = 1.2e-38  # smallest normal number of float32

ValueRange = tuple[float, float]
WireDtypes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WireFormat:
    """Element types in which tensors are sent.

    Attributes:
        dtypes: Pairs of a layer or model input (or `ALL_TENSORS`) and the name of a type. Others are sent unchanged.
        ranges: Smallest and largest value of each tensor that is sent as int8, by `range_name`.
    """

    dtypes: WireDtypes = ()
    ranges: Mapping[str, ValueRange] = field(default_factory=dict)

    @property
    def with_exact_stand_ins(self) -> WireFormat:
        """The same format with stand-ins that do not change numbers."""
        return WireFormat(tuple((name, kind if kind == UNCHANGED else EXACT_STAND_IN) for name, kind in self.dtypes))

    def __str__(self) -> str:
        """Return the text for option `--wire-dtype`: "float16,conv1=float32"; "" if nothing is narrowed."""
        return ",".join(kind if name == ALL_TENSORS else f"{name}={kind}" for name, kind in self.dtypes)


def parse_wire_format(given: str | Mapping[str, str] | WireFormat | None) -> WireFormat | None:
    """Return a wire format from text or a mapping.

    Examples: "float16", "float16,conv1=float32", {"*": "float16", "conv1": "float32"}.

    Args:
        given: Text, mapping, or a wire format, which is returned unchanged.

    Returns:
        The wire format; None for None.

    Raises:
        UsageError: A type is unknown, or a name has two types.
    """
    if given is None or isinstance(given, WireFormat):
        return given
    if isinstance(given, str):
        items = [item.rpartition("=") for item in given.split(",")]
        pairs = [(name.strip() if equals else ALL_TENSORS, kind.strip()) for name, equals, kind in items]
    else:
        pairs = list(given.items())
    for name, kind in pairs:
        if kind not in WIRE_DTYPE_NAMES:
            raise UsageError(
                f"wire: unknown type {kind!r}{did_you_mean(kind, WIRE_DTYPE_NAMES)}: "
                f"use one of {', '.join(WIRE_DTYPE_NAMES)}"
            )
        if [other for other, _ in pairs].count(name) > 1:
            raise UsageError(
                f"wire: {'all layers have' if name == ALL_TENSORS else f'{name!r} has'} two types: give one"
            )
    return WireFormat(tuple(sorted(pairs)))


def wire_format_to_json(wire: WireFormat) -> dict[str, Any]:
    """Return the keys of a plan file that describe a wire format; {} if nothing is narrowed."""
    types = dict(wire.dtypes)
    entries = {
        "wire_dtype": types[ALL_TENSORS] if types.keys() == {ALL_TENSORS} else types,
        "wire_ranges": {k: list(v) for k, v in wire.ranges.items()},
    }
    return {key: value for key, value in entries.items() if value}


def wire_format_from_json(document: Mapping[str, Any]) -> WireFormat:
    """Return the wire format in a validated plan document."""
    wire = parse_wire_format(document["wire_dtype"]) if "wire_dtype" in document else WireFormat()
    assert wire is not None
    return replace(wire, ranges={name: (low, high) for name, (low, high) in document.get("wire_ranges", {}).items()})


def range_name(key: TensorKey) -> str:
    """Return the key of a tensor, or of its partial sums, in `WireFormat.ranges`."""
    return key.tensor if key.reduce is None else "{}+{}:{}".format(key.tensor, *key.reduce)


@memoized
def with_wire_dtypes(layers: LayerGraph, types: WireDtypes) -> LayerGraph:
    """Return the layers with wire types; raise UsageError if a name is neither a layer nor a model input."""
    known = [ALL_TENSORS, *layers.layer_by_name, *layers.inputs]
    for name, _ in types:
        if name not in known:
            raise UsageError(f"wire: the network has no layer and no input {name!r}{did_you_mean(name, known)}")
    return replace(layers, wire_dtypes=types)


@memoized
def requested_wire_dtypes(layers: LayerGraph) -> Mapping[str, str]:
    """Return the requested wire type of each tensor that should not be sent unchanged."""
    types = dict(layers.wire_dtypes)
    owners = {name: name for name in layers.inputs}
    owners |= {name: layer.name for layer in layers.layers for node in layer.nodes for name in node.outputs if name}
    found = {tensor: types.get(name, types.get(ALL_TENSORS, UNCHANGED)) for tensor, name in owners.items()}
    return {tensor: kind for tensor, kind in found.items() if kind != UNCHANGED}


@memoized
def effective_wire_dtypes(layers: LayerGraph) -> Mapping[str, str]:
    """Return the wire type of each tensor that is narrowed; tensors of other types are sent unchanged."""
    return {
        name: kind
        for name, kind in requested_wire_dtypes(layers).items()
        if layers.tensors[name].dtype in _NARROWABLE_DTYPES[kind]
    }


def sent_dtype(layers: LayerGraph, tensor: str) -> int:
    """Return the onnx.TensorProto.DataType in which a tensor, or its partial sums, are sent.

    Args:
        layers: The layers, with wire types.
        tensor: Name of the tensor.

    Returns:
        The element type.
    """
    own = layers.tensors[tensor].dtype
    return _SENT_DTYPES.get(effective_wire_dtypes(layers).get(tensor, ""), own) if layers.wire_dtypes else own


def sent_nbytes(layers: LayerGraph, tensor: str, shape: Shape) -> int:
    """Return the bytes that are sent for a piece of a tensor, or of its partial sums.

    Args:
        layers: The layers, with wire types.
        tensor: Name of the tensor.
        shape: Shape of the piece.

    Returns:
        Number of bytes.
    """
    return raw_nbytes(sent_dtype(layers, tensor), shape)


def int8_scale_and_zero_point(measured: ValueRange) -> tuple[float, int]:
    """Return the int8 scale and zero point for a range of values; 0 is represented exactly."""
    low, high = min(measured[0], 0.0), max(measured[1], 0.0)
    scale = (high - low) / 255
    scale = scale if scale >= _MIN_SCALE else 1.0
    return scale, max(-128, min(127, math.floor(-128 - low / scale + 0.5)))
