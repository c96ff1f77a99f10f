"""Tasks: what one part of a layer comes to, node by node. `partition.bounds_inference` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dicompiler.ir.operator_rule import Node, Piece
from dicompiler.ir.regions import Interval, Region

TaskKind = Literal["plain", "partial", "merger"]
TaskId = tuple[str, int]  # (layer name, index of the part in the plan's list for that layer)


class TensorKey(NamedTuple):
    """Names what is held or read: a tensor, or the partial sums of it over one range of the reduction axis."""

    tensor: str
    reduce: Interval | None = None


@dataclass(frozen=True, eq=False)  # compared by identity: what follows from it is remembered
class TaskNode:
    """One node of a task and how to run it. `piece` None: as it stands, on whole tensors (layers that stay whole)."""

    node: Node
    piece: Piece | None


@dataclass(frozen=True)
class ShareTask:
    """What a share of a layer comes to, wherever it is computed.

    kind: `partial` computes the anchor alone over a range, `merger` sums such ranges and computes the absorbed nodes,
    `plain` all of the layer. outputs: the region of each tensor that it makes (None: a tensor without static shape).
    needs: the region of each incoming tensor that it must hold (weights are not among them). kept: the region of each
    state's input that it reads.
    """

    layer: str
    kind: TaskKind
    nodes: tuple[TaskNode, ...]
    outputs: Mapping[TensorKey, Region | None]
    needs: Mapping[TensorKey, Region]
    state_needs: Mapping[TensorKey, Region]


@dataclass(frozen=True)
class Task(ShareTask):
    """One part of one layer on one device. index: the part's place in the plan's list for the layer."""

    index: int
    device: str
    lane: int


def task_id(task: Task) -> TaskId:
    """What names a task in a routing."""
    return task.layer, task.index
