"""The pass `normalise`: bring any valid model into the form that all later passes rely on.

Weights are initializers, every graph output is computed by a node, and every node is read. Graph outputs that devices
cannot send (sequences of maps or tensors, and strings) are replaced, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api import Model, Pass, PipelineState
from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable, names_read, write_output_names
from dicompiler_passes.constant_folding import STANDARD_DOMAINS, fold_constants
from dicompiler_passes.node_rewrites import (
    fix_initializers,
    int64_array,
    outputs_from_nodes,
    raise_opset,
    split_to_slices,
    trim_outputs,
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

    Weights are initializers, every graph output is computed by a node, and every node is read. Nodes that stay keep
    their names. A second call changes nothing.
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
    return Model(propagate_shapes(model.without_weights()), model.weights)


log = logging.getLogger("dicompiler")

_SEQUENCE_OPS = ("SequenceConstruct", "SplitToSequence")


def maps_to_tensors(graph: ModelGraph) -> None:
    """Replace outputs that are sequences of maps by the tensor of scores that ZipMap reads.

    scores → ZipMap → output  ⇒  scores → Identity → output
    """
    output_indices = {tensor.name: i for i, tensor in enumerate(graph.outputs)}
    for node in graph.nodes:
        if (node.op, node.domain) == ("ZipMap", "ai.onnx.ml") and node.outputs[0].name in output_indices:
            name = node.outputs[0].name
            log.warning(
                "output %r is a sequence of maps, which devices cannot send: you get the tensor of scores that "
                "ZipMap %r reads, with a row for each map and a column for each label",
                name,
                node.name,
            )
            node.op, node.domain = "Identity", ""
            node.attrs.clear()
            value = onnx.ValueInfoProto(name=name)
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            graph.value_infos["output"][name] = value
            node.outputs[0] = graph.outputs[output_indices[name]] = Variable(name, value)


_LABEL_ATTRIBUTES = {"TreeEnsembleClassifier": "classlabels_int64s"}
"""Attribute with integer labels, by classifier. The other classifiers use classlabels_ints."""


def labels_to_indices(graph: ModelGraph) -> None:
    """Replace the string labels of classifiers by indices, if no node reads the labels.

    LinearClassifier(classlabels_strings = a, b) → output  ⇒  (classlabels_ints = 0, 1)
    """
    classifiers = [node for node in graph.nodes if node.domain == "ai.onnx.ml" and node.op.endswith("Classifier")]
    read_names = {name for node in graph.nodes for name in names_read(node)} if classifiers else set()
    outputs = {tensor.name for tensor in graph.outputs}
    for node in classifiers:
        labels, name = node.attrs.get("classlabels_strings"), node.outputs[0].name
        if not labels or name in read_names:
            continue
        del node.attrs["classlabels_strings"]
        node.attrs[_LABEL_ATTRIBUTES.get(node.op, "classlabels_ints")] = list(range(len(labels)))
        value = onnx.ValueInfoProto(name=name)
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
        if name in outputs:
            log.warning(
                "output %r holds strings, which devices cannot send: you get the indices, 0 to %d, of these labels: %s",
                name,
                len(labels) - 1,
                ", ".join(map(repr, labels)),
            )
            graph.value_infos["output"][name] = value
            index = [tensor.name for tensor in graph.outputs].index(name)
            node.outputs[0] = graph.outputs[index] = Variable(name, value)


def has_sequence_outputs(graph: ModelGraph) -> bool:
    output_names = {tensor.name for tensor in graph.outputs}
    return any(node.op in _SEQUENCE_OPS and node.outputs[0].name in output_names for node in graph.nodes)


def sequences_to_tensors(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> None:
    """Replace each graph output that is a sequence by its tensors, at the same position among the outputs.

    SequenceConstruct(a, b) → y  ⇒  Identity(a) → y_0, Identity(b) → y_1
    SplitToSequence(x) → y       ⇒  Split(x) → y_0, y_1

    Sequences of unknown length stay, such as those from a loop or from a split with computed sizes.
    """
    outputs = [tensor.name for tensor in graph.outputs]
    for node in [node for node in graph.nodes if node.op in _SEQUENCE_OPS and node.domain in STANDARD_DOMAINS]:
        name = node.outputs[0].name
        if name not in outputs:
            continue
        replacing = (
            _identities(graph, node, name) if node.op == _SEQUENCE_OPS[0] else _split_pieces(graph, node, name, tensors)
        )
        if not replacing:
            continue
        inner = {tensor.name for maker in replacing for tensor in maker.inputs}
        new_outputs = [output for maker in replacing for output in maker.outputs if output.name not in inner]
        dtype = tensors[node.inputs[0].name].dtype if node.inputs[0].name in tensors else onnx.TensorProto.FLOAT
        for output in new_outputs:
            value = onnx.ValueInfoProto(name=output.name)
            value.type.tensor_type.elem_type = dtype
            graph.value_infos["output"][output.name] = value
        index = [tensor.name for tensor in graph.outputs].index(name)
        graph.outputs[index : index + 1] = new_outputs
        graph.insert_nodes(replacing, before=node)
        log.warning(
            "output %r is a sequence, which devices cannot send: you get its tensors as outputs %s",
            name,
            ", ".join(repr(output.name) for output in new_outputs),
        )


def _identities(graph: ModelGraph, node: gs.Node, name: str) -> list[gs.Node]:
    outputs = [Variable(graph.unused_tensor_name(f"{name}_{index}")) for index in range(len(node.inputs))]
    return [
        gs.Node("Identity", graph.unused_node_name(output.name), inputs=[tensor], outputs=[output], domain=node.domain)
        for tensor, output in zip(node.inputs, outputs, strict=True)
    ]


def _split_pieces(graph: ModelGraph, node: gs.Node, name: str, tensors: Mapping[str, TensorInfo]) -> list[gs.Node]:
    """Return a Split of a tensor into the pieces of the sequence `name`, and Squeezes that remove the axis if needed.

    The result is [] if the sizes of the pieces are unknown.
    """
    sizes, axis = _piece_sizes(node, tensors), int(node.attrs.get("axis", 0))
    if not sizes:
        return []
    keeps_axis = len(node.inputs) > 1 or bool(node.attrs.get("keepdims", 1))
    outputs = [Variable(graph.unused_tensor_name(f"{name}_{index}")) for index in range(len(sizes))]
    pieces = outputs if keeps_axis else [Variable(graph.unused_tensor_name(f"{output.name}_cut")) for output in outputs]
    split = gs.Node("Split", graph.unused_node_name(node.name), {"axis": axis}, [node.inputs[0]], pieces, node.domain)
    if graph.opset < 13:
        split.attrs["split"] = list(sizes)
    else:
        split.inputs.append(graph.add_initializer(graph.unused_tensor_name(f"{name}_sizes"), int64_array(*sizes)))
    nodes = [split]
    for piece, output in zip(pieces, outputs, strict=True) if not keeps_axis else ():
        squeeze = gs.Node("Squeeze", graph.unused_node_name(output.name), {}, [piece], [output], node.domain)
        if graph.opset < 13:
            squeeze.attrs["axes"] = [axis]
        else:
            squeeze.inputs.append(
                graph.add_initializer(graph.unused_tensor_name(f"{output.name}_axes"), int64_array(axis))
            )
        nodes.append(squeeze)
    return nodes


def _piece_sizes(node: gs.Node, tensors: Mapping[str, TensorInfo]) -> Sequence[int]:
    """Return the length of each piece of a SplitToSequence along its axis; () if unknown."""
    source = tensors.get(node.inputs[0].name)
    if source is None or source.shape is None:
        return ()
    extent = source.shape[int(node.attrs.get("axis", 0))]
    if len(node.inputs) < 2 or not node.inputs[1].name:
        return (1,) * extent
    split = tensors.get(node.inputs[1].name)
    if split is None or split.value is None:
        return ()
    sizes = [int(size) for size in split.value.ravel()]
    if split.value.ndim:
        return sizes
    return tuple(min(sizes[0], extent - start) for start in range(0, extent, sizes[0]))
