"""Construction of a TFLite graph with as few transposes as possible.

A tensor has one of two forms: "image" (four axes with channels last: N, H, W, C) or "plain" (ONNX's order of axes).
Between operators and between devices, tensors with four axes are images, and all others are plain. A tensor is
converted to the other form only if an operator needs it, and at most once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Shape
from dicompiler.plugin_api.costs import peak_nbytes
from dicompiler_targets.tflm.flatbuffer import (
    QuantizationParams,
    TfliteOperation,
    TfliteTensor,
    collect_operator_codes,
    serialize_model,
)
from dicompiler_targets.tflm.graph import SegmentGraph, select_needed

AxisForm = Literal["image", "plain"]
NCHW_TO_NHWC = (0, 2, 3, 1)
"""The positions of the axes N, H, W, C in ONNX's order (N, C, H, W)."""
NHWC_TO_NCHW = (0, 3, 1, 2)


def get_natural_form(shape: Shape) -> AxisForm:
    """Return "image" (channels last) for four axes, else "plain" (ONNX's order)."""
    return "image" if len(shape) == 4 else "plain"


def permute(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in order)


def merge_transpose_axes(shape: Shape, order: Sequence[int]) -> tuple[Shape, tuple[int, ...]]:
    """Return shape and order of a transpose without axes of length 1, and with adjacent axes merged.

    The order is sorted if the transpose does not move any byte.
    """
    kept = [axis for axis in order if shape[axis] != 1]
    groups: list[list[int]] = []
    ranks = {axis: i for i, axis in enumerate(sorted(kept))}
    for axis in kept:
        if groups and ranks[groups[-1][-1]] + 1 == ranks[axis]:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    first = sorted(groups)
    return tuple(math.prod(shape[a] for a in group) for group in first), tuple(first.index(group) for group in groups)


class TfliteWriter:
    """A TFLite graph under construction. A tensor is identified by its ONNX name and its form (axis order)."""

    def __init__(self, graph: SegmentGraph) -> None:
        self.graph = graph
        self.tensors: list[TfliteTensor] = []
        self.operations: list[TfliteOperation] = []
        self.flattened_images: dict[str, str] = {}
        """For each matrix that is an image flattened from axis 1 on, by name: the image's name.

        `require_tensor` adds the RESHAPE from the image to the matrix only when an operator needs the matrix.
        """
        self._tensor_indices: dict[tuple[str, AxisForm], int] = {}
        self._constants: dict[tuple[str, Shape, bytes, QuantizationParams | None], int] = {}
        self._reshape_sources: dict[int, int] = {}
        """For each result of a RESHAPE (a tensor index), the input of the RESHAPE.

        A second RESHAPE reads that input directly, so that no chain of RESHAPEs is built.
        """
        for name in graph.inputs:
            self.add_output(name, get_natural_form(graph.shapes[name]))

    # -- finding and adding tensors

    def get_form(self, name: str) -> AxisForm:
        """Return the form (axis order) in which the TFLite graph has a tensor: "image" (channels last) or "plain".

        If the graph has both, it is "image" for four axes, else "plain".
        """
        known = get_natural_form(self.graph.get_shape(name))
        other: AxisForm = "plain" if known == "image" else "image"
        return other if (name, other) in self._tensor_indices and (name, known) not in self._tensor_indices else known

    def get_shape(self, index: int) -> Shape:
        return self.tensors[index].shape

    def add_tensor(self, name: str, dtype: str, shape: Shape, quantization: QuantizationParams | None = None) -> int:
        """Add a tensor that an operation computes, and return its index among the graph's tensors.

        `shape` has the axis order of the TFLite graph.
        """
        self.tensors.append(TfliteTensor(name, dtype, tuple(map(int, shape)), None, quantization))
        return len(self.tensors) - 1

    def add_output(self, name: str, form: AxisForm) -> int:
        shape = self.graph.shapes[name]
        stored_shape = permute(shape, NCHW_TO_NHWC) if form == "image" else shape
        index = self.add_tensor(name, self.graph.dtypes[name], stored_shape, self.graph.quantizations.get(name))
        self._tensor_indices[name, form] = index
        return index

    def set_alias(self, name: str, form: AxisForm, index: int) -> None:
        """Let the ONNX tensor `name`, in the given form (axis order), be the existing TFLite tensor `index`."""
        self._tensor_indices[name, form] = index

    def add_constant(
        self, data: NDArray[Any], name: str = "constant", quantization: QuantizationParams | None = None
    ) -> int:
        """Add a constant tensor, unless an equal one exists; return the tensor's index."""
        array = np.ascontiguousarray(data)
        array = array.astype(np.int32) if array.dtype == np.int64 else array
        key = (str(array.dtype), array.shape, array.tobytes(), quantization)
        if key not in self._constants:
            self.tensors.append(TfliteTensor(name, str(array.dtype), array.shape, array, quantization))
            self._constants[key] = len(self.tensors) - 1
        return self._constants[key]

    def add_like(self, index: int, shape: Shape, name: str = "") -> int:
        tensor = self.tensors[index]
        quantization = tensor.quantization
        return self.add_tensor(name or f"{tensor.name}/{len(self.tensors)}", tensor.dtype, shape, quantization)

    def require_tensor(self, name: str, form: AxisForm = "plain") -> int:
        """Return the TFLite index of a tensor in the given form (axis order); convert the tensor if necessary."""
        if (name, form) in self._tensor_indices:
            return self._tensor_indices[name, form]
        if name in self.graph.constants:
            value = self.graph.constants[name]
            index = self.add_constant(
                value.transpose(NCHW_TO_NHWC) if form == "image" else value, name, self.graph.quantizations.get(name)
            )
        elif name in self.flattened_images:
            index = self.add_reshape(self.require_tensor(self.flattened_images[name]), self.graph.shapes[name])
        else:
            other: AxisForm = "plain" if form == "image" else "image"
            source = self._tensor_indices[name, other]
            index = self.add_transpose(source, NCHW_TO_NHWC if form == "image" else NHWC_TO_NCHW)
        self._tensor_indices[name, form] = index
        return index

    def require_known_form(self, name: str) -> tuple[int, AxisForm]:
        """Return a tensor's index in the TFLite graph, and the form (axis order) in which the graph already has it."""
        form = self.get_form(name)
        return self.require_tensor(name, form), form

    # -- adding operations

    def add_operation(
        self, code: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **values: Any
    ) -> None:
        """Add an operation with TFLite's operator `code`.

        `options` is the name of the operator's options table without "Options", and `values` are the table's fields.
        """
        self.operations.append(TfliteOperation(code, tuple(inputs), tuple(outputs), options, values))

    def add_reshape(self, index: int, shape: Shape, output: int | None = None) -> int:
        """Add a RESHAPE of the tensor with this index if the shape changes; return the result's tensor index."""
        source = self._reshape_sources.get(index, index)
        if output is None and tuple(shape) in (self.get_shape(source), self.get_shape(index)):
            return source if self.get_shape(source) == tuple(shape) else index
        index = source
        result = self.add_like(index, shape) if output is None else output
        self._reshape_sources[result] = index
        target = self.add_constant(np.asarray(shape, np.int32), "shape")
        self.add_operation("RESHAPE", [index, target], [result], "Reshape", NewShape=shape)
        return result

    def add_transpose(self, index: int, order: Sequence[int], output: int | None = None) -> int:
        """Add a TRANSPOSE over as few axes as possible, or a RESHAPE if no byte moves; return the result's index."""
        shape = self.get_shape(index)
        target = permute(shape, order)
        small, axes = merge_transpose_axes(shape, order)
        if axes == tuple(sorted(axes)):
            return self.add_reshape(index, target, output)
        if (small, axes) == (shape, tuple(order)):
            result = self.add_like(index, target) if output is None else output
            self.add_operation(
                "TRANSPOSE", [index, self.add_constant(np.asarray(axes, np.int32), "axes")], [result], "Transpose"
            )
            return result
        narrow = self.add_reshape(index, small)
        moved = self.add_like(index, permute(small, axes))
        self.add_operation(
            "TRANSPOSE", [narrow, self.add_constant(np.asarray(axes, np.int32), "axes")], [moved], "Transpose"
        )
        return self.add_reshape(moved, target, output)

    def finish(self) -> tuple[bytes, tuple[str, ...], int]:
        """Return the .tflite file, the names of the operators that it uses, and the peak bytes of its tensors.

        Outputs with four axes have channels last, all others have ONNX's order of axes.
        """
        inputs = [self.require_tensor(name, get_natural_form(self.graph.shapes[name])) for name in self.graph.inputs]
        outputs: list[int] = []
        for name in self.graph.outputs:
            index = self.require_tensor(name, get_natural_form(self.graph.shapes[name]))
            if index in inputs or index in outputs or self.tensors[index].data is not None:
                self._reshape_sources.pop(index, None)
                index = self.add_reshape(
                    index, self.get_shape(index), self.add_like(index, self.get_shape(index), name)
                )
            outputs.append(index)
        operations = select_needed(self.operations, outputs)
        used = {*inputs, *outputs, *(i for operation in operations for i in (*operation.inputs, *operation.outputs))}
        new_indices = {index: new_index for new_index, index in enumerate(sorted(used - {-1}))} | {-1: -1}
        moved = [
            replace(
                operation,
                inputs=tuple(new_indices[i] for i in operation.inputs),
                outputs=tuple(new_indices[i] for i in operation.outputs),
            )
            for operation in operations
        ]
        tensors = [self.tensors[index] for index in sorted(used - {-1})]
        data = serialize_model(tensors, moved, [new_indices[i] for i in inputs], [new_indices[i] for i in outputs])
        return data, collect_operator_codes(moved), self._count_activation_bytes(operations, inputs, outputs)

    def _count_activation_bytes(
        self, operations: Sequence[TfliteOperation], inputs: Sequence[int], outputs: Sequence[int]
    ) -> int:
        """Return the maximum bytes of tensors that exist at the same time, without constants."""
        first = dict.fromkeys(inputs, 0)
        last = dict(first)
        for time, operation in enumerate(operations, 1):
            first |= {index: time for index in operation.outputs if index not in first}
            last |= dict.fromkeys((*operation.inputs, *operation.outputs), time)
        last |= dict.fromkeys(outputs, len(operations) + 1)
        return peak_nbytes((first[index], last[index], self.tensors[index].nbytes) for index in first)
