"""Geometry of windows that slide over spatial axes: the output shapes and pads that onnxruntime computes.

Devices compute with onnxruntime, which disagrees with ONNX shape inference about some attributes:

* auto_pad of a pool: onnxruntime computes the pads from the kernel without dilations, and ignores `pads`.
* ceil_mode of a pool: onnxruntime drops a last window that would start outside of the input.
* auto_pad of a ConvTranspose: the output extent is input extent · stride. ONNX adds `output_padding` to it.
* output_shape of a ConvTranspose: ONNX ends its inference at the first axis on which the output is smaller than the
  input.
* keep_aspect_ratio_policy of a Resize: onnxruntime does not resize an axis that the attribute `axes` gives as a
  negative number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicompiler.base.memoize import memoized
from dicompiler.ir.operator_rule import Operation, TensorInfo
from dicompiler.ir.regions import Shape

Attributes = Mapping[str, Any]
Pads = tuple[int, int]
"""Number of pads before the first element of an axis, and after the last."""


@dataclass(frozen=True)
class SpatialAxis:
    """One spatial axis of a convolution or pool.

    Attributes:
        extent: Number of elements over which windows slide: input elements, or output elements of a transposed
            convolution.
        count: Number of windows: output elements, or input elements of a transposed convolution.
        span: Number of elements from the first to the last that a window reads.
        stride: Distance from one window to the next.
        pad_begin: Number of pads before the first element.
        pad_end: Number of pads after the last element.
    """

    extent: int
    count: int
    span: int = 1
    stride: int = 1
    pad_begin: int = 0
    pad_end: int = 0


@dataclass(frozen=True)
class WindowAttributes:
    """The attributes of a convolution or pool that define its windows, with their defaults.

    Attributes:
        kernel: Extent of the kernel along each spatial axis.
        strides: Distance between windows along each axis.
        dilations: Distance between the elements of a window along each axis.
        pads: Pads before all axes, then after all axes.
        auto_pad: NOTSET, VALID, SAME_UPPER or SAME_LOWER.
        ceil_mode: True if the last window may reach beyond the end of the padded input.
        output_padding: Elements that a transposed convolution appends to each axis.
        output_shape: Spatial output shape of a transposed convolution; () if the other attributes determine it.
    """

    kernel: Shape
    strides: Shape
    dilations: Shape
    pads: Shape
    auto_pad: str
    ceil_mode: bool
    output_padding: Shape
    output_shape: Shape

    @classmethod
    def read(cls, attributes: Attributes, kernel: Sequence[int]) -> WindowAttributes:
        """Return the window attributes of a node with the given attributes; `kernel` is the extent of its kernel."""
        rank, auto_pad = len(kernel), attributes.get("auto_pad") or "NOTSET"

        def per_axis(name: str, default: int, count: int = rank) -> Shape:
            return tuple(attributes.get(name) or [default] * count)

        return cls(
            tuple(kernel),
            per_axis("strides", 1),
            per_axis("dilations", 1),
            per_axis("pads", 0, 2 * rank),
            auto_pad,
            bool(attributes.get("ceil_mode")),
            per_axis("output_padding", 0),
            tuple(attributes.get("output_shape") or ()),
        )

    @property
    def is_same(self) -> bool:
        """True if `auto_pad` is SAME_UPPER or SAME_LOWER, so that the pads are computed from the shapes."""
        return self.auto_pad.startswith("SAME")

    def span(self, axis: int) -> int:
        """Return the number of elements from the first to the last that a window reads along an axis."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    def distribute(self, total: int) -> Pads:
        """Return how many of `total` automatic pads are at the start and at the end of an axis.

        If `total` is negative, so are the pads: windows then skip this number of elements.
        """
        begin = int(total / 2) if self.auto_pad == "SAME_UPPER" else total - int(total / 2)
        return begin, total - begin

    def given_pads(self, axis: int) -> Pads:
        """Return the pads of an axis if `auto_pad` is VALID (no pads) or NOTSET (the attribute `pads`)."""
        return (0, 0) if self.auto_pad == "VALID" else (self.pads[axis], self.pads[len(self.kernel) + axis])

    def pool_pads(self, axis: int, extent: int) -> Pads:
        """Return the pads of an axis of a pool. Automatic pads ignore dilations, as in onnxruntime."""
        if not self.is_same:
            return self.given_pads(axis)
        stride = self.strides[axis]
        return self.distribute((-(-extent // stride) - 1) * stride + self.kernel[axis] - extent)

    def pool_count(self, axis: int, extent: int) -> int:
        """Return the number of windows of a pool along an axis of `extent` input elements."""
        (begin, end), stride = self.pool_pads(axis, extent), self.strides[axis]
        free = extent + begin + end - self.span(axis)
        if not self.ceil_mode:
            return int(free / stride) + 1
        count = -(-free // stride) + 1
        return count - 1 if (count - 1) * stride >= extent + begin else count

    def pool_axis(self, axis: int, extent: int) -> SpatialAxis:
        """Return the geometry of one axis of a pool, without input elements that no window of onnxruntime reads."""
        (begin, end), count = self.pool_pads(axis, extent), self.pool_count(axis, extent)
        covered = (count - 1) * self.strides[axis] + self.span(axis)
        if self.ceil_mode and covered < extent + begin + end:
            extent = min(extent, covered - begin)
            end = covered - begin - extent
        return SpatialAxis(extent, count, self.span(axis), self.strides[axis], begin, end)

    def has_disputed_pool(self, extents: Shape) -> bool:
        """Return True if ONNX and onnxruntime disagree about the output shape of a pool with these input extents."""
        ignores_dilations = self.is_same and max(self.dilations) > 1
        ignores_pads = self.auto_pad != "NOTSET" and any(self.pads)
        drops_window = any(self.pool_axis(axis, extent).extent < extent for axis, extent in enumerate(extents))
        return ignores_dilations or ignores_pads or drops_window

    def uncut_extent(self, axis: int, count: int) -> int:
        """Return the output extent of a transposed convolution before its pads are cut off."""
        return (count - 1) * self.strides[axis] + self.span(axis) + self.output_padding[axis]

    def transposed_extent(self, axis: int, count: int) -> int:
        """Return the output extent of a transposed convolution along an axis of `count` input elements."""
        if self.output_shape:
            return self.output_shape[axis]
        full = self.uncut_extent(axis, count)
        if self.is_same:
            return min(full, count * self.strides[axis])
        return full - sum(self.given_pads(axis))

    def transposed_pads(self, axis: int, count: int, extent: int) -> Pads:
        """Return the numbers of elements that a transposed convolution cuts off at the start and the end of an axis."""
        if not self.is_same and not self.output_shape:
            return self.given_pads(axis)
        return self.distribute(max(0, self.uncut_extent(axis, count) - extent))

    def has_disputed_transposed(self, counts: Shape) -> bool:
        """Return True if ONNX and onnxruntime disagree about the output shape of a transposed convolution.

        `counts` are the spatial extents of its input.
        """
        if self.output_shape:
            return any(extent < count for extent, count in zip(self.output_shape, counts, strict=True))
        return self.is_same and any(self.output_padding)

    def conv_pads(self, axis: int, extent: int, count: int) -> Pads:
        """Return the pads of a convolution with `count` windows along an axis of `extent` input elements."""
        if not self.is_same:
            return self.given_pads(axis)
        return self.distribute(max(0, (count - 1) * self.strides[axis] + self.span(axis) - extent))


@memoized
def window_axes(operation: Operation, kernel: tuple[int, ...]) -> tuple[SpatialAxis, ...]:
    """Return the spatial axes of a convolution, transposed convolution or pool.

    The attributes `auto_pad`, `ceil_mode` and `output_shape` are converted to pads.
    """
    attributes, op = WindowAttributes.read(operation.node.attributes, kernel), operation.node.op
    axes = []
    for axis, pair in enumerate(zip(operation.input_shape(0)[2:], operation.out_shape[2:], strict=True)):
        extent, count = pair
        if op.endswith("Pool"):
            axes.append(attributes.pool_axis(axis, extent))
            continue
        if op == "ConvTranspose":
            extent, count = count, extent
            pads = attributes.transposed_pads(axis, count, extent)
        else:
            pads = attributes.conv_pads(axis, extent, count)
        axes.append(SpatialAxis(extent, count, attributes.span(axis), attributes.strides[axis], *pads))
    return tuple(axes)


def _pool_shape(attributes: Attributes, inputs: Sequence[TensorInfo], shapes: Sequence[Shape]) -> Shape | None:  # noqa: ARG001
    data, kernel = shapes[0], attributes.get("kernel_shape") or ()
    if len(data) != len(kernel) + 2:
        return None
    windows = WindowAttributes.read(attributes, kernel)
    return (*data[:2], *(windows.pool_count(axis, extent) for axis, extent in enumerate(data[2:])))


def _transposed_shape(attributes: Attributes, inputs: Sequence[TensorInfo], shapes: Sequence[Shape]) -> Shape | None:  # noqa: ARG001
    data, weight = shapes[:2]
    windows = WindowAttributes.read(attributes, weight[2:])
    if len(data) != len(weight) or len(windows.output_shape) not in (0, len(weight) - 2):
        return None
    extents = (windows.transposed_extent(axis, count) for axis, count in enumerate(data[2:]))
    return (data[0], weight[1] * attributes.get("group", 1), *extents)


def _resized_shape(attributes: Attributes, inputs: Sequence[TensorInfo], shapes: Sequence[Shape]) -> Shape | None:
    """Return the output shape of a Resize that keeps the aspect ratio and has negative axes, else None."""
    policy, axes, data = attributes.get("keep_aspect_ratio_policy", "stretch"), attributes.get("axes") or (), shapes[0]
    sizes = inputs[3].value if len(inputs) > 3 else None
    if policy == "stretch" or all(axis >= 0 for axis in axes) or sizes is None:
        return None
    # onnxruntime does not resize axes that are given as negative numbers.
    ratios = {axis: size / data[axis] for axis, size in zip(axes, sizes.tolist(), strict=True) if axis >= 0}
    if not ratios:
        return data
    ratio = min(ratios.values()) if policy == "not_larger" else max(ratios.values())
    return tuple(math.floor(ratio * extent + 0.5) if axis in ratios else extent for axis, extent in enumerate(data))


_ShapeFunction = Callable[[Attributes, Sequence[TensorInfo], Sequence[Shape]], Shape | None]
_OUTPUT_SHAPES: Mapping[str, tuple[int, _ShapeFunction]] = {
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), (1, _pool_shape)),
    "ConvTranspose": (2, _transposed_shape),
    "Resize": (1, _resized_shape),
}
"""Number of inputs that must have a shape, and the function that computes the output shape, by operator type."""


def onnxruntime_output_shape(op: str, attributes: Attributes, inputs: Sequence[TensorInfo | None]) -> Shape | None:
    """Return the output shape that onnxruntime computes, for operators whose shape ONNX may infer differently.

    Args:
        op: Operator type in the standard domain.
        attributes: Values by attribute name, with texts as str.
        inputs: The inputs; None if an input is omitted or unknown.

    Returns:
        The shape of all outputs; None if ONNX infers the shape correctly, or if an input shape is unknown.
    """
    count, function = _OUTPUT_SHAPES.get(op, (0, None))
    shapes = [tensor.shape for tensor in inputs[:count] if tensor is not None and tensor.shape is not None]
    if function is None or len(shapes) < count:
        return None
    return function(attributes, [tensor or _OMITTED for tensor in inputs], shapes)


_OMITTED = TensorInfo("", 0, None)


def onnx_window_attributes(
    op: str, attributes: Attributes, inputs: Sequence[TensorInfo | None]
) -> tuple[Mapping[str, Any], Shape] | None:
    """Return attributes from which ONNX infers the shape that onnxruntime computes, for a pool or ConvTranspose.

    Args:
        op: Operator type in the standard domain.
        attributes: Values by attribute name, with texts as str.
        inputs: The inputs; None if an input is omitted or unknown.

    Returns:
        Changed attributes, in which None removes an attribute, and the spatial extents of the input that windows read.
        None if ONNX infers the shape correctly, or if no attributes give this shape.
    """
    if op not in _OUTPUT_SHAPES or onnxruntime_output_shape(op, attributes, inputs) is None:
        return None
    extents, *others = [tensor.shape[2:] for tensor in inputs[:2] if tensor is not None and tensor.shape is not None]
    if op == "ConvTranspose":
        windows = WindowAttributes.read(attributes, others[0])
        return _transposed_attributes(windows, extents) if windows.has_disputed_transposed(extents) else None
    if op == "Resize":
        return None
    windows = WindowAttributes.read(attributes, attributes["kernel_shape"])
    axes = [windows.pool_axis(axis, extent) for axis, extent in enumerate(extents)]
    pads = [*(axis.pad_begin for axis in axes), *(axis.pad_end for axis in axes)]
    if not windows.has_disputed_pool(extents) or min(pads) < 0:
        return None
    return {"auto_pad": None, "pads": pads}, tuple(axis.extent for axis in axes)


def _transposed_attributes(windows: WindowAttributes, counts: Shape) -> tuple[Mapping[str, Any], Shape] | None:
    pads, padding = [], []
    for axis, count in enumerate(counts):
        extent, stride = windows.transposed_extent(axis, count), windows.strides[axis]
        begin, end = windows.transposed_pads(axis, count, extent)
        pads.append((begin, end))
        padding.append(extent + begin + end - (count - 1) * stride - windows.span(axis))
        if not 0 <= padding[-1] < max(stride, windows.dilations[axis]):
            return None
    begins, ends = zip(*pads, strict=True)
    return {"auto_pad": None, "output_shape": None, "pads": [*begins, *ends], "output_padding": padding}, counts
