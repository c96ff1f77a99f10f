"""Conversion of networks in QDQ form to integer operators.

    DequantizeLinear → Conv → QuantizeLinear ⇒ Conv on int8

Operators that TFLite-micro lacks in int8 stay in float32, between a DEQUANTIZE and a QUANTIZE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dicompiler_targets.tflm.expand_qlinear import REWRITES
from dicompiler_targets.tflm.flatbuffer import QuantizationParams
from dicompiler_targets.tflm.graph import WIRE_DTYPE_REMEDY, SegmentGraph, SegmentNode, make_refusal, select_needed
from dicompiler_targets.tflm.resize import can_resize_integers

DEQUANTIZE_OP, QUANTIZE_OP = "DequantizeLinear", "QuantizeLinear"
QUANTIZATION_OPERATORS = (DEQUANTIZE_OP, QUANTIZE_OP, *REWRITES)
"""ONNX operators by which a quantized network is recognized."""
RESCALING_OPERATORS = {
    **{"Conv": (0, 1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "Add": (0, 1), "Sub": (0, 1), "Mul": (0, 1)},
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "ReduceMean"), (0,)),
}
"""Operators with an output that may have another scale than the inputs, and the indices of their quantized inputs."""
SCALE_PRESERVING_OPERATORS = (
    "MaxPool", "GlobalMaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze",
    "Transpose", "Slice", "Concat", "Resize", "Identity",
)  # fmt: skip
"""Operators that TFLite computes in int8 only if input and output have the same scale.

If the network has different scales, a QUANTIZE converts the output (for Concat, the inputs).
"""
FIXED_SCALE_OPERATORS = {"Softmax": (1 / 256, -128), "Sigmoid": (1 / 256, -128), "Tanh": (1 / 128, 0)}
"""Scale and zero point that TFLite requires for the int8 output of these operators.

If the network has other values, the operator stays in float32.
"""
DATA_MOVEMENT_OPERATORS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Identity")


def read_parameters(graph: SegmentGraph, node: SegmentNode) -> QuantizationParams:
    """Return scale and zero point of a QuantizeLinear or DequantizeLinear.

    Raises:
        DicompilerError: TFLite does not support them.
    """
    if any(name and name not in graph.constants for name in node.inputs[1:]) or node.get_attribute("block_size", 0):
        # The option --wire-dtype int8-block adds nodes with a scale for each block, which have "int8-block" in their
        # names.
        is_wire_type = "int8-block" in node.name
        remedy = WIRE_DTYPE_REMEDY if is_wire_type else "use constants, one for each channel"
        raise make_refusal(node, "its scale is computed or given for each block", remedy)
    scale = graph.constants[node.inputs[1]].reshape(-1)
    zero = graph.constants[node.inputs[2]].reshape(-1) if node.has_input(2) else np.zeros(scale.size, np.int8)
    if scale.size > 1 and np.any(zero != 0):
        raise make_refusal(
            node, "it has a scale for each channel and a zero point that is not 0", "quantise weights symmetrically"
        )
    axis = node.get_attribute("axis", 1) if scale.size > 1 else 0
    wide = zero if zero.size == scale.size else np.broadcast_to(zero, scale.shape)
    return QuantizationParams(
        tuple(map(float, scale)), tuple(map(int, wide)), axis % max(1, len(graph.get_shape(node.inputs[0])))
    )


@dataclass(frozen=True)
class _QuantizedTensors:
    """The quantized tensors of a graph in QDQ form.

    Attributes:
        dequantized: The DequantizeLinear nodes, each by the name of its output.
        params: Scale and zero point of each quantized tensor, by name.
    """

    dequantized: Mapping[str, SegmentNode]
    params: Mapping[str, QuantizationParams]


def convert_to_integer(graph: SegmentGraph) -> SegmentGraph:
    """Return a graph in QDQ form with int8 operators instead, as far as TFLite-micro has them."""
    ends = [node for node in graph.nodes if node.op in (DEQUANTIZE_OP, QUANTIZE_OP)]
    if not ends:
        return graph
    params = {(n.inputs[0] if n.op == DEQUANTIZE_OP else n.output): read_parameters(graph, n) for n in ends}
    known = _QuantizedTensors({n.output: n for n in ends if n.op == DEQUANTIZE_OP}, _propagate_params(graph, params))
    readers = graph.map_readers()
    nodes: list[SegmentNode] = []
    changed = replace(graph, quantizations=known.params)
    gone: set[str] = set()
    for node in graph.nodes:
        after = readers.get(node.output, [])
        last = after[0] if len(after) == 1 and after[0].op == QUANTIZE_OP and node.output not in graph.outputs else None
        if last is not None and _can_convert(changed, node, last, known):
            changed, replacing = _convert_node(changed, node, last, known)
            nodes.extend(replacing)
            gone.add(last.output)
        elif node.output not in gone:
            nodes.append(node)
    floats = _dequantize_constants(replace(changed, nodes=tuple(nodes)))
    return replace(floats, nodes=tuple(select_needed(floats.nodes, graph.outputs)))


def _propagate_params(graph: SegmentGraph, params: Mapping[str, QuantizationParams]) -> dict[str, QuantizationParams]:
    """Return `params` (scale and zero point by tensor), extended to int8 tensors of nodes that only move data."""
    known = dict(params)
    for nodes in (graph.nodes, graph.nodes[::-1], graph.nodes):
        for node in nodes:
            if node.op in DATA_MOVEMENT_OPERATORS and graph.dtypes[node.output] == "int8":
                sources = node.inputs if node.op == "Concat" else node.inputs[:1]
                value = next((known[name] for name in (node.output, *sources) if name in known), None)
                if value is not None:
                    for name in (node.output, *sources):
                        known.setdefault(name, value)
    return known


def _can_convert(graph: SegmentGraph, node: SegmentNode, last: SegmentNode, known: _QuantizedTensors) -> bool:
    """Return True if TFLite-micro can compute a node in QDQ form on 8-bit integers.

    `last` is the QuantizeLinear that reads the node's output. DequantizeLinear nodes compute the node's inputs.
    """
    if graph.dtypes[last.output] != "int8" or last.output not in known.params:
        return False
    if node.op in RESCALING_OPERATORS:
        indices = [i for i in RESCALING_OPERATORS[node.op] if node.has_input(i)]
    else:
        indices = list(range(len(node.inputs))) if node.op == "Concat" else [0]
    if not all(node.inputs[i] in known.dequantized for i in indices):
        return False
    sources = [known.dequantized[node.inputs[i]].inputs[0] for i in indices]
    first = known.params[sources[0]]
    out = known.params[last.output]
    if sources[0] in graph.constants or len(first.scale) > 1 or len(out.scale) > 1:
        return False
    if node.op in FIXED_SCALE_OPERATORS:
        scale, zero = FIXED_SCALE_OPERATORS[node.op]
        return bool(np.isclose(out.scale[0], scale, rtol=1e-6)) and out.zero_point == (zero,)
    if node.op in ("Conv", "Gemm"):
        # TFLite requires constant int8 weights with zero point 0, and an int32 bias with the scale of the input times
        # that of the weights.
        if any(name not in graph.constants for name in sources[1:]) or set(known.params[sources[1]].zero_point) != {0}:
            return False
        wanted = np.asarray(known.params[sources[1]].scale) * first.scale[0]
        bias = known.params[sources[2]].scale if len(sources) > 2 else wanted
        plain = node.get_attribute("alpha", 1.0) == node.get_attribute("beta", 1.0) == 1.0
        plain &= len(sources) < 3 or graph.constants[sources[2]].size == graph.shapes[node.output][1]
        return plain and bool(np.allclose(bias, wanted, rtol=1e-4)) and not node.get_attribute("transA", 0)
    if node.op == "MatMul":
        weight, rank = known.params[sources[1]], len(graph.get_shape(sources[1]))
        along = len(weight.scale) == 1 or weight.axis == 1
        return sources[1] in graph.constants and rank == 2 and along and set(weight.zero_point) == {0}
    if node.op == "Resize":
        return can_resize_integers(graph, node) and (first == out or node.get_attribute("mode", "nearest") == "nearest")
    return node.op in RESCALING_OPERATORS or node.op in SCALE_PRESERVING_OPERATORS


def _convert_node(
    graph: SegmentGraph, node: SegmentNode, last: SegmentNode, known: _QuantizedTensors
) -> tuple[SegmentGraph, list[SegmentNode]]:
    """Return the graph with the tensors of an integer version of `node`, and the nodes of this version.

    `last` is the QuantizeLinear that reads the node's output. If TFLite requires equal quantizations of inputs and
    output, nodes that change the quantization are added.
    """
    inputs = [known.dequantized[n].inputs[0] if n in known.dequantized else n for n in node.inputs]
    output, params = last.output, dict(graph.quantizations)
    shapes, dtypes, nodes = dict(graph.shapes), dict(graph.dtypes), list[SegmentNode]()
    if node.op == "Concat":
        for i, name in enumerate(inputs):
            if params[name] != params[output]:
                inputs[i] = f"{output}/{i}"
                params[inputs[i]], shapes[inputs[i]], dtypes[inputs[i]] = params[output], graph.get_shape(name), "int8"
                nodes.append(SegmentNode("Requantise", f"{node.name}/{i}", (name,), (inputs[i],)))
    elif node.op in SCALE_PRESERVING_OPERATORS and params[inputs[0]] != params[output]:
        between = f"{output}/before"
        params[between], shapes[between], dtypes[between] = params[inputs[0]], shapes[output], "int8"
        again = SegmentNode("Requantise", f"{node.name}/after", (between,), (output,))
        changed = replace(graph, quantizations=params, shapes=shapes, dtypes=dtypes)
        return changed, [replace(node, inputs=tuple(inputs), outputs=(between,)), again]
    nodes.append(replace(node, inputs=tuple(inputs), outputs=(output,)))
    return replace(graph, quantizations=params, shapes=shapes, dtypes=dtypes), nodes


def _dequantize_constants(graph: SegmentGraph) -> SegmentGraph:
    constants, nodes = dict(graph.constants), list[SegmentNode]()
    for node in graph.nodes:
        if node.op == DEQUANTIZE_OP and node.inputs[0] in constants:
            value, params = constants[node.inputs[0]].astype(np.float64), read_parameters(graph, node)
            shape = [1] * value.ndim
            if len(params.scale) > 1:
                shape[params.axis] = -1
            scale, zero = (
                np.asarray(numbers).reshape(shape if value.ndim else ())
                for numbers in (params.scale, params.zero_point)
            )
            constants[node.output] = ((value - zero) * scale).astype(np.float32)
        else:
            nodes.append(node)
    return replace(graph, constants=constants, nodes=tuple(nodes))
