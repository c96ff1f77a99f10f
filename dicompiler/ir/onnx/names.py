"""Tensor names: new names that are not in use, and replacement of names that onnxruntime reserves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import onnx

from dicompiler.ir.onnx.graph_structure import graph_and_bodies, produced_names, rename_captures

RESERVED_PREFIX = "InsertedPrecisionFreeCast_"
"""Prefix of tensor names that onnxruntime uses for casts around operators without a float16 kernel.

onnxruntime does not check whether the model has a tensor with the name of such a cast: it then defines it twice.
"""


def unique_name(name: str, taken: dict[str, int]) -> str:
    """Return the first of `name`, `name_1`, `name_2`, … that is not in use, and add it to the names in use.

    Args:
        name: The preferred name.
        taken: Names in use, each with the last number that was appended to it. The returned name is added.

    Returns:
        The name.
    """
    candidate, number = name, taken.get(name, 0)
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken[name] = number
    taken.setdefault(candidate, 0)
    return candidate


def rename_reserved_tensors(graph: onnx.GraphProto) -> dict[str, str]:
    """Rename the tensors of a graph whose names begin with a prefix that onnxruntime reserves.

    Inputs and outputs of the graph keep their names. The graph is changed in place.

    Returns:
        New names by old name.
    """
    fixed = {value.name for value in (*graph.input, *graph.output)}
    produced = dict.fromkeys(produced_names(graph))
    reserved = [name for name in produced if name.startswith(RESERVED_PREFIX) and name not in fixed]
    if not reserved:
        return {}
    taken = {name: 0 for inner in graph_and_bodies(graph) for name in produced_names(inner)}
    renamed = {name: unique_name(f"Cast_{name.removeprefix(RESERVED_PREFIX)}", taken) for name in reserved}
    _rename_tensors(graph, renamed)
    return renamed


def _rename_tensors(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    for value in chain(graph.input, graph.output, graph.value_info, graph.initializer):
        value.name = renamed.get(value.name, value.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = renamed.get(sparse.values.name, sparse.values.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = renamed.get(annotation.tensor_name, annotation.tensor_name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
        rename_captures(node, renamed)
