"""Operators that only move elements: slices, joins, new shapes and orders of axes, pads, depth and space."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dicompiler_targets.tflm.elementwise import common_form
from dicompiler_targets.tflm.graph import Node, refusal
from dicompiler_targets.tflm.writer import IMAGE, Form, Writer, permuted


def place(axis: int, rank: int, form: Form) -> int:
    """Where an axis of ONNX's lies in a tensor of that form."""
    axis %= rank
    return IMAGE.index(axis) if form == "image" else axis


def concat(writer: Writer, node: Node) -> None:
    """Concat → CONCATENATION."""
    form = common_form(writer, node.inputs, node.output)
    rank = len(writer.graph.shapes[node.output])
    inputs = [writer.read(name, form) for name in node.inputs]
    axis = place(node.attribute("axis", 1), rank, form)
    output = writer.make(node.output, form)
    writer.add("CONCATENATION", inputs, [output], "Concatenation", Axis=axis, FusedActivationFunction=0)


def integers(writer: Writer, node: Node, index: int, key: str) -> list[int] | None:
    """A parameter that is a constant input, or an attribute in older opsets; None where it is not given."""
    if node.has(index):
        value = writer.graph.constants.get(node.inputs[index])
        if value is None:
            raise refusal(node, f"its {key} are computed", "TFLite-micro wants constants; use target sockets")
        return [int(v) for v in value.reshape(-1)]
    given = node.attribute(key)
    return None if given is None else [int(v) for v in given]


def cut(writer: Writer, name: str, output: str, ranges: Sequence[tuple[int, int, int]]) -> None:
    """STRIDED_SLICE; `ranges`: (start, stop, step) for each axis in ONNX's order, resolved."""
    form = writer.form(name)
    ordered = permuted(ranges, IMAGE) if form == "image" else tuple(ranges)  # type: ignore[arg-type]
    x = writer.read(name, form)
    columns = [writer.constant(np.asarray(column, np.int32), "range") for column in zip(*ordered, strict=True)]
    writer.add("STRIDED_SLICE", [x, *columns], [writer.make(output, form)], "StridedSlice")


def slice_(writer: Writer, node: Node) -> None:
    """Slice with constant ranges and steps above 0."""
    shape = writer.graph.shape(node.inputs[0])
    starts, ends = integers(writer, node, 1, "starts"), integers(writer, node, 2, "ends")
    assert starts is not None and ends is not None
    along = integers(writer, node, 3, "axes") or list(range(len(starts)))
    steps = integers(writer, node, 4, "steps") or [1] * len(starts)
    if min(steps) < 1:
        raise refusal(node, "a step is below 1", "use target sockets")
    ranges = [(0, extent, 1) for extent in shape]
    for axis, start, end, step in zip(along, starts, ends, steps, strict=True):
        begin, stop, _ = slice(start, end, step).indices(shape[axis])
        ranges[axis % len(shape)] = (begin, stop, step)
    cut(writer, node.inputs[0], node.output, ranges)


def split(writer: Writer, node: Node) -> None:
    """Split → a STRIDED_SLICE for each output."""
    shape = writer.graph.shape(node.inputs[0])
    axis, start = node.attribute("axis", 0) % len(shape), 0
    for output in node.outputs:
        stop = start + writer.graph.shapes[output][axis]
        cut(writer, node.inputs[0], output, [(start, stop, 1) if i == axis else (0, e, 1) for i, e in enumerate(shape)])
        start = stop


def reshape(writer: Writer, node: Node) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze → RESHAPE in ONNX's order. An image that becomes a matrix of its batch's
    rows waits for its readers: a FULLY_CONNECTED takes it as it lies."""
    name, shape = node.inputs[0], writer.graph.shapes[node.output]
    source = writer.graph.shape(name)
    if len(source) == 4 and tuple(shape) == (source[0], math.prod(source[1:])) and name not in writer.graph.constants:
        writer.flat[node.output] = name
        return
    writer.alias(node.output, "plain", writer.reshape(writer.read(name), shape))


def transpose(writer: Writer, node: Node) -> None:
    """Transpose → at most one TRANSPOSE, from the form that there is to the form that is wanted."""
    name = node.inputs[0]
    rank = len(writer.graph.shape(name))
    order = node.attribute("perm", list(range(rank))[::-1])
    form = writer.form(name)
    if rank == 4:
        wanted = [order[axis] for axis in IMAGE]  # ONNX's axes of the input, in the order of the output as an image
        writer.alias(
            node.output,
            "image",
            writer.transpose(writer.read(name, form), [place(axis, 4, form) for axis in wanted]),
        )
    else:
        writer.alias(node.output, "plain", writer.transpose(writer.read(name), order))


def pad(writer: Writer, node: Node) -> None:
    """Pad with a constant → PAD or PADV2."""
    rank = len(writer.graph.shape(node.inputs[0]))
    amounts = integers(writer, node, 1, "pads")
    if amounts is None or node.attribute("mode", "constant") != "constant" or node.has(3) or min(amounts) < 0:
        raise refusal(
            node, "only pads above 0 filled with one number on all axes can be expressed", "use target sockets"
        )
    number = writer.graph.constants[node.inputs[2]] if node.has(2) else np.float32(node.attribute("value", 0.0))
    form = writer.form(node.inputs[0])
    pairs = list(zip(amounts[:rank], amounts[rank:], strict=True))
    ordered = [pairs[axis] for axis in IMAGE] if form == "image" else pairs
    x = writer.read(node.inputs[0], form)
    inputs = [x, writer.constant(np.asarray(ordered, np.int32), "pads")]
    output = writer.make(node.output, form)
    if float(number.reshape(())) == 0 and writer.tensors[x].dtype in ("float32", "int8"):
        writer.add("PAD", inputs, [output], "Pad")
    else:
        value = writer.constant(np.asarray([number.reshape(())], writer.tensors[x].dtype), "value")
        writer.add("PADV2", [*inputs, value], [output], "PadV2")


def depth_space(code: str, options: str, writer: Writer, node: Node) -> None:
    """DepthToSpace (depth, column, row) and SpaceToDepth: the same in TFLite, on images."""
    if node.attribute("mode", "DCR") != "DCR":
        raise refusal(node, "mode CRD", "TFLite-micro has DCR only; use target sockets")
    x = writer.read(node.inputs[0], "image")
    writer.add(code, [x], [writer.make(node.output, "image")], options, BlockSize=node.attribute("blocksize"))
