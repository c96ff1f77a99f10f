"""Placing: every part of every layer becomes nodes on its device, with slices and joins between them.

Model + Routing + Plan → PlacedGraph: partition writes it as ONNX; of a plan that is only evaluated it is cut unwritten
"""

from __future__ import annotations

from collections import Counter

from dicompiler.ir.operator_rule import Node, Piece
from dicompiler.ir.plan import Plan
from dicompiler.ir.recurrent_states import StatePiece
from dicompiler.ir.regions import Region, full_region
from dicompiler.ir.routing import Assembly, AssemblyLeaf, Box, Routing
from dicompiler.ir.tasks import Task, TaskId, TensorKey, task_id
from dicompiler.partition.placed_graph import (
    ModelFacts,
    NodePlacement,
    PlacedGraph,
    PlacedGraphBuilder,
    PlacedTensor,
    WeightSlice,
)
from dicompiler.partition.routing import format_region
from dicompiler.partition.wire_casts import WireCasts


def place_parts(given: ModelFacts, routing: Routing, plan: Plan) -> PlacedGraph:
    """The nodes that a plan comes to, by its routing. With replicas: of the first role, whose plan it must be."""
    return _Placer(given, routing, plan).run()


class _Placer:
    """Turns each live task into nodes, in step order."""

    def __init__(self, given: ModelFacts, routing: Routing, plan: Plan) -> None:
        self.facts, self.routing, self.plan = given, routing, plan
        self.layers = routing.layers
        self.builder = PlacedGraphBuilder(given)
        self.tensor_of_task: dict[tuple[TensorKey, TaskId], PlacedTensor] = {}
        self.shared_tensors: dict[object, PlacedTensor] = {}  # what serves several readers: slices and joins
        self.captured_names: set[str] = set()
        self.task_count_by_layer = Counter(task.layer for task in routing.tasks)
        self.first_delivery_of = {delivery.output: delivery for delivery in reversed(routing.deliveries)}
        self.output_name_of_task = self._find_direct_outputs()
        self.state_tensors = self._declare_state_tensors()
        self.placement_of_task: dict[TaskId | None, NodePlacement] = {}
        self.wire_casts = WireCasts(self.builder, self.layers, plan.wire_format)

    def run(self) -> PlacedGraph:
        for task in self.routing.tasks:
            self._place_task(task)
        return self.builder.build(
            self.captured_names, self._add_deliveries(), self.plan.source, self._add_state_outputs()
        )

    def _declare_state_tensors(self) -> dict[tuple[str, str], PlacedTensor]:
        """What a device has of a state when a frame begins; where it has all of it, under the graph input's name."""
        kept = dict[tuple[str, str], PlacedTensor]()
        for one in self.routing.state_retentions:
            alone = [other.past for other in self.routing.state_retentions].count(one.past) == 1
            whole = one.region == full_region(self.layers.tensors[one.past].shape or ())
            name = one.past if alone and whole else self.builder.unique_tensor_name(f"{one.past}@{one.device}")
            kept[one.past, one.device] = self.builder.declare(name, self._dtype(one.past), one.region)
        return kept

    def _add_state_outputs(self) -> list[StatePiece]:
        """What a device has of states at the end of a frame, made there."""
        last, pieces = 1 + max(self.routing.runs.values(), default=0), list[StatePiece]()
        for one in self.routing.state_retentions:
            place = NodePlacement(one.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            held = self._add_assembly(one.assembly, TensorKey(one.present), place)
            if (
                isinstance(one.assembly, AssemblyLeaf)
                and one.assembly.box.origin is not None
                and one.assembly.box.region == held.region
            ):
                held = self.builder.add_identity(
                    held, place, self.builder.unique_tensor_name(f"{one.present}@{one.device}="), held.name
                )
            read = self.state_tensors[one.past, one.device].name
            pieces.append(StatePiece(one.device, one.past, one.present, one.region, read, held.name))
        return pieces

    def _dtype(self, tensor: str) -> int:
        return self.layers.tensors[tensor].dtype

    def _find_direct_outputs(self) -> dict[tuple[TensorKey, TaskId], str]:
        """Outputs that the first sink computes itself in one piece: that piece bears the output's name."""
        names: dict[tuple[TensorKey, TaskId], str] = {}
        for output, delivery in self.first_delivery_of.items():
            tree = delivery.assembly
            if tree is None:
                layer = self.layers.producer[output].name
                makers = (t for t in self.routing.tasks if t.layer == layer and t.device == delivery.device)
                names[TensorKey(output), task_id(next(makers))] = output
            elif isinstance(tree, AssemblyLeaf) and tree.box.task is not None and tree.region == tree.box.region:
                names[tree.box.key, tree.box.task] = output
        return names

    def _tensor_name(self, key: TensorKey, task: Task) -> str:
        """The tensor's own name where one task computes it and it is no output, else with the device's behind it."""
        if (key, task_id(task)) in self.output_name_of_task:
            return self.output_name_of_task[key, task_id(task)]
        if self.task_count_by_layer[task.layer] == 1 and key.tensor not in self.first_delivery_of:
            return key.tensor
        lane = f"#{task.lane}" if task.lane else ""
        reduce = f"+{key.reduce[0]}:{key.reduce[1]}" if key.reduce else ""
        return self.builder.unique_tensor_name(f"{key.tensor}@{task.device}{lane}{reduce}")

    def _add_assembly(self, tree: Assembly, key: TensorKey, place: NodePlacement, name: str = "") -> PlacedTensor:
        """The nodes of an assembly on the reader's device, shared by all its readers in that lane."""
        if isinstance(tree, AssemblyLeaf):
            return self._add_local_slice(self._tensor_of_box(tree.box, place), tree.region, place)
        at = (tree, place.device, place.lane)
        if at not in self.shared_tensors:
            pieces = [self._add_assembly(child, key, place) for child in tree.children]
            name = name or self.builder.unique_tensor_name(f"{key.tensor}@{place.device}&")
            self.shared_tensors[at] = self.builder.add_concat(pieces, tree.axis, place, name)
        return self.shared_tensors[at]

    def _add_local_slice(self, held: PlacedTensor, region: Region, place: NodePlacement) -> PlacedTensor:
        """A slice on the reader's device, shared by all its readers in that lane."""
        if held.region == region:
            return held
        at = (held.name, region, place.device, place.lane)
        if at not in self.shared_tensors:
            self.shared_tensors[at] = self.builder.add_slice(held, region, place)
        return self.shared_tensors[at]

    def _tensor_of_box(self, box: Box, place: NodePlacement) -> PlacedTensor:
        """The tensor that a box is; for a received one the slice of it that its sender makes, once for all."""
        assert box.region is not None
        if box.origin is None:
            if box.task is None:
                return self.state_tensors.get((box.key.tensor, box.device)) or PlacedTensor(
                    box.key.tensor, box.region, self._dtype(box.key.tensor)
                )
            return self.tensor_of_task[box.key, box.task]
        at = (box.origin, box.region)
        if at not in self.shared_tensors:
            run, _, position, _ = place.step_key
            early = NodePlacement(box.origin.device, box.origin.lane, (run, -1, position, 0))
            behind = self.placement_of_task.get(box.origin.task, early)
            self.shared_tensors[at] = self.wire_casts.narrow(self._tensor_of_box(box.origin, place), box, early, behind)
        return self.wire_casts.widen(self.shared_tensors[at], box.key, place)

    def _place_task(self, task: Task) -> None:
        """Inputs assembled, then node by node as the pieces say; those of a layer that stays whole as they stand."""
        position = 2 * self.layers.position[task.layer] + (task.kind != "partial")
        turn = (self.routing.runs[task_id(task)], task.lane, position, 1)
        place = NodePlacement(task.device, task.lane, turn, task_id(task))
        self.placement_of_task[task_id(task)] = place
        reads = self.routing.reads.get(task_id(task), {})
        held = {key.tensor: self._add_assembly(tree, key, place) for key, tree in reads.items() if key.reduce is None}
        if task.kind == "merger":
            layer = self.layers.layer_by_name[task.layer]
            anchor = layer.nodes[layer.anchor]
            tensor, operator = self.layers.cut_output(anchor), self.layers.rule_of(anchor).merge_operator
            partials = sorted((key for key in reads if key.reduce is not None), key=lambda key: key.reduce or (0, 0))
            terms = [self._add_assembly(reads[key], key, place) for key in partials]
            held[tensor] = self.builder.add_merge(terms, operator, place, self._tensor_name(TensorKey(tensor), task))
        for work in task.nodes:
            if work.piece is None:
                self._place_whole_node(work.node, held, task, place)
            else:
                self._place_node(work.node, work.piece, held, task, place)
        self.tensor_of_task |= {(key, task_id(task)): held[key.tensor] for key in task.outputs}

    def _place_node(
        self, node: Node, piece: Piece, held: dict[str, PlacedTensor], task: Task, place: NodePlacement
    ) -> None:
        """One node on regions of its inputs, with inputs, output, attributes and operator changed."""
        output, (target,) = self.layers.cut_output(node), task.outputs
        name = self._tensor_name(target if output == target.tensor else TensorKey(output), task)
        inputs = self._node_inputs(node, piece, held, place)
        raw = (
            name
            if piece.written_region in (None, piece.out)
            else self.builder.unique_tensor_name(f"{name}{format_region(piece.written_region)}")
        )
        # Outputs that nobody reads but that the operator insists on keep a name.
        others = [
            o and self.builder.unique_tensor_name(f"{o}@{place.device}") if o != output else raw for o in node.outputs
        ]
        called = node.name if name in node.outputs else f"{node.name}@{place.device}"
        written = self.builder.declare(raw, self._dtype(output), piece.written_region or piece.out)
        if piece.table_rows is None:
            self.builder.copy_node(node.name, called, inputs, others, place, piece)
        else:
            table, numbers = (self.layers.tensors[tensor] for tensor in node.inputs)
            read = PlacedTensor(inputs[1], piece.needs[1] or (), numbers.dtype)
            self.builder.add_table_lookup(
                node.name, called, inputs[0], read, (table.shape or ())[0], written, place, piece
            )
        held[output] = self.builder.add_slice(written, piece.out, place, name)

    def _node_inputs(self, node: Node, piece: Piece, held: dict[str, PlacedTensor], place: NodePlacement) -> list[str]:
        """What the node reads there; '' for what it leaves out."""
        inputs: list[str] = []
        beyond = [("", None)] * (max(piece.constants, default=-1) + 1 - len(node.inputs))
        for i, (tensor, need) in enumerate((*zip(node.inputs, piece.needs, strict=True), *beyond)):
            if i in piece.constants:
                array = piece.constants[i]
                inputs.append(self.builder.add_constant(array, f"{node.name}.{i}{array.tolist()}"))
            elif not tensor:
                inputs.append("")
            elif need is not None and self.layers.tensors[tensor].is_constant:
                whole = need == self.facts.initializer_regions[tensor]
                inputs.append(tensor if whole else self.builder.add_constant(WeightSlice(tensor, need)))
            elif need is not None:
                inputs.append(self._add_local_slice(held[tensor], need, place).name)
        while inputs and not inputs[-1]:
            inputs.pop()
        return inputs

    def _place_whole_node(self, node: Node, held: dict[str, PlacedTensor], task: Task, place: NodePlacement) -> None:
        """A node of a layer that stays whole, with the names that its inputs have here."""
        for tensor in filter(None, node.outputs):
            shape = self.layers.tensors[tensor].shape  # what has none is read where it is made alone, by its name
            held[tensor] = PlacedTensor(
                self._tensor_name(TensorKey(tensor), task), full_region(shape or ()), self._dtype(tensor)
            )
            known = held[tensor] if shape is not None else self.facts.value_infos.get(tensor)
            if known is not None:
                self.builder.tensor_knowledge[held[tensor].name] = known
        self.captured_names.update(node.inputs)  # among them initializers that only sub-graphs name
        names, proto = {tensor: one.name for tensor, one in held.items()}, self.facts.nodes[node.name]
        inputs, outputs = ([names.get(name, name) for name in ends] for ends in (proto.input, proto.output))
        self.builder.copy_node(node.name, node.name, inputs, outputs, place, captured=names)

    def _add_deliveries(self) -> dict[str, str]:
        """The graph's outputs on the devices that want them: name of each further sink's output → the output that it
        is."""
        last = 1 + max(self.routing.runs.values(), default=0)
        extra: dict[str, str] = {}
        delivered = set(self.output_name_of_task.values())
        for delivery in self.routing.deliveries:
            output, first = delivery.output, self.first_delivery_of[delivery.output] is delivery
            if delivery.assembly is None or (first and output in delivered):
                continue
            place = NodePlacement(delivery.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            name = output if first else self.builder.unique_tensor_name(f"{output}@{delivery.device}")
            held = self._add_assembly(delivery.assembly, TensorKey(output), place, name)
            if held.name != name:
                self.builder.add_identity(held, place, name, held.name)
            if not first:
                extra[name] = output
        return extra
