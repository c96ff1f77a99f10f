"""Writes one TFLite graph, and keeps the order of axes in which each tensor is held there, so that few transposes do.

Tensors of rank 4 are held as images, channels last (N, H, W, C), from one operator to the next and between devices:
this is the layout on the wire. All others are held plain, in ONNX's order. A tensor is brought into the other order
only where an operator asks for it, once, and by a RESHAPE where the bytes are the same.
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
"""The axes of ONNX's (N, C, H, W) in the order in which an image holds them."""
NHWC_TO_NCHW = (0, 3, 1, 2)


def get_natural_form(shape: Shape) -> AxisForm:
    """The form in which a tensor of this shape crosses the borders of a segment."""
    return "image" if len(shape) == 4 else "plain"


def permute(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The entries of `shape` in that order."""
    return tuple(shape[axis] for axis in order)


def merge_transpose_axes(shape: Shape, order: Sequence[int]) -> tuple[Shape, tuple[int, ...]]:
    """The same move of memory over as few axes as possible: axes of extent 1 dropped, neighbours that stay together
    merged. Returns (shape, order); the order is sorted where nothing moves."""
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
    """A graph of TFLite while it grows. Tensors are found by ONNX's name and form."""

    def __init__(self, graph: SegmentGraph) -> None:
        self.graph = graph
        self.tensors: list[TfliteTensor] = []
        self.operations: list[TfliteOperation] = []
        self.flattened_images: dict[str, str] = {}
        """Matrices that are images flattened from axis 1 on, not made yet: → the image."""
        self._held: dict[tuple[str, AxisForm], int] = {}
        self._constants: dict[tuple[str, Shape, bytes, QuantizationParams | None], int] = {}
        self._reshape_sources: dict[int, int] = {}
        """What RESHAPE made → what it was made from: a second RESHAPE starts there."""
        for name in graph.inputs:
            self.add_output(name, get_natural_form(graph.shapes[name]))

    # -- tensors

    def get_form(self, name: str) -> AxisForm:
        """The form in which the tensor is held; the natural one where it is held in both."""
        known = get_natural_form(self.graph.get_shape(name))
        other: AxisForm = "plain" if known == "image" else "image"
        return other if (name, other) in self._held and (name, known) not in self._held else known

    def get_shape(self, index: int) -> Shape:
        """The shape of a TFLite tensor."""
        return self.tensors[index].shape

    def add_tensor(self, name: str, dtype: str, shape: Shape, quantisation: QuantizationParams | None = None) -> int:
        """A tensor more, by its TFLite shape."""
        self.tensors.append(TfliteTensor(name, dtype, tuple(map(int, shape)), None, quantisation))
        return len(self.tensors) - 1

    def add_output(self, name: str, form: AxisForm) -> int:
        """The tensor that some operation is about to make, held in this form."""
        shape = self.graph.shapes[name]
        held = permute(shape, NCHW_TO_NHWC) if form == "image" else shape
        index = self.add_tensor(name, self.graph.dtypes[name], held, self.graph.quantizations.get(name))
        self._held[name, form] = index
        return index

    def set_alias(self, name: str, form: AxisForm, index: int) -> None:
        """`name` is what the tensor at `index` holds."""
        self._held[name, form] = index

    def add_constant(
        self, data: NDArray[Any], name: str = "constant", quantisation: QuantizationParams | None = None
    ) -> int:
        """A constant; equal ones are held once."""
        array = np.ascontiguousarray(data)
        array = array.astype(np.int32) if array.dtype == np.int64 else array
        key = (str(array.dtype), array.shape, array.tobytes(), quantisation)
        if key not in self._constants:
            self.tensors.append(TfliteTensor(name, str(array.dtype), array.shape, array, quantisation))
            self._constants[key] = len(self.tensors) - 1
        return self._constants[key]

    def add_like(self, index: int, shape: Shape, name: str = "") -> int:
        """A tensor of the type of another one, of another shape."""
        tensor = self.tensors[index]
        about = tensor.quantization
        return self.add_tensor(name or f"{tensor.name}/{len(self.tensors)}", tensor.dtype, shape, about)

    def read_tensor(self, name: str, form: AxisForm = "plain") -> int:
        """The tensor in that form, brought into it if need be."""
        if (name, form) in self._held:
            return self._held[name, form]
        if name in self.graph.constants:
            value = self.graph.constants[name]
            index = self.add_constant(
                value.transpose(NCHW_TO_NHWC) if form == "image" else value, name, self.graph.quantizations.get(name)
            )
        elif name in self.flattened_images:
            index = self.add_reshape(self.read_tensor(self.flattened_images[name]), self.graph.shapes[name])
        else:
            other: AxisForm = "plain" if form == "image" else "image"
            source = self._held[name, other]
            index = self.add_transpose(source, NCHW_TO_NHWC if form == "image" else NHWC_TO_NCHW)
        self._held[name, form] = index
        return index

    def read_held(self, name: str) -> tuple[int, AxisForm]:
        """(the tensor as it is held, its form)."""
        form = self.get_form(name)
        return self.read_tensor(name, form), form

    # -- operations

    def add_operation(
        self, code: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **values: Any
    ) -> None:
        """An operation more."""
        self.operations.append(TfliteOperation(code, tuple(inputs), tuple(outputs), options, values))

    def add_reshape(self, index: int, shape: Shape, output: int | None = None) -> int:
        """RESHAPE, where it changes something or must make `output`."""
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
        """TRANSPOSE over as few axes as possible, or RESHAPE where the bytes stay."""
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
        """The file, the operator codes that it uses, and the most bytes that its tensors take at once.

        Outputs are held in their natural forms; each is a tensor of its own that some operation makes.
        """
        inputs = [self.read_tensor(name, get_natural_form(self.graph.shapes[name])) for name in self.graph.inputs]
        outputs: list[int] = []
        for name in self.graph.outputs:
            index = self.read_tensor(name, get_natural_form(self.graph.shapes[name]))
            if index in inputs or index in outputs or self.tensors[index].data is not None:
                self._reshape_sources.pop(index, None)
                index = self.add_reshape(
                    index, self.get_shape(index), self.add_like(index, self.get_shape(index), name)
                )
            outputs.append(index)
        operations = select_needed(self.operations, outputs)
        used = {*inputs, *outputs, *(i for operation in operations for i in (*operation.inputs, *operation.outputs))}
        places = {index: place for place, index in enumerate(sorted(used - {-1}))} | {-1: -1}
        moved = [
            replace(o, inputs=tuple(places[i] for i in o.inputs), outputs=tuple(places[i] for i in o.outputs))
            for o in operations
        ]
        tensors = [self.tensors[index] for index in sorted(used - {-1})]
        data = serialize_model(tensors, moved, [places[i] for i in inputs], [places[i] for i in outputs])
        return data, collect_operator_codes(moved), self._count_activation_bytes(operations, inputs, outputs)

    def _count_activation_bytes(
        self, operations: Sequence[TfliteOperation], inputs: Sequence[int], outputs: Sequence[int]
    ) -> int:
        """The most bytes that tensors take at once: each from the operation that makes it to its last reader."""
        first = dict.fromkeys(inputs, 0)
        last = dict(first)
        for time, operation in enumerate(operations, 1):
            first |= {index: time for index in operation.outputs if index not in first}
            last |= dict.fromkeys((*operation.inputs, *operation.outputs), time)
        last |= dict.fromkeys(outputs, len(operations) + 1)
        return peak_nbytes((first[index], last[index], self.tensors[index].nbytes) for index in first)
