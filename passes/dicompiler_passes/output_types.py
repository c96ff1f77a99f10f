"""Replacement of outputs that devices cannot send: sequences of maps or tensors, and strings.

A warning tells users what they get instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable, names_read
from dicompiler_passes.constant_folding import STANDARD_DOMAINS
from dicompiler_passes.normalize_rewrites import int64_array

log = logging.getLogger("dicompiler")

_SEQUENCE_OPS = ("SequenceConstruct", "SplitToSequence")


def maps_to_tensors(graph: ModelGraph) -> None:
    """Replace outputs that are sequences of maps by the tensors that the maps are made of.

    scores → ZipMap → output  ⇒  scores → Identity → output
    """
    outputs = {tensor.name: i for i, tensor in enumerate(graph.outputs)}
    for node in graph.nodes:
        if (node.op, node.domain) == ("ZipMap", "ai.onnx.ml") and node.outputs[0].name in outputs:
            name = node.outputs[0].name
            log.warning(
                "output %r is a sequence of maps, which no device can send: it is given as the tensor of scores that "
                "ZipMap %r makes it of, a row for each map, a column for each label",
                name,
                node.name,
            )
            node.op, node.domain = "Identity", ""
            node.attrs.clear()
            value = onnx.ValueInfoProto(name=name)
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            graph.value_infos["output"][name] = value
            node.outputs[0] = graph.outputs[outputs[name]] = Variable(name, value)


_LABEL_ATTRIBUTES = {"TreeEnsembleClassifier": "classlabels_int64s"}
"""Attribute of integer labels by classifier; all other classifiers use classlabels_ints."""


def labels_to_indices(graph: ModelGraph) -> None:
    """Replace string labels that are only outputs by their indices.

    LinearClassifier(classlabels_strings = a, b) → output  ⇒  (classlabels_ints = 0, 1)
    """
    classifiers = [node for node in graph.nodes if node.domain == "ai.onnx.ml" and node.op.endswith("Classifier")]
    read = {name for node in graph.nodes for name in names_read(node)} if classifiers else set()
    outputs = {tensor.name for tensor in graph.outputs}
    for node in classifiers:
        words, name = node.attrs.get("classlabels_strings"), node.outputs[0].name
        if not words or name in read:
            continue
        del node.attrs["classlabels_strings"]
        node.attrs[_LABEL_ATTRIBUTES.get(node.op, "classlabels_ints")] = list(range(len(words)))
        value = onnx.ValueInfoProto(name=name)
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
        if name in outputs:
            log.warning(
                "output %r is of words, which no device can send: it is given as their numbers, 0 to %d, of %s",
                name,
                len(words) - 1,
                ", ".join(map(repr, words)),
            )
            graph.value_infos["output"][name] = value
            index = [tensor.name for tensor in graph.outputs].index(name)
            node.outputs[0] = graph.outputs[index] = Variable(name, value)


def has_sequence_outputs(graph: ModelGraph) -> bool:
    """Return True if an output is a sequence made by a node that tells its length."""
    outputs = {tensor.name for tensor in graph.outputs}
    return any(node.op in _SEQUENCE_OPS and node.outputs[0].name in outputs for node in graph.nodes)


def sequences_to_tensors(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> None:
    """Replace outputs that are sequences by their tensors, in the same place.

    SequenceConstruct(a, b) → y  ⇒  Identity(a) → y_0, Identity(b) → y_1
    SplitToSequence(x) → y       ⇒  Split(x) → y_0, y_1

    Sequences of unknown length stay, such as those of a loop or of a split with computed sizes.
    """
    outputs = [tensor.name for tensor in graph.outputs]
    for node in [node for node in graph.nodes if node.op in _SEQUENCE_OPS and node.domain in STANDARD_DOMAINS]:
        name = node.outputs[0].name
        if name not in outputs:
            continue
        makers = (
            _identities(graph, node, name) if node.op == _SEQUENCE_OPS[0] else _split_pieces(graph, node, name, tensors)
        )
        if not makers:
            continue
        between = {tensor.name for maker in makers for tensor in maker.inputs}
        made = [output for maker in makers for output in maker.outputs if output.name not in between]
        kind = tensors[node.inputs[0].name].dtype if node.inputs[0].name in tensors else onnx.TensorProto.FLOAT
        for output in made:
            value = onnx.ValueInfoProto(name=output.name)
            value.type.tensor_type.elem_type = kind
            graph.value_infos["output"][output.name] = value
        place = [tensor.name for tensor in graph.outputs].index(name)
        graph.outputs[place : place + 1] = made
        graph.insert_nodes(makers, before=node)
        log.warning(
            "output %r is a sequence, which no device can send: its tensors are given as outputs %s",
            name,
            ", ".join(repr(output.name) for output in made),
        )


def _identities(graph: ModelGraph, node: gs.Node, name: str) -> list[gs.Node]:
    """Return an Identity for each tensor of a sequence."""
    made = [Variable(graph.unused_tensor_name(f"{name}_{index}")) for index in range(len(node.inputs))]
    return [
        gs.Node("Identity", graph.unused_node_name(output.name), inputs=[tensor], outputs=[output], domain=node.domain)
        for tensor, output in zip(node.inputs, made, strict=True)
    ]


def _split_pieces(graph: ModelGraph, node: gs.Node, name: str, tensors: Mapping[str, TensorInfo]) -> list[gs.Node]:
    """Return a Split into a sequence's pieces, with Squeezes if needed; [] if unknown."""
    sizes, axis = _piece_sizes(node, tensors), int(node.attrs.get("axis", 0))
    if not sizes:
        return []
    keeps = len(node.inputs) > 1 or bool(node.attrs.get("keepdims", 1))
    made = [Variable(graph.unused_tensor_name(f"{name}_{index}")) for index in range(len(sizes))]
    cut = made if keeps else [Variable(graph.unused_tensor_name(f"{output.name}_cut")) for output in made]
    split = gs.Node("Split", graph.unused_node_name(node.name), {"axis": axis}, [node.inputs[0]], cut, node.domain)
    if graph.opset < 13:
        split.attrs["split"] = list(sizes)
    else:
        split.inputs.append(graph.add_initializer(graph.unused_tensor_name(f"{name}_sizes"), int64_array(*sizes)))
    nodes = [split]
    for before, after in zip(cut, made, strict=True) if not keeps else ():
        squeeze = gs.Node("Squeeze", graph.unused_node_name(after.name), {}, [before], [after], node.domain)
        if graph.opset < 13:
            squeeze.attrs["axes"] = [axis]
        else:
            squeeze.inputs.append(
                graph.add_initializer(graph.unused_tensor_name(f"{after.name}_axes"), int64_array(axis))
            )
        nodes.append(squeeze)
    return nodes


def _piece_sizes(node: gs.Node, tensors: Mapping[str, TensorInfo]) -> Sequence[int]:
    """Return the extents of a SplitToSequence's pieces along its axis; () if unknown."""
    source = tensors.get(node.inputs[0].name)
    if source is None or source.shape is None:
        return ()
    extent = source.shape[int(node.attrs.get("axis", 0))]
    if len(node.inputs) < 2 or not node.inputs[1].name:
        return (1,) * extent
    given = tensors.get(node.inputs[1].name)
    if given is None or given.value is None:
        return ()
    sizes = [int(size) for size in given.value.ravel()]
    if given.value.ndim:
        return sizes
    return tuple(min(sizes[0], extent - start) for start in range(0, extent, sizes[0]))
