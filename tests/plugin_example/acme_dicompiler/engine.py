"""An engine that computes element-wise operators with numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dicompiler.plugin_api import Engine
from dicompiler.plugin_api.artifacts import BoardPackage, EngineFiles, UnsupportedByEngine

FLOAT = 1
"""ONNX's number of the type float32."""


@dataclass(frozen=True)
class NumpyEngine(Engine):
    """numpy, for segments of Add, Mul and Relu."""

    name: ClassVar[str] = "acme_numpy"
    packages: ClassVar[tuple[BoardPackage, ...]] = (BoardPackage("numpy", (1, 26)),)
    operators: ClassVar[frozenset[str]] = frozenset(("Add", "Mul", "Relu"))

    def convert(self, model: Any, weights: Mapping[str, Any]) -> EngineFiles:
        """Write the nodes as JSON; there are no weights."""
        graph = model.graph
        for reason in self.unsupported_nodes(model, weights).values():
            raise UnsupportedByEngine(reason)
        if graph.initializer or any(v.type.tensor_type.elem_type != FLOAT for v in (*graph.input, *graph.output)):
            raise UnsupportedByEngine("a constant, or a tensor that is not of type float")
        document = {
            "inputs": [value.name for value in graph.input],
            "nodes": [[node.op_type, list(node.input), node.output[0]] for node in graph.node],
            "outputs": [value.name for value in graph.output],
        }
        return EngineFiles(json.dumps(document).encode(), b"")
