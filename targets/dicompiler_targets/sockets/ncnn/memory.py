"""Prediction of the memory that ncnn needs for the weights of segments.

ncnn copies all weights when it loads them. For 3×3 convolutions of stride 1 it keeps transformed weights instead, which
are up to WINOGRAD_GROWTH times as large. The prediction is an upper bound, because ncnn chooses the transformation by
the processor and the channels: ResNet-18 needed 3.9 times its weights on an x86-64 host, VGG16 1.4 times, MobileNetV2
1.4 times.
"""

from __future__ import annotations

import onnx
from onnx import helper

from dicompiler.plugin_api import Program
from dicompiler.plugin_api.costs import constant_sizes

WINOGRAD_SHAPE = (3, 3)
WINOGRAD_GROWTH = 64 / 9
"""Largest growth of the weights of a 3×3 convolution: F(6×6, 3×3) stores 8×8 values for each kernel of 3×3.

Source: A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks" (2015), section 4.
"""


def predict_ncnn_bytes(program: Program) -> dict[str, int]:
    """Return an upper bound of the bytes of the weights that ncnn keeps on each device, in all roles."""
    largest: dict[str, dict[str, int]] = {device.device: {} for device in program.devices}
    for role in program.roles:
        for device in role.devices:
            for segment in device.segments:
                sizes = constant_sizes(segment)
                for node in segment.model.graph.node:
                    is_transformed = node.op_type == "Conv" and _is_winograd(node)
                    growth = WINOGRAD_GROWTH if is_transformed else 1.0
                    for name in node.input:
                        if name in sizes:
                            largest[device.device][f"{segment.name}/{name}"] = int(growth * sizes[name])
    return {name: sum(entries.values()) for name, entries in largest.items()}


def _is_winograd(node: onnx.NodeProto) -> bool:
    """Return True if ncnn may compute a convolution with Winograd's algorithm."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return (
        tuple(attributes.get("kernel_shape", WINOGRAD_SHAPE)) == WINOGRAD_SHAPE
        and set(attributes.get("strides", (1,))) == {1}
        and set(attributes.get("dilations", (1,))) == {1}
        and attributes.get("group", 1) == 1
    )
