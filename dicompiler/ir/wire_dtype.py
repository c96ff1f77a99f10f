"""The wire: the element types in which tensors travel between devices, narrower than their own where a plan says so.

text, or JSON ⇄ Wire;   LayerGraph with such types → bytes of what travels: all that counts such bytes asks here
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
"""In the place of a layer's name: all that are not named. In that of a type: as they are; as they are, but with the
nodes that would narrow and widen them, which is how the exact check proves a plan's geometry."""

_FLOAT_DTYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE})
_NARROWABLE_DTYPES: Mapping[str, frozenset[int]] = {
    "float16": _FLOAT_DTYPES,
    "bfloat16": _FLOAT_DTYPES,
    "int8": frozenset({onnx.TensorProto.FLOAT}),
    EXACT_STAND_IN: _FLOAT_DTYPES,
}
"""Type on the wire → element types of the tensors that it narrows; all others travel as they are."""
_SENT_DTYPES = {
    "float16": int(onnx.TensorProto.FLOAT16),
    "bfloat16": int(onnx.TensorProto.BFLOAT16),
    "int8": int(onnx.TensorProto.INT8),
}
WIRE_DTYPE_NAMES = (*_SENT_DTYPES, UNCHANGED)
_MIN_SCALE = 1.2e-38  # that float32 has with all its bits

ValueRange = tuple[float, float]
WireDtypes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WireFormat:
    """How tensors travel. types: (layer or graph input, or ALL; name of a type); what is not named travels as it is.

    ranges: the lowest and the highest number of each tensor that travels as int8, by `range_name`: its 256 steps.
    """

    dtypes: WireDtypes = ()
    ranges: Mapping[str, ValueRange] = field(default_factory=dict)

    @property
    def with_exact_stand_ins(self) -> WireFormat:
        """The same with stand-ins that change no number."""
        return WireFormat(tuple((name, kind if kind == UNCHANGED else EXACT_STAND_IN) for name, kind in self.dtypes))

    def __str__(self) -> str:
        """As `--wire` takes it: "float16", "float16,conv1=float32"; "" where all travels as it is."""
        return ",".join(kind if name == ALL_TENSORS else f"{name}={kind}" for name, kind in self.dtypes)


def parse_wire_format(given: str | Mapping[str, str] | WireFormat | None) -> WireFormat | None:
    """`given` as a Wire: "float16", "float16,conv1=float32", {"*": "float16", "conv1": "float32"}. UsageError for a
    type that there is not."""
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
                f"wire: there is no type {kind!r}{did_you_mean(kind, WIRE_DTYPE_NAMES)}: take one of {', '.join(WIRE_DTYPE_NAMES)}"
            )
        if [other for other, _ in pairs].count(name) > 1:
            raise UsageError(
                f"wire: {'all layers have' if name == ALL_TENSORS else f'{name!r} has'} two types: give one"
            )
    return WireFormat(tuple(sorted(pairs)))


def wire_format_to_json(wire: WireFormat) -> dict[str, Any]:
    """Its entries in a plan file; none where all travels as it is."""
    types = dict(wire.dtypes)
    entries = {
        "wire": types[ALL_TENSORS] if types.keys() == {ALL_TENSORS} else types,
        "ranges": {k: list(v) for k, v in wire.ranges.items()},
    }
    return {key: value for key, value in entries.items() if value}


def wire_format_from_json(document: Mapping[str, Any]) -> WireFormat:
    """The inverse; `document` has been checked against the schema of plans."""
    wire = parse_wire_format(document["wire"]) if "wire" in document else WireFormat()
    assert wire is not None
    return replace(wire, ranges={name: (low, high) for name, (low, high) in document.get("ranges", {}).items()})


def range_name(key: TensorKey) -> str:
    """What `Wire.ranges` calls a tensor, or the partial sums of it over a range."""
    return key.tensor if key.reduce is None else "{}+{}:{}".format(key.tensor, *key.reduce)


@memoized
def with_wire_dtypes(layers: LayerGraph, types: WireDtypes) -> LayerGraph:
    """The same layers, whose tensors travel so. UsageError for a name that is no layer's and no input's."""
    known = [ALL_TENSORS, *layers.layer_by_name, *layers.inputs]
    for name, _ in types:
        if name not in known:
            raise UsageError(f"wire: the network has no layer and no input {name!r}{did_you_mean(name, known)}")
    return replace(layers, wire_dtypes=types)


@memoized
def requested_wire_dtypes(layers: LayerGraph) -> Mapping[str, str]:
    """Tensor → the name of the type that it is to travel in, for those that are not to travel as they are."""
    types = dict(layers.wire_dtypes)
    owners = {name: name for name in layers.inputs}
    owners |= {name: layer.name for layer in layers.layers for node in layer.nodes for name in node.outputs if name}
    found = {tensor: types.get(name, types.get(ALL_TENSORS, UNCHANGED)) for tensor, name in owners.items()}
    return {tensor: kind for tensor, kind in found.items() if kind != UNCHANGED}


@memoized
def effective_wire_dtypes(layers: LayerGraph) -> Mapping[str, str]:
    """The same, for those that can: others travel as they are, whatever is asked."""
    return {
        name: kind
        for name, kind in requested_wire_dtypes(layers).items()
        if layers.tensors[name].dtype in _NARROWABLE_DTYPES[kind]
    }


def sent_dtype(layers: LayerGraph, tensor: str) -> int:
    """The element type (onnx.TensorProto.DataType) in which a tensor, or partial sums of it, travel."""
    own = layers.tensors[tensor].dtype
    return _SENT_DTYPES.get(effective_wire_dtypes(layers).get(tensor, ""), own) if layers.wire_dtypes else own


def sent_nbytes(layers: LayerGraph, tensor: str, shape: Shape) -> int:
    """Bytes of a piece of a tensor, or of partial sums of it, on its way between devices."""
    return raw_nbytes(sent_dtype(layers, tensor), shape)


def int8_scale_and_zero_point(measured: ValueRange) -> tuple[float, int]:
    """(scale, zero point) of int8 for numbers in a range: 0 is one of its steps, as QuantizeLinear wants it."""
    low, high = min(measured[0], 0.0), max(measured[1], 0.0)
    scale = (high - low) / 255
    scale = scale if scale >= _MIN_SCALE else 1.0
    return scale, max(-128, min(127, math.floor(-128 - low / scale + 0.5)))
