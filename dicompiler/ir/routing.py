"""Routing: what follows from layers and plan alone. The live tasks, and for each the tree of pieces of its inputs.

`partition.routing` works it out; the rewrite reads it and the costs read it: one truth for both.
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
    """One region of a tensor (or of partial sums of it) that a device holds.

    task: the one that computes it; None for a graph input on a source, and for a received box.
    origin: for a received box the computed one it is cut out of; what was received is never sent on.
    region None: a tensor without static shape, whole.
    """

    key: TensorKey
    region: Region | None
    device: str
    lane: int
    task: TaskId | None = None
    origin: Box | None = None


class AssemblyLeaf(NamedTuple):
    """A leaf of an assembly: `region` of a box that is held on the reader's device."""

    box: Box
    region: Region


class AssemblyConcat(NamedTuple):
    """`children` side by side along `axis`."""

    axis: int
    children: tuple[Assembly, ...]


Assembly = AssemblyLeaf | AssemblyConcat


@dataclass(frozen=True)
class OutputDelivery:
    """A graph output on one of the devices that want it. `tree` None: a tensor without static shape, which is
    delivered by a device that computes it (a sink, where one does)."""

    output: str
    device: str
    assembly: Assembly | None


@dataclass(frozen=True)
class StateRetention:
    """A box of a state on a device: the `region` of graph input `past` in a frame is what `tree` made of graph output
    `present` there in the frame before."""

    device: str
    past: str
    present: str
    region: Region
    assembly: Assembly


@dataclass(frozen=True)
class Routing:
    """`tasks`: the live ones in step order: run by run, in a run lane by lane, then in layer order.

    reads: task → what it reads → the tree that makes it. deliveries: the same for graph outputs. received: every box
    that travels. dropped: parts that nobody reads. runs: the number of each live task's run (see `lane_runs`).
    others: of a plan with replicas or losses the routings of its further roles; everything else is the first role's.
    lost: the devices without which it is played. keepings: the boxes of states, where they are read.
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
        """The routing of each role, those for losses last."""
        return (changed(self, other_roles=()), *self.other_roles)

    @property
    def replica_roles(self) -> tuple[Routing, ...]:
        """Those in force while nothing is lost: frame i goes by entry i mod n."""
        return tuple(role for role in self.roles if not role.failed)

    def nbytes(self, box: Box) -> int:
        """Raw bytes of a box; of a received one those that travel."""
        assert box.region is not None
        dtype = self.layers.tensors[box.key.tensor].dtype
        dtype = dtype if box.origin is None else sent_dtype(self.layers, box.key.tensor)
        return raw_nbytes(dtype, region_shape(box.region))

    @cached_property
    def total_bytes(self) -> int:
        """All bytes that travel between devices for one frame."""
        return sum(self.nbytes(box) for box in self.received_boxes)


def assembly_leaves(tree: Assembly) -> tuple[AssemblyLeaf, ...]:
    """The leaves of an assembly, in order."""
    return (
        (tree,)
        if isinstance(tree, AssemblyLeaf)
        else tuple([leaf for child in tree.children for leaf in assembly_leaves(child)])
    )
