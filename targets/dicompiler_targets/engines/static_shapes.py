"""Static shapes of the tensors of a submodel, for the converters of engines."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import shape_inference

Shape = tuple[int, ...]


def infer_values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs, computed tensors and outputs of a submodel, with inferred types and shapes."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    return [*graph.input, *graph.value_info, *graph.output]


def static_shapes(values: Iterable[onnx.ValueInfoProto]) -> dict[str, Shape]:
    """Return the shapes by name, without tensors of unknown shape."""
    shapes = {}
    for value in values:
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes
