"""Random small networks with integer values, and random plans for them, for property tests and benchmarks.

Everything is drawn from a `random.Random`; hypothesis passes one that it can shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from support.generator_steps import ANY, SPATIAL

from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.random_ops import random_layers
from dicompiler.ir.regions import Interval, Region, full_region, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape, reduction_length

DEVICES = ("a", "b", "c", "d")
CLUSTER = Platform(
    "test",
    tuple(Host(name, 2**40) for name in DEVICES),
    tuple(Device(name, name, 1e9) for name in DEVICES),
    Network("switch", 1e8),
)
"""Of these devices, all alike: a host each, with memory for whatever is drawn."""


@dataclass
class Net:
    """A growing network; `live` has (tensor, shape) that later nodes can read."""

    rng: Random
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    live: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def weight(self, *shape: int, nonzeros: int = 2) -> str:
        """Add a sparse weight with at most `nonzeros` of ±1 per filter, so that values stay small at any depth."""
        name = f"w{len(self.weights)}"
        flat = np.zeros((shape[0], int(np.prod(shape[1:]))), np.float32)
        for row in flat:
            for _ in range(nonzeros):
                row[self.rng.randrange(flat.shape[1])] = self.rng.choice((-1, 1))
        self.weights.append(numpy_helper.from_array(flat.reshape(shape), name))
        return name

    def vector(self, length: int, values: Sequence[int]) -> str:
        name = f"w{len(self.weights)}"
        array = np.array([self.rng.choice(values) for _ in range(length)], np.float32)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, inputs: Sequence[str], shape: Sequence[int], **attributes: Any) -> str:
        name, output = f"{op.lower()}{len(self.nodes)}", f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name, **attributes))
        self.live.append((output, tuple(shape)))
        return output

    def pick(self, rank: int | None = None) -> tuple[str, tuple[int, ...]]:
        """Return a live tensor, usually a late one."""
        chosen = [t for t in self.live if rank is None or len(t[1]) == rank] or self.live
        return chosen[-1] if self.rng.random() < 0.7 else self.rng.choice(chosen)


def _window(net: Net, extents: Sequence[int]) -> dict[str, Any] | None:
    """Return kernel, strides, dilations and pads that leave at least one output; None if these extents allow none."""
    rng = net.rng
    kernel = [rng.choice((1, 2, 3, 3, 5)) for _ in extents]
    strides = [rng.choice((1, 1, 2, 3)) for _ in extents]
    dilations = [rng.choice((1, 1, 2)) for _ in extents]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    window = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    if rng.random() < 0.2:
        window.pop("dilations")
        mode = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
        out = [
            -(-e // s) if mode != "VALID" else (e - k) // s + 1
            for e, s, k in zip(extents, strides, kernel, strict=True)
        ]
        padded = all((o - 1) * s + k >= e for o, s, k, e in zip(out, strides, kernel, extents, strict=True))
        # onnxruntime rejects the negative pads that SAME gives if a stride is longer than its kernel.
        return {**window, "auto_pad": mode, "out": out} if min(out) > 0 and (padded or mode == "VALID") else None
    pads = [rng.randrange(k) for k in kernel * 2]
    rank = len(kernel)
    out = [
        (e + pads[i] + pads[rank + i] - span) // s + 1
        for i, (e, span, s) in enumerate(zip(extents, spans, strides, strict=True))
    ]
    return {**window, "pads": pads, "out": out} if min(out) > 0 else None


def _conv(net: Net) -> None:
    name, (n, c, *extents) = net.pick(4)
    window = _window(net, extents)
    if window is None:
        return
    out = window.pop("out")
    groups = net.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    groups = 1 if net.rng.random() < 0.5 else groups
    channels = groups * net.rng.choice((1, 2, 3))
    inputs = [name, net.weight(channels, c // groups, *window["kernel_shape"])]
    if net.rng.random() < 0.5:
        inputs.append(net.vector(channels, range(-3, 4)))
    net.add("Conv", inputs, (n, channels, *out), group=groups, **window)


def _pool(net: Net) -> None:
    name, (n, c, *extents) = net.pick(4)
    op = net.rng.choice(("MaxPool", "AveragePool"))
    window = _window(net, extents)
    if window is None:
        return
    if op == "AveragePool":
        # Averages of integers are exact only if the number of elements is a power of two: kernels of 1 or 2, no pads.
        window.pop("dilations", None)
        window["kernel_shape"] = [min(2, k) for k in window["kernel_shape"]]
        window.pop("auto_pad", None)
        window["pads"] = [0] * 4
        pairs = zip(extents, window["kernel_shape"], window["strides"], strict=True)
        window["out"] = [(e - k) // s + 1 for e, k, s in pairs]
        if min(window["out"]) < 1:
            return
    elif net.opset < 10 or not _touches(window, extents):
        return
    out = window.pop("out")
    net.add(op, [name], (n, c, *out), **window)


def _touches(window: dict[str, Any], extents: Sequence[int]) -> bool:
    """Return True if every window has a tap inside the input; onnxruntime's MaxPool of pads only is −3e38."""
    if "pads" not in window:
        return True
    axes = zip(
        *(window[name] for name in ("kernel_shape", "strides", "dilations", "pads", "out")), extents, strict=False
    )
    return all(
        any(0 <= i * stride - pad + tap * dilation < extent for tap in range(kernel))
        for kernel, stride, dilation, pad, out, extent in axes
        for i in range(out)
    )


def _unary(net: Net) -> None:
    name, shape = net.pick()
    op = net.rng.choice(("Relu", "Neg", "Abs", "Identity", "Dropout"))
    net.add(op, [name], shape)


def _batch_normalization(net: Net) -> None:
    name, shape = net.pick(4)
    c = shape[1]
    ones, zeros = net.vector(c, (1,)), net.vector(c, (0,))
    net.add(
        "BatchNormalization",
        [name, net.vector(c, (-1, 1)), net.vector(c, range(-5, 6)), zeros, ones],
        shape,
        epsilon=0.0,
    )


def _binary(net: Net) -> None:
    name, shape = net.pick()
    same = [t for t, s in net.live if s == shape]
    op = net.rng.choice(("Add", "Sub", "Max"))
    other = net.rng.choice(same)
    if net.rng.random() < 0.25:
        other = net.vector(shape[-1], range(-3, 4))
    elif net.rng.random() < 0.2 and len(shape) == 4:
        other = net.weight(shape[1], 1, 1)
    net.add(op, [name, other] if net.rng.random() < 0.5 else [other, name], shape)


def _silu(net: Net) -> None:
    name, shape = net.pick()
    net.add("Max", [name, net.add("Neg", [name], shape)], shape)


def _concat(net: Net) -> None:
    _, shape = net.pick()
    axis = net.rng.randrange(len(shape))
    fitting = [(t, s) for t, s in net.live if len(s) == len(shape) and replace_dim(s, axis) == replace_dim(shape, axis)]
    parts = [net.rng.choice(fitting) for _ in range(net.rng.choice((2, 3)))]
    total = sum(s[axis] for _, s in parts)
    negative = net.opset >= 11 and net.rng.random() < 0.5
    whole = (*shape[:axis], total, *shape[axis + 1 :])
    net.add("Concat", [t for t, _ in parts], whole, axis=axis - len(shape) * negative)


def replace_dim(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 0, *shape[axis + 1 :])


def _shuffle(net: Net) -> None:
    """Append ShuffleNet's channel shuffle: N, g, c/g, H, W and back."""
    name, (n, c, h, w) = net.pick(4)
    g = net.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    split = _reshape_to(net, name, (n, g, c // g, h, w))
    turned = net.add("Transpose", [split], (n, c // g, g, h, w), perm=[0, 2, 1, 3, 4])
    _reshape_to(net, turned, (n, c, h, w))


def _reshape_to(net: Net, name: str, shape: Sequence[int]) -> str:
    wanted = f"w{len(net.weights)}"
    net.weights.append(numpy_helper.from_array(np.array(shape, np.int64), wanted))
    return net.add("Reshape", [name, wanted], shape)


def _transpose(net: Net) -> None:
    name, shape = net.pick()
    perm = list(range(len(shape)))
    net.rng.shuffle(perm)
    if len(shape) == 4 and net.rng.random() < 0.8:
        return
    net.add("Transpose", [name], [shape[i] for i in perm], perm=perm)


def _global(net: Net) -> None:
    name, (n, c, *_) = net.pick(4)
    net.add("GlobalMaxPool", [name], (n, c, 1, 1))


def _dense(net: Net) -> None:
    name, shape = net.pick()
    if len(shape) != 2:
        flat = (shape[0], int(np.prod(shape[1:])))
        name = net.add("Flatten", [name], flat) if net.rng.random() < 0.5 else _reshape_to(net, name, flat)
        shape = flat
    out = net.rng.choice((1, 3, 4, 8))
    if net.rng.random() < 0.5:
        net.add("MatMul", [name, net.weight(shape[1], out)], (shape[0], out))
        return
    turned = net.rng.random() < 0.5
    weight = net.weight(out, shape[1]) if turned else net.weight(shape[1], out)
    inputs = [name, weight]
    if net.opset < 11 or net.rng.random() < 0.7:
        inputs.append(net.vector(out, range(-3, 4)))
    net.add("Gemm", inputs, (shape[0], out), transB=int(turned), alpha=net.rng.choice((1.0, 2.0)), beta=2.0)


def _hardmax(net: Net) -> None:
    name, shape = net.pick()
    net.add("Hardmax", [name], shape, axis=net.rng.randrange(1, len(shape)))


STEPS = (
    *[_conv] * 5, *[_pool] * 2, _unary, _unary, _batch_normalization, _binary, _binary, _silu, _concat, _shuffle,
    _transpose, _global, _dense, _dense, _hardmax, *SPATIAL, *ANY,
)  # fmt: skip


def random_model(rng: Random, depth: int = 8) -> onnx.ModelProto:
    """Return a network of up to `depth` random steps; every unread tensor is an output (at most three)."""
    net = Net(rng, rng.choice((9, 11, 13, 17)))
    shape = (rng.choice((1, 1, 1, 2)), rng.choice((1, 2, 3, 4)), rng.randrange(3, 10), rng.randrange(3, 9))
    net.live.append(("x", shape))
    for _ in range(rng.randrange(2, depth + 1)):
        step = rng.choice(STEPS)
        if step in (_dense, _unary, _binary, _silu, _concat, _transpose, _hardmax, *ANY) or any(
            len(s) == 4 for _, s in net.live
        ):
            step(net)
    if not net.nodes:
        _unary(net)
    read = {name for node in net.nodes for name in node.input}
    ends = [(name, s) for name, s in net.live if name not in read and name != "x"]
    if rng.random() < 0.2:
        ends.append(next((t for t in net.live[1:] if t not in ends), ends[0]))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in dict(ends[-3:]).items()]
    graph = helper.make_graph(
        net.nodes, "random", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], outputs, net.weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", net.opset)], ir_version=8)


def integers(rng: Random, model: onnx.ModelProto) -> dict[str, NDArray[np.float32]]:
    """Return inputs of −4 … 4."""
    values = np.random.default_rng(rng.randrange(2**31))
    return {
        v.name: values.integers(-4, 5, [d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
    }


def _cuts(rng: Random, extent: int, most: int = 4) -> list[Interval]:
    """Split 0..extent into up to `most` intervals of any sizes."""
    inner = sorted(rng.sample(range(1, extent), min(rng.randrange(most), extent - 1)))
    return list(zip([0, *inner], [*inner, extent], strict=True))


def _regions(rng: Random, layers: LayerGraph, layer: Layer) -> list[Region]:
    """Return regions that cover the layer's output, cut along up to two axes; some of them overlap."""
    shape = output_shape(layers, layer)
    regions = [full_region(shape)]
    allowed = cuttable_axes(layers, layer)
    for axis in rng.sample(allowed, min(len(allowed), rng.choice((0, 1, 1, 1, 2)))):
        regions = [with_interval(region, axis, cut) for region in regions for cut in _cuts(rng, shape[axis])]
    if rng.random() < 0.3:
        regions = [
            tuple(
                (max(0, a - rng.randrange(2)), min(e, b + rng.randrange(2))) if i in allowed else (a, b)
                for i, ((a, b), e) in enumerate(zip(region, shape, strict=True))
            )
            for region in regions
        ]
    return regions


def random_plan(rng: Random, layers: LayerGraph, devices: Sequence[str] = DEVICES) -> Plan:
    """Return a valid plan with any regions, devices and lanes, and some layers by LIP; random layers have one part."""

    def place(region: Region | None, reduce: Interval | None = None) -> Part:
        return Part(rng.choice(devices), region, reduce, rng.choice((0, 0, 0, 1, 2)) if rng.random() < 0.5 else 0)

    parts, random = dict[str, tuple[Part, ...]](), random_layers(layers)
    for layer in layers.layers:
        extent = reduction_length(layers, layer)
        if layer.whole_reason:
            own = [place(None) for _ in range(rng.choice((1, 1, 2)))]
        elif extent is not None and extent > 1 and rng.random() < 0.4:
            merged = _regions(rng, layers, layer)
            own = [place(region, cut) for cut in _cuts(rng, extent, 3) for region in _regions(rng, layers, layer)]
            own += [place(region) for region in merged]
        else:
            own = [place(region) for region in _regions(rng, layers, layer)]
        if rng.random() < 0.2:
            own.append(rng.choice([part for part in own if part.reduce is None]))
            own[-1] = Part(rng.choice(devices), own[-1].region, None, own[-1].lane)
        parts[layer.name] = tuple(own[:1] if layer.name in random else own)
    source = tuple(rng.sample(list(devices), rng.choice((1, 1, 2))))
    sink = tuple(rng.sample(list(devices), rng.choice((1, 1, 2))))
    return Plan(parts, source, sink)
