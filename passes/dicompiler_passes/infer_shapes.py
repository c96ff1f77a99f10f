"""The pass `infer-shapes`: gives the graph's inputs their sizes and every tensor its type and shape.

In: a Model, and sizes for the dimensions that it leaves open. Out: the model with value_info for all that onnx can
infer, in which the computations of shapes have become constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import onnx

from dicompiler.base.errors import DicompilerError, UsageError, nearest
from dicompiler.ir.compilation import Compilation
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.regions import Shape
from dicompiler.ir.rule import Tensor
from dicompiler.plugin.passes import Pass
from dicompiler_passes.draft import Draft, int64, keep
from dicompiler_passes.folding import STANDARD, fold
from dicompiler_passes.tidying import outputs_from_nodes, scalar_ranges, split_to_slices

_EXAMPLE = (1, 3, 224, 224)


@dataclass(frozen=True)
class InferShapes(Pass):
    """Sets the inputs' sizes, infers every tensor's shape, and folds what computes shapes.

    x: [N, 3, H, W], shape=x=1x3x224x224         ⇒  x: [1, 3, 224, 224]; N, H, W are known wherever they stand
    Shape(x) → Gather → Concat → Reshape(y, ·)   ⇒  Reshape(y, (constant))
    Split → a, b into equal shares               ⇒  Slice → a, Slice → b
    node of which only the shape was read        ⇒  (gone)

    shape: `input=1x3x224x224`, for any number of inputs; a dimension that is a number already must be the same. In a
    pipeline's text it is quoted: infer-shapes{shape="x=1x3x224x224"}.
    """

    name: ClassVar[str] = "infer-shapes"

    shape: tuple[str, ...] = ()

    def run(self, compilation: Compilation) -> Compilation:
        """Replaces the model. UsageError for an unknown input; DicompilerError where a dimension is left open."""
        return replace(compilation, model=infer_shapes(compilation.model, parse_shapes(self.shape)))


def parse_shapes(texts: Iterable[str]) -> dict[str, Shape]:
    """("x=1x3x224x224",) → {"x": (1, 3, 224, 224)}; `x=` is a scalar. UsageError for anything else."""
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        parts = dims.split("x") if dims else []
        if not equals or not name or not all(part.isdecimal() for part in parts):
            raise UsageError(f"shape {text!r} is not of the form input=1x3x224x224")
        if name in shapes:
            raise UsageError(f"shape {text!r}: input {name!r} has a shape already: give each input one")
        shapes[name] = tuple(int(part) for part in parts)
    return shapes


def infer_shapes(model: Model, shapes: Mapping[str, Shape]) -> Model:
    """The model with the sizes `shapes` of its inputs, and all that follows from them."""
    draft = Draft(model)
    sizes = _bind(draft, shapes)
    for value in (*draft.graph.input, *draft.graph.output, *draft.graph.value_info):
        _substitute(value, sizes)
    model = draft.model()
    hints = [*model.proto.graph.value_info, *model.proto.graph.output]
    while True:
        model = _infer(fold(model), hints)
        draft = Draft(model)
        tensors = model.tensors()
        if not (_fold_shapes(draft, tensors) or split_to_slices(draft, tensors) or scalar_ranges(draft, tensors)):
            break
        model = draft.model()
    if shapes:
        _check_sizes(model)
    draft.prune()
    outputs_from_nodes(draft)
    return draft.model()


# --- the inputs' sizes --------------------------------------------------------------------------------------------


def _bind(draft: Draft, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Gives the graph's inputs their shapes. Returns the size of every dimension that had a name ("N" → 1)."""
    initializers = draft.initializers
    inputs = {value.name: value for value in draft.graph.input if value.name not in initializers}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise UsageError(f"shape: the model has no input {name!r}{nearest(name, inputs)}")
        _bind_input(inputs[name], shape, sizes)
    for value in inputs.values():
        _substitute(value, sizes)
        _check_static(value)
    return sizes


def _bind_input(value: onnx.ValueInfoProto, shape: Shape, sizes: dict[str, int]) -> None:
    """Sets one input's shape, and the `sizes` of its named dimensions."""
    text = "x".join(map(str, shape))
    if not value.type.HasField("tensor_type"):
        raise DicompilerError(f"shape {value.name}={text}: this input is no tensor: leave it out")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        tensor.shape.SetInParent()
        for _ in shape:
            tensor.shape.dim.add()
    if len(tensor.shape.dim) != len(shape):
        raise DicompilerError(
            f"shape {value.name}={text}: the input has {len(tensor.shape.dim)} dimensions: {_example(value)}"
        )
    for axis, (dim, size) in enumerate(zip(tensor.shape.dim, shape, strict=True)):
        fixed = dim.dim_value if _is_static(dim) else sizes.setdefault(dim.dim_param, size) if dim.dim_param else size
        if fixed != size:
            raise DicompilerError(
                f"shape {value.name}={text}: dimension {axis} is {size} where the model has {fixed}: {_example(value)}"
            )
        dim.dim_value = size


def _is_static(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether the dimension is a size; some exporters write -1 for an open one."""
    return dim.HasField("dim_value") and dim.dim_value >= 0


def _check_static(value: onnx.ValueInfoProto) -> None:
    """DicompilerError where the input's shape is not known; an input that is no tensor has none."""
    if not value.type.HasField("tensor_type"):
        return
    if not value.type.tensor_type.HasField("shape"):
        raise DicompilerError(f"infer-shapes: input {value.name!r} has no shape: {_example(value)}")
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        if not _is_static(dim):
            called = f" ({dim.dim_param!r})" if dim.dim_param else ""
            raise DicompilerError(
                f"infer-shapes: dimension {axis}{called} of input {value.name!r} is open: {_example(value)}"
            )


def _example(value: onnx.ValueInfoProto) -> str:
    """The remedy: a size for each dimension, its own where it is known."""
    dims = value.type.tensor_type.shape.dim or [onnx.TensorShapeProto.Dimension()] * len(_EXAMPLE)
    usual = [*_EXAMPLE, *([1] * len(dims))]
    sizes = [dim.dim_value if _is_static(dim) else usual[axis] for axis, dim in enumerate(dims)]
    return f"give it as --shape {value.name}={'x'.join(map(str, sizes))}"


def _substitute(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> None:
    """Named dimensions of which the size is known become numbers."""
    for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]


# --- what follows from them ---------------------------------------------------------------------------------------


def _infer(model: Model, hints: Iterable[onnx.ValueInfoProto]) -> Model:
    """The model with the value_info that onnx infers from its inputs.

    What the file said before (`hints`, of outputs too) counts only where onnx finds no static shape, as after an
    operator that it does not know: an exporter may have written other sizes there.
    """
    bare = _without_shapes(model)
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    found = Model(inferred).tensors()
    made = {name for node in bare.graph.node for name in node.output}
    missing = {v.name: v for v in hints if v.name in made and (v.name not in found or found[v.name].shape is None)}
    if missing:
        bare.graph.value_info.extend(v for name, v in missing.items() if name not in _names(bare.graph.output))
        for value in bare.graph.output:
            if value.name in missing:
                value.CopyFrom(missing[value.name])
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    draft = Draft(model)
    keep(draft.graph.value_info, list(inferred.graph.value_info))
    for value, now in zip(draft.graph.output, inferred.graph.output, strict=True):
        if now.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.CopyFrom(now.type.tensor_type.shape)
    return draft.model()


def _without_shapes(model: Model) -> onnx.ModelProto:
    """The model without weights in which only inputs and initializers have shapes."""
    bare = model.light()
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return bare


def _names(values: Iterable[onnx.ValueInfoProto]) -> set[str]:
    return {value.name for value in values}


def _check_sizes(model: Model) -> None:
    """DicompilerError where the sizes that the user gave do not fit each other further inside, as in a MatMul."""
    try:
        onnx.shape_inference.infer_shapes(_without_shapes(model), strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        cause = " ".join(str(error).split())
        raise DicompilerError(f"infer-shapes: the given shapes do not fit the model: {cause}") from error


def _fold_shapes(draft: Draft, tensors: Mapping[str, Tensor]) -> bool:
    """Shape and Size of a tensor of static shape → their value; whether there was one."""
    nodes: list[onnx.NodeProto] = []
    for node in draft.graph.node:
        source = tensors.get(node.input[0]) if node.input else None
        folds = node.op_type in ("Shape", "Size") and node.domain in STANDARD
        if not folds or source is None or source.shape is None:
            nodes.append(node)
        elif node.op_type == "Size":
            draft.put(node.output[0], int64(math.prod(source.shape)).reshape(()))
        else:
            bounds: dict[str, Any] = {a.name: a.i for a in node.attribute}
            draft.put(node.output[0], int64(*source.shape[slice(bounds.get("start", 0), bounds.get("end"))]))
    changed = len(nodes) < len(draft.graph.node)
    if changed:
        keep(draft.graph.node, nodes)
    return changed
