"""The pass `normalise`: brings any legal model into the form that all later passes rely on.

In: a loaded Model. Out: one whose weights are initializers, whose outputs come from nodes and whose every node is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import Compilation, Model, Pass
from dicompiler_passes.folding import fold
from dicompiler_passes.legality import propagated
from dicompiler_passes.quantised import own_dequantise
from dicompiler_passes.sendable import makes_outputs, maps_to_tensors, sequences_to_tensors, words_to_numbers
from dicompiler_passes.tidying import fix_initializers, outputs_from_nodes, split_to_slices, trim_outputs


@dataclass(frozen=True)
class Normalise(Pass):
    """Makes weights of what is constant, and of each output the work of a node.

    Constant, ConstantOfShape, Transpose(w) …    ⇒  (initializer)
    initializer that is a graph input too        ⇒  (initializer), its value is compiled in; IR 3 becomes 4
    Split → a, b                                 ⇒  Slice → a, Slice → b
    MatMul(w) → Split → q, k                     ⇒  MatMul(w[:, :n]) → q, MatMul(w[:, n:]) → k
    Dropout → y, mask (unread)                   ⇒  Dropout → y
    DequantizeLinear → a, b                      ⇒  DequantizeLinear → a, DequantizeLinear → b
    scores → ZipMap → output                     ⇒  scores → Identity → output
    SequenceConstruct(a, b) → output             ⇒  a → output_0, b → output_1
    labels that are words → output               ⇒  their numbers → output
    w → output, x → output, a → output twice     ⇒  Identity → output
    node or initializer that nobody reads        ⇒  (gone)
    """

    name: ClassVar[str] = "normalise"

    def run(self, compilation: Compilation) -> Compilation:
        """Replaces the model; every node that stays keeps its name."""
        return replace(compilation, model=normalise(compilation.model))


def normalise(model: Model) -> Model:
    """The model in normal form. Doing it twice changes nothing."""
    graph = model.graph()
    fix_initializers(graph)
    graph.prune()
    fold(graph)
    if makes_outputs(graph):
        sequences_to_tensors(graph, _inferred(model.with_graph(graph)).tensors())
    if any(node.op == "Split" for node in graph.nodes):
        split_to_slices(graph, _inferred(model.with_graph(graph)).tensors())
    maps_to_tensors(graph)
    words_to_numbers(graph)
    trim_outputs(graph)
    graph.prune()
    outputs_from_nodes(graph)
    own_dequantise(graph)
    return model.with_graph(graph)


def _inferred(model: Model) -> Model:
    """The model with what shape inference finds already (a Split into equal shares must know the extent)."""
    return Model(propagated(model.light()), model.weights)
