"""Inputs that are strings, sequences, maps or optional values: random values, and conversion of user inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from dicompiler.base.errors import DicompilerError
from dicompiler.base.input_arrays import to_array
from dicompiler.base.rng import named_generator
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import is_fixed_size

RANDOM_LENGTH = 3
"""Number of elements of a random sequence or map."""
_EXTRA_STRINGS = ("", "alpha", "beta gamma", "ünïcødé")
"""Strings that are drawn in addition to those that occur in the network."""


def random_non_tensor_inputs(model: Model, seed: int, integers_only: bool = False) -> dict[str, Any]:
    """Draw values for the inputs that are strings, sequences, maps or optional values, by input name.

    With `integers_only`, all numbers in these values are integers.
    """
    types = _non_tensor_types(model)
    strings = known_strings(model) if types else ()
    return {
        name: _random_value(value_type, strings, named_generator(seed, f"{name}/unsized"), integers_only)
        for name, value_type in types.items()
    }


def known_strings(model: Model) -> tuple[str, ...]:
    """Return the strings in constants and attributes of the model, and the fixed strings _EXTRA_STRINGS."""
    strings: dict[str, None] = {}
    for name, (dtype, _) in model.initializers().items():
        if dtype == onnx.TensorProto.STRING:
            strings.update(dict.fromkeys(map(_to_str, model.array(name).ravel().tolist())))
    for node in model.proto.graph.node:
        for attribute in node.attribute:
            values = [*attribute.strings, *(attribute.t.string_data if attribute.HasField("t") else ())]
            strings.update(dict.fromkeys(map(_to_str, values)))
    return (*strings, *_EXTRA_STRINGS)


def _to_str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _non_tensor_types(model: Model) -> dict[str, onnx.TypeProto]:
    constants = model.initializers()
    values = (value for value in model.proto.graph.input if value.name not in constants)
    return {value.name: value.type for value in values if not is_fixed_size(value.type.tensor_type.elem_type)}


def _random_value(
    value_type: onnx.TypeProto, strings: Sequence[str], rng: np.random.Generator, integers_only: bool
) -> Any:
    form, arguments = value_type.WhichOneof("value"), (strings, rng, integers_only)
    if form == "sequence_type":
        return [_random_value(value_type.sequence_type.elem_type, *arguments) for _ in range(RANDOM_LENGTH)]
    if form == "optional_type":
        return _random_value(value_type.optional_type.elem_type, *arguments)
    if form == "map_type":
        has_string_keys = value_type.map_type.key_type == onnx.TensorProto.STRING
        keys: Sequence[Any] = list(strings[:RANDOM_LENGTH]) if has_string_keys else range(RANDOM_LENGTH)
        return {key: _random_value(value_type.map_type.value_type, *arguments).item() for key in keys}
    shape = tuple(dim.dim_value or 1 for dim in value_type.tensor_type.shape.dim)
    if value_type.tensor_type.elem_type == onnx.TensorProto.STRING:
        return np.array(strings, object)[rng.integers(0, len(strings), shape)]
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value_type.tensor_type.elem_type))
    is_real = dtype.kind == "f" and not integers_only
    numbers = rng.standard_normal(shape) if is_real else rng.integers(0, 2 if dtype.kind == "b" else 4, shape)
    return np.asarray(numbers).astype(dtype)


def to_ort_inputs(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a user's inputs to the types that onnxruntime expects.

    Lists become arrays, arrays named x_0, x_1, … become the sequence x, and missing optional values become None.

    Raises:
        DicompilerError: A value does not match its type.
    """
    values = dict(inputs)
    for name, value_type in _non_tensor_types(model).items():
        if value_type.WhichOneof("value") == "tensor_type":
            continue
        index = 0
        while name not in inputs and f"{name}_{index}" in values:
            values.setdefault(name, []).append(values.pop(f"{name}_{index}"))
            index += 1
        if name not in values and value_type.WhichOneof("value") == "optional_type":
            values[name] = None
        if name in values:
            values[name] = _to_ort_value(value_type, values[name], f"input {name!r}")
    return values


def _to_ort_value(value_type: onnx.TypeProto, value: Any, place: str) -> Any:
    form = value_type.WhichOneof("value")
    if form == "optional_type":
        return None if value is None else _to_ort_value(value_type.optional_type.elem_type, value, place)
    if form == "sequence_type":
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            raise DicompilerError(f"{place} is a sequence: give a list of its elements")
        element_type = value_type.sequence_type.elem_type
        return [_to_ort_value(element_type, element, f"{place}[{i}]") for i, element in enumerate(value)]
    if form == "map_type":
        if not isinstance(value, Mapping):
            raise DicompilerError(f"{place} is a map: give a dict of its keys and values")
        has_string_keys = value_type.map_type.key_type == onnx.TensorProto.STRING
        return {key if has_string_keys else int(key): element for key, element in value.items()}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value_type.tensor_type.elem_type)
    return to_array(value, np.dtype(dtype), place)
