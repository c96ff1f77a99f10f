"""Check that the installed onnxruntime can load a model, as the devices and the verification will do."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.graph_structure import graph_and_bodies
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import dtype_name

SILENT = 4
"""Severity level of onnxruntime at which it logs only fatal errors."""

_MISSING_KERNEL = re.compile(r"Could not find an implementation for (\S+)\((\d+)\) node with name '(.*)'")


def check_loadable(model: Model) -> None:
    """Raise DicompilerError if the installed onnxruntime cannot load the model.

    The model is first loaded without its weights, so that large models need no more time and memory than small ones. If
    this fails, the model is loaded with its weights, because some operators accept only constants. In this second try,
    onnxruntime may also replace operators.
    """
    # The executor imports onnxruntime, which not every program that imports this module needs.
    from dicompiler.verify.executor import OrtSession

    place = model.display_name
    try:
        OrtSession(model.without_weights(), {}, place, "none", is_single_use=True, log_severity=SILENT)
    except DicompilerError:
        try:
            OrtSession(model.proto, model.weights, place, "all", is_single_use=True, log_severity=SILENT)
        except DicompilerError as error:
            missing = _MISSING_KERNEL.search(str(error))
            if missing is None:
                raise DicompilerError(f"{error}: correct the model, or export it again") from error
            raise DicompilerError(_describe_missing_kernel(model, *missing.groups())) from error


def _describe_missing_kernel(model: Model, op: str, opset: str, name: str) -> str:
    import onnxruntime

    tensors = model.tensors()
    types = dict.fromkeys(
        dtype_name(tensors[tensor].dtype).lower()
        for node in _nodes_named(model.proto, name)
        for tensor in node.input
        if tensor in tensors
    )
    inputs = f" with inputs of type {', '.join(types)}" if types else ""
    return (
        f"{model.display_name}: {op} {name!r}: onnxruntime {onnxruntime.__version__} has no kernel for {op} of opset "
        f"{opset}{inputs}: export the model with another type or opset"
    )


def _nodes_named(model: onnx.ModelProto, name: str) -> Iterator[onnx.NodeProto]:
    for graph in graph_and_bodies(model.graph):
        yield from (node for node in graph.node if node.name == name)
