"""The pass `normalise`: bring any valid model into the form that all later passes rely on.

In this form, weights are initializers, every graph output is computed by a node, and every node is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import Model, Pass, PipelineState
from dicompiler.plugin_api.onnx import write_output_names
from dicompiler_passes.constant_folding import fold_constants
from dicompiler_passes.normalize_rewrites import (
    fix_initializers,
    outputs_from_nodes,
    raise_opset,
    split_to_slices,
    trim_outputs,
)
from dicompiler_passes.output_types import (
    has_sequence_outputs,
    labels_to_indices,
    maps_to_tensors,
    sequences_to_tensors,
)
from dicompiler_passes.qdq_grouping import duplicate_dequantize
from dicompiler_passes.shape_checks import propagate_shapes


@dataclass(frozen=True)
class Normalise(Pass):
    """Turn constants into initializers, compute each graph output by a node, and remove unread nodes.

    Constant, ConstantOfShape, Transpose(w) …    ⇒  (initializer)
    initializer that is also a graph input       ⇒  (initializer): callers can no longer set it; IR version 3 becomes 4
    operators of an opset below 7                ⇒  opset 7, if it defines the operators in the same way
    Split → a, b                                 ⇒  Slice → a, Slice → b
    MatMul(w) → Split → q, k                     ⇒  MatMul(w[:, :n]) → q, MatMul(w[:, n:]) → k
    Dropout → y, mask (unread)                   ⇒  Dropout → y
    DequantizeLinear → a, b                      ⇒  DequantizeLinear → a, DequantizeLinear → b
    scores → ZipMap → output                     ⇒  scores → Identity → output
    SequenceConstruct(a, b) → output             ⇒  a → output_0, b → output_1
    string labels → output                       ⇒  indices of the labels → output
    initializer or graph input → output          ⇒  Identity → output
    a → output a, and again output a             ⇒  a → output a
    unread node or initializer                   ⇒  (removed)
    """

    name: ClassVar[str] = "normalise"

    def run(self, state: PipelineState) -> PipelineState:
        return replace(state, model=normalise(state.model))


def normalise(model: Model) -> Model:
    """Return the model in the form that later passes rely on.

    In this form, weights are initializers, every graph output is computed by a node, and every node is read. A second
    call changes nothing. Nodes that stay keep their names.
    """
    graph = model.graph()
    fix_initializers(graph)
    raise_opset(graph)
    graph.prune()
    fold_constants(graph)
    if has_sequence_outputs(graph):
        sequences_to_tensors(graph, _infer_shapes(model.with_graph(graph)).tensors())
    if any(node.op == "Split" for node in graph.nodes):
        split_to_slices(graph, _infer_shapes(model.with_graph(graph)).tensors())
    maps_to_tensors(graph)
    labels_to_indices(graph)
    trim_outputs(graph)
    graph.prune()
    renamed = outputs_from_nodes(graph)
    duplicate_dequantize(graph)
    result = model.with_graph(graph)
    write_output_names(result.proto, renamed)
    return result


def _infer_shapes(model: Model) -> Model:
    """Return the model with inferred shapes, because a Split into equal pieces needs the length of its axis."""
    return Model(propagate_shapes(model.without_weights()), model.weights)
