"""Networks with branches that join again: ResNet, DenseNet, MobileNetV2, and two small ones for tests.

Each function appends a network to a builder, and returns the name of the tensor with the logits.
"""

from __future__ import annotations

from dicompiler.networks.builder import NetworkBuilder
from dicompiler.networks.classic import scale_channels

#: Factors of the scales of BatchNormalization at the end of a residual branch, and in a shortcut. The sum of their
#: squares is about 1, so that activations keep their size at any depth.
BRANCH_GAIN, SHORTCUT_GAIN = 0.3, 0.95


def _conv_norm(
    net: NetworkBuilder,
    x: str,
    conv: str,
    norm: str,
    channels: int,
    kernel: int,
    stride: int = 1,
    group: int = 1,
    gain: float = 1.0,
) -> str:
    return net.batch_norm(net.conv(x, conv, channels, kernel, stride, group=group, bias=False), norm, gain)


def _head(net: NetworkBuilder, x: str, name: str, classes: int) -> str:
    return net.gemm(net.flatten(net.global_average(x, "avgpool"), "flatten"), name, classes)


RESNET_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _residual_block(net: NetworkBuilder, x: str, name: str, channels: int, stride: int, expansion: int) -> str:
    """Append a ResNet block: a basic block (expansion 1) or a bottleneck (expansion 4)."""
    steps = ((3, stride, 1), (3, 1, 1)) if expansion == 1 else ((1, 1, 1), (3, stride, 1), (1, 1, expansion))
    y = x
    for number, (kernel, step, times) in enumerate(steps, 1):
        last = number == len(steps)
        conv, norm, gain = f"{name}.conv{number}", f"{name}.bn{number}", BRANCH_GAIN if last else 1.0
        y = _conv_norm(net, y, conv, norm, channels * times, kernel, step, gain=gain)
        if not last:
            y = net.relu(y, f"{name}.relu{number}")
    if stride != 1 or net.channels(x) != channels * expansion:
        conv, norm = f"{name}.downsample.0", f"{name}.downsample.1"
        x = _conv_norm(net, x, conv, norm, channels * expansion, 1, stride, gain=SHORTCUT_GAIN)
    return net.relu(net.add(y, x, f"{name}.add"), f"{name}.relu")


def resnet(net: NetworkBuilder, depth: int, classes: int = 1000, width: float = 1.0) -> str:
    """ResNet-18, -50 or -101 (He et al. 2016, table 1)."""
    x = net.relu(_conv_norm(net, "input", "conv1", "bn1", scale_channels(64, width), 7, 2), "relu")
    x = net.pool(x, "maxpool", 3, 2, 1)
    for stage, count in enumerate(RESNET_BLOCKS[depth], 1):
        for block in range(count):
            stride = 2 if stage > 1 and block == 0 else 1
            channels = scale_channels(64 * 2 ** (stage - 1), width)
            x = _residual_block(net, x, f"layer{stage}.{block}", channels, stride, 1 if depth == 18 else 4)
    return _head(net, x, "fc", classes)


DENSENET_BLOCKS = {121: (6, 12, 24, 16)}


def densenet(net: NetworkBuilder, depth: int, classes: int = 1000, width: float = 1.0) -> str:
    """DenseNet-121 (Huang et al. 2017, table 1): growth 32, compression 1/2."""
    growth = scale_channels(32, width)
    x = net.relu(_conv_norm(net, "input", "conv0", "norm0", 2 * growth, 7, 2), "relu0")
    x = net.pool(x, "pool0", 3, 2, 1)
    for number, count in enumerate(DENSENET_BLOCKS[depth], 1):
        for layer in range(1, count + 1):
            name = f"denseblock{number}.{layer}"
            y = net.relu(net.batch_norm(x, f"{name}.norm1"), f"{name}.relu1")
            y = _conv_norm(net, y, f"{name}.conv1", f"{name}.norm2", 4 * growth, 1)
            y = net.conv(net.relu(y, f"{name}.relu2"), f"{name}.conv2", growth, 3, bias=False)
            x = net.concat([x, y], f"{name}.concat")
        if number < len(DENSENET_BLOCKS[depth]):
            name = f"transition{number}"
            y = net.relu(net.batch_norm(x, f"{name}.norm"), f"{name}.relu")
            y = net.conv(y, f"{name}.conv", net.channels(x) // 2, 1, bias=False)
            x = net.pool(y, f"{name}.pool", 2, 2, op="AveragePool")
    return _head(net, net.relu(net.batch_norm(x, "norm5"), "relu5"), "classifier", classes)


def _round_to_multiple_of_8(channels: float) -> int:
    """Return the nearest multiple of 8 that is at least 8 and at least 0.9 times `channels` (MobileNet's rule)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


#: Stages of MobileNetV2 (Sandler et al. 2018, table 2): (expansion t, channels c, repeats n, stride s).
MOBILENET_V2 = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


def _inverted_residual(net: NetworkBuilder, x: str, name: str, expansion: int, channels: int, stride: int) -> str:
    """Append MobileNetV2's block: a depthwise convolution between two pointwise ones.

    The first convolution multiplies the number of channels by `expansion`, and is omitted if this is 1.
    """
    hidden, y = net.channels(x) * expansion, x
    joined = stride == 1 and net.channels(x) == channels
    if expansion != 1:
        y = _conv_norm(net, y, f"{name}.expand", f"{name}.expand.bn", hidden, 1)
        y = net.clip(y, f"{name}.expand.relu6", 0, 6)
    y = _conv_norm(net, y, f"{name}.depthwise", f"{name}.depthwise.bn", hidden, 3, stride, group=hidden)
    y = net.clip(y, f"{name}.depthwise.relu6", 0, 6)
    y = _conv_norm(net, y, f"{name}.project", f"{name}.project.bn", channels, 1, gain=BRANCH_GAIN if joined else 1.0)
    return net.add(x, y, f"{name}.add") if joined else y


def mobilenet_v2(net: NetworkBuilder, classes: int = 1000, width: float = 1.0) -> str:
    """MobileNetV2 (Sandler et al. 2018), with its own rule for `width`: channels are multiples of 8."""
    x = _conv_norm(net, "input", "features.0", "features.0.bn", _round_to_multiple_of_8(32 * width), 3, 2)
    x = net.clip(x, "features.0.relu6", 0, 6)
    number = 1
    for expansion, channels, count, stride in MOBILENET_V2:
        for repeat in range(count):
            step, rounded = stride if repeat == 0 else 1, _round_to_multiple_of_8(channels * width)
            x = _inverted_residual(net, x, f"features.{number}", expansion, rounded, step)
            number += 1
    channels = _round_to_multiple_of_8(1280 * max(1.0, width))
    x = _conv_norm(net, x, f"features.{number}", f"features.{number}.bn", channels, 1)
    return _head(net, net.clip(x, f"features.{number}.relu6", 0, 6), "classifier", classes)


def tiny(net: NetworkBuilder, classes: int = 10, width: float = 1.0) -> str:
    """Small network with typical elements of large networks, and a few thousand parameters."""
    base = scale_channels(8, width)
    x = net.relu(_conv_norm(net, "input", "stem", "stem.bn", base, 3), "stem.relu")
    y = net.relu(_conv_norm(net, x, "res1", "res1.bn", base, 3), "res1.relu")
    y = _conv_norm(net, y, "res2", "res2.bn", base, 3, gain=BRANCH_GAIN)
    x = net.relu(net.add(x, y, "add"), "add.relu")
    x = net.pool(x, "pool", 3, 2, 1)
    left = net.relu(net.conv(x, "left", base, 1), "left.relu")
    right = net.relu(net.conv(x, "right", base, 5), "right.relu")
    x = net.concat([left, right], "concat")
    x = net.relu(net.conv(x, "depthwise", 2 * base, 3, 2, group=2 * base), "depthwise.relu")
    x = net.relu(net.conv(x, "pointwise", 3 * base, 1), "pointwise.relu")
    return _head(net, x, "fc", classes)


def quirks(net: NetworkBuilder, classes: int = 10, width: float = 1.0) -> str:
    """Unusual elements that make real networks hard to split: uneven pads, groups, LRN, ceil_mode, and others."""
    base = 4 * scale_channels(2, width)
    x = net.relu(net.conv("input", "conv1", base, (5, 3), (2, 1), (1, 0, 2, 1)), "relu1")
    x = net.unary("LRN", x, "norm1", size=5, alpha=1e-4, beta=0.75, bias=1.0)
    x = net.pool(x, "pool1", 3, 2, (0, 0, 1, 1), ceil_mode=1)
    x = net.relu(net.conv(x, "conv2", 2 * base, 3, group=2), "relu2")
    batch, channels, height, breadth = net.shapes[x]
    y = net.reshape(x, "shuffle.split", (batch, 2, channels // 2, height, breadth))
    y = net.transpose(y, "shuffle.transpose", (0, 2, 1, 3, 4))
    x = net.reshape(y, "shuffle.join", (batch, channels, height, breadth))
    y = net.relu(net.conv(x, "conv3", base, 3, dilation=2), "relu3")
    z = net.pool(x, "pool3", 3, 1, 1, op="AveragePool", count_include_pad=0)
    x = net.concat([y, z], "concat3")
    x = net.pool(x, "pool4", 3, 2, 1, op="AveragePool", count_include_pad=1)
    return net.unary("Softmax", _head(net, x, "fc", classes), "softmax", axis=1)
