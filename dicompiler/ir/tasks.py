"""Tasks: the nodes that compute one part (a device's piece of a layer). `partition.bounds_inference` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dicompiler.ir.operator_rule import Node, Piece
from dicompiler.ir.regions import Interval, Region

TaskKind = Literal["plain", "partial", "merger"]
TaskId = tuple[str, int]
"""Name of a layer, and the index of a part in the plan's list of the layer's parts."""


class TensorKey(NamedTuple):
    """Name of a tensor, or of its partial sums over one range of the reduction axis.

    Attributes:
        tensor: Name of the tensor.
        reduce: Range of the reduction axis; None for the tensor itself.
    """

    tensor: str
    reduce: Interval | None = None


@dataclass(frozen=True, eq=False)  # Compared by identity: task nodes are keys of memoized results and need a fast hash.
class TaskNode:
    """A node of a task (the computation of a piece of a layer), with the region of its output that the task computes.

    Attributes:
        node: The node.
        piece: Computation of the region; None: the unchanged node on whole tensors, in layers that stay whole.
    """

    node: Node
    piece: Piece | None


@dataclass(frozen=True)
class ShareTask:
    """Nodes that compute a share (a piece of a layer that is not assigned to a device).

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
    """Nodes that compute one part (a piece of a layer on one device).

    Attributes:
        index: Index of the part in the plan's list of the layer's parts.
        device: Name of the device.
        lane: Lane (group of the device's parts) to which the part belongs. The device computes one lane after another;
            all lanes share its memory.
    """

    index: int
    device: str
    lane: int


def task_id(task: Task) -> TaskId:
    """Return the key of a task in a routing: the name of the layer and the index of the part."""
    return task.layer, task.index
