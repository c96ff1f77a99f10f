"""Tasks: the nodes that compute one part of a layer. `partition.bounds_inference` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dicompiler.ir.operator_rule import Node, Piece
from dicompiler.ir.regions import Interval, Region

TaskKind = Literal["plain", "partial", "merger"]
TaskId = tuple[str, int]  # (layer name, index of the part in the plan's list for that layer)


class TensorKey(NamedTuple):
    """Name of a tensor, or of its partial sums over one range of the reduction axis.

    Attributes:
        tensor: Name of the tensor.
        reduce: Range of the reduction axis; None for the tensor itself.
    """

    tensor: str
    reduce: Interval | None = None


@dataclass(frozen=True, eq=False)  # Compared by identity, because results are memoized per node.
class TaskNode:
    """A node of a task.

    Attributes:
        node: The node.
        piece: How to compute it; None: unchanged, on whole tensors (in layers that stay whole).
    """

    node: Node
    piece: Piece | None


@dataclass(frozen=True)
class ShareTask:
    """Task of a share of a layer, on any device.

    Attributes:
        layer: Name of the layer.
        kind: `partial`: computes a partial sum of the anchor; `merger`: adds partial sums and computes the absorbed
            nodes; `plain`: computes all nodes.
        nodes: The nodes, in topological order.
        outputs: Region of each computed tensor; None for a tensor without static shape.
        needs: Region that is needed of each input tensor, without weights.
        state_needs: Region that is needed of the input of each state.
    """

    layer: str
    kind: TaskKind
    nodes: tuple[TaskNode, ...]
    outputs: Mapping[TensorKey, Region | None]
    needs: Mapping[TensorKey, Region]
    state_needs: Mapping[TensorKey, Region]


@dataclass(frozen=True)
class Task(ShareTask):
    """Task of one part of a layer on one device.

    Attributes:
        index: Index of the part in the plan's list for the layer.
        device: Name of the device.
        lane: Lane of the device.
    """

    index: int
    device: str
    lane: int


def task_id(task: Task) -> TaskId:
    """Return the key of a task in a routing: the layer's name and the part's index.

    Args:
        task: The task.

    Returns:
        The key.
    """
    return task.layer, task.index
