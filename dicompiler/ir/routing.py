"""Routing: the tasks that must run, and the boxes that they exchange.

`partition.routing` derives it from layers and plan alone. Placement and cost models both use it, so predicted and sent
bytes are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import cached_property
from typing import NamedTuple

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.regions import Region, region_shape
from dicompiler.ir.tasks import Task, TaskId, TensorKey
from dicompiler.ir.wire_dtype import sent_dtype


class Box(NamedTuple):
    """A region of a tensor, or of partial sums of it, that is stored on a device.

    Attributes:
        key: The tensor.
        region: The region; None for a tensor without static shape, which is stored as a whole.
        device: Name of the device.
        lane: Lane of the device.
        task: Task that computes the box; None for a model input on a source, and for a received box.
        origin: For a received box, the computed box from which it was cut. Received boxes are never sent on.
    """

    key: TensorKey
    region: Region | None
    device: str
    lane: int
    task: TaskId | None = None
    origin: Box | None = None


class AssemblyLeaf(NamedTuple):
    """Leaf of an assembly: a region of a box on the reader's device.

    Attributes:
        box: The box.
        region: Region of it that is read.
    """

    box: Box
    region: Region


class AssemblyConcat(NamedTuple):
    """Inner node of an assembly: its children, concatenated along an axis.

    Attributes:
        axis: The axis.
        children: Assemblies, in order.
    """

    axis: int
    children: tuple[Assembly, ...]


Assembly = AssemblyLeaf | AssemblyConcat


@dataclass(frozen=True)
class OutputDelivery:
    """A model output on one of the sinks.

    Attributes:
        output: Name of the output.
        device: Name of the sink.
        assembly: How it is assembled. None for a tensor without static shape, which the device that computes it
            delivers (a sink, if one computes it).
    """

    output: str
    device: str
    assembly: Assembly | None


@dataclass(frozen=True)
class StateRetention:
    """A region of a state that a device keeps between frames.

    Attributes:
        device: Name of the device.
        past: Model input of the state.
        present: Model output of the state.
        region: The region, of both.
        assembly: How the region of `present` is assembled on the device at the end of a frame.
    """

    device: str
    past: str
    present: str
    region: Region
    assembly: Assembly


@dataclass(frozen=True)
class Routing:
    """Live tasks of a plan, and the tensors that they read.

    Attributes:
        layers: The layers.
        tasks: Live tasks in step order: by run, then by lane, then in layer order.
        reads: Assembly of each tensor that a task reads, by task and tensor.
        deliveries: Model outputs on the sinks.
        received_boxes: All boxes that are sent between devices.
        dropped_tasks: Parts with unread results.
        runs: Number of the run of each live task (see `number_lane_runs`).
        other_roles: Routings of further roles of a plan with replicas or failure plans. All other attributes are those
            of the first role.
        failed: Failed devices for which this role is used.
        state_retentions: Regions of states that devices keep.
    """

    layers: LayerGraph = field(repr=False)
    tasks: tuple[Task, ...]
    reads: Mapping[TaskId, Mapping[TensorKey, Assembly]] = field(repr=False)
    deliveries: tuple[OutputDelivery, ...]
    received_boxes: tuple[Box, ...]
    dropped_tasks: tuple[TaskId, ...]
    runs: Mapping[TaskId, int] = field(repr=False)
    other_roles: tuple[Routing, ...] = field(default=(), repr=False)
    failed: tuple[str, ...] = ()
    state_retentions: tuple[StateRetention, ...] = ()

    @property
    def roles(self) -> tuple[Routing, ...]:
        """Routing of each role; roles of failure plans come last."""
        return (changed(self, other_roles=()), *self.other_roles)

    @property
    def replica_roles(self) -> tuple[Routing, ...]:
        """Routings that are used while no device is down: frame i uses entry i mod n."""
        return tuple(role for role in self.roles if not role.failed)

    def nbytes(self, box: Box) -> int:
        """Return the raw bytes of a box; for a received box, those that are sent.

        Args:
            box: A box with static shape.

        Returns:
            Number of bytes.
        """
        assert box.region is not None
        dtype = self.layers.tensors[box.key.tensor].dtype
        dtype = dtype if box.origin is None else sent_dtype(self.layers, box.key.tensor)
        return raw_nbytes(dtype, region_shape(box.region))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that devices send to each other for one frame."""
        return sum(self.nbytes(box) for box in self.received_boxes)


def assembly_leaves(tree: Assembly) -> tuple[AssemblyLeaf, ...]:
    """Return the leaves of an assembly, in order.

    Args:
        tree: The assembly.

    Returns:
        Its leaves.
    """
    return (
        (tree,)
        if isinstance(tree, AssemblyLeaf)
        else tuple([leaf for child in tree.children for leaf in assembly_leaves(child)])
    )
