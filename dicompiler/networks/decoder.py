"""Text decoder as PyTorch's exporter writes it, with RMS normalization, rotary positions, SwiGLU and caches.

Sequences have the shape (N, positions, features). Keys and values have the shape (N, heads, positions, features of a
head).
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from dicompiler.base.errors import UsageError
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.networks.transformers import BRANCH_GAIN, linear, split_heads

LOWEST_SCORE = float(np.finfo(np.float32).min)
"""Number that is added to the attention scores of unused positions, so that their softmax is 0."""


def llama_small(
    net: NetworkBuilder,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    kv_heads: int = 4,
    vocabulary: int = 32_000,
    past: int = 0,
    static: bool = False,
) -> str:
    """Llama-like decoder (Touvron et al. 2023) of 24 layers: 336 118 784 parameters.

    The output has one row of logits per token. With caches (`past` > 0), the positions of the tokens are an input, and
    the outputs present.N.key and present.N.value contain the caches of layer N. Unless `static` is True, the input
    attention_mask marks the rows that are used.

    Args:
        net: The builder to which the network is appended.
        layers: Number of decoder layers.
        hidden: Number of features of a token between layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        vocabulary: Number of different tokens.
        past: Number of rows of the caches past_key_values.N.key and past_key_values.N.value. With 0 there are no
            caches, and positions are counted from 0.
        static: True if the caches keep their size. The rows of the new tokens then replace the rows with the indices in
            the input cache_position. Rows after the replaced ones are not used.
    """
    if hidden % heads or heads % kv_heads or hidden // heads % 2:
        raise UsageError(
            f"network {net.name!r}: {hidden} features, {heads} heads, {kv_heads} heads of keys and values: choose an "
            "even number of features per head, and a number of query heads that the number of key heads divides"
        )
    if static and past < net.input_shape[1]:
        raise UsageError(
            f"network {net.name!r}: past is {past}: use at least the number of tokens ({net.input_shape[1]})"
        )
    x = net.add_weight("embed_tokens.weight", (vocabulary, hidden), "bias")
    x = net.add_node("Gather", "embed_tokens", [x, "input_ids"], (*net.input_shape, hidden), axis=0)
    positions = _position_ids(net, past, static)
    cos_sin, mask = _rotary_angles(net, positions, hidden // heads), _attention_mask(net, positions, past, static)
    rows = _cache_rows(net) if static else ""
    for number in range(layers):
        name = f"layers.{number}"
        y = _rms_norm(net, x, f"{name}.input_norm")
        projections = []
        for kind, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
            projection = linear(net, y, f"{name}.{kind}_proj", count * (hidden // heads), bias=False)
            projections.append(split_heads(net, projection, f"{name}.{kind}", count))
        q, k, v = projections
        q, k = _rotate(net, q, f"{name}.q.turned", cos_sin), _rotate(net, k, f"{name}.k.turned", cos_sin)
        if past:
            k, v = (_append_to_cache(net, t, f"{number}.{kind}", past, rows) for kind, t in (("key", k), ("value", v)))
        k, v = _repeat_heads(net, k, f"{name}.k.shared", heads), _repeat_heads(net, v, f"{name}.v.shared", heads)
        y = _grouped_attention(net, q, k, v, name, mask)
        x = net.add(x, linear(net, y, f"{name}.o_proj", hidden, BRANCH_GAIN, bias=False), f"{name}.add1")
        y = _swiglu(net, _rms_norm(net, x, f"{name}.post_norm"), name, 11 * hidden // 4)
        x = net.add(x, y, f"{name}.add2")
    return linear(net, _rms_norm(net, x, "norm"), "lm_head", vocabulary, bias=False)


def _position_ids(net: NetworkBuilder, past: int, static: bool) -> str:
    """Append a tensor with the positions of the tokens, of shape (N, tokens), or (1, tokens) if shared."""
    rows = net.input_shape[1]
    if not past:
        return net.add_constant("positions", np.arange(rows, dtype=np.int64)[None])
    if not static:
        net.add_input("attention_mask", (net.input_shape[0], past + rows), TensorProto.INT64)
        return net.add_input("position_ids", net.input_shape, TensorProto.INT64)
    net.add_input("cache_position", (rows,), TensorProto.INT64)
    axes = net.add_constant("positions.axes", np.array([0], np.int64))
    return net.add_node("Unsqueeze", "positions", ["cache_position", axes], (1, rows))


def _rotary_angles(net: NetworkBuilder, positions: str, size: int) -> tuple[str, str]:
    """Append the cosine and the sine of the rotary angles, of shape (N or 1, 1, positions, features of a head).

    `positions` is the tensor with the positions of the tokens, and `size` the number of features of a head.
    """
    batch, rows = net.shapes.get(positions, (1, net.input_shape[1]))
    inverse_frequencies = (10_000.0 ** (-np.arange(0, size, 2) / size)).astype(np.float32)[None, :, None]
    frequencies = net.add_constant("rotary.inv_freq", inverse_frequencies)
    net.shapes[frequencies] = (1, size // 2, 1)
    axes = net.add_constant("rotary.axes", np.array([1], np.int64))
    x = net.add_node("Unsqueeze", "rotary.unsqueeze", [positions, axes], (batch, 1, rows))
    x = net.add_node("Cast", "rotary.cast", [x], (batch, 1, rows), to=TensorProto.FLOAT)
    x = net.add_node("MatMul", "rotary.angles", [frequencies, x], (batch, size // 2, rows))
    x = net.transpose(x, "rotary.transpose", (0, 2, 1))
    x = net.concat([x, x], "rotary.concat", axis=2)
    both = (net.unary(op, x, f"rotary.{op.lower()}") for op in ("Cos", "Sin"))
    shape = (batch, 1, rows, size)
    cos, sin = (net.add_node("Unsqueeze", f"{t}.unsqueeze", [t, axes], shape) for t in both)
    return cos, sin


def _rotate(net: NetworkBuilder, x: str, name: str, cos_sin: tuple[str, str]) -> str:
    """Append the rotary embedding of x: x · cos + (-b, a) · sin, in which a and b are the two halves of x's features.

    `cos_sin` are the tensors with the cosine and the sine of the rotary angles.
    """
    *front, size = net.shapes[x]
    half, (cos, sin) = (*front, size // 2), cos_sin

    def part(kind: str, start: int, stop: int) -> str:
        ends = [net.add_constant(f"{name}.{kind}.{i}", np.array([n], np.int64)) for i, n in enumerate((start, stop, 3))]
        return net.add_node("Slice", f"{name}.{kind}", [x, *ends], half)

    high = net.unary("Neg", part("high", size // 2, np.iinfo(np.int64).max), f"{name}.neg")
    rotated = net.concat([high, part("low", 0, size // 2)], f"{name}.rotated", axis=3)
    return net.add(net.mul(x, cos, f"{name}.cos"), net.mul(rotated, sin, f"{name}.sin"), name)


def _attention_mask(net: NetworkBuilder, positions: str, past: int, static: bool) -> str:
    """Append the mask that is added to scores: 0, or a very low number for a key that must not be used.

    The mask has the shape (N or 1, 1, tokens, keys); the keys are those of the cache and of the tokens. `positions` is
    the tensor with the positions of the tokens.
    """
    rows = net.input_shape[1]
    total = past if static else past + rows
    if static:
        columns = net.add_constant("mask.columns", np.arange(total, dtype=np.int64))
        axes = net.add_constant("mask.axes", np.array([1, 3], np.int64))
        position_column = net.add_node("Unsqueeze", "mask.rows", [positions, axes], (1, 1, rows, 1))
        seen = net.add_node("LessOrEqual", "mask.seen", [columns, position_column], (1, 1, rows, total))
    else:
        ahead = np.arange(total)[None] <= past + np.arange(rows)[:, None]
        if not past:
            return net.add_constant("mask", np.where(ahead, 0, LOWEST_SCORE).astype(np.float32)[None, None])
        axes = net.add_constant("mask.axes", np.array([1, 2], np.int64))
        shape = (net.input_shape[0], 1, 1, total)
        kept = net.add_node("Unsqueeze", "mask.unsqueeze", ["attention_mask", axes], shape)
        kept = net.add_node("Cast", "mask.cast", [kept], shape, to=TensorProto.BOOL)
        causal = net.add_constant("mask.causal", ahead[None, None])
        seen = net.add_node("And", "mask.seen", [causal, kept], (net.input_shape[0], 1, rows, total))
    values = [net.add_constant(f"mask.{kind}", np.float32(v)) for kind, v in (("zero", 0), ("lowest", LOWEST_SCORE))]
    return net.add_node("Where", "mask", [seen, *values], net.shapes[seen])


def _cache_rows(net: NetworkBuilder) -> str:
    """Append the indices of the cache rows that the new tokens replace, in the shape (tokens, 1) for ScatterND."""
    axes = net.add_constant("cache.axes", np.array([1], np.int64))
    return net.add_node("Unsqueeze", "cache.rows", ["cache_position", axes], (net.input_shape[1], 1))


def _append_to_cache(net: NetworkBuilder, x: str, name: str, past: int, rows: str) -> str:
    """Append a tensor with the keys or values of all positions: those in the cache, and the new ones, `x`.

    If `rows` is "", the new rows are appended to the `past` rows of the cache. Otherwise a ScatterND replaces the
    cache's rows with the indices in the tensor `rows`.
    """
    batch, heads, _, size = net.shapes[x]
    cache = net.add_input(f"past_key_values.{name}", (batch, heads, past, size))
    if rows:
        turned = [net.transpose(t, f"cache.{name}.{kind}", (2, 0, 1, 3)) for kind, t in (("past", cache), ("new", x))]
        y = net.add_node("ScatterND", f"cache.{name}.scatter", [turned[0], rows, turned[1]], net.shapes[turned[0]])
        y = net.transpose(y, f"cache.{name}", (1, 2, 0, 3))
    else:
        y = net.concat([cache, x], f"cache.{name}", axis=2)
    net.outputs[f"present.{name}"] = y
    return y


def _repeat_heads(net: NetworkBuilder, x: str, name: str, heads: int) -> str:
    """Append copies of each key or value head for the query heads that share it."""
    batch, count, rows, size = net.shapes[x]
    if count == heads:
        return x
    axes = net.add_constant(f"{name}.axes", np.array([2], np.int64))
    shape = (batch, count, heads // count, rows, size)
    x = net.add_node("Unsqueeze", f"{name}.unsqueeze", [x, axes], (batch, count, 1, rows, size))
    target = net.add_constant(f"{name}.size", np.array(shape, np.int64))
    x = net.add_node("Expand", f"{name}.expand", [x, target], shape)
    return net.reshape(x, name, (batch, heads, rows, size))


def _grouped_attention(net: NetworkBuilder, q: str, k: str, v: str, name: str, mask: str) -> str:
    """Append softmax(Q·Kᵀ / √d + mask)·V for each head, joined to the shape (N, positions, features)."""
    batch, heads, rows, size = net.shapes[q]
    scores = net.matmul(q, net.transpose(k, f"{name}.keys", (0, 1, 3, 2)), f"{name}.scores")
    scale = net.add_constant(f"{name}.scale", np.float32(size**-0.5))
    scores = net.add(net.mul(scores, scale, f"{name}.scaled"), mask, f"{name}.masked")
    y = net.matmul(net.unary("Softmax", scores, f"{name}.softmax", axis=-1), v, f"{name}.values")
    y = net.transpose(y, f"{name}.transpose", (0, 2, 1, 3))
    return net.reshape(y, f"{name}.joined", (batch, rows, heads * size))


def _rms_norm(net: NetworkBuilder, x: str, name: str) -> str:
    """Append RMS normalization: x / √(mean of x² + ε), multiplied by a weight per feature."""
    shape, axes = net.shapes[x], {"axes": [-1]}
    inputs = [net.add_node("Pow", f"{name}.square", [x, net.add_constant(f"{name}.two", np.float32(2))], shape)]
    if net.opset >= 18:
        inputs, axes = [*inputs, net.add_constant(f"{name}.axes", np.array([-1], np.int64))], {}
    y = net.add_node("ReduceMean", f"{name}.mean", inputs, (*shape[:-1], 1), **axes)
    y = net.add(y, net.add_constant(f"{name}.epsilon", np.float32(1e-5)), f"{name}.add")
    y = net.unary("Reciprocal", net.unary("Sqrt", y, f"{name}.sqrt"), f"{name}.reciprocal")
    return net.mul(net.mul(x, y, f"{name}.normal"), net.add_weight(f"{name}.weight", shape[-1:], "scale"), name)


def _swiglu(net: NetworkBuilder, x: str, name: str, features: int) -> str:
    """Append the feed-forward network SwiGLU: SiLU of one projection, times a second projection, projected back."""
    gate = linear(net, x, f"{name}.gate_proj", features, bias=False)
    gate = net.mul(gate, net.unary("Sigmoid", gate, f"{name}.sigmoid"), f"{name}.silu")
    y = net.mul(gate, linear(net, x, f"{name}.up_proj", features, bias=False), f"{name}.product")
    return linear(net, y, f"{name}.down_proj", net.shapes[x][-1], BRANCH_GAIN, bias=False)
