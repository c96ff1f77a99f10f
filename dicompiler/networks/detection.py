"""YOLOv8n and YOLO11n (Ultralytics) as their exporter writes them, with normalizations folded into convolutions.

The output has the shape (N, 4 + classes, cells): boxes in pixels, then the probabilities of the classes. A cell is a
square of the image, with one box.

Sources are `ultralytics/cfg/models/v8/yolov8.yaml` and `11/yolo11.yaml` at scale n, and `ultralytics/nn/modules/*.py`.
The networks have the numbers of parameters that Ultralytics' `model.info()` prints after `fuse()`, less 16 fixed ones:
the possible distances in `_decode_boxes` are a constant here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.errors import UsageError
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.networks.classic import scale_channels

SILU_GAIN = 1.05
"""Factor of the weights of convolutions before SiLU, so that large activations keep their size."""
FIRST_CONV_GAIN, LAST_CONV_GAIN = 10.0, 0.1
"""Factors of the weights of the first convolution and of the last ones.

SiLU damps small values more than large ones, so small activations would shrink from layer to layer. The first
convolution therefore enlarges activations, and the last convolutions reduce the outputs again.
"""
BRANCH_GAIN = 0.3
"""Factor of the weights of the last convolution of a residual branch, so that activations keep their size."""
DISTANCE_BINS = 16
"""Number of possible distances from a cell to a side of its box. The head predicts a score for each of them."""

Block = Callable[[NetworkBuilder, str, str, int], str]


def _conv_silu(
    net: NetworkBuilder,
    x: str,
    name: str,
    channels: int,
    kernel: int = 1,
    stride: int = 1,
    group: int = 1,
    gain: float = SILU_GAIN,
) -> str:
    x = net.conv(x, f"{name}.conv", channels, kernel, stride, group=group, gain=gain)
    return net.mul(x, net.unary("Sigmoid", x, f"{name}.act.sigmoid"), f"{name}.act.mul")


def _bottleneck(net: NetworkBuilder, x: str, name: str, channels: int, hidden: int, shortcut: bool = True) -> str:
    y = _conv_silu(net, x, f"{name}.cv1", hidden, 3)
    y = _conv_silu(net, y, f"{name}.cv2", channels, 3, gain=BRANCH_GAIN if shortcut else SILU_GAIN)
    return net.add(x, y, f"{name}.add") if shortcut else y


def _plain_bottleneck(net: NetworkBuilder, x: str, name: str, channels: int) -> str:
    return _bottleneck(net, x, name, channels, channels)


def _open_bottleneck(net: NetworkBuilder, x: str, name: str, channels: int) -> str:
    return _bottleneck(net, x, name, channels, channels, False)


def _narrow_bottleneck(net: NetworkBuilder, x: str, name: str, channels: int) -> str:
    return _bottleneck(net, x, name, channels, max(1, channels // 2))


def _c3k(net: NetworkBuilder, x: str, name: str, channels: int) -> str:
    """Append a C3k block: two bottlenecks in sequence, in parallel to a convolution."""
    hidden = max(1, channels // 2)
    y = _conv_silu(net, x, f"{name}.cv1", hidden)
    for number in (0, 1):
        y = _plain_bottleneck(net, y, f"{name}.m.{number}", hidden)
    both = net.concat([y, _conv_silu(net, x, f"{name}.cv2", hidden)], f"{name}.concat")
    return _conv_silu(net, both, f"{name}.cv3", channels)


def _c2f(
    net: NetworkBuilder,
    x: str,
    name: str,
    channels: int,
    block: Block = _plain_bottleneck,
    repeats: int = 1,
    hidden_share: float = 0.5,
) -> str:
    """Append a cross-stage partial block (C2f, C3k2): half of the channels pass through `repeats` blocks.

    The other half and the outputs of all blocks are concatenated. Each half has `hidden_share` times as many channels
    as the output.
    """
    hidden = scale_channels(channels, hidden_share)
    x = _conv_silu(net, x, f"{name}.cv1", 2 * hidden)
    pieces = net.split(x, f"{name}.split", (hidden, hidden))
    for number in range(repeats):
        pieces.append(block(net, pieces[-1], f"{name}.m.{number}", hidden))
    return _conv_silu(net, net.concat(pieces, f"{name}.concat"), f"{name}.cv2", channels)


def _sppf(net: NetworkBuilder, x: str, name: str, channels: int) -> str:
    """Append a spatial pyramid pooling block (SPPF): three consecutive 5 x 5 max pools with concatenated outputs."""
    pieces = [_conv_silu(net, x, f"{name}.cv1", max(1, net.channels(x) // 2))]
    for number in range(3):
        pieces.append(net.pool(pieces[-1], f"{name}.m.{number}", 5, 1, 2))
    return _conv_silu(net, net.concat(pieces, f"{name}.concat"), f"{name}.cv2", channels)


def _c2psa(net: NetworkBuilder, x: str, name: str, channels: int) -> str:
    """Append a C2PSA block: residual attention and a residual feed-forward network for half of the channels."""
    hidden = max(2, channels // 2)
    a, b = net.split(_conv_silu(net, x, f"{name}.cv1", 2 * hidden), f"{name}.split", (hidden, hidden))
    b = net.add(b, _attention(net, b, f"{name}.m.0.attn", max(1, hidden // 64)), f"{name}.m.0.add")
    y = _conv_silu(net, b, f"{name}.m.0.ffn.0", 2 * hidden)
    y = net.conv(y, f"{name}.m.0.ffn.1.conv", hidden, 1, gain=BRANCH_GAIN)
    b = net.add(b, y, f"{name}.m.0.add2")
    return _conv_silu(net, net.concat([a, b], f"{name}.concat"), f"{name}.cv2", channels)


def _attention(net: NetworkBuilder, x: str, name: str, heads: int) -> str:
    """Append attention with keys half as long as values; a depthwise convolution of the values encodes positions."""
    batch, channels, height, width = net.shapes[x]
    length, cells = channels // heads, height * width
    key = max(1, length // 2)
    x = net.conv(x, f"{name}.qkv.conv", heads * (2 * key + length), 1)
    x = net.reshape(x, f"{name}.reshape", (batch, heads, 2 * key + length, cells))
    q, k, v = net.split(x, f"{name}.split", (key, key, length), axis=2)
    scores = net.matmul(net.transpose(q, f"{name}.q", (0, 1, 3, 2)), k, f"{name}.scores")
    scores = net.mul(scores, net.add_constant(f"{name}.scale", np.float32(key**-0.5)), f"{name}.scaled")
    weights = net.transpose(net.unary("Softmax", scores, f"{name}.softmax", axis=-1), f"{name}.weights", (0, 1, 3, 2))
    image = (batch, channels, height, width)
    y = net.reshape(net.matmul(v, weights, f"{name}.values"), f"{name}.image", image)
    place = net.conv(net.reshape(v, f"{name}.v", image), f"{name}.pe.conv", channels, 3, group=channels)
    return net.conv(net.add(y, place, f"{name}.add"), f"{name}.proj.conv", channels, 1, gain=BRANCH_GAIN)


def _upsample(net: NetworkBuilder, x: str, name: str) -> str:
    return net.resize(x, name, 2, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")


def yolov8n(net: NetworkBuilder, classes: int = 80, width: float = 1.0) -> str:
    """YOLOv8n for images of 640 x 640: 3 151 888 trained parameters."""

    def block(x: str, number: int, channels: int, kind: Block = _plain_bottleneck, repeats: int = 1) -> str:
        return _c2f(net, x, f"model.{number}", scale_channels(channels, width), kind, repeats)

    def down(x: str, number: int, channels: int) -> str:
        return _conv_silu(net, x, f"model.{number}", scale_channels(channels, width), 3, 2)

    x = block(down(_stem(net, width), 1, 32), 2, 32)
    p3 = block(down(x, 3, 64), 4, 64, repeats=2)
    p4 = block(down(p3, 5, 128), 6, 128, repeats=2)
    p5 = _sppf(net, block(down(p4, 7, 256), 8, 256), "model.9", scale_channels(256, width))
    n4 = block(net.concat([_upsample(net, p5, "model.10"), p4], "model.11"), 12, 128, _open_bottleneck)
    n3 = block(net.concat([_upsample(net, n4, "model.13"), p3], "model.14"), 15, 64, _open_bottleneck)
    n4 = block(net.concat([down(n3, 16, 64), n4], "model.17"), 18, 128, _open_bottleneck)
    n5 = block(net.concat([down(n4, 19, 128), p5], "model.20"), 21, 256, _open_bottleneck)
    return _detection_head(net, (n3, n4, n5), "model.22", classes, False)


def yolo11n(net: NetworkBuilder, classes: int = 80, width: float = 1.0) -> str:
    """YOLO11n, with C3k2 blocks and attention (C2PSA), for images of 640 x 640: 2 616 232 trained parameters."""

    def block(x: str, number: int, channels: int, kind: Block = _narrow_bottleneck, hidden_share: float = 0.5) -> str:
        return _c2f(net, x, f"model.{number}", scale_channels(channels, width), kind, hidden_share=hidden_share)

    def down(x: str, number: int, channels: int) -> str:
        return _conv_silu(net, x, f"model.{number}", scale_channels(channels, width), 3, 2)

    x = block(down(_stem(net, width), 1, 32), 2, 64, hidden_share=0.25)
    p3 = block(down(x, 3, 64), 4, 128, hidden_share=0.25)
    p4 = block(down(p3, 5, 128), 6, 128, _c3k)
    x = _sppf(net, block(down(p4, 7, 256), 8, 256, _c3k), "model.9", scale_channels(256, width))
    p5 = _c2psa(net, x, "model.10", scale_channels(256, width))
    n4 = block(net.concat([_upsample(net, p5, "model.11"), p4], "model.12"), 13, 128)
    n3 = block(net.concat([_upsample(net, n4, "model.14"), p3], "model.15"), 16, 64)
    n4 = block(net.concat([down(n3, 17, 64), n4], "model.18"), 19, 128)
    n5 = block(net.concat([down(n4, 20, 128), p5], "model.21"), 22, 256, _c3k)
    return _detection_head(net, (n3, n4, n5), "model.23", classes, True)


def _stem(net: NetworkBuilder, width: float) -> str:
    """Append the first convolution. Raise UsageError if a side of the image is not a multiple of 32."""
    # With other sizes, upsampled maps would not have the size of the maps with which they are concatenated.
    if any(side % 32 for side in net.input_shape[2:]):
        raise UsageError(f"network {net.name!r}: size is {net.input_shape[2:]}: use multiples of 32")
    return _conv_silu(net, "input", "model.0", scale_channels(16, width), 3, 2, gain=FIRST_CONV_GAIN)


def _detection_head(net: NetworkBuilder, maps: Sequence[str], name: str, classes: int, separable: bool) -> str:
    """Append the head, which predicts a box and class scores for each cell of three feature maps."""
    box, score = 4 * DISTANCE_BINS, max(net.channels(maps[0]), min(classes, 100))
    levels = []
    for level, x in enumerate(maps):
        y = _conv_silu(net, _conv_silu(net, x, f"{name}.cv2.{level}.0", box, 3), f"{name}.cv2.{level}.1", box, 3)
        y = net.conv(y, f"{name}.cv2.{level}.2", box, 1, gain=LAST_CONV_GAIN)
        z, branch = x, f"{name}.cv3.{level}"
        for number in (0, 1):
            if separable:
                z = _conv_silu(net, z, f"{branch}.{number}.0", net.channels(z), 3, group=net.channels(z))
                z = _conv_silu(net, z, f"{branch}.{number}.1", score, 1)
            else:
                z = _conv_silu(net, z, f"{branch}.{number}", score, 3)
        both = net.concat([y, net.conv(z, f"{branch}.2", classes, 1, gain=LAST_CONV_GAIN)], f"{name}.concat.{level}")
        batch, channels, height, width = net.shapes[both]
        levels.append(net.reshape(both, f"{name}.reshape.{level}", (batch, channels, height * width)))
    boxes, scores = net.split(net.concat(levels, f"{name}.concat", axis=2), f"{name}.split", (box, classes))
    boxes = _decode_boxes(net, boxes, maps, name)
    return net.concat([boxes, net.unary("Sigmoid", scores, f"{name}.sigmoid")], f"{name}.output")


def _decode_boxes(net: NetworkBuilder, x: str, maps: Sequence[str], name: str) -> str:
    """Append the conversion of predicted distances to boxes: center and size in pixels, one box for each cell.

    `x` has scores for DISTANCE_BINS possible distances from the cell to each side of the box. The mean distance,
    weighted by the softmax of the scores, is used.
    """
    batch, _, cells = net.shapes[x]
    x = net.reshape(x, f"{name}.dfl.reshape", (batch, 4, DISTANCE_BINS, cells))
    x = net.transpose(x, f"{name}.dfl.transpose", (0, 2, 1, 3))
    x = net.unary("Softmax", x, f"{name}.dfl.softmax", axis=1)
    bins = np.arange(DISTANCE_BINS, dtype=np.float32).reshape(1, DISTANCE_BINS, 1, 1)
    weight = net.add_constant(f"{name}.dfl.conv.weight", bins)
    x = net.add_node("Conv", f"{name}.dfl.conv", [x, weight], (batch, 1, 4, cells), kernel_shape=(1, 1))
    x = net.reshape(x, f"{name}.dfl.sides", (batch, 4, cells))
    before, after = net.split(x, f"{name}.sides", (2, 2))
    points, strides = _anchor_points(net, maps)
    anchor = net.add_constant(f"{name}.anchors", points)
    low = net.add_node("Sub", f"{name}.low", [anchor, before], net.shapes[before])
    high = net.add(after, anchor, f"{name}.high")
    corner_sum = net.add(low, high, f"{name}.sum")
    middle = net.mul(corner_sum, net.add_constant(f"{name}.half", np.float32(0.5)), f"{name}.centre")
    extent = net.add_node("Sub", f"{name}.extent", [high, low], net.shapes[low])
    box = net.concat([middle, extent], f"{name}.box")
    return net.mul(box, net.add_constant(f"{name}.strides", strides), f"{name}.pixels")


def _anchor_points(net: NetworkBuilder, maps: Sequence[str]) -> list[NDArray[np.float32]]:
    """Return the centers (x, y) and the side lengths of the cells of all feature maps.

    The centers have the shape (1, 2, cells) and are in units of the cell. The side lengths have the shape (1, 1, cells)
    and are in pixels of the image.
    """
    points, strides = [], []
    for x in maps:
        height, width = net.shapes[x][2:]
        rows, columns = np.mgrid[:height, :width] + 0.5
        points.append(np.stack([columns.ravel(), rows.ravel()]))
        strides.append(np.full((1, height * width), net.input_shape[2] / height))
    return [np.concatenate(each, axis=1).astype(np.float32)[None] for each in (points, strides)]
