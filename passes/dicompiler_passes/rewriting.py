"""The placed graph while it is being built: nodes with their step and device, tensors with their regions and shapes.

Knows how each opset writes a Slice, a Concat, a sum; knows nothing of plans and layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from dicompiler.importing import unique
from dicompiler.model import Model
from dicompiler.program import DEVICE, LANE, ORIGIN, PART, REGION
from dicompiler.regions import Region, full, shape_of, shift
from dicompiler.routing import show
from dicompiler.structure import bodies, node_reads
from dicompiler.weights import LARGE, Weight, hollow

OPSET = 13  # of the standard operators, in a model that has none of them
Step = tuple[int, int, int, int]  # run, lane (-1: before all lanes), place in layer order, phase


@dataclass(frozen=True)
class Held:
    """A tensor of the placed graph: its name there, and the region of the original tensor that it holds."""

    name: str
    region: Region


@dataclass(frozen=True)
class Place:
    """Where and when nodes are put, and the part (layer/index) that they belong to."""

    device: str
    lane: int
    step: Step
    part: str = ""


class Builder:
    """Collects the placed graph. Names are unique and follow from the order of calls alone."""

    def __init__(self, model: Model) -> None:
        self.model = model
        graph = model.proto.graph
        self.opset = next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), 0)
        self.shapes = {name: shape for name, (_, shape) in model.initializers().items()}
        self.taken = {name for node in graph.node for name in (*node_reads(node), *node.output)}
        self.taken |= {v.name for v in (*graph.input, *graph.output)} | set(self.shapes)
        self.node_names: set[str] = set()
        self.nodes: list[tuple[Step, int, onnx.NodeProto]] = []
        self.values: dict[str, onnx.ValueInfoProto] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.weights: dict[str, Weight] = {}
        self.constants: dict[tuple[str, str, bytes], str] = {}
        self.cuts: dict[tuple[str, Region], str] = {}

    def name(self, wanted: str) -> str:
        """`wanted`, or with a number behind it where the graph has that name already."""
        return unique(wanted, self.taken)

    def declare(self, name: str, dtype: int, region: Region) -> Held:
        """Says what type and shape a new tensor has."""
        self.values[name] = helper.make_tensor_value_info(name, dtype, shape_of(region))
        return Held(name, region)

    def add(self, proto: onnx.NodeProto, place: Place, origin: str, region: Region | None) -> None:
        """Puts a node on a device; its name is made unique."""
        proto.name = unique(proto.name, self.node_names)
        marks = {DEVICE: place.device, ORIGIN: origin}
        if region is not None:
            marks[REGION] = show(region)
        if place.part:
            marks[PART] = place.part
        if place.lane:
            marks[LANE] = str(place.lane)
        for key, value in marks.items():
            proto.metadata_props.add(key=key, value=value)
        self.nodes.append((place.step, len(self.nodes), proto))

    def constant(self, wanted: str, array: np.ndarray[Any, Any]) -> str:
        """An initializer with these values; the same values under the same wanted name are one."""
        key = (wanted, f"{array.dtype}{array.shape}", array.tobytes())
        if key not in self.constants:
            name = self.constants[key] = self.name(wanted)
            self.initializers[name] = onnx.numpy_helper.from_array(array, name)
        return self.constants[key]

    def integers(self, values: Sequence[int]) -> str:
        """An int64 vector as initializer."""
        return self.constant(f"int64{list(values)}", np.array(values, np.int64))

    def weight(self, name: str, region: Region) -> str:
        """`region` of an initializer of the model: itself where that is all of it, else a cut of it."""
        if region == full(self.shapes[name]):
            return name
        if (name, region) not in self.cuts:
            own = self.cuts[name, region] = self.name(name + show(region))
            held = self.model.weights.get(name)
            weight = (held if held is not None else Weight.of(self.model.array(name))).cut(region)
            if weight.nbytes < LARGE:
                self.initializers[own] = onnx.numpy_helper.from_array(weight.array(), own)
            else:
                self.weights[own] = weight
                self.initializers[own] = hollow(own, weight)
        return self.cuts[name, region]

    def slice(self, held: Held, region: Region, dtype: int, place: Place, name: str = "") -> Held:
        """held → Slice → region, under this name. Itself where nothing is cut."""
        if held.region == region:
            return held
        local = shift(region, held.region)
        axes = [axis for axis, cut in enumerate(region) if cut != held.region[axis]]
        starts, ends = [local[a][0] for a in axes], [local[a][1] for a in axes]
        out = name or self.name(held.name + show(region))
        if 0 < self.opset < 10:
            proto = helper.make_node("Slice", [held.name], [out], out, axes=axes, starts=starts, ends=ends)
        else:
            operands = [held.name, *(self.integers(values) for values in (starts, ends, axes))]
            proto = helper.make_node("Slice", operands, [out], out)
        self.add(proto, place, held.name, region)
        return self.declare(out, dtype, region)

    def concat(self, pieces: Sequence[Held], axis: int, dtype: int, place: Place, name: str) -> Held:
        """pieces side by side along `axis` → Concat → the region of them all."""
        region = list(pieces[0].region)
        region[axis] = (pieces[0].region[axis][0], pieces[-1].region[axis][1])
        self.add(
            helper.make_node("Concat", [p.name for p in pieces], [name], name, axis=axis), place, name, tuple(region)
        )
        return self.declare(name, dtype, tuple(region))

    def merge(self, terms: Sequence[Held], op: str, dtype: int, place: Place, name: str) -> Held:
        """terms[0] + terms[1] + …, in this order, as a chain of Adds (or of another `op`); one term: Identity."""
        op = "Sum" if op == "Add" and 0 < self.opset < 7 else op  # onnxruntime has no Add of before opset 7
        total = terms[0]
        if len(terms) == 1:
            self.add(helper.make_node("Identity", [total.name], [name], name), place, name, total.region)
        for i, term in enumerate(terms[1:], 1):
            out = name if i == len(terms) - 1 else self.name(f"{name}+{i}")
            self.add(helper.make_node(op, [total.name, term.name], [out], out), place, name, total.region)
            total = self.declare(out, dtype, total.region)
        return self.declare(name, dtype, total.region)

    def identity(self, held: Held, dtype: int, place: Place, name: str) -> Held:
        """held under another name."""
        self.add(helper.make_node("Identity", [held.name], [name], name), place, held.name, held.region)
        return self.declare(name, dtype, held.region)

    def finish(self, outputs: Iterable[onnx.ValueInfoProto], keep: Iterable[str], marks: Mapping[str, str]) -> Model:
        """The placed model: the original's header, inputs and first outputs; nodes in step order; the initializers
        that are used, and those in `keep`."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model.proto)
        if self.opset == 0:  # operators of other domains alone: ours need the standard ones
            proto.opset_import.append(helper.make_opsetid("", OPSET))
        graph = proto.graph
        outputs = list(outputs)
        nodes = _live([node for _, _, node in sorted(self.nodes, key=lambda e: e[:2])], {v.name for v in outputs}, keep)
        del graph.node[:], graph.value_info[:], graph.output[:]
        graph.node.extend(nodes)
        graph.output.extend(outputs)
        done = {v.name for v in (*graph.input, *graph.output)}
        graph.value_info.extend(value for name, value in self.values.items() if name not in done)
        used = {name for node in nodes for name in node.input} | set(keep)
        whole = [t for t in self.model.proto.graph.initializer if t.name in used]
        del graph.initializer[:]
        graph.initializer.extend([*whole, *self.initializers.values()])
        for key, value in marks.items():
            proto.metadata_props.add(key=key, value=value)
        weights = {t.name: self.model.weights[t.name] for t in whole if t.name in self.model.weights}
        return Model(proto, {**weights, **self.weights})


def _live(nodes: Sequence[onnx.NodeProto], wanted: set[str], kept: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that lead to what is wanted: a copy of a layer that stays whole may have outputs that nobody reads."""
    read = {*wanted, *kept}
    live = []
    for node in reversed(nodes):
        if read.intersection(node.output):
            read.update(node_reads(node))
            live.append(node)
    return live[::-1]


def rename_captures(proto: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """In place: names that the node's bodies take from outside become what `renamed` says."""
    for body in bodies(proto):
        own = {v.name for v in body.input} | {t.name for t in body.initializer}
        own |= {name for node in body.node for name in node.output}
        outer = {old: new for old, new in renamed.items() if old not in own}
        for node in body.node:
            node.input[:] = [outer.get(name, name) for name in node.input]
            rename_captures(node, outer)
        for value in body.output:
            value.name = outer.get(value.name, value.name)
