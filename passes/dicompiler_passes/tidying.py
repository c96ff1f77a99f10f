"""The rewrites that bring a model into its normal form; each takes a draft and edits it.

In: a Draft. Out: the same draft, in which outputs come from nodes, Splits are Slices and nothing is unread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from dicompiler.ir.regions import Interval
from dicompiler.ir.rule import Tensor
from dicompiler_passes.draft import Draft, all_reads, int64, keep
from dicompiler_passes.folding import STANDARD

_FIRST_IR_WITH_FREE_INITIALIZERS = 4


def fix_initializers(draft: Draft) -> None:
    """Initializers are no longer graph inputs, so that a caller cannot override them: their value is compiled in.

    IR version 3 demands that they are inputs, so it becomes 4, which differs from 3 in just this.
    """
    initializers = draft.initializers
    keep(draft.graph.input, [value for value in draft.graph.input if value.name not in initializers])
    draft.proto.ir_version = max(draft.proto.ir_version, _FIRST_IR_WITH_FREE_INITIALIZERS)


def outputs_from_nodes(draft: Draft) -> None:
    """Every graph output gets a node of its own that makes it: an Identity where there is none.

    (w, an initializer) → output w         ⇒  (w_value) → Identity → w
    a → output a and again output a        ⇒  a and Identity(a) → a_1
    (x, a graph input) → output x          ⇒  x → Identity → x_1    (a name cannot stand for both)
    """
    inputs, initializers, seen = {v.name for v in draft.graph.input}, draft.initializers, set[str]()
    for value in draft.graph.output:
        name = value.name
        if name in seen or name in inputs:
            value.name = draft.name(name)
            _identity(draft, name, value.name)
        elif name in initializers:
            constant = draft.name(f"{name}_value")
            draft.rename_initializer(name, constant)
            _identity(draft, constant, name)
        seen.update((name, value.name))


def _identity(draft: Draft, source: str, target: str) -> None:
    draft.graph.node.add(op_type="Identity", name=draft.node_name(target), input=[source], output=[target])


def trim_outputs(draft: Draft) -> None:
    """Optional outputs that nobody reads go: Dropout → y, mask  ⇒  Dropout → y. Nodes in training mode stay."""
    read, opset = all_reads(draft.graph), draft.opset()
    for node in draft.graph.node:
        training = any(a.name == "training_mode" and a.i for a in node.attribute)
        if node.domain not in STANDARD or training or not onnx.defs.has(node.op_type):
            continue
        last = len(node.output)
        while last > 1 and node.output[last - 1] not in read and _is_optional(node.op_type, last - 1, opset):
            last -= 1
        del node.output[last:]


def _is_optional(op: str, index: int, opset: int) -> bool:
    """Whether output `index` of the standard operator may be left out."""
    try:
        outputs = onnx.defs.get_schema(op, max_inclusive_version=opset).outputs
    except onnx.defs.SchemaError:
        return False
    return index < len(outputs) and outputs[index].option == onnx.defs.OpSchema.FormalParameterOption.Optional


def split_to_slices(draft: Draft, tensors: Mapping[str, Tensor]) -> bool:
    """Each used output of a Split gets a Slice of its own; whether there was one.

    Split(x, axis=1, sizes 2, 3) → a, b     ⇒  Slice(x, 0:2) → a,  Slice(x, 2:5) → b

    Because a layer has one output that is cut. A Split stays where its sizes are not known: not constant, or equal
    shares of an axis that is not static in `tensors` (run infer-shapes).
    """
    read, opset = all_reads(draft.graph), draft.opset()
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in draft.graph.node:
        cuts = _cuts(node, opset, tensors) if node.op_type == "Split" and node.domain in STANDARD else None
        if cuts is None:
            nodes.append(node)
            continue
        axis, intervals = cuts
        changed = True
        for output, interval in zip(node.output, intervals, strict=True):
            if output in read:
                nodes.append(_slice(draft, node, output, axis, interval, opset))
    if changed:
        keep(draft.graph.node, nodes)
    return changed


def _cuts(node: onnx.NodeProto, opset: int, tensors: Mapping[str, Tensor]) -> tuple[int, Sequence[Interval]] | None:
    """The axis and, per output, the interval of it that a Split cuts out; None where that is not known.

    The sizes are an input from opset 13 on (and in opset 1), an attribute before; without them the shares are equal,
    and from opset 18 on the last may be smaller.
    """
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    axis = int(attributes.get("axis", 0))
    source = tensors.get(node.input[0])
    sizes: Sequence[int] | None = attributes.get("split")
    if sizes is None and len(node.input) > 1 and node.input[1]:
        given = tensors.get(node.input[1])
        if given is None or given.value is None:
            return None
        sizes = [int(size) for size in given.value]
    if sizes is None:
        if source is None or source.shape is None:
            return None
        extent, count = source.shape[axis], len(node.output)
        share = math.ceil(extent / count)
        if extent % count and opset < 18:
            return None
        sizes = [max(0, min(share, extent - share * index)) for index in range(count)]
    if len(sizes) != len(node.output):
        return None
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return axis, [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def scalar_ranges(draft: Draft, tensors: Mapping[str, Tensor]) -> bool:
    """Range gets scalars; whether there was one that did not.

    (x of shape [1]) → Range                ⇒  x → Reshape → Range

    onnxruntime computes such a Range, yet refuses to load it where it can see the shape, as in a part of the model.
    """
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in draft.graph.node:
        for index, name in enumerate(node.input if node.op_type == "Range" and node.domain in STANDARD else ()):
            if name in tensors and tensors[name].shape == (1,):
                shape, scalar = draft.name(f"{name}_no_axes"), draft.name(f"{name}_scalar")
                draft.put(shape, int64())
                title = draft.node_name(scalar)
                nodes.append(onnx.helper.make_node("Reshape", [name, shape], [scalar], title, domain=node.domain))
                node.input[index] = scalar
                changed = True
        nodes.append(node)
    if changed:
        keep(draft.graph.node, nodes)
    return changed


def _slice(
    draft: Draft, split: onnx.NodeProto, output: str, axis: int, interval: Interval, opset: int
) -> onnx.NodeProto:
    """A Slice of the split's input; attributes before opset 10, inputs from then on."""
    index = list(split.output).index(output)
    node = onnx.NodeProto(op_type="Slice", domain=split.domain, name=draft.node_name(f"{split.name}_{index}"))
    node.metadata_props.extend(split.metadata_props)
    if split.HasField("doc_string"):
        node.doc_string = split.doc_string
    if not split.HasField("domain"):
        node.ClearField("domain")
    values: dict[str, Any] = {"starts": interval[0], "ends": interval[1], "axes": axis}
    node.input.append(split.input[0])
    node.output.append(output)
    for key, value in values.items():
        if opset < 10:
            node.attribute.append(onnx.helper.make_attribute(key, [value]))
        else:
            name = draft.name(f"{node.name}_{key}")
            draft.put(name, int64(value))
            node.input.append(name)
    return node
