"""Networks without residual connections: LeNet-5, AlexNet, VGG, SqueezeNet, YOLOv2.

Each function appends a network to a builder, and returns the name of the tensor with the logits (YOLOv2: the last
feature map).
"""

from __future__ import annotations

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.networks.builder import NetworkBuilder


def scale_channels(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded to an integer of at least 1."""
    return max(1, round(channels * width))


def _classifier(net: NetworkBuilder, x: str, hidden: int, classes: int) -> str:
    x = net.flatten(x, "flatten")
    x = net.relu(net.gemm(x, "fc6", hidden), "relu6")
    x = net.relu(net.gemm(x, "fc7", hidden), "relu7")
    return net.gemm(x, "fc8", classes)


def lenet(net: NetworkBuilder, classes: int = 10, width: float = 1.0) -> str:
    """LeNet-5 (LeCun et al. 1998, fig. 2) for grey images of 32 x 32, with max pooling and ReLU.

    Unlike in the original, each filter of the second convolution reads all channels of its input.
    """
    x = net.conv("input", "conv1", scale_channels(6, width), 5, pads=0)
    x = net.pool(net.relu(x, "relu1"), "pool1", 2, 2)
    x = net.conv(x, "conv2", scale_channels(16, width), 5, pads=0)
    x = net.pool(net.relu(x, "relu2"), "pool2", 2, 2)
    x = net.flatten(x, "flatten")
    x = net.relu(net.gemm(x, "fc3", scale_channels(120, width)), "relu3")
    x = net.relu(net.gemm(x, "fc4", scale_channels(84, width)), "relu4")
    return net.gemm(x, "fc5", classes)


ALEXNET_LAYERS = {
    "one-column": ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False)),
    "two-column": ((96, 11, 4, 0, True), (256, 5, 1, 2, True), (384, 3, 1, 1, False), (384, 3, 1, 1, False)),
}


def alexnet(net: NetworkBuilder, classes: int = 1000, width: float = 1.0, columns: str = "one-column") -> str:
    """AlexNet without LRN and without groups.

    `columns` selects the numbers of channels. "one-column" has those of Krizhevsky 2014 ("One weird trick"), as in
    torchvision. "two-column" is the original (Krizhevsky et al. 2012), for images of 227 x 227.
    """
    if columns not in ALEXNET_LAYERS:
        raise UsageError(f"alexnet: columns must be one of {', '.join(ALEXNET_LAYERS)}, not {columns!r}")
    x = "input"
    layers = (*ALEXNET_LAYERS[columns], (256, 3, 1, 1, True))
    for number, (channels, kernel, stride, pad, pooled) in enumerate(layers, 1):
        x = net.conv(x, f"conv{number}", scale_channels(channels, width), kernel, stride, pad)
        x = net.relu(x, f"relu{number}")
        if pooled:
            x = net.pool(x, f"pool{number}", 3, 2)
    return _classifier(net, x, scale_channels(4096, width), classes)


VGG_BLOCKS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(net: NetworkBuilder, depth: int, classes: int = 1000, width: float = 1.0) -> str:
    """VGG-16 or VGG-19 (Simonyan and Zisserman 2015, table 1, columns D and E)."""
    x = "input"
    for block, (count, channels) in enumerate(zip(VGG_BLOCKS[depth], (64, 128, 256, 512, 512), strict=True), 1):
        for number in range(1, count + 1):
            x = net.conv(x, f"conv{block}_{number}", scale_channels(channels, width), 3)
            x = net.relu(x, f"relu{block}_{number}")
        x = net.pool(x, f"pool{block}", 2, 2)
    return _classifier(net, x, scale_channels(4096, width), classes)


def squeezenet(net: NetworkBuilder, classes: int = 1000, width: float = 1.0) -> str:
    """SqueezeNet 1.1 (Iandola et al. 2016, the authors' lighter release), as in torchvision."""

    def fire(x: str, name: str, squeeze: int, expand: int) -> str:
        x = net.relu(net.conv(x, f"{name}.squeeze", scale_channels(squeeze, width), 1), f"{name}.squeeze.relu")
        ends = [net.conv(x, f"{name}.expand{k}x{k}", scale_channels(expand, width), k) for k in (1, 3)]
        return net.concat([net.relu(end, f"{end.removesuffix('.out')}.relu") for end in ends], f"{name}.concat")

    x = net.relu(net.conv("input", "conv1", scale_channels(64, width), 3, 2, 0), "relu1")
    modules = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for number, (squeeze, expand) in enumerate(modules, 2):
        if number in (2, 4, 6):
            x = net.pool(x, f"pool{number // 2}", 3, 2, ceil_mode=1)
        x = fire(x, f"fire{number}", squeeze, expand)
    x = net.relu(net.conv(x, "conv10", classes, 1), "relu10")
    return net.flatten(net.global_average(x, "pool10"), "flatten")


#: Convolutions of Darknet-19 (Redmon and Farhadi 2017, table 6): (channels, kernel size). None is a 2 x 2 pool.
DARKNET_LAYERS = (
    *((32, 3), None, (64, 3), None, (128, 3), (64, 1), (128, 3), None, (256, 3), (128, 1), (256, 3), None),
    *((512, 3), (256, 1), (512, 3), (256, 1), (512, 3), None, (1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3)),
)
PASSTHROUGH_MODES = ("space-to-depth", "reshape")


def yolov2(
    net: NetworkBuilder, classes: int = 80, width: float = 1.0, anchors: int = 5, passthrough: str = "space-to-depth"
) -> str:
    """YOLOv2 (Redmon and Farhadi 2017) as in its authors' yolov2.cfg.

    The output has the shape (N, anchors * (5 + classes), H / 32, W / 32). `passthrough` selects the operators that
    rearrange squares of 2 x 2 elements to four channels: SpaceToDepth ("space-to-depth"), or Reshape, Transpose and
    Reshape with equal results ("reshape").
    """
    if passthrough not in PASSTHROUGH_MODES:
        raise UsageError(f"yolov2: unknown passthrough {passthrough!r}{did_you_mean(passthrough, PASSTHROUGH_MODES)}")

    def block(x: str, name: str, channels: int, kernel: int) -> str:
        x = net.batch_norm(net.conv(x, name, scale_channels(channels, width), kernel, bias=False), f"{name}.bn")
        return net.unary("LeakyRelu", x, f"{name}.leaky", alpha=0.1)

    x, fine, number = "input", "", 0
    for step in DARKNET_LAYERS:
        number += step is not None
        if step is None:
            fine = x
            x = net.pool(x, f"pool{number}", 2, 2)
        else:
            x = block(x, f"conv{number}", *step)
    x = block(block(x, "conv19", 1024, 3), "conv20", 1024, 3)
    side = _space_to_depth(net, block(fine, "conv21", 64, 1), "passthrough", passthrough)
    x = block(net.concat([side, x], "concat"), "conv22", 1024, 3)
    return net.conv(x, "conv23", anchors * (5 + classes), 1)


def _space_to_depth(net: NetworkBuilder, x: str, name: str, how: str) -> str:
    """Append the conversion of each 2 x 2 square to four channels: (N, C, H, W) ⇒ (N, 4 C, H / 2, W / 2).

    `how` selects the operators: "space-to-depth" for SpaceToDepth, "reshape" for Reshape, Transpose and Reshape.
    """
    batch, channels, height, width = net.shapes[x]
    shape = (batch, channels * 4, height // 2, width // 2)
    if how == "space-to-depth":
        return net.add_node("SpaceToDepth", name, [x], shape, blocksize=2)
    x = net.reshape(x, f"{name}.split", (batch, channels, height // 2, 2, width // 2, 2))
    return net.reshape(net.transpose(x, f"{name}.transpose", (0, 3, 5, 1, 2, 4)), f"{name}.join", shape)
