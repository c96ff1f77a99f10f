"""The four reference networks of MLPerf Tiny (Banbury et al. 2021) for microcontrollers.

The output contains the probabilities of the classes, or the reconstructed input of the autoencoder. Convolutions have
TensorFlow's "same" pads.
"""

from __future__ import annotations

from dicompiler.networks.builder import IntOrPair, NetworkBuilder, to_pair
from dicompiler.networks.classic import scale_channels
from dicompiler.networks.residual import BRANCH_GAIN, SHORTCUT_GAIN


def _same_pads(net: NetworkBuilder, x: str, kernel: IntOrPair, stride: IntOrPair) -> tuple[int, int, int, int]:
    """Return TensorFlow's "same" pads (top, left, bottom, right). If their sum is odd, the larger pad is at the end."""
    axes = zip(net.shapes[x][2:], to_pair(kernel), to_pair(stride), strict=True)
    totals = [max((-(-extent // step) - 1) * step + size - extent, 0) for extent, size, step in axes]
    top, left = (total // 2 for total in totals)
    return top, left, totals[0] - top, totals[1] - left


def _conv_norm(
    net: NetworkBuilder,
    x: str,
    name: str,
    channels: int,
    kernel: IntOrPair,
    stride: IntOrPair = 1,
    group: int = 1,
    gain: float = 1.0,
) -> str:
    pads = _same_pads(net, x, kernel, stride)
    return net.batch_norm(net.conv(x, name, channels, kernel, stride, pads, group), f"{name}.bn", gain)


def _separable_block(net: NetworkBuilder, x: str, name: str, channels: int, stride: int) -> str:
    deep = _conv_norm(net, x, f"{name}.depthwise", net.channels(x), 3, stride, net.channels(x))
    x = net.relu(deep, f"{name}.depthwise.relu")
    return net.relu(_conv_norm(net, x, f"{name}.pointwise", channels, 1), f"{name}.pointwise.relu")


def _head(net: NetworkBuilder, x: str, classes: int) -> str:
    sides = (net.shapes[x][2], net.shapes[x][3])
    x = net.flatten(net.pool(x, "avgpool", sides, sides, op="AveragePool"), "flatten")
    return net.unary("Softmax", net.gemm(x, "fc", classes), "softmax", axis=1)


#: Blocks of MobileNetV1 (Howard et al. 2017, table 1): (channels at width 1, stride).
MOBILENET_V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


def person_detection(net: NetworkBuilder, classes: int = 2, width: float = 0.25) -> str:
    """Visual wake words: MobileNetV1 with a quarter of the channels, for color images of 96 x 96."""
    x = net.relu(_conv_norm(net, "input", "conv1", scale_channels(32, width), 3, 2), "relu1")
    for number, (channels, stride) in enumerate(MOBILENET_V1, 2):
        x = _separable_block(net, x, f"block{number}", scale_channels(channels, width), stride)
    return _head(net, x, classes)


def resnet8(net: NetworkBuilder, classes: int = 10, width: float = 1.0) -> str:
    """Image classification: three residual stages of 16, 32 and 64 channels, for color images of 32 x 32 (CIFAR-10)."""
    x = net.relu(_conv_norm(net, "input", "conv1", scale_channels(16, width), 3), "relu1")
    for stage in (1, 2, 3):
        name, channels, stride = f"stage{stage}", scale_channels(16 * 2 ** (stage - 1), width), 1 if stage == 1 else 2
        y = net.relu(_conv_norm(net, x, f"{name}.conv1", channels, 3, stride), f"{name}.relu1")
        y = _conv_norm(net, y, f"{name}.conv2", channels, 3, gain=BRANCH_GAIN)
        if stage > 1:
            pads = _same_pads(net, x, 1, stride)
            x = net.conv(x, f"{name}.shortcut", channels, 1, stride, pads, gain=SHORTCUT_GAIN)
        x = net.relu(net.add(x, y, f"{name}.add"), f"{name}.relu2")
    return _head(net, x, classes)


def ds_cnn(net: NetworkBuilder, classes: int = 12, width: float = 1.0) -> str:
    """Keyword spotting: four depthwise separable blocks (Zhang et al. 2017).

    The input is 49 x 10 features of a second of sound.
    """
    channels = scale_channels(64, width)
    x = net.relu(_conv_norm(net, "input", "conv1", channels, (10, 4), 2), "relu1")
    for number in range(2, 6):
        x = _separable_block(net, x, f"block{number}", channels, 1)
    return _head(net, x, classes)


def autoencoder(net: NetworkBuilder, width: float = 1.0) -> str:
    """Anomaly detection: fully connected, with 8 features in the middle, for five time frames of 128 mel bands."""
    x = "input"
    for number in range(1, 10):
        x = net.gemm(x, f"fc{number}", 8 if number == 5 else scale_channels(128, width))
        x = net.relu(net.batch_norm(x, f"bn{number}"), f"relu{number}")
    return net.gemm(x, "fc10", net.shapes["input"][1])
