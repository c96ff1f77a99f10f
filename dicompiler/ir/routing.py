"""Routing: the tasks (computations) that a plan requires, and the regions of tensors that devices exchange for them.

The module `partition.routing` derives tasks and regions from layers and plan alone. Cost models and the partitioned
model both use them, so predicted bytes are equal to sent bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from dicompiler.ir.layers import LayerGraph, TensorKey
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.operator_rule import Node, Piece
from dicompiler.ir.regions import Region, region_shape
from dicompiler.ir.wire_dtype import sent_nbytes

TaskKind = Literal["plain", "partial", "merger"]
TaskId = tuple[str, int]
"""Name of a layer, and the index of a part in the plan's list of the layer's parts."""


# With `eq=False`, task nodes are compared by identity: they are keys of memoized results and need a fast hash.
@dataclass(frozen=True, eq=False)
class TaskNode:
    """A node of a task (the computation of a piece of a layer), with the region of its output that the task computes.

    Attributes:
        node: The ONNX node.
        piece: Computation of the region; None: the unchanged node on whole tensors, in layers that stay whole.
    """

    node: Node
    piece: Piece | None


@dataclass(frozen=True)
class ShareTask:
    """Computation of a piece of a layer that is not yet assigned to a device.

    Attributes:
        layer: Name of the layer.
        kind: `partial`: computes a partial sum of the anchor (the layer's main operator); `merger`: adds partial sums
            and computes the other nodes of the layer; `plain`: computes all nodes.
        nodes: The nodes, in topological order.
        outputs: Region of each computed tensor; None for a tensor without static shape.
        needs: Region that is needed of each input tensor, without weights.
        state_needs: Region that is needed of each model input that is a state (an output of the previous frame).
    """

    layer: str
    kind: TaskKind
    nodes: tuple[TaskNode, ...]
    outputs: Mapping[TensorKey, Region | None]
    needs: Mapping[TensorKey, Region]
    state_needs: Mapping[TensorKey, Region]


@dataclass(frozen=True)
class Task(ShareTask):
    """Computation of one part (a piece of a layer on one device).

    Attributes:
        index: Index of the part in the plan's list of the layer's parts.
        device: Name of the device.
        lane: Number of the group of the device's parts to which the part belongs. The device computes one group (lane)
            after another.
    """

    index: int
    device: str
    lane: int


def task_id(task: Task) -> TaskId:
    return task.layer, task.index


class Box(NamedTuple):
    """Region of a tensor (or of its partial sums) that is stored on a device.

    Attributes:
        key: Name of the tensor, with the range of the reduction axis for partial sums.
        region: The region; None for a tensor without static shape, which is stored as a whole.
        device: Name of the device.
        lane: Lane (group of the device's parts, computed one group after another) of the task that computes the box, or
            for which the box is received.
        task: Task that computes the box; None for a received box, and for a model input on a source device.
        origin: For a received box, the sender's box from which it was cut. The sender computed that box, or is a
            source.
    """

    key: TensorKey
    region: Region | None
    device: str
    lane: int
    task: TaskId | None = None
    origin: Box | None = None


class AssemblyLeaf(NamedTuple):
    """Leaf of an assembly tree: the part that is read from one stored box.

    By an assembly tree, a device puts a region of a tensor together from boxes (regions) that it stores.

    Attributes:
        box: The box that is read.
        region: Region that is read from it, in coordinates of the whole tensor.
    """

    box: Box
    region: Region


class AssemblyConcat(NamedTuple):
    """Inner node of an assembly tree: the concatenation of its children along an axis.

    By an assembly tree, a device puts a region of a tensor together from boxes (regions) that it stores.

    Attributes:
        axis: Axis of the concatenation.
        children: Trees of the regions that are concatenated, in the order of their positions on the axis.
    """

    axis: int
    children: tuple[Assembly, ...]


Assembly = AssemblyLeaf | AssemblyConcat


@dataclass(frozen=True)
class OutputDelivery:
    """Delivery of a model output to the caller of the run by a sink (a device that receives the model's outputs).

    Attributes:
        output: Name of the model output.
        device: Name of the sink. An output without static shape is delivered by a device that computes it.
        assembly: Tree that builds the output from boxes (regions stored on the sink); None for an output without static
            shape.
    """

    output: str
    device: str
    assembly: Assembly | None


@dataclass(frozen=True)
class StateRetention:
    """A region of a state (a model output that becomes an input of the next frame) that a device keeps.

    Attributes:
        device: Name of the device.
        past: Name of the model input of the state.
        present: Name of the model output of the state.
        region: The region, which is the same for `past` and `present`.
        assembly: Tree that builds the region of `present` on the device at the end of a frame.
    """

    device: str
    past: str
    present: str
    region: Region
    assembly: Assembly


@dataclass(frozen=True)
class Routing:
    """Live tasks of a plan (computations of parts with results that are read), and the tensors that they read.

    Attributes:
        layers: The layers that the plan divides.
        tasks: Live tasks in execution order: by period, then by lane, then in layer order.
        reads: By task and tensor, the tree that builds the read region of the tensor from boxes (stored regions).
        deliveries: The model outputs that each sink delivers (each device that receives model outputs).
        received_boxes: All boxes that are sent between devices, as they are stored on the receiver.
        dropped_tasks: Tasks of the plan whose results nothing reads.
        periods: Number of the period of each live task. No lane (group of a device's parts) reads a tensor that another
            lane or device computes in the same period, so in each period, a device can compute its lanes one after
            another.
        other_roles: Routings of further roles (replicas and failure plans). All other attributes belong to the first
            role (the plan itself, or its first replica).
        failed: Names of the failed devices for which this routing is used; () if it is used while no device is down.
        state_retentions: Regions of states (outputs that are inputs of the next frame) that devices keep.
    """

    layers: LayerGraph = field(repr=False)
    tasks: tuple[Task, ...]
    reads: Mapping[TaskId, Mapping[TensorKey, Assembly]] = field(repr=False)
    deliveries: tuple[OutputDelivery, ...]
    received_boxes: tuple[Box, ...]
    dropped_tasks: tuple[TaskId, ...]
    periods: Mapping[TaskId, int] = field(repr=False)
    other_roles: tuple[Routing, ...] = field(default=(), repr=False)
    failed: tuple[str, ...] = ()
    state_retentions: tuple[StateRetention, ...] = ()

    @property
    def roles(self) -> tuple[Routing, ...]:
        """Routing of each role (way to compute a frame): of the plan or its replicas, then of the failure plans."""
        return (replace(self, other_roles=()), *self.other_roles)

    @property
    def replica_roles(self) -> tuple[Routing, ...]:
        """Routings of the plan's n replicas (copies on other devices), or of the plan itself.

        While no device is down, frame i uses entry i mod n.
        """
        return tuple(role for role in self.roles if not role.failed)

    def nbytes(self, box: Box) -> int:
        """Return the stored bytes of a computed box (a region of a tensor), or the sent bytes of a received box.

        Args:
            box: A box with static shape.

        Returns:
            Number of bytes. For a received box, they depend on the element type in which the tensor is sent.
        """
        assert box.region is not None
        if box.origin is not None:
            return sent_nbytes(self.layers, box.key.tensor, region_shape(box.region))
        return raw_nbytes(self.layers.tensors[box.key.tensor].dtype, region_shape(box.region))

    @cached_property
    def call_readers(self) -> Mapping[TaskId, frozenset[TaskId]]:
        """For each task, the tasks that read its results in the same call of the engine.

        A call ends after a result that is sent, before a task that needs a received tensor, and at the end of a lane.
        """
        readers: dict[TaskId, set[TaskId]] = {}
        lanes = {task_id(task): (task.lane, self.periods.get(task_id(task))) for task in self.tasks}
        for reader, reads in self.reads.items():
            if any(leaf.box.origin is not None for tree in reads.values() for leaf in assembly_leaves(tree)):
                continue  # The task receives a tensor, so it begins another call.
            for producer in filter(None, map(find_uncut_producer, reads.values())):
                if producer not in self._sent_tasks and lanes.get(producer) == lanes.get(reader):
                    readers.setdefault(producer, set()).add(reader)
        return {task: frozenset(found) for task, found in readers.items()}

    @cached_property
    def leaving_tasks(self) -> frozenset[TaskId]:
        """The tasks of which a result is also used outside their call: sent, cut, joined, delivered or kept."""
        trees = [delivery.assembly for delivery in self.deliveries if delivery.assembly is not None]
        trees += [retention.assembly for retention in self.state_retentions]
        for reader, reads in self.reads.items():
            for tree in reads.values():
                producer = find_uncut_producer(tree)
                if producer is None or reader not in self.call_readers.get(producer, ()):
                    trees.append(tree)
        used = {leaf.box.task for tree in trees for leaf in assembly_leaves(tree)}
        return self._sent_tasks | {task for task in used if task is not None}

    @cached_property
    def _sent_tasks(self) -> frozenset[TaskId]:
        """The tasks of which a result is sent to another device."""
        origins = (box.origin for box in self.received_boxes if box.origin is not None)
        return frozenset(origin.task for origin in origins if origin.task is not None)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that devices send to each other for one frame."""
        return sum(self.nbytes(box) for box in self.received_boxes)


def assembly_leaves(tree: Assembly) -> tuple[AssemblyLeaf, ...]:
    """Return the leaves of an assembly tree, by which a device puts a region of a tensor together from stored boxes.

    Args:
        tree: The tree.

    Returns:
        Its leaves, in the order of concatenation. Each is a region that is read from one box.
    """
    if isinstance(tree, AssemblyLeaf):
        return (tree,)
    return tuple([leaf for child in tree.children for leaf in assembly_leaves(child)])


def find_uncut_producer(tree: Assembly) -> TaskId | None:
    """Return the task of the same device that computed exactly the region that an assembly tree builds, if any.

    Args:
        tree: The tree, by which a device puts a region of a tensor together.

    Returns:
        The task; None if the region is cut, joined, received or a model input.
    """
    if isinstance(tree, AssemblyLeaf) and tree.region == tree.box.region:
        return tree.box.task
    return None
