"""The lowest ONNX IR version that has everything that a model contains.

onnxruntime refuses a model with a newer IR version than it knows, even if the model uses nothing new.
"""

from __future__ import annotations

import onnx

from dicompiler.ir.onnx.graph_structure import graph_and_bodies

_BASE_VERSION = 4
"""First version with initializers that are not graph inputs. Segments (ONNX sub-models) have such initializers."""
_SPARSE_VERSION, _OPTIONAL_VERSION = 6, 8
_FUNCTION_VERSION, _FUNCTION_DEFAULTS_VERSION, _OVERLOAD_VERSION = 8, 9, 10
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "precision")
"""Names of attributes whose value is an element type (an onnx.TensorProto.DataType)."""
_FIRST_TYPES = ((17, 9), (21, 10), (23, 11), (24, 12), (25, 13), (27, 14))
"""For each IR version that added element types: the first of these types (onnx.TensorProto), and the version."""


def lowest_ir_version(model: onnx.ModelProto) -> int:
    """Return the lowest IR version that has all element types and constructs of a model.

    Args:
        model: The model.

    Returns:
        The version. It is at least 4, so that initializers need not be graph inputs, but never above the model's own.
    """
    needed = {_BASE_VERSION, *map(_function_version, model.functions)}
    for root in (model.graph, *model.functions):
        for graph in graph_and_bodies(root):
            needed |= {_attribute_version(attribute) for node in graph.node for attribute in node.attribute}
            needed |= {_value_version(value.type) for value in graph.value_info}
            if isinstance(graph, onnx.GraphProto):
                needed |= {_value_version(value.type) for value in (*graph.input, *graph.output)}
                needed |= {_type_version(tensor.data_type) for tensor in graph.initializer}
                needed |= {max(_SPARSE_VERSION, _type_version(t.values.data_type)) for t in graph.sparse_initializer}
    return min(max(needed), model.ir_version)


def _function_version(function: onnx.FunctionProto) -> int:
    if function.overload:
        return _OVERLOAD_VERSION
    return _FUNCTION_DEFAULTS_VERSION if function.attribute_proto else _FUNCTION_VERSION


def _attribute_version(attribute: onnx.AttributeProto) -> int:
    """Return the lowest IR version that has all element types in an attribute.

    These are the types of the attribute's tensors, and its value if it is an element type, such as `to` of Cast.
    """
    types = [tensor.data_type for tensor in (attribute.t, *attribute.tensors)]
    types += [attribute.i] if attribute.name in _TYPE_ATTRIBUTES else []
    return max(map(_type_version, types))


def _value_version(value: onnx.TypeProto) -> int:
    kind = value.WhichOneof("value")
    if kind == "sequence_type":
        return _value_version(value.sequence_type.elem_type)
    if kind == "optional_type":
        return max(_OPTIONAL_VERSION, _value_version(value.optional_type.elem_type))
    if kind == "sparse_tensor_type":
        return max(_OPTIONAL_VERSION, _type_version(value.sparse_tensor_type.elem_type))
    return _type_version(value.tensor_type.elem_type)


def _type_version(element_type: int) -> int:
    return max((version for first, version in _FIRST_TYPES if element_type >= first), default=_BASE_VERSION)
