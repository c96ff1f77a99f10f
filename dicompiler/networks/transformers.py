"""Transformers as PyTorch's exporter writes them: BERT, ViT, Whisper's encoder, SegFormer.

Sequences have the shape (N, positions, features). The numbers of parameters equal those of Hugging Face's and timm's
models (`sum(p.numel() for p in parameters())`).
"""

from __future__ import annotations

import math

import numpy as np

from dicompiler.base.errors import UsageError
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.networks.classic import scale_channels

BRANCH_GAIN = 0.3
"""Factor of the weights at the end of a residual branch, so that activations keep their size at any depth."""


def _layer_norm(net: NetworkBuilder, x: str, name: str, epsilon: float = 1e-6) -> str:
    """Append a LayerNormalization over the features, which needs opset 17 or later."""
    if net.opset < 17:
        raise UsageError(f"network {net.name!r}: opset {net.opset} has no LayerNormalization: use 17 or later")
    size = (net.shapes[x][-1],)
    weights = [net.add_weight(f"{name}.weight", size, "scale"), net.add_weight(f"{name}.bias", size, "shift")]
    return net.add_node("LayerNormalization", name, [x, *weights], net.shapes[x], axis=-1, epsilon=epsilon)


def linear(net: NetworkBuilder, x: str, name: str, features: int, gain: float = 0.7, bias: bool = True) -> str:
    """Append a linear layer: a MatMul by a weight of shape (input features, `features`), and an Add of a bias."""
    length = net.shapes[x][-1]
    weight = net.add_weight(f"{name}.weight", (length, features), "filter", length, gain)
    x = net.matmul(x, weight, f"{name}.matmul")
    return net.add(x, net.add_weight(f"{name}.bias", (features,), "bias"), name) if bias else x


def _scalar(net: NetworkBuilder, op: str, x: str, name: str, value: float) -> str:
    return net.add_node(op, name, [x, net.add_constant(f"{name}.value", np.float32(value))], net.shapes[x])


def _gelu(net: NetworkBuilder, x: str, name: str) -> str:
    """Append x · (1 + erf(x / √2)) / 2 as the five nodes that the exporter writes."""
    y = net.unary("Erf", _scalar(net, "Div", x, f"{name}.div", math.sqrt(2)), f"{name}.erf")
    y = net.mul(x, _scalar(net, "Add", y, f"{name}.add", 1.0), f"{name}.mul")
    return _scalar(net, "Mul", y, name, 0.5)


def split_heads(net: NetworkBuilder, x: str, name: str, heads: int, perm: tuple[int, ...] = (0, 2, 1, 3)) -> str:
    """Append a Reshape and a Transpose that give each head its own axis.

    (N, positions, features) ⇒ (N, positions, heads, features of a head), then permuted by `perm`.
    """
    batch, positions, features = net.shapes[x]
    x = net.reshape(x, f"{name}.reshape", (batch, positions, heads, features // heads))
    return net.transpose(x, f"{name}.transpose", perm)


def _attention(net: NetworkBuilder, q: str, k: str, v: str, name: str, heads: int, mask: str = "") -> str:
    """Append softmax(Q·Kᵀ / √d + mask)·V for each head, joined to the shape (N, positions, features)."""
    batch, positions, features = net.shapes[q]
    q, k = split_heads(net, q, f"{name}.q", heads), split_heads(net, k, f"{name}.k", heads, (0, 2, 3, 1))
    scores = net.matmul(q, k, name)
    scores = _scalar(net, "Div", scores, f"{name}.scaled", math.sqrt(features // heads))
    if mask:
        scores = net.add(scores, mask, f"{name}.masked")
    weights = net.unary("Softmax", scores, f"{name}.softmax", axis=-1)
    y = net.matmul(weights, split_heads(net, v, f"{name}.v", heads), f"{name}.values")
    y = net.transpose(y, f"{name}.transpose", (0, 2, 1, 3))
    return net.reshape(y, f"{name}.joined", (batch, positions, features))


def _mlp(net: NetworkBuilder, x: str, first: str, second: str, hidden: int) -> str:
    y = _gelu(net, linear(net, x, first, hidden), f"{first}.gelu")
    return linear(net, y, second, net.shapes[x][-1], BRANCH_GAIN)


def _first_position(net: NetworkBuilder, x: str, name: str) -> str:
    first = net.add_constant(f"{name}.index", np.array(0, np.int64))
    return net.add_node("Gather", name, [x, first], (net.shapes[x][0], net.shapes[x][2]), axis=1)


def bert_base(
    net: NetworkBuilder, layers: int = 12, vocabulary: int = 30_522, classes: int = 0, width: float = 1.0
) -> str:
    """BERT base, uncased (Devlin et al. 2019): 108 891 648 parameters.

    If `classes` is 0, the output contains the last hidden states of all tokens. Otherwise it contains one logit per
    class, computed from the first token.
    """
    heads, hidden = 12, 12 * scale_channels(64, width)
    shape = (*net.input_shape, hidden)
    x = ""
    tables = {"input_ids": ("word", vocabulary), "token_type_ids": ("token_type", 2), "": ("position", 512)}
    if net.input_shape[1] > 512:
        raise UsageError(f"network {net.name!r}: size is {net.input_shape[1]} tokens: use at most 512")
    positions = net.add_constant("position_ids", np.arange(net.input_shape[1], dtype=np.int64)[None])
    for tensor, (kind, rows) in tables.items():
        table = net.add_weight(f"embeddings.{kind}.weight", (rows, hidden), "bias")
        y_shape = shape if tensor else (1, *shape[1:])
        y = net.add_node("Gather", f"embeddings.{kind}", [table, tensor or positions], y_shape, axis=0)
        x = net.add(x, y, f"embeddings.{kind}.add") if x else y
    x = _layer_norm(net, x, "embeddings.norm", 1e-12)
    mask = _attention_mask(net)
    for number in range(layers):
        name = f"layer.{number}"
        q, k, v = (linear(net, x, f"{name}.{kind}", hidden) for kind in ("query", "key", "value"))
        y = linear(net, _attention(net, q, k, v, f"{name}.attention", heads, mask), f"{name}.attention.output", hidden)
        x = _layer_norm(net, net.add(y, x, f"{name}.attention.add"), f"{name}.attention.norm", 1e-12)
        y = _mlp(net, x, f"{name}.intermediate", f"{name}.output", 4 * hidden)
        x = _layer_norm(net, net.add(y, x, f"{name}.output.add"), f"{name}.output.norm", 1e-12)
    if not classes:
        return x
    pooled = net.unary("Tanh", net.gemm(_first_position(net, x, "pooler.first"), "pooler", hidden), "pooler.tanh")
    return net.gemm(pooled, "classifier", classes)


def _attention_mask(net: NetworkBuilder) -> str:
    """Append the mask that is added to scores: 0 for a token, or a very low number for padding.

    The input attention_mask is 1 for a token and 0 for padding.
    """
    batch, length = net.input_shape
    axes = net.add_constant("mask.axes", np.array([1, 2], np.int64))
    x = net.add_node("Unsqueeze", "mask.unsqueeze", ["attention_mask", axes], (batch, 1, 1, length))
    x = net.add_node("Cast", "mask.cast", [x], net.shapes[x], to=1)
    one = net.add_constant("mask.one", np.float32(1))
    x = net.add_node("Sub", "mask.inverted", [one, x], net.shapes[x])
    return _scalar(net, "Mul", x, "mask.scaled", float(np.finfo(np.float32).min))


def vit_tiny(net: NetworkBuilder, classes: int = 1000, width: float = 1.0) -> str:
    """ViT-tiny, patches of 16 (Touvron et al. 2021, DeiT-Ti; timm's `vit_tiny_patch16_224`): 5 717 416 parameters."""
    heads, hidden = 3, 3 * scale_channels(64, width)
    x = net.conv("input", "patch_embed", hidden, 16, 16, pads=0)
    batch, _, height, columns = net.shapes[x]
    x = net.transpose(net.reshape(x, "patches", (batch, hidden, height * columns)), "sequence", (0, 2, 1))
    token = net.add_weight("cls_token", (1, 1, hidden), "bias")
    if batch > 1:
        size = net.add_constant("cls.shape", np.array([batch, 1, hidden], np.int64))
        token = net.add_node("Expand", "cls", [token, size], (batch, 1, hidden))
    net.shapes[token] = (batch, 1, hidden)
    x = net.concat([token, x], "tokens")
    x = net.add(x, net.add_weight("pos_embed", (1, height * columns + 1, hidden), "bias"), "positions")
    for number in range(12):
        name = f"blocks.{number}"
        y = linear(net, _layer_norm(net, x, f"{name}.norm1"), f"{name}.attn.qkv", 3 * hidden)
        q, k, v = net.split(y, f"{name}.attn.split", (hidden,) * 3, axis=2)
        y = linear(net, _attention(net, q, k, v, f"{name}.attn", heads), f"{name}.attn.proj", hidden, BRANCH_GAIN)
        x = net.add(x, y, f"{name}.add1")
        y = _mlp(net, _layer_norm(net, x, f"{name}.norm2"), f"{name}.mlp.fc1", f"{name}.mlp.fc2", 4 * hidden)
        x = net.add(x, y, f"{name}.add2")
    return net.gemm(_first_position(net, _layer_norm(net, x, "norm"), "first"), "head", classes)


def whisper_tiny_encoder(net: NetworkBuilder, layers: int = 4, width: float = 1.0) -> str:
    """Whisper tiny's encoder (Radford et al. 2022) on 80 mel bands x 3000 frames: 8 208 384 parameters.

    These include 576 000 for positions, which are sinusoids in the original and random numbers here.
    """
    heads, hidden = 6, 6 * scale_channels(64, width)
    x = _gelu(net, net.conv1d("input", "conv1", hidden, 3, 1, 1), "conv1.gelu")
    x = _gelu(net, net.conv1d(x, "conv2", hidden, 3, 2, 1), "conv2.gelu")
    x = net.transpose(x, "sequence", (0, 2, 1))
    x = net.add(x, net.add_weight("embed_positions.weight", net.shapes[x][1:], "bias"), "positions")
    for number in range(layers):
        name = f"layers.{number}"
        y = _layer_norm(net, x, f"{name}.norm1", 1e-5)
        q, k, v = (linear(net, y, f"{name}.{kind}_proj", hidden, bias=kind != "k") for kind in "qkv")
        y = linear(net, _attention(net, q, k, v, f"{name}.attn", heads), f"{name}.out_proj", hidden, BRANCH_GAIN)
        x = net.add(x, y, f"{name}.add1")
        y = _mlp(net, _layer_norm(net, x, f"{name}.norm2", 1e-5), f"{name}.fc1", f"{name}.fc2", 4 * hidden)
        x = net.add(x, y, f"{name}.add2")
    return _layer_norm(net, x, "norm", 1e-5)


#: Stages of SegFormer-B0: (heads, features of a head, factor by which the image is reduced for keys and values, kernel
#: size and stride of the convolution that computes the patches).
SEGFORMER_B0 = ((1, 32, 8, 7, 4), (2, 32, 4, 3, 2), (5, 32, 2, 3, 2), (8, 32, 1, 3, 2))


def segformer_b0(net: NetworkBuilder, classes: int = 150, width: float = 1.0) -> str:
    """SegFormer-B0 (Xie et al. 2021) for the 150 classes of ADE20K: 3 752 694 trained parameters.

    The map of logits has a quarter of the image's height and width.
    """
    if any(side % 32 for side in net.input_shape[2:]):
        raise UsageError(f"network {net.name!r}: size is {net.input_shape[2:]}: use multiples of 32")
    x, maps = "input", list[str]()
    for number, (heads, length, reduction, kernel, stride) in enumerate(SEGFORMER_B0):
        name, hidden = f"stage{number}", heads * scale_channels(length, width)
        image = net.conv(x, f"{name}.patch", hidden, kernel, stride)
        tokens = _layer_norm(net, _image_to_sequence(net, image, f"{name}.flat"), f"{name}.patch.norm", 1e-5)
        for block in (0, 1):
            tokens = _segformer_block(net, tokens, net.shapes[image], f"{name}.{block}", heads, reduction)
        x = _sequence_to_image(net, _layer_norm(net, tokens, f"{name}.norm", 1e-5), f"{name}.image", net.shapes[image])
        maps.append(x)
    return _segformer_head(net, maps, classes, scale_channels(256, width))


def _image_to_sequence(net: NetworkBuilder, x: str, name: str) -> str:
    """Append the conversion of an image to a sequence of pixels: (N, C, H, W) ⇒ (N, H·W, C)."""
    batch, channels, height, width = net.shapes[x]
    return net.transpose(net.reshape(x, f"{name}.reshape", (batch, channels, height * width)), name, (0, 2, 1))


def _sequence_to_image(net: NetworkBuilder, x: str, name: str, shape: tuple[int, ...]) -> str:
    """Append the conversion of a sequence of pixels to an image: (N, H·W, C) ⇒ (N, C, H, W) as in `shape`."""
    turned = net.transpose(x, f"{name}.transpose", (0, 2, 1))
    return net.reshape(turned, name, (shape[0], net.shapes[x][2], *shape[2:]))


def _segformer_block(net: NetworkBuilder, x: str, image: tuple[int, ...], name: str, heads: int, reduction: int) -> str:
    """Append attention and a feed-forward network with a depthwise convolution.

    `x` is a sequence of the pixels of an image with the shape `image`. Keys and values are computed from the image
    reduced by the factor `reduction`.
    """
    hidden = net.shapes[x][2]
    y = _layer_norm(net, x, f"{name}.norm1", 1e-5)
    reduced = y
    if reduction > 1:
        reduced = _sequence_to_image(net, y, f"{name}.sr.image", image)
        reduced = net.conv(reduced, f"{name}.sr", hidden, reduction, reduction, pads=0)
        reduced = _layer_norm(net, _image_to_sequence(net, reduced, f"{name}.sr.flat"), f"{name}.sr.norm", 1e-5)
    q, k, v = (linear(net, t, f"{name}.{kind}", hidden) for kind, t in zip("qkv", (y, reduced, reduced), strict=True))
    y = linear(net, _attention(net, q, k, v, f"{name}.attn", heads), f"{name}.proj", hidden, BRANCH_GAIN)
    x = net.add(y, x, f"{name}.add1")
    y = linear(net, _layer_norm(net, x, f"{name}.norm2", 1e-5), f"{name}.fc1", 4 * hidden)
    y = _sequence_to_image(net, y, f"{name}.dw.image", image)
    y = net.conv(y, f"{name}.dwconv", 4 * hidden, 3, group=4 * hidden)
    y = _gelu(net, _image_to_sequence(net, y, f"{name}.dw.flat"), f"{name}.gelu")
    return net.add(linear(net, y, f"{name}.fc2", hidden, BRANCH_GAIN), x, f"{name}.add2")


def _segformer_head(net: NetworkBuilder, maps: list[str], classes: int, hidden: int) -> str:
    """Append the head: feature maps are enlarged to the size of the first one, concatenated, mixed and classified."""
    height = net.shapes[maps[0]][2]
    pieces = []
    for number, x in enumerate(maps):
        y = linear(net, _image_to_sequence(net, x, f"head.{number}.flat"), f"head.{number}.proj", hidden)
        y = _sequence_to_image(net, y, f"head.{number}.image", net.shapes[x])
        factor = height // net.shapes[x][2]
        pieces.append(y if factor == 1 else net.resize(y, f"head.{number}.resize", factor, mode="linear"))
    x = net.concat(pieces[::-1], "head.concat")
    x = net.relu(net.batch_norm(net.conv(x, "head.fuse", hidden, 1, bias=False), "head.bn"), "head.relu")
    return net.conv(x, "head.classifier", classes, 1)
