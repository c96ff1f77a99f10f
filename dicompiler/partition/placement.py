"""Placement: conversion of the parts of a plan to nodes on devices, connected by slices and concatenations.

A `Routing` becomes a `PlacedGraph`: nodes with a device and a position in time, and the tensors that devices send.
"""

from __future__ import annotations

from collections import Counter

from dicompiler.ir.layers import TensorKey
from dicompiler.ir.operator_rule import Node, Piece
from dicompiler.ir.plan import Plan
from dicompiler.ir.recurrent_states import StatePiece
from dicompiler.ir.regions import Region, full_region
from dicompiler.ir.routing import Assembly, AssemblyLeaf, Box, Routing, Task, TaskId, find_uncut_producer, task_id
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


def place_parts(facts: ModelFacts, routing: Routing, plan: Plan) -> PlacedGraph:
    """Return the placed graph (nodes with devices) for the routing of a plan.

    `plan` is the plan for which the routing was made: the main plan, a replica of it on other devices, or a failure
    plan.
    """
    return _Placer(facts, routing, plan).make_graph()


class _Placer:
    """Converter of tasks (computations of parts of layers on devices) to nodes."""

    def __init__(self, facts: ModelFacts, routing: Routing, plan: Plan) -> None:
        self.facts, self.routing, self.plan = facts, routing, plan
        self.layers = routing.layers
        self.builder = PlacedGraphBuilder(facts)
        self.tensor_of_task: dict[tuple[TensorKey, TaskId], PlacedTensor] = {}
        # Outputs of Slices, Concats and transfers, by a key of their contents, so that several readers share them.
        self.shared_tensors: dict[object, PlacedTensor] = {}
        self.captured_names: set[str] = set()
        self.task_count_by_layer = Counter(task.layer for task in routing.tasks)
        self.first_delivery_of = {delivery.output: delivery for delivery in reversed(routing.deliveries)}
        self.output_name_of_task = self._find_direct_outputs()
        self.state_tensors = self._declare_state_tensors()
        self.placement_of_task: dict[TaskId | None, NodePlacement] = {}
        self.wire_casts = WireCasts(self.builder, self.layers, plan.wire_format)

    def make_graph(self) -> PlacedGraph:
        for task in self.routing.tasks:
            self._place_task(task)
        copies = self._add_deliveries()
        return self.builder.build(self.captured_names, copies, self.plan.source, self._add_state_outputs())

    def _declare_state_tensors(self) -> dict[tuple[str, str], PlacedTensor]:
        """Declare a tensor for each region of a state (an output of the previous frame) that a device keeps.

        The result has the tensor by (model input of the state, device).
        """
        tensors = dict[tuple[str, str], PlacedTensor]()
        piece_count = Counter(retention.past for retention in self.routing.state_retentions)
        for retention in self.routing.state_retentions:
            past, device = retention.past, retention.device
            is_whole = retention.region == full_region(self.layers.tensors[past].shape or ())
            # If one device keeps the whole state, the tensor has the name of the model input.
            keeps_name = is_whole and piece_count[past] == 1
            name = past if keeps_name else self.builder.unique_tensor_name(f"{past}@{device}")
            tensors[past, device] = self.builder.declare(name, self._dtype(past), retention.region)
        return tensors

    def _add_state_outputs(self) -> list[StatePiece]:
        """Add nodes that assemble the region of each state that each device keeps, and return these regions.

        A state is a model output that is a model input of the next frame.
        """
        last, pieces = 1 + max(self.routing.periods.values(), default=0), list[StatePiece]()
        for retention in self.routing.state_retentions:
            device, past, present, assembly = retention.device, retention.past, retention.present, retention.assembly
            place = NodePlacement(device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            tensor = self._add_assembly(assembly, TensorKey(present), place)
            box = assembly.box if isinstance(assembly, AssemblyLeaf) else None
            if box is not None and box.origin is not None and box.region == tensor.region:
                name = self.builder.unique_tensor_name(f"{present}@{device}=")
                tensor = self.builder.add_identity(tensor, place, name, tensor.name)
            read_name = self.state_tensors[past, device].name
            pieces.append(StatePiece(device, past, present, retention.region, read_name, tensor.name))
        return pieces

    def _dtype(self, tensor: str) -> int:
        return self.layers.tensors[tensor].dtype

    def _find_direct_outputs(self) -> dict[tuple[TensorKey, TaskId], str]:
        """Return the names of the model outputs that a single task computes whole, by tensor and task.

        A task computes one part of a layer, here on the output's first sink (a device that receives outputs). Its
        tensor gets the name of the output, so that no copy is needed.
        """
        names: dict[tuple[TensorKey, TaskId], str] = {}
        for output, delivery in self.first_delivery_of.items():
            tree = delivery.assembly
            if tree is None:
                layer = self.layers.producer[output].name
                makers = (t for t in self.routing.tasks if t.layer == layer and t.device == delivery.device)
                names[TensorKey(output), task_id(next(makers))] = output
            elif (producer := find_uncut_producer(tree)) is not None:
                names[TensorKey(output), producer] = output
        return names

    def _tensor_name(self, key: TensorKey, task: Task) -> str:
        """Return the name of a tensor that a task (the computation of one part of a layer) computes."""
        if (key, task_id(task)) in self.output_name_of_task:
            return self.output_name_of_task[key, task_id(task)]
        # A tensor that only one task computes keeps its name, unless it is a model output.
        if self.task_count_by_layer[task.layer] == 1 and key.tensor not in self.first_delivery_of:
            return key.tensor
        lane = f"#{task.lane}" if task.lane else ""
        reduce = f"+{key.reduce[0]}:{key.reduce[1]}" if key.reduce else ""
        return self.builder.unique_tensor_name(f"{key.tensor}@{task.device}{lane}{reduce}")

    def _add_assembly(self, tree: Assembly, key: TensorKey, place: NodePlacement, name: str = "") -> PlacedTensor:
        """Return a region of a tensor, which slices and concatenations on the reader's device assemble.

        Readers in the same lane (group of the device's parts) share these nodes, which are added for the first of them.
        """
        if isinstance(tree, AssemblyLeaf):
            return self._add_local_slice(self._tensor_of_box(tree.box, place), tree.region, place)
        cache_key = (tree, place.device, place.lane)
        if cache_key not in self.shared_tensors:
            pieces = [self._add_assembly(child, key, place) for child in tree.children]
            name = name or self.builder.unique_tensor_name(f"{key.tensor}@{place.device}&")
            self.shared_tensors[cache_key] = self.builder.add_concat(pieces, tree.axis, place, name)
        return self.shared_tensors[cache_key]

    def _add_local_slice(self, tensor: PlacedTensor, region: Region, place: NodePlacement) -> PlacedTensor:
        """Return a region of `tensor`, from a Slice on the reader's device if it is not the whole tensor.

        Readers in the same lane (group of the device's parts) share the Slice, which is added for the first of them.
        """
        if tensor.region == region:
            return tensor
        cache_key = (tensor.name, region, place.device, place.lane)
        if cache_key not in self.shared_tensors:
            self.shared_tensors[cache_key] = self.builder.add_slice(tensor, region, place)
        return self.shared_tensors[cache_key]

    def _tensor_of_box(self, box: Box, place: NodePlacement) -> PlacedTensor:
        """Return the tensor of a box (a region of a tensor on a device).

        If the box is received, the nodes that slice and convert it are added at the first call.
        """
        assert box.region is not None
        if box.origin is None:
            if box.task is None:
                return self.state_tensors.get((box.key.tensor, box.device)) or PlacedTensor(
                    box.key.tensor, box.region, self._dtype(box.key.tensor)
                )
            return self.tensor_of_task[box.key, box.task]
        cache_key = (box.origin, box.region)
        if cache_key not in self.shared_tensors:
            # The sender's Slice has the position of the layer that reads the box. The lane -1 puts it before all lanes
            # (groups of parts) of the sender, so that the receiver does not wait for them.
            period, _, position, _ = place.step_key
            slice_placement = NodePlacement(box.origin.device, box.origin.lane, (period, -1, position, 0))
            whole = self._tensor_of_box(box.origin, place)
            piece = self.builder.add_slice(whole, box.region, slice_placement)
            # The cast of an uncut tensor directly follows the node that computes the tensor.
            is_cut = piece is not whole
            maker = slice_placement if is_cut else self.placement_of_task.get(box.origin.task, slice_placement)
            self.shared_tensors[cache_key] = self.wire_casts.narrow(piece, box, slice_placement, maker)
        return self.wire_casts.widen(self.shared_tensors[cache_key], box, place)

    def _place_task(self, task: Task) -> None:
        """Add the nodes of a task (the computation of one part of a layer), and those that assemble its inputs."""
        # Each layer has two positions in the order of execution: the first for computing partial sums, and the second
        # for adding them. Tasks without partial sums also have the second one.
        position = 2 * self.layers.position[task.layer] + (task.kind != "partial")
        step_key = (self.routing.periods[task_id(task)], task.lane, position, 1)
        place = NodePlacement(task.device, task.lane, step_key, task_id(task))
        self.placement_of_task[task_id(task)] = place
        reads = self.routing.reads.get(task_id(task), {})
        tensors = {
            key.tensor: self._add_assembly(tree, key, place) for key, tree in reads.items() if key.reduce is None
        }
        if task.kind == "merger":
            layer = self.layers.layer_by_name[task.layer]
            anchor = layer.nodes[layer.anchor]
            tensor, operator = self.layers.cut_output(anchor), self.layers.rule_of(anchor).merge_operator
            partials = sorted((key for key in reads if key.reduce is not None), key=lambda key: key.reduce or (0, 0))
            terms = [self._add_assembly(reads[key], key, place) for key in partials]
            tensors[tensor] = self.builder.add_merge(terms, operator, place, self._tensor_name(TensorKey(tensor), task))
        for task_node in task.nodes:
            if task_node.piece is None:
                self._place_whole_node(task_node.node, tensors, task, place)
            else:
                self._place_node(task_node.node, task_node.piece, tensors, task, place)
        self.tensor_of_task |= {(key, task_id(task)): tensors[key.tensor] for key in task.outputs}

    def _place_node(
        self, node: Node, piece: Piece, tensors: dict[str, PlacedTensor], task: Task, place: NodePlacement
    ) -> None:
        """Add a node that computes a piece: a region of its output, from regions of its inputs."""
        output, (target,) = self.layers.cut_output(node), task.outputs
        name = self._tensor_name(target if output == target.tensor else TensorKey(output), task)
        inputs = self._node_inputs(node, piece, tensors, place)
        written_name = name
        # Some operators, for example LRN, write a larger region than the task must compute. It is sliced at the end.
        if piece.written_region is not None and piece.written_region != piece.out:
            written_name = self.builder.unique_tensor_name(f"{name}{format_region(piece.written_region)}")
        outputs = [written_name if o == output else self._unread_output(o, place) for o in node.outputs]
        node_name = node.name if name in node.outputs else f"{node.name}@{place.device}"
        written = self.builder.declare(written_name, self._dtype(output), piece.written_region or piece.out)
        if piece.table_rows is None:
            self.builder.copy_node(node.name, node_name, inputs, outputs, place, piece)
        else:
            table, indices = (self.layers.tensors[tensor] for tensor in node.inputs)
            read = PlacedTensor(inputs[1], piece.needs[1] or (), indices.dtype)
            row_count = (table.shape or ())[0]
            self.builder.add_table_lookup(node.name, node_name, inputs[0], read, row_count, written, place, piece)
        tensors[output] = self.builder.add_slice(written, piece.out, place, name)

    def _unread_output(self, output: str, place: NodePlacement) -> str:
        return output and self.builder.unique_tensor_name(f"{output}@{place.device}")

    def _node_inputs(
        self, node: Node, piece: Piece, tensors: dict[str, PlacedTensor], place: NodePlacement
    ) -> list[str]:
        """Return the input names of a node that computes a piece (a region of its output); "" for an omitted input."""
        inputs: list[str] = []
        omitted = [("", None)] * (max(piece.constants, default=-1) + 1 - len(node.inputs))
        for i, (tensor, need) in enumerate((*zip(node.inputs, piece.needs, strict=True), *omitted)):
            if i in piece.constants:
                array = piece.constants[i]
                inputs.append(self.builder.add_constant(array, f"{node.name}.{i}{array.tolist()}"))
            elif not tensor:
                inputs.append("")
            elif need is not None and self.layers.tensors[tensor].is_constant:
                whole = need == self.facts.initializer_regions[tensor]
                inputs.append(tensor if whole else self.builder.add_constant(WeightSlice(tensor, need)))
            elif need is not None:
                inputs.append(self._add_local_slice(tensors[tensor], need, place).name)
        while inputs and not inputs[-1]:
            inputs.pop()
        return inputs

    def _place_whole_node(self, node: Node, tensors: dict[str, PlacedTensor], task: Task, place: NodePlacement) -> None:
        """Add an unchanged node of a layer that stays whole, with the names that its inputs have on this device."""
        for tensor in filter(None, node.outputs):
            # A tensor without a static shape gets the region of a scalar. The region is never used, because only this
            # device reads the tensor.
            shape, name = self.layers.tensors[tensor].shape, self._tensor_name(TensorKey(tensor), task)
            tensors[tensor] = PlacedTensor(name, full_region(shape or ()), self._dtype(tensor))
            info = tensors[tensor] if shape is not None else self.facts.value_infos.get(tensor)
            if info is not None:
                self.builder.tensor_descriptions[name] = info
        # `node.inputs` includes initializers that only subgraphs of the node read. They must not be removed as unread.
        self.captured_names.update(node.inputs)
        names, proto = {tensor: placed.name for tensor, placed in tensors.items()}, self.facts.nodes[node.name]
        inputs, outputs = ([names.get(name, name) for name in ends] for ends in (proto.input, proto.output))
        self.builder.copy_node(node.name, node.name, inputs, outputs, place, captured=names)

    def _add_deliveries(self) -> dict[str, str]:
        """Add the nodes that assemble the model's outputs on the sinks (the devices that receive them).

        Returns:
            The model output of each copy, by the name of the copy. If an output has several sinks, all but the first
            get copies.
        """
        last = 1 + max(self.routing.periods.values(), default=0)
        copies: dict[str, str] = {}
        delivered = set(self.output_name_of_task.values())
        for delivery in self.routing.deliveries:
            output, first = delivery.output, self.first_delivery_of[delivery.output] is delivery
            if delivery.assembly is None or (first and output in delivered):
                continue
            place = NodePlacement(delivery.device, 0, (last, 0, 2 * len(self.layers.layers), 1))
            name = output if first else self.builder.unique_tensor_name(f"{output}@{delivery.device}")
            tensor = self._add_assembly(delivery.assembly, TensorKey(output), place, name)
            if tensor.name != name:
                self.builder.add_identity(tensor, place, name, tensor.name)
            if not first:
                copies[name] = output
        return copies
