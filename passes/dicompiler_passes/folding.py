"""Constant folding: what depends on constants only is computed once, here, by onnxruntime itself.

In: a Model. Out: the same model, in which the results are initializers and the nodes that made them are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import bodies, captures, node_reads
from dicompiler.ir.onnx.weights import array_dtype, dense
from dicompiler_passes.draft import Draft, all_reads, keep, rename_reads

STANDARD = ("", "ai.onnx")

RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)
"""Operators whose result is another one each time."""

KEPT = ("DequantizeLinear",)
"""Operators whose result is larger than what they are given: a quantised weight stays so up to where it is read."""

NOT_TENSORS = frozenset(
    "Optional SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap SplitToSequence".split()
)
"""Operators whose result is no tensor, so that no initializer can hold it."""

_CONSTANT_NUMBERS: Mapping[str, type[np.generic]] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def fold(model: Model) -> Model:
    """Computes every node whose inputs are all constants, and what follows from it; `model` itself where none is.

    Constant → (initializer);  ConstantOfShape, Transpose(w), Concat(a, b) … → (initializer);  Identity(w) → w.
    Not folded: DequantizeLinear, random operators, operators of other domains, control flow that reads tensors around
    it, and what onnxruntime cannot compute (then the node stays). An initializer that is a graph input too is not
    constant. A graph output that is constant is an initializer afterwards.
    """
    draft = Draft(model)
    lifted = draft.lift()
    constants, outputs = draft.constants, draft.outputs
    renamed: dict[str, str] = {}
    kept: dict[int, onnx.NodeProto] = {}
    pending: dict[int, onnx.NodeProto] = {}
    for index, node in enumerate(draft.graph.node):
        rename_reads(node, renamed)
        if not foldable(node, constants) or (node.op_type == "Identity" and node.output[0] in outputs):
            kept[index] = node  # such an Identity is there to give the output its name
            continue
        if node.op_type == "Constant":
            _put_constant(draft, node)
        elif node.op_type == "Identity":
            renamed[node.output[0]] = node.input[0]
        else:
            pending[index] = node
        constants.update(name for name in node.output if name)
    if not lifted and len(kept) == len(draft.graph.node):
        return model
    kept |= _compute(draft, pending, {name for node in kept.values() for name in node_reads(node)} | outputs)
    keep(draft.graph.node, [kept[index] for index in sorted(kept)])
    _drop_consumed(draft, model)
    return draft.model()


def _drop_consumed(draft: Draft, before: Model) -> None:
    """Drops the initializers that only folded nodes read; one that nobody ever read is not ours to drop."""
    untouched = set(before.initializers()) - all_reads(before.proto.graph)
    live = all_reads(draft.graph) | {value.name for value in draft.graph.input} | untouched
    keep(draft.graph.initializer, [t for t in draft.graph.initializer if t.name in live])


def foldable(node: onnx.NodeProto, constants: set[str]) -> bool:
    """Whether the node gives the same tensors each time, and those from `constants` alone."""
    if node.domain not in STANDARD or not any(node.output) or not constants.issuperset(filter(None, node.input)):
        return False
    return node.op_type not in (*KEPT, *NOT_TENSORS) and _repeats(node) and not captures(node)


def _repeats(node: onnx.NodeProto) -> bool:
    """Whether the node, and all in its bodies, gives the same result each time."""
    if node.op_type in RANDOM or (node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]):
        return False
    return all(_repeats(inner) for body in bodies(node) for inner in body.node)


def _put_constant(draft: Draft, node: onnx.NodeProto) -> None:
    """A Constant node's value as the initializer of its output's name."""
    (attribute,) = node.attribute
    name = node.output[0]
    if attribute.name == "value":
        draft.put_tensor(name, attribute.t)
    elif attribute.name == "sparse_value":
        draft.put(name, dense(attribute.sparse_tensor))
    elif attribute.name in ("value_string", "value_strings"):
        value = onnx.helper.get_attribute_value(attribute)
        shape = () if attribute.name == "value_string" else (len(value),)
        texts = [value] if attribute.name == "value_string" else list(value)
        draft.graph.initializer.add(name=name, data_type=onnx.TensorProto.STRING, dims=shape, string_data=texts)
    else:
        draft.put(name, np.array(onnx.helper.get_attribute_value(attribute), _CONSTANT_NUMBERS[attribute.name]))


def _compute(draft: Draft, pending: dict[int, onnx.NodeProto], read: set[str]) -> dict[int, onnx.NodeProto]:
    """Puts what `pending` computes of `read` into the draft. Returns those that onnxruntime could not compute."""
    if not pending:
        return {}
    source = draft.model()
    made = {name for node in pending.values() for name in node.output if name}
    try:
        found = _run(list(pending.values()), sorted(made & read), source, {})
    except _Refused:
        found, failed = _compute_singly(pending, source)
    else:
        failed = {}
    still = {name for node in failed.values() for name in node_reads(node)}
    for name in sorted(found.keys() & (read | still)):
        draft.put(name, found[name])
    return failed


def _compute_singly(
    pending: dict[int, onnx.NodeProto], source: Model
) -> tuple[dict[str, NDArray[Any]], dict[int, onnx.NodeProto]]:
    """All results that can be had, and the nodes that cannot be computed, with what follows from them."""
    found: dict[str, NDArray[Any]] = {}
    failed: dict[int, onnx.NodeProto] = {}
    missing: set[str] = set()
    for index, node in pending.items():
        try:
            if not missing.isdisjoint(node.input):
                raise _Refused
            found |= _run([node], [name for name in node.output if name], source, found)
        except _Refused:
            failed[index] = node
            missing.update(node.output)
    return found, failed


class _Refused(Exception):
    """onnxruntime cannot compute it."""


def _run(
    nodes: Sequence[onnx.NodeProto], wanted: Sequence[str], source: Model, found: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The values of `wanted`, which `nodes` make of the initializers of `source` and of `found`."""
    import onnxruntime

    made = {name for node in nodes for name in node.output}
    needed = sorted({name for node in nodes for name in node.input if name} - made)
    graph = onnx.GraphProto(name="constants", node=nodes, output=[onnx.ValueInfoProto(name=name) for name in wanted])
    feeds: dict[str, NDArray[Any]] = {}
    for name in needed:
        array = found[name] if name in found else source.array(name)
        if array.dtype.kind == "V":  # numpy does not know such a type (bfloat16 …), so it cannot be fed
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        else:
            feeds[name] = np.require(array, requirements=["C", "A"])
            graph.input.append(onnx.helper.make_tensor_value_info(name, array_dtype(array), array.shape))
    model = onnx.ModelProto(ir_version=max(4, source.proto.ir_version), graph=graph)
    model.opset_import.extend(source.proto.opset_import)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = session.run(list(wanted), feeds)
    except Exception as error:  # onnxruntime's exceptions have no other common base
        raise _Refused from error
    if not all(isinstance(value, np.ndarray) for value in values):
        raise _Refused
    return dict(zip(wanted, values, strict=True))
