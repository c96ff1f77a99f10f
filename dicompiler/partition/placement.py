"""Placing: every part of every layer becomes nodes on its device, with slices and joins between them.

Model + Routing + Plan → PlacedGraph: partition writes it as ONNX; of a plan that is only evaluated it is cut unwritten
"""

from __future__ import annotations

from collections import Counter

from dicompiler.ir.plan import Plan
from dicompiler.ir.regions import Region, full
from dicompiler.ir.routing import Box, Routing, Take, Tree
from dicompiler.ir.rule import Node, Piece
from dicompiler.ir.states import Kept
from dicompiler.ir.tasks import Key, Task, TaskId, task_id
from dicompiler.partition.narrowing import Border
from dicompiler.partition.placed_graph import Cut, Given, Held, Place, PlacedGraph, PlacedGraphBuilder
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
        self.made: dict[object, Held] = {}  # what serves several readers: slices and joins
        self.captured: set[str] = set()
        self.alone = Counter(task.layer for task in routing.tasks)
        self.firsts = {delivery.output: delivery for delivery in reversed(routing.deliveries)}
        self.delivered = self._delivered_as_computed()
        self.kept = self._kept()
        self.places: dict[TaskId | None, Place] = {}
        self.border = Border(self.builder, self.layers, plan.wire)

    def run(self) -> PlacedGraph:
        for task in self.routing.tasks:
            self._task(task)
        return self.builder.finish(self.captured, self._deliver(), self.plan.source, self._keep())

    def _kept(self) -> dict[tuple[str, str], Held]:
        """What a device has of a state when a frame begins; where it has all of it, under the graph input's name."""
        kept = dict[tuple[str, str], Held]()
        for one in self.routing.keepings:
            alone = [other.past for other in self.routing.keepings].count(one.past) == 1
            whole = one.region == full(self.layers.tensors[one.past].shape or ())
            name = one.past if alone and whole else self.builder.name(f"{one.past}@{one.device}")
            kept[one.past, one.device] = self.builder.declare(name, self._dtype(one.past), one.region)
        return kept

    def _keep(self) -> list[Kept]:
        """What a device has of states at the end of a frame, made there."""
        last, pieces = 1 + max(self.routing.runs.values(), default=0), list[Kept]()
        for one in self.routing.keepings:
            place = Place(one.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            held = self._hold(one.tree, Key(one.present), place)
            if isinstance(one.tree, Take) and one.tree.box.origin is not None and one.tree.box.region == held.region:
                held = self.builder.identity(held, place, self.builder.name(f"{one.present}@{one.device}="), held.name)
            read = self.kept[one.past, one.device].name
            pieces.append(Kept(one.device, one.past, one.present, one.region, read, held.name))
        return pieces

    def _dtype(self, tensor: str) -> int:
        return self.layers.tensors[tensor].dtype

    def _delivered_as_computed(self) -> dict[tuple[Key, TaskId], str]:
        """Outputs that the first sink computes itself in one piece: that piece bears the output's name."""
        names: dict[tuple[Key, TaskId], str] = {}
        for output, delivery in self.firsts.items():
            tree = delivery.tree
            if tree is None:
                layer = self.layers.producer[output].name
                makers = (t for t in self.routing.tasks if t.layer == layer and t.device == delivery.device)
                names[Key(output), task_id(next(makers))] = output
            elif isinstance(tree, Take) and tree.box.task is not None and tree.region == tree.box.region:
                names[tree.box.key, tree.box.task] = output
        return names

    def _name(self, key: Key, task: Task) -> str:
        """The tensor's own name where one task computes it and it is no output, else with the device's behind it."""
        if (key, task_id(task)) in self.delivered:
            return self.delivered[key, task_id(task)]
        if self.alone[task.layer] == 1 and key.tensor not in self.firsts:
            return key.tensor
        lane = f"#{task.lane}" if task.lane else ""
        reduce = f"+{key.reduce[0]}:{key.reduce[1]}" if key.reduce else ""
        return self.builder.name(f"{key.tensor}@{task.device}{lane}{reduce}")

    def _hold(self, tree: Tree, key: Key, place: Place, name: str = "") -> Held:
        """The nodes of an assembly on the reader's device, shared by all its readers in that lane."""
        if isinstance(tree, Take):
            return self._local(self._box(tree.box, place), tree.region, place)
        at = (tree, place.device, place.lane)
        if at not in self.made:
            pieces = [self._hold(child, key, place) for child in tree.children]
            name = name or self.builder.name(f"{key.tensor}@{place.device}&")
            self.made[at] = self.builder.concat(pieces, tree.axis, place, name)
        return self.made[at]

    def _local(self, held: Held, region: Region, place: Place) -> Held:
        """A slice on the reader's device, shared by all its readers in that lane."""
        if held.region == region:
            return held
        at = (held.name, region, place.device, place.lane)
        if at not in self.made:
            self.made[at] = self.builder.slice(held, region, place)
        return self.made[at]

    def _box(self, box: Box, place: Place) -> Held:
        """The tensor that a box is; for a received one the slice of it that its sender makes, once for all."""
        assert box.region is not None
        if box.origin is None:
            if box.task is None:
                return self.kept.get((box.key.tensor, box.device)) or Held(
                    box.key.tensor, box.region, self._dtype(box.key.tensor)
                )
            return self.computed[box.key, box.task]
        at = (box.origin, box.region)
        if at not in self.made:
            run, _, position, _ = place.turn
            early = Place(box.origin.device, box.origin.lane, (run, -1, position, 0))
            behind = self.places.get(box.origin.task, early)
            self.made[at] = self.border.narrowed(self._box(box.origin, place), box, early, behind)
        return self.border.widened(self.made[at], box.key, place)

    def _task(self, task: Task) -> None:
        """Inputs assembled, then node by node as the pieces say; those of a layer that stays whole as they stand."""
        position = 2 * self.layers.position[task.layer] + (task.kind != "partial")
        turn = (self.routing.runs[task_id(task)], task.lane, position, 1)
        place = Place(task.device, task.lane, turn, task_id(task))
        self.places[task_id(task)] = place
        reads = self.routing.reads.get(task_id(task), {})
        held = {key.tensor: self._hold(tree, key, place) for key, tree in reads.items() if key.reduce is None}
        if task.kind == "merger":
            layer = self.layers.by_name[task.layer]
            anchor = layer.nodes[layer.anchor]
            tensor, operator = self.layers.cut_output(anchor), self.layers.rule(anchor).merge
            partials = sorted((key for key in reads if key.reduce is not None), key=lambda key: key.reduce or (0, 0))
            terms = [self._hold(reads[key], key, place) for key in partials]
            held[tensor] = self.builder.merge(terms, operator, place, self._name(Key(tensor), task))
        for work in task.works:
            if work.piece is None:
                self._as_it_stands(work.node, held, task, place)
            else:
                self._node(work.node, work.piece, held, task, place)
        self.computed |= {(key, task_id(task)): held[key.tensor] for key in task.outputs}

    def _node(self, node: Node, piece: Piece, held: dict[str, Held], task: Task, place: Place) -> None:
        """One node on regions of its inputs, with inputs, output, attributes and operator changed."""
        output, (target,) = self.layers.cut_output(node), task.outputs
        name = self._name(target if output == target.tensor else Key(output), task)
        inputs = self._inputs(node, piece, held, place)
        raw = name if piece.raw in (None, piece.out) else self.builder.name(f"{name}{show(piece.raw)}")
        # Outputs that nobody reads but that the operator insists on keep a name.
        others = [o and self.builder.name(f"{o}@{place.device}") if o != output else raw for o in node.outputs]
        called = node.name if name in node.outputs else f"{node.name}@{place.device}"
        written = self.builder.declare(raw, self._dtype(output), piece.raw or piece.out)
        if piece.rows is None:
            self.builder.copy(node.name, called, inputs, others, place, piece)
        else:
            table, numbers = (self.layers.tensors[tensor] for tensor in node.inputs)
            read = Held(inputs[1], piece.needs[1] or (), numbers.dtype)
            self.builder.look_up(node.name, called, inputs[0], read, (table.shape or ())[0], written, place, piece)
        held[output] = self.builder.slice(written, piece.out, place, name)

    def _inputs(self, node: Node, piece: Piece, held: dict[str, Held], place: Place) -> list[str]:
        """What the node reads there; '' for what it leaves out."""
        inputs: list[str] = []
        beyond = [("", None)] * (max(piece.constants, default=-1) + 1 - len(node.inputs))
        for i, (tensor, need) in enumerate((*zip(node.inputs, piece.needs, strict=True), *beyond)):
            if i in piece.constants:
                array = piece.constants[i]
                inputs.append(self.builder.constant(array, f"{node.name}.{i}{array.tolist()}"))
            elif not tensor:
                inputs.append("")
            elif need is not None and self.layers.tensors[tensor].constant:
                whole = need == self.given.whole[tensor]
                inputs.append(tensor if whole else self.builder.constant(Cut(tensor, need)))
            elif need is not None:
                inputs.append(self._local(held[tensor], need, place).name)
        while inputs and not inputs[-1]:
            inputs.pop()
        return inputs

    def _as_it_stands(self, node: Node, held: dict[str, Held], task: Task, place: Place) -> None:
        """A node of a layer that stays whole, with the names that its inputs have here."""
        for tensor in filter(None, node.outputs):
            shape = self.layers.tensors[tensor].shape  # what has none is read where it is made alone, by its name
            held[tensor] = Held(self._name(Key(tensor), task), full(shape or ()), self._dtype(tensor))
            known = held[tensor] if shape is not None else self.given.values.get(tensor)
            if known is not None:
                self.builder.values[held[tensor].name] = known
        self.captured.update(node.inputs)  # among them initializers that only sub-graphs name
        names, proto = {tensor: one.name for tensor, one in held.items()}, self.given.nodes[node.name]
        inputs, outputs = ([names.get(name, name) for name in ends] for ends in (proto.input, proto.output))
        self.builder.copy(node.name, node.name, inputs, outputs, place, captured=names)

    def _deliver(self) -> dict[str, str]:
        """The graph's outputs on the devices that want them: name of each further sink's output → the output that it
        is."""
        last = 1 + max(self.routing.runs.values(), default=0)
        extra: dict[str, str] = {}
        delivered = set(self.delivered.values())
        for delivery in self.routing.deliveries:
            output, first = delivery.output, self.firsts[delivery.output] is delivery
            if delivery.tree is None or (first and output in delivered):
                continue
            place = Place(delivery.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            name = output if first else self.builder.name(f"{output}@{delivery.device}")
            held = self._hold(delivery.tree, Key(output), place, name)
            if held.name != name:
                self.builder.identity(held, place, name, held.name)
            if not first:
                extra[name] = output
        return extra
