"""Windows along one axis as windows over images of height 1: TFLite-micro has no others.

Graph → Graph: Conv (N, C, L) ⇒ Reshape (N, C, 1, L) → Conv → Reshape (N, C, L)
"""

from __future__ import annotations

from dataclasses import replace

from dicompiler_targets.tflm.graph import SegmentGraph, SegmentNode

_WINDOW_OPERATORS = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
_AXIS_ATTRIBUTE_DEFAULTS = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}
"""Attributes with an entry for each axis, and what stands there for an axis of extent 1."""


def widen_windows(graph: SegmentGraph) -> SegmentGraph:
    """The graph with every window of rank 3 in rank 4."""
    for node in graph.nodes:
        if node.op in _WINDOW_OPERATORS and len(graph.get_shape(node.inputs[0])) == 3:
            graph = _widen_node(graph, node)
    return graph


def _widen_node(graph: SegmentGraph, node: SegmentNode) -> SegmentGraph:
    x, y = node.inputs[0], node.output
    names = {x: f"{y}/wide input", y: f"{y}/wide"}
    shapes, dtypes = dict(graph.shapes), dict(graph.dtypes)
    about, constants = dict(graph.quantizations), dict(graph.constants)
    for name, wide in names.items():
        batch, channels, length = graph.shapes[name]
        shapes[wide], dtypes[wide] = (batch, channels, 1, length), graph.dtypes[name]
        if name in about:
            about[wide] = about[name]
    inputs = [names[x], *node.inputs[1:]]
    if len(inputs) > 1 and inputs[1] in constants:
        inputs[1] = f"{y}/wide weight"
        constants[inputs[1]] = constants[node.inputs[1]][:, :, None]
        if node.inputs[1] in about:
            about[inputs[1]] = about[node.inputs[1]]
    attributes = {
        k: [_AXIS_ATTRIBUTE_DEFAULTS[k], *v] if k in _AXIS_ATTRIBUTE_DEFAULTS else v for k, v in node.attributes.items()
    }
    if "pads" in attributes:
        begin, end = attributes["pads"]
        attributes["pads"] = [0, begin, 0, end]
    replacement = (
        SegmentNode("Reshape", f"{node.name}/widen", (x,), (names[x],)),
        replace(node, inputs=tuple(inputs), outputs=(names[y], *node.outputs[1:]), attributes=attributes),
        SegmentNode("Reshape", f"{node.name}/narrow", (names[y],), (y,)),
    )
    nodes = tuple(new for old in graph.nodes for new in (replacement if old is node else (old,)))
    return replace(graph, nodes=nodes, shapes=shapes, dtypes=dtypes, quantizations=about, constants=constants)
