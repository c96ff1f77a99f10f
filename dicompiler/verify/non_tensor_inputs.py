"""Inputs whose bytes no shape tells: words, sequences, maps and optional values. Seeded ones that a network can take,
and those that a user gives.

In: the model and its inputs' types. Out: what onnxruntime takes: arrays of words, lists, dicts, None.
"""

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
"""Elements of a seeded sequence or map."""
_EXTRA_STRINGS = ("", "alpha", "beta gamma", "ünïcødé")
"""Words that nobody has to know."""


def random_non_tensor_inputs(model: Model, seed: int, integers_only: bool = False) -> dict[str, Any]:
    """A value for each input that is not sized: words of those that the network knows, and some that it does not.
    whole: numbers in sequences, maps and optional values are whole."""
    types = _non_tensor_types(model)
    known = known_strings(model) if types else ()
    return {
        name: _random_value(kind, known, named_generator(seed, f"{name}/unsized"), integers_only)
        for name, kind in types.items()
    }


def known_strings(model: Model) -> tuple[str, ...]:
    """The words in constants and lists of the model's nodes."""
    found: dict[str, None] = {}
    for name, (dtype, _) in model.initializers().items():
        if dtype == onnx.TensorProto.STRING:
            found.update(dict.fromkeys(map(_to_str, model.array(name).ravel().tolist())))
    for node in model.proto.graph.node:
        for attribute in node.attribute:
            words = [*attribute.strings, *(attribute.t.string_data if attribute.HasField("t") else ())]
            found.update(dict.fromkeys(map(_to_str, words)))
    return (*found, *_EXTRA_STRINGS)


def _to_str(word: Any) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)


def _non_tensor_types(model: Model) -> dict[str, onnx.TypeProto]:
    """The types of the inputs that are not sized."""
    constants = model.initializers()
    values = (value for value in model.proto.graph.input if value.name not in constants)
    return {value.name: value.type for value in values if not is_fixed_size(value.type.tensor_type.elem_type)}


def _random_value(kind: onnx.TypeProto, known: Sequence[str], rng: np.random.Generator, whole: bool) -> Any:
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        return [_random_value(kind.sequence_type.elem_type, known, rng, whole) for _ in range(RANDOM_LENGTH)]
    if which == "optional_type":
        return _random_value(kind.optional_type.elem_type, known, rng, whole)
    if which == "map_type":
        words = kind.map_type.key_type == onnx.TensorProto.STRING
        keys: Sequence[Any] = list(known[:RANDOM_LENGTH]) if words else range(RANDOM_LENGTH)
        return {key: _random_value(kind.map_type.value_type, known, rng, whole).item() for key in keys}
    shape = tuple(dim.dim_value or 1 for dim in kind.tensor_type.shape.dim)
    if kind.tensor_type.elem_type == onnx.TensorProto.STRING:
        return np.array(known, object)[rng.integers(0, len(known), shape)]
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))
    real = dtype.kind == "f" and not whole
    numbers = rng.standard_normal(shape) if real else rng.integers(0, 2 if dtype.kind == "b" else 4, shape)
    return np.asarray(numbers).astype(dtype)


def to_ort_inputs(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`inputs` as onnxruntime takes what is no tensor: of plain lists the arrays that the types say; arrays called x_0,
    x_1, … are the sequence x; an optional value that is not given is None. DicompilerError for what does not fit."""
    nested = {
        name: kind for name, kind in _non_tensor_types(model).items() if kind.WhichOneof("value") != "tensor_type"
    }
    given = dict(inputs)
    for name, kind in nested.items():
        row = 0
        while name not in inputs and f"{name}_{row}" in given:
            given.setdefault(name, []).append(given.pop(f"{name}_{row}"))
            row += 1
        if name not in given and kind.WhichOneof("value") == "optional_type":
            given[name] = None
        if name in given:
            given[name] = _to_ort_value(kind, given[name], f"input {name!r}")
    return given


def _to_ort_value(kind: onnx.TypeProto, given: Any, place: str) -> Any:
    which = kind.WhichOneof("value")
    if which == "optional_type":
        return None if given is None else _to_ort_value(kind.optional_type.elem_type, given, place)
    if which == "sequence_type":
        if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
            raise DicompilerError(f"{place} is a sequence: give a list")
        return [_to_ort_value(kind.sequence_type.elem_type, one, f"{place}[{i}]") for i, one in enumerate(given)]
    if which == "map_type":
        if not isinstance(given, Mapping):
            raise DicompilerError(f"{place} is a map: give a dict")
        words = kind.map_type.key_type == onnx.TensorProto.STRING
        return {key if words else int(key): one for key, one in given.items()}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
    return to_array(given, np.dtype(dtype), place)
