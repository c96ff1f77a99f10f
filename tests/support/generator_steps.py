"""Steps that append an operator to a random network of generators.py, in the form of the network's opset.

All values stay integers. A step does nothing if the network's tensors do not suit the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import numpy_helper

if TYPE_CHECKING:
    from support.generators import Net

LARGEST = 14
"""Axes grow no longer than this."""


def constant(net: Net, values: Any, dtype: Any = np.int64) -> str:
    """Add a constant with these values, and return its name."""
    name = f"w{len(net.weights)}"
    net.weights.append(numpy_helper.from_array(np.array(values, dtype), name))
    return name


def conv_transpose(net: Net) -> None:
    name, (n, c, *extents) = net.pick(4)
    rng = net.rng
    kernel, strides = [rng.choice((1, 2, 3, 4)) for _ in extents], [rng.choice((1, 2, 3)) for _ in extents]
    dilations = [rng.choice((1, 1, 2)) for _ in extents]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [rng.randrange(span) for span in spans * 2]
    added = [rng.randrange(stride) for stride in strides]
    out = [(e - 1) * strides[i] + spans[i] + added[i] - pads[i] - pads[len(extents) + i] for i, e in enumerate(extents)]
    if min(out) < 1 or max(out) > LARGEST:
        return
    groups = rng.choice([g for g in range(1, c + 1) if c % g == 0])
    filters = rng.choice((1, 2, 3))
    inputs = [name, net.weight(c, filters, *kernel)]
    if rng.random() < 0.5:
        inputs.append(net.vector(groups * filters, range(-3, 4)))
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "output_padding": added}
    net.add("ConvTranspose", inputs, (n, groups * filters, *out), group=groups, **attributes)


def resize(net: Net) -> None:
    name, shape = net.pick(4)
    factor = net.rng.choice((2.0, 2.0, 3.0, 0.5))
    axes = net.rng.choice(((2, 3), (2,), (3,)))
    scales = [factor if axis in axes else 1.0 for axis in range(4)]
    out = [int(extent * scale) for extent, scale in zip(shape, scales, strict=True)]
    if min(out) < 1 or max(out) > LARGEST:
        return
    if net.opset < 11:
        if factor > 1:
            net.add("Upsample", [name, constant(net, scales, np.float32)], out, mode="nearest")
        return
    attributes = {
        "coordinate_transformation_mode": net.rng.choice(("half_pixel", "asymmetric", "pytorch_half_pixel")),
        "nearest_mode": net.rng.choice(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    }
    none = constant(net, [], np.float32)
    if net.rng.random() < 0.5:
        inputs = [name, none, constant(net, scales, np.float32)]
    else:
        inputs = [name, none, none if net.opset < 13 else "", constant(net, out)]
    net.add("Resize", inputs, out, mode="nearest", **attributes)


def pad(net: Net) -> None:
    name, shape = net.pick()
    mode = net.rng.choice(("constant", "reflect", "edge"))
    most = [min(3, e - 1) if mode == "reflect" else 3 for e in shape]
    pads = [net.rng.randint(0, m) if axis > 1 or net.rng.random() < 0.2 else 0 for axis, m in enumerate(most)]
    pads += [net.rng.randint(-1 if mode == "constant" and e > 2 else 0, m) for e, m in zip(shape, most, strict=True)]
    out = [e + pads[i] + pads[len(shape) + i] for i, e in enumerate(shape)]
    if max(out) > LARGEST:
        return
    if net.opset < 11:
        net.add("Pad", [name], out, mode=mode, pads=pads, value=2.0)
    else:
        net.add("Pad", [name, constant(net, pads), constant(net, 2, np.float32)], out, mode=mode)


def slice_(net: Net) -> None:
    name, shape = net.pick()
    axis = net.rng.randrange(len(shape))
    low = net.rng.randrange(shape[axis])
    high = net.rng.randint(low + 1, shape[axis])
    step = net.rng.choice((1, 1, 2, -1) if net.opset >= 10 else (1,))
    out = [*shape[:axis], -(-(high - low) // abs(step)), *shape[axis + 1 :]]
    start, end = (low, high) if step > 0 else (high - 1, low - 1 - shape[axis])
    if net.opset < 10:
        net.add("Slice", [name], out, starts=[start], ends=[end], axes=[axis])
    else:
        net.add("Slice", [name, *(constant(net, [value]) for value in (start, end, axis, step))], out)


def depth_and_space(net: Net) -> None:
    name, (n, c, h, w) = net.pick(4)
    if c % 4 == 0 and 2 * max(h, w) <= LARGEST:
        attributes = {"mode": net.rng.choice(("DCR", "CRD"))} if net.opset >= 11 else {}
        net.add("DepthToSpace", [name], (n, c // 4, 2 * h, 2 * w), blocksize=2, **attributes)
    elif h % 2 == 0 and w % 2 == 0:
        net.add("SpaceToDepth", [name], (n, c * 4, h // 2, w // 2), blocksize=2)


def reduced(net: Net) -> None:
    name, shape = net.pick()
    op = net.rng.choice(("ReduceSum", "ReduceMax", "ReduceMin"))
    axes = sorted(net.rng.sample(range(len(shape)), net.rng.randint(1, min(2, len(shape) - 1) or 1)))
    keep = len(shape) - len(axes) < 2 or net.rng.random() < 0.7
    out = [1 if i in axes else e for i, e in enumerate(shape) if keep or i not in axes]
    if op == "ReduceSum" and net.opset >= 13:
        net.add(op, [name, constant(net, axes)], out, keepdims=int(keep))
    else:
        net.add(op, [name], out, axes=axes, keepdims=int(keep))


def einsum(net: Net) -> None:
    name, shape = net.pick()
    letters = "abcd"[: len(shape)]
    if net.opset < 12 or len(shape) > 4:
        return
    if net.rng.random() < 0.3:
        turned = "".join(net.rng.sample(letters, len(letters)))
        net.add("Einsum", [name], [shape[letters.index(x)] for x in turned], equation=f"{letters}->{turned}")
        return
    axis = net.rng.randrange(len(shape))
    filters = net.rng.choice((1, 2, 4))
    out = letters.replace(letters[axis], "m")
    equation = f"{letters},m{letters[axis]}->{out}"
    net.add(
        "Einsum",
        [name, net.weight(filters, shape[axis])],
        (*shape[:axis], filters, *shape[axis + 1 :]),
        equation=equation,
    )


def matmul(net: Net) -> None:
    name, shape = net.pick()
    columns = net.rng.choice((1, 3, 4))
    stack = () if net.rng.random() < 0.7 or len(shape) < 3 else shape[:-2]
    weight = net.weight(*stack, shape[-1], columns)
    net.add("MatMul", [name, weight], (*shape[:-1], columns))


def gather(net: Net) -> None:
    name, shape = net.pick()
    axis = net.rng.randrange(len(shape))
    low = -shape[axis] if net.opset >= 11 else 0
    picked = [net.rng.randrange(low, shape[axis]) for _ in range(net.rng.choice((1, 2, 5)))]
    if len(shape) > 2 and net.rng.random() < 0.3:
        net.add("Gather", [name, constant(net, picked[0])], (*shape[:axis], *shape[axis + 1 :]), axis=axis)
    else:
        net.add("Gather", [name, constant(net, picked)], (*shape[:axis], len(picked), *shape[axis + 1 :]), axis=axis)


def repeated(net: Net) -> None:
    name, shape = net.pick()
    times: Sequence[int] = [net.rng.choice((1, 1, 1, 2, 3)) if e * 3 <= LARGEST else 1 for e in shape]
    out = [e * t for e, t in zip(shape, times, strict=True)]
    if net.rng.random() < 0.5:
        net.add("Tile", [name, constant(net, times)], out)
    else:
        wanted = [net.rng.choice((3, 4)) if e == 1 else 1 for e in shape]
        net.add("Expand", [name, constant(net, wanted)], [max(e, w) for e, w in zip(shape, wanted, strict=True)])


def along_an_axis(net: Net) -> None:
    name, shape = net.pick()
    axis = net.rng.randrange(len(shape))
    if net.opset >= 11 and net.rng.random() < 0.5:
        net.add("CumSum", [name, constant(net, axis)], shape, reverse=net.rng.choice((0, 1)))
        return
    k = net.rng.randint(1, shape[axis])
    out = (*shape[:axis], k, *shape[axis + 1 :])
    if net.opset < 10:
        net.add("TopK", [name], out, axis=axis, k=k)
    else:
        net.add("TopK", [name, constant(net, [k])], out, axis=axis)
    net.nodes[-1].output.append(f"{net.nodes[-1].output[0]}_places")


def prelu(net: Net) -> None:
    name, shape = net.pick()
    slope = net.vector(shape[-1], (-1, 0, 1, 2))
    net.add("PRelu", [name, slope], shape)


def unsqueezed(net: Net) -> None:
    name, shape = net.pick()
    if len(shape) > 4:
        return
    axis = net.rng.randrange(len(shape) + 1)
    longer = (*shape[:axis], 1, *shape[axis:])
    own = net.opset >= 13
    inputs, attributes = ([constant(net, [axis])], {}) if own else ([], {"axes": [axis]})
    made = net.add("Unsqueeze", [name, *inputs], longer, **attributes)
    if net.rng.random() < 0.5:
        net.add("Squeeze", [made, *inputs], shape, **attributes)


def without_rule(net: Net) -> None:
    """Append ReverseSequence, which has no operator rule and is therefore never split."""
    name, shape = net.pick()
    if net.opset >= 10 and len(shape) > 1:
        lengths = constant(net, [net.rng.randint(1, shape[0]) for _ in range(shape[1])])
        net.add("ReverseSequence", [name, lengths], shape)


SPATIAL = (conv_transpose, conv_transpose, resize, resize, depth_and_space)
"""Steps that take a tensor of rank 4."""
ANY = (
    pad, slice_, reduced, reduced, einsum, matmul, gather, repeated, along_an_axis, prelu, unsqueezed, without_rule,
)  # fmt: skip
"""Steps that take any tensor."""
