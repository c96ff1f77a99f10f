"""Handwritten programs with the unsplit models that they compute, for tests of executors and targets.

Each function returns (program, model, inputs). All numbers are small integers, so that outputs must be bit-equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import parser

from dicompiler.ir.onnx.model import Model, Weight, make_placeholder
from dicompiler.ir.program import DeviceProgram, Program, Segment, Step, TensorSpec, Transfer

Made = tuple[Program, Model, dict[str, NDArray[Any]]]
HEAD = '<ir_version: 9, opset_import: ["" : 19]>\n'


def parse(text: str, weights: Mapping[str, Weight]) -> onnx.ModelProto:
    """Return the model of a graph in ONNX text; names in `weights` that it reads become initializers without data."""
    model = parser.parse_model(HEAD + text)
    used = dict.fromkeys(name for node in model.graph.node for name in node.input)
    model.graph.initializer.extend(make_placeholder(name, weights[name]) for name in used if name in weights)
    return model


def segment(name: str, device: str, text: str, weights: Mapping[str, Weight]) -> Segment:
    """Return a segment from ONNX text that omits the graph's name."""
    model = parse(f"{name} {text}", weights)
    names = [tuple(v.name for v in values) for values in (model.graph.input, model.graph.output)]
    return Segment(name, device, model, names[0], names[1])


def steps(text: str) -> tuple[Step, ...]:
    """Return the steps of a device from text such as "receive 0, run 0, send 1"."""
    words = [step.split() for step in text.split(",")]
    return tuple(Step(kind, int(index)) for kind, index in words)  # type: ignore[arg-type]


def integers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Return random integers from -3 to 3."""
    found: NDArray[Any] = np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)
    return found


def value(name: str, *shape: int, dtype: int = onnx.TensorProto.FLOAT) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def halo(size: int = 16, channels: int = 4) -> Made:
    """Return two convolutions that are cut in height over devices a and b; c joins the halves of the output.

    Between the convolutions, a and b exchange one row.
    """
    half, last = size // 2, size
    w = {
        "w1": Weight.from_array(integers((channels, 3, 3, 3), 1)),
        "w2": Weight.from_array(integers((2, channels, 3, 3), 2)),
        "b1": Weight.from_array(integers((channels,), 3)),
    }
    conv1, conv2 = "Conv <pads = [{0},1,{1},1]>", "Conv <pads = [{0},1,{1},1]>"
    # Constants for a Slice that takes rows lo to hi (axis 2) of a tensor.
    rows = "<int64[1] lo = {{{0}}}, int64[1] hi = {{{1}}}, int64[1] axis = {{2}}>"
    x, y, z = f"float[1,3,{size},{size}]", f"float[1,{channels},{{}},{size}]", f"float[1,2,{{}},{size}]"
    whole = parse(
        f"whole ({x} x) => ({z.format(size)} out) {{ y = {conv1.format(1, 1)}(x, w1, b1)\n"
        f"r = Relu(y)\n z = {conv2.format(1, 1)}(r, w2)\n out = Relu(z) }}",
        w,
    )
    a = (
        segment(
            "a0", "a",
            f"({x} x) => (float[1,3,{half + 1},{size}] xb) {rows.format(half - 1, last)}"
            " { xb = Slice(x, lo, hi, axis) }",
            w,
        ),
        segment(
            "a1", "a",
            f"({x} x) => ({y.format(1)} ra_end, {y.format(half)} ra)"
            f" <int64[1] lo = {{0}}, int64[1] hi = {{{half + 1}}}, int64[1] axis = {{2}},"
            f" int64[1] s = {{{half - 1}}}, int64[1] e = {{{half}}}>"
            f" {{ xa = Slice(x, lo, hi, axis)\n y = {conv1.format(1, 0)}(xa, w1, b1)\n ra = Relu(y)\n"
            " ra_end = Slice(ra, s, e, axis) }",
            w,
        ),
        segment(
            "a2", "a",
            f"({y.format(half)} ra, {y.format(1)} rb_start) => ({z.format(half)} za)"
            f" {{ r = Concat <axis = 2> (ra, rb_start)\n za = {conv2.format(1, 0)}(r, w2) }}",
            w,
        ),
    )  # fmt: skip
    b = (
        segment(
            "b0", "b",
            f"(float[1,3,{half + 1},{size}] xb) => ({y.format(1)} rb_start, {y.format(half)} rb) {rows.format(0, 1)}"
            f" {{ y = {conv1.format(0, 1)}(xb, w1, b1)\n rb = Relu(y)\n rb_start = Slice(rb, lo, hi, axis) }}",
            w,
        ),
        segment(
            "b1", "b",
            f"({y.format(half)} rb, {y.format(1)} ra_end) => ({z.format(half)} zb)"
            f" {{ r = Concat <axis = 2> (ra_end, rb)\n zb = {conv2.format(0, 1)}(r, w2) }}",
            w,
        ),
    )  # fmt: skip
    c = segment(
        "c0", "c",
        f"({z.format(half)} za, {z.format(half)} zb) => ({z.format(size)} out)"
        " { z = Concat <axis = 2> (za, zb)\n out = Relu(z) }",
        w,
    )  # fmt: skip
    transfers = (
        Transfer(0, "a", "b", value("xb", 1, 3, half + 1, size)),
        Transfer(1, "a", "b", value("ra_end", 1, channels, 1, size)),
        Transfer(2, "b", "a", value("rb_start", 1, channels, 1, size)),
        Transfer(3, "a", "c", value("za", 1, 2, half, size)),
        Transfer(4, "b", "c", value("zb", 1, 2, half, size)),
    )
    devices = (
        DeviceProgram("a", "a", a, steps("receive 2, run 0, send 0, run 1, send 1, run 2, send 3"), ("x",), {}),
        DeviceProgram("b", "b", b, steps("receive 0, receive 1, run 0, send 2, run 1, send 4"), (), {}),
        DeviceProgram("c", "c", (c,), steps("receive 3, receive 4, run 0"), (), {"out": "out"}),
    )
    order = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))
    inputs, outputs = (value("x", 1, 3, size, size),), (value("out", 1, 2, size, size),)
    program = Program(devices, transfers, inputs, outputs, w, order)
    return program, Model(whole, w), {"x": integers((1, 3, size, size), 9)}


def partial(dtype: str = "float", rows: int = 1) -> Made:
    """Return a matrix product that is split along its reduction axis over devices a and b.

    Both devices add the partial sums (all-reduce) and deliver the output.

    Args:
        dtype: ONNX type of the inputs and the output.
        rows: Number of rows of the inputs.
    """
    onnx_type = onnx.TensorProto.DataType.Value(dtype.upper())
    numpy_type = onnx.helper.tensor_dtype_to_np_dtype(onnx_type)
    weight = integers((32, 24), 4)
    whole_w = {"w": Weight.from_array(weight), "bias": Weight.from_array(integers((24,), 5))}
    w = {"wa": Weight.from_array(weight[:16]), "wb": Weight.from_array(weight[16:]), "bias": whole_w["bias"]}
    n, cast = rows, f"Cast <to = {onnx_type}>"
    whole = parse(
        f"whole ({dtype}[{n},16] x, {dtype}[{n},16] x2) => ({dtype}[{n},24] out) {{ c = Cast <to = 1> (x)\n"
        f" c2 = Cast <to = 1> (x2)\n f = Concat <axis = 1> (c, c2)\n p = MatMul(f, w)\n s = Add(p, bias)\n"
        f" out = {cast}(s) }}",
        whole_w,
    )
    merge = f"(float[{n},24] pa, float[{n},24] pb) => ({dtype}[{n},24] {{}})"
    merge += f" {{{{ p = Add(pa, pb)\n s = Add(p, bias)\n {{}} = {cast}(s) }}}}"
    product = f"({dtype}[{n},16] {{0}}) => (float[{n},24] {{2}})"
    product += " {{ f = Cast <to = 1> ({0})\n {2} = MatMul(f, {1}) }}"
    a = (
        segment("a0", "a", product.format("x", "wa", "pa"), w),
        segment("a1", "a", merge.format("out", "out"), w),
    )
    b = (
        segment("b0", "b", product.format("x2", "wb", "pb"), w),
        segment("b1", "b", merge.format("again", "again"), w),
    )
    transfers = (
        Transfer(0, "a", "b", value("x2", n, 16, dtype=onnx_type)),
        Transfer(1, "a", "b", value("pa", n, 24)),
        Transfer(2, "b", "a", value("pb", n, 24)),
    )
    devices = (
        DeviceProgram("a", "h", a, steps("receive 2, send 0, run 0, send 1, run 1"), ("x", "x2"), {"out": "out"}),
        DeviceProgram("b", "h", b, steps("receive 0, receive 1, run 0, send 2, run 1"), (), {"again": "out"}),
    )
    given = (value("x", n, 16, dtype=onnx_type), value("x2", n, 16, dtype=onnx_type))
    outputs = (value("out", n, 24, dtype=onnx_type),)
    program = Program(devices, transfers, given, outputs, w, ((0, 0), (1, 0), (0, 1), (1, 1)))
    inputs = {"x": integers((n, 16), 6, numpy_type), "x2": integers((n, 16), 7, numpy_type)}
    return program, Model(whole, whole_w), inputs


def unknown_shape() -> Made:
    """Return a program of one device with input and output shapes that are known only at run time."""
    w: dict[str, Weight] = {}
    text = "(float[n,m] x) => (float[k,2] out) { t = Transpose(x)\n out = Tile(t, times) }"
    text = text.replace("{", "<int64[2] times = {2, 1}> {", 1)
    one = segment("a0", "a", text, w)
    devices = (DeviceProgram("a", "a", (one,), steps("run 0"), ("x",), {"out": "out"}),)
    border = (TensorSpec("x", onnx.TensorProto.FLOAT, None),), (TensorSpec("out", onnx.TensorProto.FLOAT, None),)
    program = Program(devices, (), *border, w, ((0, 0),))
    return program, Model(one.model, w), {"x": integers((2, 5), 8)}


def endless() -> Made:
    """Return a program in which device a sends x to b. The loop on b runs for hours, so outputs cannot be compared."""
    w: dict[str, Weight] = {}
    count = """
        (float[1] x) => (float[1] out) <int64 times = {1000000000000}, bool yes = {1}> {
          out = Loop (times, yes, x) <body = turn (int64 i, bool go, float[1] s) => (bool again, float[1] t) {
            again = Identity(go)
            t = Add(s, x)
          }>
        }"""
    one = segment("b0", "b", count, w)
    devices = (
        DeviceProgram("a", "a", (), steps("send 0"), ("x",), {}),
        DeviceProgram("b", "b", (one,), steps("receive 0, run 0"), (), {"out": "out"}),
    )
    border = (value("x", 1),), (value("out", 1),)
    program = Program(devices, (Transfer(0, "a", "b", value("x", 1)),), *border, w, ((1, 0),))
    return program, Model(one.model, w), {"x": np.ones(1, np.float32)}


def failing() -> Made:
    """Return a program in which device a sends an index to b. The Gather on b fails if the index is above 3."""
    w: dict[str, Weight] = {}
    one = segment("b0", "b", "(int64[1] x) => (float[1] out) <float[4] t = {1, 2, 3, 4}> { out = Gather(t, x) }", w)
    devices = (
        DeviceProgram("a", "a", (), steps("send 0"), ("x",), {}),
        DeviceProgram("b", "b", (one,), steps("receive 0, run 0"), (), {"out": "out"}),
    )
    x = value("x", 1, dtype=onnx.TensorProto.INT64)
    program = Program(devices, (Transfer(0, "a", "b", x),), (x,), (value("out", 1),), w, ((1, 0),))
    return program, Model(one.model, w), {"x": np.array([1], np.int64)}
