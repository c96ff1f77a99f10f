"""Faults that break a placed model but leave it legal, so that only its results can reveal them.

Each fault changes any placed model of the same plan in place, so that check models of all seeds get the same fault.
Changes that provably have no effect are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from dicompiler.partition.placed_model import REGION_KEY

Change = Callable[[onnx.ModelProto], None]


@dataclass(frozen=True)
class Fault:
    """A fault: `change` breaks a placed model, and `name` says where and how."""

    name: str
    change: Change


class Placed:
    """Shapes, regions and constants of a placed model, by tensor name."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        graph = proto.graph
        self.nodes = list(graph.node)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        values = (*graph.value_info, *graph.input, *graph.output)
        self.shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
        marks = {name: node.metadata_props for node in graph.node for name in node.output}
        self.regions = {
            name: next((entry.value for entry in entries if entry.key == REGION_KEY), None)
            for name, entries in marks.items()
        }
        for name in self.shapes.keys() - self.regions.keys():
            self.regions[name] = "all"

    def of(self, *ops: str) -> Iterator[tuple[int, onnx.NodeProto]]:
        """Yield index and node of each node of these operators."""
        return ((i, node) for i, node in enumerate(self.nodes) if node.op_type in ops)

    def attribute(self, node: onnx.NodeProto, name: str) -> Any:
        """Return the value of an attribute that the node has."""
        return next(helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name)

    def bounds(self, node: onnx.NodeProto) -> list[list[int]]:
        """Return (starts, ends, axes) of a Slice: inputs since opset 10, attributes before."""
        if len(node.input) > 1:
            return [numpy_helper.to_array(self.constants[name]).tolist() for name in node.input[1:4]]
        return [list(self.attribute(node, name)) for name in ("starts", "ends", "axes")]

    def unordered(self, tensor: str) -> bool:
        """Return True if the network only pools or reduces the tensor, in any order."""
        readers = [node for node in self.nodes if node.op_type not in ("Concat", "Slice") and _reads(node, tensor)]
        return all(node.op_type.startswith(("Global", "Reduce")) for node in readers)


def original(tensor: str) -> str:
    """Return the tensor of the whole network of which a tensor is a piece."""
    return tensor.split("@")[0].split("[")[0]


def _reads(node: onnx.NodeProto, tensor: str) -> bool:
    return any(original(name) == original(tensor) for name in node.input)


def shifted_slices(placed: Placed) -> Iterator[Fault]:
    """Yield Slices that are shifted by one along an axis."""
    for i, node in placed.of("Slice"):
        starts, ends, axes = placed.bounds(node)
        for k, axis in enumerate(axes):
            for step in (-1, 1):
                if starts[k] + step >= 0 and ends[k] + step <= placed.shapes[node.input[0]][axis]:
                    moved = [[v + step * (j == k) for j, v in enumerate(values)] for values in (starts, ends)]
                    yield Fault(f"{node.output[0]}: axis {axis} by {step}", _with_bounds(i, *moved))


def _with_bounds(index: int, starts: Sequence[int], ends: Sequence[int]) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        node = proto.graph.node[index]
        for place, (name, values) in enumerate((("starts", starts), ("ends", ends)), 1):
            if len(node.input) > 1:
                node.input[place] = f"fault.{name}"
                proto.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), f"fault.{name}"))
            else:
                next(entry for entry in node.attribute if entry.name == name).ints[:] = values

    return change


def dropped_rows(placed: Placed) -> Iterator[Fault]:
    """Yield Slices with the last row (column, channel) replaced by the one before."""
    for i, node in placed.of("Slice"):
        for axis in placed.bounds(node)[2]:
            extent = placed.shapes[node.output[0]][axis]
            if extent > 1:
                rows = [*range(extent - 1), extent - 2]
                yield Fault(f"{node.output[0]}: axis {axis}", _gathered(i, axis, rows))


def swapped_channels(placed: Placed) -> Iterator[Fault]:
    """Yield swaps of two neighbouring output channels of a layer with weights."""
    for i, node in placed.of("Conv", "Gemm", "MatMul"):
        channels = placed.shapes[node.output[0]][1]
        for first in range(channels - 1):
            order = list(range(channels))
            order[first : first + 2] = [first + 1, first]
            yield Fault(f"{node.output[0]}: {first} and {first + 1}", _gathered(i, 1, order))


def _gathered(index: int, axis: int, rows: Sequence[int]) -> Change:
    """Replace the output of a node by the given rows of it."""

    def change(proto: onnx.ModelProto) -> None:
        node = proto.graph.node[index]
        gather = helper.make_node("Gather", ["fault", "fault.rows"], [node.output[0]], "fault", axis=axis)
        gather.metadata_props.extend(node.metadata_props)
        node.output[0] = "fault"
        proto.graph.initializer.append(numpy_helper.from_array(np.array(rows, np.int64), "fault.rows"))
        proto.graph.node.insert(index + 1, gather)

    return change


def swapped_pieces(placed: Placed) -> Iterator[Fault]:
    """Yield swaps of two pieces of the same shape in a Concat."""
    for i, node in placed.of("Concat"):
        if placed.attribute(node, "axis") >= 2 and placed.unordered(node.output[0]):
            continue
        for b, second in enumerate(node.input):
            for a, first in enumerate(node.input[:b]):
                if first != second and placed.shapes[first] == placed.shapes[second]:
                    yield Fault(f"{node.output[0]}: {a} and {b}", _with_inputs(i, {a: second, b: first}))


def _with_inputs(index: int, inputs: dict[int, str]) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        for place, name in inputs.items():
            proto.graph.node[index].input[place] = name

    return change


def moved_pads(placed: Placed) -> Iterator[Fault]:
    """Yield rows of padding moved to the other end of a window's axis."""
    for i, node in placed.of("AveragePool", "Conv", "LpPool", "MaxPool"):
        pads = list(placed.attribute(node, "pads")) if any(a.name == "pads" for a in node.attribute) else []
        rank = len(pads) // 2
        for axis in range(rank):
            if node.op_type != "Conv" and placed.shapes[node.output[0]][2 + axis] == 1:
                continue  # A pool with only one window reads the same rows after the shift, so this is not a fault.
            for source, target in ((axis, rank + axis), (rank + axis, axis)):
                kernel = placed.attribute(node, "kernel_shape")[axis] if node.op_type != "Conv" else 1 << 30
                if pads[source] > 0 and pads[target] + 1 < kernel:
                    moved = [pad - (k == source) + (k == target) for k, pad in enumerate(pads)]
                    yield Fault(f"{node.output[0]}: {pads} to {moved}", _with_pads(i, moved))


def _with_pads(index: int, pads: Sequence[int]) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        next(entry for entry in proto.graph.node[index].attribute if entry.name == "pads").ints[:] = pads

    return change


def wrong_sums(placed: Placed) -> Iterator[Fault]:
    """Yield partial sums that are added twice (instead of or in addition to another), or omitted."""
    for i, node in placed.of("Add"):
        first, second = node.input
        if "+" in second:  # The name of a partial sum contains "+" and its range of input channels.
            yield Fault(f"{node.output[0]}: {first} twice", _with_inputs(i, {1: first}))
            yield Fault(f"{node.output[0]}: {second} twice", _with_inputs(i, {0: second}))
            yield Fault(f"{node.output[0]}: without {second}", _identity(i))
            yield Fault(f"{node.output[0]}: and {second} again", _added_again(i, second))


def _identity(index: int) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        node = proto.graph.node[index]
        node.op_type = "Identity"
        del node.input[1]

    return change


def _added_again(index: int, tensor: str) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        node = proto.graph.node[index]
        again = helper.make_node("Add", ["fault", tensor], [node.output[0]], "fault")
        again.metadata_props.extend(node.metadata_props)
        node.output[0] = "fault"
        proto.graph.node.insert(index + 1, again)

    return change


def wrong_weights(placed: Placed) -> Iterator[Fault]:
    """Yield nodes with the weights of another part of their layer."""
    cuts = [name for name in placed.constants if "[" in name and not name.startswith("int64")]
    for i, node in enumerate(placed.nodes):
        for place, name in enumerate(node.input):
            for other in cuts if name in cuts else ():
                same = placed.constants[other].dims == placed.constants[name].dims
                if other != name and same and original(other) == original(name):
                    yield Fault(f"{node.name}: {other}", _with_inputs(i, {place: other}))


def wrong_tiles(placed: Placed) -> Iterator[Fault]:
    """Yield nodes that read another region of their input."""
    made: list[str] = []
    for i, node in enumerate(placed.nodes):
        for place, name in enumerate(node.input):
            for other in made if name and name not in placed.constants else ():
                if original(other) != original(name) or placed.shapes[other] != placed.shapes[name]:
                    continue
                if placed.regions[other] != placed.regions[name]:
                    yield Fault(f"{node.name}: {other} for {name}", _with_inputs(i, {place: other}))
        made += [name for name in node.output if name in placed.shapes]


KINDS: dict[str, Callable[[Placed], Iterator[Fault]]] = {
    "shifted slice": shifted_slices,
    "dropped row": dropped_rows,
    "swapped channels": swapped_channels,
    "swapped pieces": swapped_pieces,
    "moved pad": moved_pads,
    "wrong sum": wrong_sums,
    "wrong weights": wrong_weights,
    "wrong tile": wrong_tiles,
}
