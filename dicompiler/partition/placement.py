"""Placing: every part of every layer becomes nodes on its device, with slices and joins between them.

Model + Routing + Plan → PlacedGraph: partition writes it as ONNX; of a plan that is only evaluated it is cut unwritten
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.ir.plan import Plan
from dicompiler.ir.regions import Region, full
from dicompiler.ir.routing import Box, Routing, Take, Tree
from dicompiler.ir.rule import Node, Piece
from dicompiler.ir.tasks import Key, Task, TaskId, task_id
from dicompiler.partition.placed_graph import Given, Held, Place, PlacedGraph, PlacedGraphBuilder, Turn
from dicompiler.partition.routing import show


def place(given: Given, routing: Routing, plan: Plan) -> PlacedGraph:
    """The nodes that a plan comes to, by its routing. With replicas: of the first role, whose plan it must be."""
    return _Placer(given, routing, plan).run()


class _Placer:
    """Turns each live task into nodes, in step order."""

    def __init__(self, given: Given, routing: Routing, plan: Plan) -> None:
        self.given, self.routing, self.plan = given, routing, plan
        self.layers = routing.layers
        self.builder = PlacedGraphBuilder(given)
        self.computed: dict[tuple[Key, TaskId], Held] = {}
        self.sent: dict[tuple[Box, Region], Held] = {}
        self.cut: dict[tuple[str, Region, str, int], Held] = {}
        self.joined: dict[tuple[Tree, str, int], Held] = {}
        self.kept: set[str] = set()
        self.alone = Counter(task.layer for task in routing.tasks)
        self.delivered = self._delivered_as_computed()

    def run(self) -> PlacedGraph:
        for task in self.routing.tasks:
            place = Place(task.device, task.lane, self._turn(task), task_id(task))
            (self._whole if self.layers.by_name[task.layer].reason else self._task)(task, place)
        return self.builder.finish(self.kept, self._deliver(), self.plan.source)

    def _turn(self, task: Task) -> Turn:
        position = self.layers.position[task.layer]
        return (self.routing.runs[task_id(task)], task.lane, 2 * position + (task.kind != "partial"), 1)

    def _dtype(self, tensor: str) -> int:
        return self.layers.tensors[tensor].dtype

    def _delivered_as_computed(self) -> dict[tuple[Key, TaskId], str]:
        """Outputs that the first sink computes itself in one piece: that piece bears the output's name."""
        names: dict[tuple[Key, TaskId], str] = {}
        firsts = {delivery.output: delivery for delivery in reversed(self.routing.deliveries)}
        for output, delivery in firsts.items():
            tree = delivery.tree
            if tree is None:
                layer = self.layers.producer[output].name
                makers = (t for t in self.routing.tasks if t.layer == layer and t.device == delivery.device)
                names[Key(output), task_id(next(makers))] = output
            elif isinstance(tree, Take) and tree.box.task is not None and tree.region == tree.box.region:
                names[tree.box.key, tree.box.task] = output
        return names

    def _name(self, tensor: str, key: Key, task: Task) -> str:
        """The tensor's own name where one task computes it and it is no output, else with the device's behind it."""
        if (key, task_id(task)) in self.delivered:
            return self.delivered[key, task_id(task)]
        if self.alone[task.layer] == 1 and tensor not in self.layers.outputs:
            return tensor
        lane = f"#{task.lane}" if task.lane else ""
        reduce = f"+{key.reduce[0]}:{key.reduce[1]}" if key.reduce else ""
        return self.builder.name(f"{tensor}@{task.device}{lane}{reduce}")

    def _hold(self, tree: Tree, key: Key, place: Place, name: str = "") -> Held:
        """The nodes of an assembly on the reader's device, shared by all its readers in that lane."""
        if isinstance(tree, Take):
            return self._local(self._box(tree.box, place), tree.region, place)
        at = (tree, place.device, place.lane)
        if at not in self.joined:
            pieces = [self._hold(child, key, place) for child in tree.children]
            name = name or self.builder.name(f"{key.tensor}@{place.device}&")
            self.joined[at] = self.builder.concat(pieces, tree.axis, place, name)
        return self.joined[at]

    def _local(self, held: Held, region: Region, place: Place) -> Held:
        """A slice on the reader's device, shared by all its readers in that lane."""
        if held.region == region:
            return held
        at = (held.name, region, place.device, place.lane)
        if at not in self.cut:
            self.cut[at] = self.builder.slice(held, region, place)
        return self.cut[at]

    def _box(self, box: Box, place: Place) -> Held:
        """The tensor that a box is; for a received one the slice of it that its sender makes, once for all."""
        assert box.region is not None
        if box.origin is None:
            if box.task is None:
                return Held(box.key.tensor, box.region, self._dtype(box.key.tensor))
            return self.computed[box.key, box.task]
        at = (box.origin, box.region)
        if at not in self.sent:
            run, _, position, _ = place.turn
            early = Place(box.origin.device, box.origin.lane, (run, -1, position, 0))
            self.sent[at] = self.builder.slice(self._box(box.origin, place), box.region, early)
        return self.sent[at]

    def _task(self, task: Task, place: Place) -> None:
        """Nodes of a layer that can be cut: inputs assembled, then node by node as the pieces say."""
        reads = self.routing.reads.get(task_id(task), {})
        held = {key.tensor: self._hold(tree, key, place) for key, tree in reads.items() if key.reduce is None}
        layer = self.layers.by_name[task.layer]
        ((target, region),) = task.outputs.items()
        assert region is not None
        if task.kind == "merger":
            anchor = layer.nodes[layer.anchor]
            tensor, operator = self.layers.cut_output(anchor), self.layers.rule(anchor).merge
            partials = sorted((key for key in reads if key.reduce is not None), key=lambda key: key.reduce or (0, 0))
            terms = [self._hold(reads[key], key, place) for key in partials]
            held[tensor] = self.builder.merge(terms, operator, place, self._name(tensor, Key(tensor), task))
        for work in task.works:
            assert work.piece is not None
            output = self.layers.cut_output(work.node)
            name = self._name(output, target if output == target.tensor else Key(output), task)
            held[output] = self._node(work.node, work.piece, held, output, name, place)
        self.computed[target, task_id(task)] = held[target.tensor]

    def _node(self, node: Node, piece: Piece, held: dict[str, Held], output: str, name: str, place: Place) -> Held:
        """One node on regions of its inputs, with inputs, output, attributes and operator changed; it makes `name`."""
        inputs = self._inputs(node, piece, held, place)
        raw = name if piece.raw in (None, piece.out) else self.builder.name(f"{name}{show(piece.raw)}")
        # Outputs that nobody reads but that the operator insists on keep a name.
        others = [o and self.builder.name(f"{o}@{place.device}") if o != output else raw for o in node.outputs]
        called = node.name if name in node.outputs else f"{node.name}@{place.device}"
        self.builder.copy(node.name, called, (inputs, others), place, piece)
        written = self.builder.declare(raw, self._dtype(output), piece.raw or piece.out)
        return self.builder.slice(written, piece.out, place, name)

    def _inputs(self, node: Node, piece: Piece, held: dict[str, Held], place: Place) -> list[str]:
        """What the node reads there; '' for what it leaves out."""
        inputs: list[str] = []
        beyond = [("", None)] * (max(piece.constants, default=-1) + 1 - len(node.inputs))
        for i, (tensor, need) in enumerate((*zip(node.inputs, piece.needs, strict=True), *beyond)):
            if i in piece.constants or not tensor:
                inputs.append(self._constant(node, i, piece.constants[i]) if i in piece.constants else "")
            elif need is not None and self.layers.tensors[tensor].constant:
                inputs.append(self.builder.weight(tensor, need))
            elif need is not None:
                inputs.append(self._local(held[tensor], need, place).name)
        while inputs and not inputs[-1]:
            inputs.pop()
        return inputs

    def _constant(self, node: Node, index: int, array: NDArray[Any]) -> str:
        if array.dtype == np.int64 and array.ndim == 1:
            return self.builder.integers(tuple(array.tolist()))
        return self.builder.constant(f"{node.name}.{index}{array.tolist()}", array)

    def _whole(self, task: Task, place: Place) -> None:
        """Nodes of a layer that stays whole, as they stand, with the names that its inputs have here."""
        reads = self.routing.reads.get(task_id(task), {})
        names = {key.tensor: self._hold(tree, key, place).name for key, tree in reads.items()}
        for work in task.works:
            for tensor in filter(None, work.node.outputs):
                names[tensor] = self._name(tensor, Key(tensor), task)
                shape = self.layers.tensors[tensor].shape
                if shape is not None:
                    self.builder.declare(names[tensor], self._dtype(tensor), full(shape))
                elif tensor in self.given.values:
                    self.builder.values[names[tensor]] = self.given.values[tensor]
            self.kept.update(work.node.inputs)  # among them initializers that only sub-graphs name
            self.builder.keep(work.node.name, names, place)
        for key, region in task.outputs.items():
            if region is not None:  # a tensor without static shape is read where it is made alone
                self.computed[key, task_id(task)] = Held(names[key.tensor], region, self._dtype(key.tensor))

    def _deliver(self) -> dict[str, str]:
        """The graph's outputs on the devices that want them: name of each further sink's output → the output that it
        is."""
        last = 1 + max(self.routing.runs.values(), default=0)
        extra: dict[str, str] = {}
        seen: set[str] = set()
        for delivery in self.routing.deliveries:
            output, first = delivery.output, delivery.output not in seen
            seen.add(output)
            if delivery.tree is None or (first and output in self.delivered.values()):
                continue
            place = Place(delivery.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            name = output if first else self.builder.name(f"{output}@{delivery.device}")
            held = self._hold(delivery.tree, Key(output), place, name)
            if held.name != name:
                self.builder.identity(held, place, name, held.name)
            if not first:
                extra[name] = output
        return extra
