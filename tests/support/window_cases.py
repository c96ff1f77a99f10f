"""Seeded one-operator models with every combination of the attributes of convolutions, pools and Resize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from support.backend_models import Case

Draw = tuple[str, list[NDArray[Any] | None], dict[str, Any], int]
"""Operator, inputs (the first is the graph input), attributes, and opset."""

AUTO_PADS = (None, None, "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def integers(rng: Random, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(rng.randrange(2**32)).integers(-4, 5, shape).astype(np.float32)


class Windows:
    """Extents, kernel, and the attributes that convolutions and pools share."""

    def __init__(self, rng: Random, dilated: bool = True, max_extent: int = 9) -> None:
        rank = rng.choice((1, 2, 2, 2, 3))

        def each(low: int, high: int, count: int = rank) -> list[int]:
            return [rng.randint(low, high) for _ in range(count)]

        self.each, self.rank = each, rank
        self.kernel, self.extents = each(1, 4), each(1, max_extent)
        self.attributes: dict[str, Any] = {}
        if rng.random() < 0.8:
            self.attributes["strides"] = each(1, 3)
        if dilated and rng.random() < 0.4:
            self.attributes["dilations"] = each(1, 3)
        if auto_pad := rng.choice(AUTO_PADS):
            self.attributes["auto_pad"] = auto_pad
        if rng.random() < (0.6 if auto_pad in (None, "NOTSET") else 0.2):
            self.attributes["pads"] = each(0, 2, 2 * rank)


def draw_conv(rng: Random) -> Draw:
    windows = Windows(rng)
    groups, filters, channels = rng.choice((1, 1, 2, 3)), rng.randint(1, 3), rng.randint(1, 2)
    if groups > 1:
        windows.attributes["group"] = groups
    weight = integers(rng, groups * filters, channels, *windows.kernel)
    values = [integers(rng, 1, groups * channels, *windows.extents), weight]
    return "Conv", [*values, *_bias(rng, groups * filters)], windows.attributes, rng.choice((1, 9, 11, 17, 22))


def draw_conv_transpose(rng: Random) -> Draw:
    windows = Windows(rng, max_extent=6)
    groups, filters, channels = rng.choice((1, 1, 2)), rng.randint(1, 3), rng.randint(1, 2)
    if groups > 1:
        windows.attributes["group"] = groups
    if rng.random() < 0.6:
        strides, dilations = (windows.attributes.get(name, [1] * windows.rank) for name in ("strides", "dilations"))
        largest = [max(pair) - 1 for pair in zip(strides, dilations, strict=True)]
        windows.attributes["output_padding"] = [rng.randint(0, size) for size in largest]
    if rng.random() < 0.25:
        windows.attributes["output_shape"] = windows.each(1, 16)
    weight = integers(rng, groups * channels, filters, *windows.kernel)
    values = [integers(rng, 1, groups * channels, *windows.extents), weight]
    return "ConvTranspose", [*values, *_bias(rng, groups * filters)], windows.attributes, rng.choice((1, 9, 11, 17, 22))


def _bias(rng: Random, filters: int) -> list[NDArray[Any]]:
    return [integers(rng, filters)] if rng.random() < 0.5 else []


def draw_pool(op: str, ceil_since: int, dilations_since: int) -> Callable[[Random], Draw]:
    def draw(rng: Random) -> Draw:
        opset = rng.choice((7, 10, 11, 18, 19, 22))
        windows = Windows(rng, dilated=opset >= dilations_since)
        windows.attributes["kernel_shape"] = windows.kernel
        if opset >= ceil_since and rng.random() < 0.5:
            windows.attributes["ceil_mode"] = 1
        if op == "AveragePool" and rng.random() < 0.5:
            windows.attributes["count_include_pad"] = 1
        if op == "LpPool":
            windows.attributes["p"] = rng.choice((1, 2))
        return op, [integers(rng, 1, 2, *windows.extents)], windows.attributes, opset

    return draw


SCALES = (0.25, 0.5, 0.7, 1, 1.5, 2, 3)
COORDINATES = (
    "half_pixel pytorch_half_pixel asymmetric align_corners tf_half_pixel_for_nn tf_crop_and_resize "
    "half_pixel_symmetric"
).split()


def draw_resize(rng: Random) -> Draw:
    opset = rng.choice((7, 9, 10, 11, 13, 18, 19, 22))
    shape = [rng.randint(1, 2), rng.randint(1, 3), rng.randint(2, 8), rng.randint(2, 8)]
    factors: list[float] = [1, rng.choice((1, 1, 1, 2)), rng.choice(SCALES), rng.choice(SCALES)]
    mode, x = rng.choice(("nearest", "linear", "cubic")), integers(rng, *shape)
    attributes: dict[str, Any] = {"mode": mode}
    if opset == 7:
        return "Upsample", [x], attributes | {"scales": [float(max(1, factor)) for factor in factors]}, opset
    if opset < 11:
        return "Upsample" if opset == 9 else "Resize", [x, np.array(factors, np.float32)], attributes, opset
    # The deprecated tf_half_pixel_for_nn is left out, because onnxruntime prints a warning for it.
    known = [name for name in COORDINATES if name != "tf_half_pixel_for_nn"][: 6 if opset >= 19 else 5]
    attributes["coordinate_transformation_mode"] = coordinates = rng.choice(known)
    if mode == "nearest":
        names = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
        attributes["nearest_mode"] = rng.choice(names)
    if mode == "cubic" and rng.random() < 0.5:
        attributes |= {"exclude_outside": 1, "cubic_coeff_a": -0.5}
    axes = [0, 1, 2, 3]
    if opset >= 18 and rng.random() < 0.5:
        axes = rng.choice(([2, 3], [3, 2], [3], [1, 2, 3]))
        attributes["axes"] = [axis - 4 if rng.random() < 0.4 else axis for axis in axes]
    if opset >= 18 and rng.random() < 0.2:
        attributes["antialias"] = 1
    ends = np.array([0.1] * len(axes) + [0.9] * len(axes), np.float32)
    roi = ends if coordinates == "tf_crop_and_resize" else np.zeros(0, np.float32) if opset < 13 else None
    if rng.random() < 0.5:
        return "Resize", [x, roi, np.array([factors[axis] for axis in axes], np.float32)], attributes, opset
    sizes = np.array([max(1, int(shape[axis] * factors[axis])) for axis in axes], np.int64)
    if opset >= 18 and rng.random() < 0.5:
        attributes["keep_aspect_ratio_policy"] = rng.choice(("stretch", "not_larger", "not_smaller"))
    return "Resize", [x, roi, np.zeros(0, np.float32) if opset < 13 else None, sizes], attributes, opset


DRAWS: Mapping[str, Callable[[Random], Draw]] = {
    "Conv": draw_conv,
    "ConvTranspose": draw_conv_transpose,
    "MaxPool": draw_pool("MaxPool", 10, 10),
    "AveragePool": draw_pool("AveragePool", 10, 19),
    "LpPool": draw_pool("LpPool", 18, 18),
    "Resize": draw_resize,
}


def window_case(op: str, seed: int) -> Case:
    """Return a model of one node between two element-wise nodes, of which ONNX knows only the input shape."""
    op, values, attributes, opset = DRAWS[op](Random(seed))
    return make_case(f"{op}, opset {opset}, {attributes}", op, values, attributes, opset)


def make_case(
    name: str, op: str, values: Sequence[NDArray[Any] | None], attributes: Mapping[str, Any], opset: int = 17
) -> Case:
    names = ["a", *(f"w{i}" if value is not None else "" for i, value in enumerate(values[1:]))]
    nodes = [
        helper.make_node("Neg" if opset > 1 else "Relu", ["x"], ["a"], "before"),
        helper.make_node(op, names, ["b"], "node", **attributes),
        helper.make_node("Neg" if opset > 1 else "Relu", ["b"], ["y"], "after"),
    ]
    constants = [numpy_helper.from_array(v, n) for v, n in zip(values[1:], names[1:], strict=True) if v is not None]
    x = values[0]
    assert x is not None
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [onnx.ValueInfoProto(name="y")],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return Case(name, "node", model, {"x": x})
