"""Models that no exporter writes, with unreasonable sizes, numbers and shapes.

Each function returns a model, bytes, or the path of a file that it writes into the given directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dicompiler.ir.onnx.protobuf_io import encode_varint

HUGE = 2**62
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def value(name: str, shape: Sequence[Any] | None = (1, 4, 8, 8), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] = (value("x"),),
    outputs: Sequence[onnx.ValueInfoProto] = (value("y", None),),
    functions: Sequence[onnx.FunctionProto] = (),
    opset: int = 17,
    ir: int = 8,
    **weights: Any,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, ir_version=ir, opset_imports=opsets, functions=functions)


def one(op: str, *inputs: str, shape: Sequence[Any] | None = (1, 4, 8, 8), opset: int = 17, **given: Any) -> Any:
    """Return a model of one node, "culprit"; `given` has its attributes, and arrays, which are its constants."""
    arrays = {name: array for name, array in given.items() if isinstance(array, (np.ndarray, np.generic))}
    attributes = {name: entry for name, entry in given.items() if name not in arrays}
    node = helper.make_node(op, ["x", *inputs], ["y"], "culprit", **attributes)
    return model([node], [value("x", shape)], opset=opset, **arrays)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def conv(**attributes: Any) -> onnx.ModelProto:
    return one("Conv", "w", w=np.ones((4, 4, 3, 3), np.float32), **attributes)


def pool(**attributes: Any) -> onnx.ModelProto:
    return one("MaxPool", **({"kernel_shape": [2, 2]} | attributes))


ILLEGAL: dict[str, Callable[[], onnx.ModelProto]] = {
    "a stride of 0": lambda: conv(strides=[0, 1]),
    "a stride below 0": lambda: pool(strides=[-1, 1]),
    "a dilation of 0": lambda: conv(dilations=[0, 0]),
    "a kernel of 0": lambda: pool(kernel_shape=[0, 2]),
    "a kernel of 2^62": lambda: pool(kernel_shape=[HUGE, HUGE]),
    "a kernel of another rank": lambda: pool(kernel_shape=[2, 2, 2]),
    "weights of another rank than the input": lambda: one(
        "Conv", "w", w=np.ones((4, 4, 3), np.float32), kernel_shape=[1, 1]
    ),
    "no groups": lambda: conv(group=0),
    "groups that do not fit": lambda: conv(group=3),
    "pads of 2^31": lambda: conv(pads=[2**31] * 4),
    "pads of 2^62": lambda: conv(pads=[HUGE] * 4),
    "pads below 0": lambda: conv(pads=[-2, 0, 0, 0]),
    "too few pads": lambda: conv(pads=[1, 1]),
    "pads of a pool that are larger than its kernel": lambda: pool(pads=[9, 9, 9, 9]),
    "an unknown auto_pad": lambda: conv(auto_pad="SAMEISH"),
    "a Reshape with two unknown sizes": lambda: one("Reshape", "s", s=ints(-1, -1)),
    "a Reshape to another number of elements": lambda: one("Reshape", "s", s=ints(3, 5)),
    "a Reshape that divides by 0": lambda: one("Reshape", "s", s=ints(0, 0, -1), shape=(0, 4)),
    "a Reshape to less than nothing": lambda: one("Reshape", "s", s=ints(-2, 4)),
    "an axis out of range": lambda: one("Softmax", axis=4),
    "an axis far out of range": lambda: one("Concat", "x", axis=-HUGE),
    "an axis of a Flatten out of range": lambda: one("Flatten", axis=9),
    "a permutation that is none": lambda: one("Transpose", perm=[0, 0, 1, 2]),
    "a permutation of another rank": lambda: one("Transpose", perm=[0, 1]),
    "a rank too low": lambda: one("Conv", "w", w=np.ones((4, 4, 3, 3), np.float32), shape=(4, 4)),
    "extents that do not fit": lambda: one("MatMul", "w", w=np.ones((7, 2), np.float32)),
    "shapes that cannot be broadcast": lambda: one("Add", "w", w=np.ones(3, np.float32)),
    "a window larger than its input": lambda: pool(kernel_shape=[20, 20]),
    "an LRN over no channels": lambda: one("LRN", size=0),
    "a number where a list stands": lambda: conv(strides=1),
    "a Split into 2^40 parts": lambda: one("Split", "s", s=ints(2**40, -(2**40)), axis=1),
    "a type that is none": lambda: one("Cast", to=999),
    "an input that nobody makes": lambda: one("Add", "nobody"),
}
"""Illegal attributes and shapes: each is rejected with the node's name."""


def sizes(op: str, *inputs: str, **given: Any) -> Callable[[], onnx.ModelProto]:
    """Return a node with a result that is far larger than its inputs."""
    arrays = {name: array for name, array in given.items() if isinstance(array, (np.ndarray, np.generic))}
    attributes = {name: entry for name, entry in given.items() if name not in arrays}
    made = helper.make_node(op, inputs, ["big"], "culprit", **attributes)
    read = helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0)
    return lambda: model([made, read, helper.make_node("Add", ["x", "sum"], ["y"])], **arrays)


def ranks() -> onnx.ModelProto:
    """Return a model with 2^40 axes, given as a length."""
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["shape"], "length", value=numpy_helper.from_array(ints(1))),
        helper.make_node("ConstantOfShape", ["shape"], ["big"], "culprit"),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    return model(nodes, n=ints(2**40))


def sums() -> onnx.ModelProto:
    """Return a vector that could be a shape, so that ONNX's shape inference computes each element."""
    nodes = [helper.make_node("Cast", ["v"], ["f"], "culprit", to=FLOAT), helper.make_node("ReduceSum", ["f"], ["y"])]
    return model(nodes, [value("v", [2**40], INT64)])


def rank_of_input() -> onnx.ModelProto:
    return model([helper.make_node("Expand", ["x", "s"], ["y"], "culprit")], [value("x"), value("s", [2**28], INT64)])


def calls(depth: int = 40, last: int | None = None) -> onnx.ModelProto:
    """Return functions that each call the next one twice; the last calls number `last`."""

    def function(i: int) -> onnx.FunctionProto:
        called = f"f{i + 1}" if i + 1 < depth else (None if last is None else f"f{last}")
        op, domain = (called, "f") if called else ("Relu", "")
        nodes = [helper.make_node(op, [a], [b], domain=domain) for a, b in (("a", "b"), ("b", "c"))]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
        return helper.make_function("f", f"f{i}", ["a"], ["c"], nodes, opsets)

    nodes = [helper.make_node("f0", ["x"], ["y"], "culprit", domain="f")]
    return model(nodes, functions=[function(i) for i in range(depth)])


def nested(depth: int) -> bytes:
    """Return an If inside an If inside an If …, by hand because protobuf itself gives up at 33."""

    def field(number: int, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content

    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["t"])], "b", [], [value("t", None)])
    other = helper.make_attribute("else_branch", branch).SerializeToString()
    inner = branch.SerializeToString()
    for _ in range(depth):
        then = [field(1, b"then_branch"), b"\xa0\x01\x05", field(6, inner)]
        node = helper.make_node("If", ["c"], ["t"], "culprit").SerializeToString() + field(5, *then) + field(5, other)
        inner = field(1, node) + field(2, b"b") + field(12, value("t", None).SerializeToString())
    inputs = [field(11, v.SerializeToString()) for v in (value("x"), value("c", [], TensorProto.BOOL))]
    return b"\x08\x08" + field(8, b"\x10\x11") + field(7, inner, *inputs)


def loop(trips: int) -> onnx.ModelProto:
    """Return a Loop with a practically infinite trip count."""
    inside = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["a"], ["b"])]
    ports = [value("i", [], INT64), value("go", [], TensorProto.BOOL), value("a")]
    body = helper.make_graph(inside, "body", ports, [value("on", [], TensorProto.BOOL), value("b")])
    node = helper.make_node("Loop", ["n", "", "x"], ["y"], "culprit", body=body)
    return model([node], n=np.int64(trips))


def sparse(*, indices: Sequence[int] = (1, 3), dims: Sequence[int] = (2, 4), values: Any = (5, 6)) -> onnx.ModelProto:
    made = model([helper.make_node("Add", ["x", "s"], ["y"])], [value("x", [2, 4])])
    numbers = numpy_helper.from_array(np.float32(values), "s")
    made.graph.sparse_initializer.add(values=numbers, indices=numpy_helper.from_array(ints(*indices), ""), dims=dims)
    return made


def weight(**fields: Any) -> onnx.ModelProto:
    made = model([helper.make_node("Add", ["x", "w"], ["y"], "culprit")], w=np.ones(8, np.float32))
    for name, entry in fields.items():
        if isinstance(entry, (list, tuple)):
            getattr(made.graph.initializer[0], name)[:] = entry
        else:
            setattr(made.graph.initializer[0], name, entry)
    return made


def outside(directory: Path, entries: dict[str, str]) -> onnx.ModelProto:
    """Return external data of 32 bytes in `directory`, with these entries of the reference changed."""
    made = weight()
    tensor = made.graph.initializer[0]
    (directory / "w.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in ({"location": "w.bin", "offset": "0", "length": "32"} | entries).items():
        tensor.external_data.add(key=key, value=entry)
    return made


def named(name: str) -> onnx.ModelProto:
    """Return nodes and tensors of this name, one with an illegal attribute."""
    nodes = [
        helper.make_node("Relu", ["x"], [name]),
        helper.make_node("MaxPool", [name], ["y"], name, kernel_shape=[0, 0]),
    ]
    return model(nodes)


def relu(*shape: Any, dtype: int = FLOAT, **header: Any) -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"], "culprit")], [value("x", shape, dtype)], **header)


def edited(edit: Callable[[onnx.ModelProto], object], made: onnx.ModelProto | None = None) -> onnx.ModelProto:
    proto = made or relu(1, 4)
    edit(proto)
    return proto


def twice(field: str) -> onnx.ModelProto:
    """Return a model with a repeated element."""
    proto = weight()
    entries = getattr(proto.graph, field)
    entries.add().CopyFrom(entries[0])
    return proto


def cycle() -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
                  helper.make_node("Relu", ["b"], ["y"])])  # fmt: skip


ABSURD: dict[str, Callable[[], onnx.ModelProto | bytes]] = {
    **{f"{op} of 2^40": sizes(op, *given, **more) for op, given, more in (
        ("ConstantOfShape", "n", {"n": ints(2**40)}),
        ("Expand", "vn", {"v": np.float32([1]), "n": ints(2**40)}),
        ("Tile", "vn", {"v": np.float32([1]), "n": ints(2**40)}),
        ("Range", "anb", {"a": np.int64(0), "n": np.int64(2**40), "b": np.int64(1)}),
        ("Pad", "vn", {"v": np.float32([1]), "n": ints(0, 2**40)}),
        ("OneHot", "vnp", {"v": ints(1), "n": np.int64(2**40), "p": np.float32([0, 1])}),
        ("Resize", ["v", "", "n"], {"v": np.ones((1, 1, 2, 2), np.float32), "n": np.float32([1, 1, 2**20, 2**20])}),
        ("RandomNormal", "", {"shape": [2**40]}),
        ("HannWindow", "n", {"n": np.int64(2**40)}),
    )},
    "ConstantOfShape of 2^33": sizes("ConstantOfShape", "n", n=ints(2**33)),
    "ConstantOfShape of 2^62 by 2^62": sizes("ConstantOfShape", "n", n=ints(HUGE, HUGE)),
    "sums over a vector of 2^40": sums,
    "2^40 axes": ranks,
    "2^20 axes": lambda: one("Expand", "s", s=np.ones(2**20, np.int64)),
    "2^28 axes": rank_of_input,
    "an epsilon that is no number": lambda: one(
        "BatchNormalization", "s", "s", "s", "s", s=np.ones(4, np.float32), epsilon=float("nan")
    ),
    "a stride of 2^62": lambda: pool(strides=[HUGE, 1]),
    "pads of 2^30": lambda: conv(pads=[2**30, 0, 0, 0]),
    "3 000 axes": lambda: relu(*[1] * 3000),
    "3 000 axes of a weight": lambda: weight(dims=[1] * 2999 + [8]),
    "2^40 calls": calls,
    "functions that call themselves": lambda: calls(3, 0),
    "2 000 If in each other": lambda: nested(2000),
    "30 If in each other": lambda: nested(30),
    "90 If in each other": lambda: nested(90),
    "a sparse index out of range": lambda: sparse(indices=[1, 9]),
    "a sparse index below 0": lambda: sparse(indices=[-1, 3]),
    "sparse values without index": lambda: sparse(indices=[1]),
    "a sparse tensor of 2^62": lambda: sparse(dims=[HUGE]),
    "a sparse tensor of less than nothing": lambda: sparse(dims=[-2, 4]),
    "an input of 2^62": lambda: relu(HUGE),
    "an input of 2^62 by 2^62": lambda: relu(HUGE, HUGE),
    "an input of less than nothing": lambda: relu(-5, 4),
    "an input of nothing": lambda: relu(0, 4),
    "a weight of 2^62": lambda: weight(dims=[HUGE]),
    "a weight of 2^62 by 4": lambda: weight(dims=[HUGE, 4]),
    "a weight of less than nothing": lambda: weight(dims=[-1]),
    "a weight of more bytes than there are": lambda: weight(dims=[2**28]),
    "a weight of no type": lambda: weight(data_type=77),
    "a model of nothing": onnx.ModelProto,
    "a graph of nothing": lambda: model([], [], []),
    "a graph without nodes": lambda: model([], [value("x")], [value("x")]),
    "an unknown operator": lambda: one("Frobnicate"),
    "an unknown domain": lambda: edited(lambda m: setattr(m.graph.node[0], "domain", "nowhere")),
    "opset 0": lambda: relu(1, 4, opset=0),
    "opset 2^31": lambda: relu(1, 4, opset=2**31),
    "opset 2^62": lambda: relu(1, 4, opset=HUGE),
    "opset -1": lambda: relu(1, 4, opset=-1),
    "IR version 0": lambda: relu(1, 4, ir=0),
    "IR version 2^62": lambda: relu(1, 4, ir=HUGE),
    "two weights of one name": lambda: twice("initializer"),
    "two inputs of one name": lambda: twice("input"),
    "two makers of one tensor": lambda: twice("node"),
    "a circle": cycle,
    "a name of a megabyte": lambda: named("n" * 2**20),
    "a name with line ends": lambda: named("a\nb\r\n\x1b[31mred\x1b[0m\x07\x9b2J"),
    "a name with NUL": lambda: named("a\0b"),
    "a name that turns what follows around": lambda: named("a\u202eb\u2028c"),
    "texts": lambda: relu(3, dtype=TensorProto.STRING),
    "10 000 inputs": lambda: model(
        [helper.make_node("Sum", [f"x{i}" for i in range(10_000)], ["y"])], [value(f"x{i}", [1]) for i in range(10_000)]
    ),
    "a Loop of 2^62": lambda: loop(HUGE),
    "a model that is text": lambda: b"ir_version: 8" * 9,
    "a message in a message in a message": lambda: b"\x3a\xff\xff\xff\xff\x07" + b"\x0a\x10" * 50_000,
}  # fmt: skip
"""All other cases."""

EXTERNAL: dict[str, dict[str, str]] = {
    "external data at an absolute path": {"location": "/etc/hostname"},
    "external data above": {"location": "../w.bin"},
    "external data that is not there": {"location": "v.bin"},
    "external data beyond the end": {"offset": str(2**40)},
    "external data at less than 0": {"offset": "-8"},
    "external data of 10^5000 bytes": {"length": "9" * 5000},
    "external data in a directory": {"location": "."},
    "external data with NUL in its name": {"location": "w\0.bin"},
}


def write_all(directory: Path) -> dict[str, Path]:
    """Write all invalid models to files, each in its own directory."""
    files = {}
    for number, name in enumerate([*ILLEGAL, *ABSURD, *EXTERNAL]):
        place = directory / str(number)
        place.mkdir()
        made = outside(place, EXTERNAL[name]) if name in EXTERNAL else (ILLEGAL | ABSURD)[name]()
        files[name] = place / "m.onnx"
        files[name].write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return files
