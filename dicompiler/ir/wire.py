"""The wire: the element types in which tensors travel between devices, narrower than their own where a plan says so.

text, or JSON ⇄ Wire;   LayerGraph with such types → bytes of what travels: all that counts such bytes asks here
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from dicompiler.base.errors import UsageError, nearest
from dicompiler.base.remembering import remembered
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.regions import Shape
from dicompiler.ir.tasks import Key

ALL, KEPT, EXACT = "*", "float32", "exact"
"""In the place of a layer's name: all that are not named. In that of a type: as they are; as they are, but with the
nodes that would narrow and widen them, which is how the exact check proves a plan's geometry."""

_WIDE = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE})
_TAKES: Mapping[str, frozenset[int]] = {
    "float16": _WIDE,
    "bfloat16": _WIDE,
    "int8": frozenset({onnx.TensorProto.FLOAT}),
    EXACT: _WIDE,
}
"""Type on the wire → element types of the tensors that it narrows; all others travel as they are."""
_SENT = {
    "float16": int(onnx.TensorProto.FLOAT16),
    "bfloat16": int(onnx.TensorProto.BFLOAT16),
    "int8": int(onnx.TensorProto.INT8),
}
NAMES = (*_SENT, KEPT)
_SMALLEST = 1.2e-38  # that float32 has with all its bits

Range = tuple[float, float]
WireTypes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Wire:
    """How tensors travel. types: (layer or graph input, or ALL; name of a type); what is not named travels as it is.

    ranges: the lowest and the highest number of each tensor that travels as int8, by `range_name`: its 256 steps.
    """

    types: WireTypes = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @property
    def exact(self) -> Wire:
        """The same with stand-ins that change no number."""
        return Wire(tuple((name, kind if kind == KEPT else EXACT) for name, kind in self.types))

    def __str__(self) -> str:
        """As `--wire` takes it: "float16", "float16,conv1=float32"; "" where all travels as it is."""
        return ",".join(kind if name == ALL else f"{name}={kind}" for name, kind in self.types)


def wire_of(given: str | Mapping[str, str] | Wire | None) -> Wire | None:
    """`given` as a Wire: "float16", "float16,conv1=float32", {"*": "float16", "conv1": "float32"}. UsageError for a
    type that there is not."""
    if given is None or isinstance(given, Wire):
        return given
    if isinstance(given, str):
        items = [item.rpartition("=") for item in given.split(",")]
        pairs = [(name.strip() if equals else ALL, kind.strip()) for name, equals, kind in items]
    else:
        pairs = list(given.items())
    for name, kind in pairs:
        if kind not in NAMES:
            raise UsageError(f"wire: there is no type {kind!r}{nearest(kind, NAMES)}: take one of {', '.join(NAMES)}")
        if [other for other, _ in pairs].count(name) > 1:
            raise UsageError(f"wire: {'all layers have' if name == ALL else f'{name!r} has'} two types: give one")
    return Wire(tuple(sorted(pairs)))


def wire_json(wire: Wire) -> dict[str, Any]:
    """Its entries in a plan file; none where all travels as it is."""
    types = dict(wire.types)
    entries = {
        "wire": types[ALL] if types.keys() == {ALL} else types,
        "ranges": {k: list(v) for k, v in wire.ranges.items()},
    }
    return {key: value for key, value in entries.items() if value}


def wire_from_json(document: Mapping[str, Any]) -> Wire:
    """The inverse; `document` has been checked against the schema of plans."""
    wire = wire_of(document["wire"]) if "wire" in document else Wire()
    assert wire is not None
    return replace(wire, ranges={name: (low, high) for name, (low, high) in document.get("ranges", {}).items()})


def range_name(key: Key) -> str:
    """What `Wire.ranges` calls a tensor, or the partial sums of it over a range."""
    return key.tensor if key.reduce is None else "{}+{}:{}".format(key.tensor, *key.reduce)


@remembered
def on_wire(layers: LayerGraph, types: WireTypes) -> LayerGraph:
    """The same layers, whose tensors travel so. UsageError for a name that is no layer's and no input's."""
    known = [ALL, *layers.by_name, *layers.inputs]
    for name, _ in types:
        if name not in known:
            raise UsageError(f"wire: the network has no layer and no input {name!r}{nearest(name, known)}")
    return replace(layers, wire=types)


@remembered
def asked(layers: LayerGraph) -> Mapping[str, str]:
    """Tensor → the name of the type that it is to travel in, for those that are not to travel as they are."""
    types = dict(layers.wire)
    owners = {name: name for name in layers.inputs}
    owners |= {name: layer.name for layer in layers.layers for node in layer.nodes for name in node.outputs if name}
    found = {tensor: types.get(name, types.get(ALL, KEPT)) for tensor, name in owners.items()}
    return {tensor: kind for tensor, kind in found.items() if kind != KEPT}


@remembered
def kinds(layers: LayerGraph) -> Mapping[str, str]:
    """The same, for those that can: others travel as they are, whatever is asked."""
    return {name: kind for name, kind in asked(layers).items() if layers.tensors[name].dtype in _TAKES[kind]}


def sent_dtype(layers: LayerGraph, tensor: str) -> int:
    """The element type (onnx.TensorProto.DataType) in which a tensor, or partial sums of it, travel."""
    own = layers.tensors[tensor].dtype
    return _SENT.get(kinds(layers).get(tensor, ""), own) if layers.wire else own


def sent_nbytes(layers: LayerGraph, tensor: str, shape: Shape) -> int:
    """Bytes of a piece of a tensor, or of partial sums of it, on its way between devices."""
    return raw_nbytes(sent_dtype(layers, tensor), shape)


def steps(measured: Range) -> tuple[float, int]:
    """(scale, zero point) of int8 for numbers in a range: 0 is one of its steps, as QuantizeLinear wants it."""
    low, high = min(measured[0], 0.0), max(measured[1], 0.0)
    scale = (high - low) / 255
    scale = scale if scale >= _SMALLEST else 1.0
    return scale, max(-128, min(127, math.floor(-128 - low / scale + 0.5)))
