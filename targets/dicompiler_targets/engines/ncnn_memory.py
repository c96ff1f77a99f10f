"""Prediction of the memory that ncnn needs for the weights of segments.

ncnn copies all weights when it loads them. For 3×3 convolutions of stride 1 it keeps transformed weights instead, which
are up to WINOGRAD_GROWTH times as large. The prediction is an upper bound, because the transformation that
ncnn chooses depends on the processor and the channels. For example, ResNet-18 needed 3.9 times its weights on an x86-64
host, VGG16 1.4 times, and MobileNetV2 1.4 times.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from dicompiler.plugin_api import Segment
from dicompiler.plugin_api.costs import constant_sizes

WINOGRAD_SHAPE = (3, 3)
WINOGRAD_GROWTH = 64 / 9
"""Largest growth of the weights of a 3×3 convolution.

The algorithm F(m×m, r×r) stores (m + r − 1)² values for each kernel of r×r (A. Lavin, S. Gray, "Fast Algorithms for
Convolutional Neural Networks", 2015). The largest m of ncnn is 6.
"""


def predict_ncnn_bytes(segments: Sequence[Segment]) -> int:
    """Return an upper bound of the bytes that ncnn needs to keep the weights of one device's segments."""
    kept: dict[tuple[str, str], int] = {}
    for segment in segments:
        kept |= _weight_bytes(segment)
    return sum(kept.values())


def _weight_bytes(segment: Segment) -> dict[tuple[str, str], int]:
    """Return the maximum bytes that ncnn keeps for each weight, by the names of the segment and of the weight."""
    sizes = constant_sizes(segment)
    kept = {(segment.name, name): size for name, size in sizes.items()}
    for node in segment.model.graph.node:
        if node.op_type == "Conv" and node.input[1] in sizes and _is_winograd(node):
            kept[segment.name, node.input[1]] = int(WINOGRAD_GROWTH * sizes[node.input[1]])
    return kept


def _is_winograd(node: onnx.NodeProto) -> bool:
    """Return True if ncnn may compute a convolution with Winograd's algorithm."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return (
        tuple(attributes.get("kernel_shape", WINOGRAD_SHAPE)) == WINOGRAD_SHAPE
        and set(attributes.get("strides", (1,))) == {1}
        and set(attributes.get("dilations", (1,))) == {1}
        and attributes.get("group", 1) == 1
    )
