"""Networks in QDQ form: an operator between dequantised inputs and a quantised output computes on the numbers.

Graph → Graph: DequantizeLinear → Conv → QuantizeLinear ⇒ Conv on int8. What TFLite-micro cannot do so stays in float32
between a DEQUANTIZE and a QUANTIZE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dicompiler_targets.tflm.flatbuffer import Quantisation
from dicompiler_targets.tflm.graph import Graph, Node, needed, refusal
from dicompiler_targets.tflm.qlinear import REWRITES
from dicompiler_targets.tflm.resize import on_numbers

DEQUANTISE, QUANTISE = "DequantizeLinear", "QuantizeLinear"
QUANTISING = (DEQUANTISE, QUANTISE, *REWRITES)
"""Operators that quantised networks have."""
RESCALING = {
    **{"Conv": (0, 1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "Add": (0, 1), "Sub": (0, 1), "Mul": (0, 1)},
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "ReduceMean"), (0,)),
}
"""Operators that go from any scale to any other, and which of their inputs are quantised."""
KEEPING = (
    "MaxPool", "GlobalMaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze",
    "Transpose", "Slice", "Concat", "Resize", "Identity",
)  # fmt: skip
"""Operators whose output has the scale of its input; where another is asked for, a QUANTIZE follows (of Concat: goes
before)."""
FIXED = {"Softmax": (1 / 256, -128), "Sigmoid": (1 / 256, -128), "Tanh": (1 / 128, 0)}
"""Operators whose output has one scale and zero point only; with others they stay in float32."""
MOVING = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Identity")


def parameters(graph: Graph, node: Node) -> Quantisation:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear node. DicompilerError for what TFLite lacks."""
    if any(name and name not in graph.constants for name in node.inputs[1:]) or node.attribute("block_size", 0):
        raise refusal(node, "its scale is computed or one for each block", "take constants, one for each channel")
    scale = graph.constants[node.inputs[1]].reshape(-1)
    zero = graph.constants[node.inputs[2]].reshape(-1) if node.has(2) else np.zeros(scale.size, np.int8)
    if scale.size > 1 and np.any(zero != 0):
        raise refusal(
            node, "a scale for each channel with a zero point that is not 0", "quantise weights symmetrically"
        )
    axis = node.attribute("axis", 1) if scale.size > 1 else 0
    wide = zero if zero.size == scale.size else np.broadcast_to(zero, scale.shape)
    return Quantisation(
        tuple(map(float, scale)), tuple(map(int, wide)), axis % max(1, len(graph.shape(node.inputs[0])))
    )


@dataclass(frozen=True)
class _Known:
    """dequantised: output of each DequantizeLinear → that node. about: each quantised tensor's numbers."""

    dequantised: Mapping[str, Node]
    about: Mapping[str, Quantisation]


def quantised(graph: Graph) -> Graph:
    """The graph with every operator on numbers that can be; constants that only float operators read are floats."""
    ends = [node for node in graph.nodes if node.op in (DEQUANTISE, QUANTISE)]
    if not ends:
        return graph
    about = {(n.inputs[0] if n.op == DEQUANTISE else n.output): parameters(graph, n) for n in ends}
    known = _Known({n.output: n for n in ends if n.op == DEQUANTISE}, _spread(graph, about))
    readers = graph.readers()
    nodes: list[Node] = []
    changed = replace(graph, quantisations=known.about)
    gone: set[str] = set()
    for node in graph.nodes:
        after = readers.get(node.output, [])
        last = after[0] if len(after) == 1 and after[0].op == QUANTISE and node.output not in graph.outputs else None
        if last is not None and _can(changed, node, last, known):
            changed, replacing = _on_numbers(changed, node, last, known)
            nodes.extend(replacing)
            gone.add(last.output)
        elif node.output not in gone:
            nodes.append(node)
    floats = _floats(replace(changed, nodes=tuple(nodes)))
    return replace(floats, nodes=tuple(needed(floats.nodes, graph.outputs)))


def _spread(graph: Graph, about: Mapping[str, Quantisation]) -> dict[str, Quantisation]:
    """What is known of one end of a node that only moves numbers holds at its other end."""
    known = dict(about)
    for nodes in (graph.nodes, graph.nodes[::-1], graph.nodes):
        for node in nodes:
            if node.op in MOVING and graph.dtypes[node.output] == "int8":
                sources = node.inputs if node.op == "Concat" else node.inputs[:1]
                value = next((known[name] for name in (node.output, *sources) if name in known), None)
                if value is not None:
                    for name in (node.output, *sources):
                        known.setdefault(name, value)
    return known


def _can(graph: Graph, node: Node, last: Node, known: _Known) -> bool:
    """Whether TFLite-micro computes the node on 8-bit numbers."""
    if graph.dtypes[last.output] != "int8" or last.output not in known.about:
        return False
    if node.op in RESCALING:
        places = [i for i in RESCALING[node.op] if node.has(i)]
    else:
        places = list(range(len(node.inputs))) if node.op == "Concat" else [0]
    if not all(node.inputs[i] in known.dequantised for i in places):
        return False
    sources = [known.dequantised[node.inputs[i]].inputs[0] for i in places]
    first = known.about[sources[0]]
    out = known.about[last.output]
    if sources[0] in graph.constants or len(first.scale) > 1 or len(out.scale) > 1:
        return False
    if node.op in FIXED:
        scale, zero = FIXED[node.op]
        return bool(np.isclose(out.scale[0], scale, rtol=1e-6)) and out.zero == (zero,)
    if node.op in ("Conv", "Gemm"):
        # Weights and bias as TFLite has them: constants in int8 around 0, and in int32 at the product of both scales.
        if any(name not in graph.constants for name in sources[1:]) or set(known.about[sources[1]].zero) != {0}:
            return False
        wanted = np.asarray(known.about[sources[1]].scale) * first.scale[0]
        bias = known.about[sources[2]].scale if len(sources) > 2 else wanted
        plain = node.attribute("alpha", 1.0) == node.attribute("beta", 1.0) == 1.0
        plain &= len(sources) < 3 or graph.constants[sources[2]].size == graph.shapes[node.output][1]
        return plain and bool(np.allclose(bias, wanted, rtol=1e-4)) and not node.attribute("transA", 0)
    if node.op == "MatMul":
        weight, rank = known.about[sources[1]], len(graph.shape(sources[1]))
        along = len(weight.scale) == 1 or weight.axis == 1
        return sources[1] in graph.constants and rank == 2 and along and set(weight.zero) == {0}
    if node.op == "Resize":
        return on_numbers(graph, node) and (first == out or node.attribute("mode", "nearest") == "nearest")
    return node.op in RESCALING or node.op in KEEPING


def _on_numbers(graph: Graph, node: Node, last: Node, known: _Known) -> tuple[Graph, list[Node]]:
    """The node on the numbers, and what brings them to one scale before or behind it."""
    inputs = [known.dequantised[n].inputs[0] if n in known.dequantised else n for n in node.inputs]
    output, about = last.output, dict(graph.quantisations)
    shapes, dtypes, nodes = dict(graph.shapes), dict(graph.dtypes), list[Node]()
    if node.op == "Concat":
        for i, name in enumerate(inputs):
            if about[name] != about[output]:
                inputs[i] = f"{output}/{i}"
                about[inputs[i]], shapes[inputs[i]], dtypes[inputs[i]] = about[output], graph.shape(name), "int8"
                nodes.append(Node("Requantise", f"{node.name}/{i}", (name,), (inputs[i],)))
    elif node.op in KEEPING and about[inputs[0]] != about[output]:
        between = f"{output}/before"
        about[between], shapes[between], dtypes[between] = about[inputs[0]], shapes[output], "int8"
        again = Node("Requantise", f"{node.name}/after", (between,), (output,))
        changed = replace(graph, quantisations=about, shapes=shapes, dtypes=dtypes)
        return changed, [replace(node, inputs=tuple(inputs), outputs=(between,)), again]
    nodes.append(replace(node, inputs=tuple(inputs), outputs=(output,)))
    return replace(graph, quantisations=about, shapes=shapes, dtypes=dtypes), nodes


def _floats(graph: Graph) -> Graph:
    """Constants that are dequantised for an operator in float32 are dequantised here."""
    constants, nodes = dict(graph.constants), list[Node]()
    for node in graph.nodes:
        if node.op == DEQUANTISE and node.inputs[0] in constants:
            value, about = constants[node.inputs[0]].astype(np.float64), parameters(graph, node)
            shape = [1] * value.ndim
            if len(about.scale) > 1:
                shape[about.axis] = -1
            scale, zero = (
                np.asarray(numbers).reshape(shape if value.ndim else ()) for numbers in (about.scale, about.zero)
            )
            constants[node.output] = ((value - zero) * scale).astype(np.float32)
        else:
            nodes.append(node)
    return replace(graph, constants=constants, nodes=tuple(nodes))
