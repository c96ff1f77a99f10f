"""Tensor names: new names that are not taken, and replacement of names that onnxruntime reserves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import onnx

from dicompiler.ir.onnx.graph_structure import control_flow_bodies, rename_captures

RESERVED_PREFIX = "InsertedPrecisionFreeCast_"
"""Prefix of the tensors of casts that onnxruntime inserts around operators without a float16 kernel.

It only checks whether a node has such a name, so a tensor with this prefix would be defined twice.
"""


def unique_name(name: str, taken: dict[str, int]) -> str:
    """Return `name`, or `name_1`, `name_2` …: the first that is not taken, and add it to `taken`.

    Args:
        name: The preferred name.
        taken: All names, each with the last number that was appended to it.

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
    """Rename tensors with a reserved prefix in place, and return new names by old names."""
    fixed = {value.name for value in (*graph.input, *graph.output)}
    found = [
        name for name in dict.fromkeys(_produced_names(graph)) if name.startswith(RESERVED_PREFIX) and name not in fixed
    ]
    if not found:
        return {}
    taken = dict.fromkeys(_all_produced_names(graph), 0)
    renamed = {name: unique_name(f"Cast_{name.removeprefix(RESERVED_PREFIX)}", taken) for name in found}
    _rename_tensors(graph, renamed)
    return renamed


def _produced_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the tensors that a graph receives or computes."""
    yield from (value.name for value in chain(graph.input, graph.initializer))
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from (name for node in graph.node for name in node.output if name)


def _all_produced_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the tensors that a graph and its bodies receive or compute."""
    yield from _produced_names(graph)
    for node in graph.node:
        for body in control_flow_bodies(node):
            yield from _all_produced_names(body)


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
