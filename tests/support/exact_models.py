"""Small networks and models from text for tests of the exact check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from onnx import numpy_helper, parser

from dicompiler import networks
from dicompiler.ir.onnx.model import Model

SMALL: dict[str, dict[str, Any]] = {
    "tiny": {},
    "lenet": {},
    "quirks": {},
    "squeezenet": {"size": 64},
    "mobilenet_v2": {"size": 64, "width": 0.5},
    "resnet18": {"size": 64, "width": 0.25},
    "light/squeezenet": {},
}


_loaded: dict[str, Model] = {}


def network(name: str) -> Model:
    """Return a network of SMALL as a Model, cached."""
    if name not in _loaded:
        _loaded[name] = Model.load(networks.build(name, 1, **SMALL[name]))
    return _loaded[name]


def from_text(text: str, constants: Mapping[str, NDArray[Any]] | None = None) -> Model:
    """Return a model in ONNX's text form, with `constants` as initializers."""
    proto = parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (constants or {}).items())
    return Model.load(proto)
