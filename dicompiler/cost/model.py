"""Cost models: how long a piece of a layer takes on a device. And the counting of operations that they rest on.

LayerGraph + Layer + region → multiplications, FLOPs, bytes;   … + Device → seconds.   No model, no weights, no clock.
What an operator costs is said by its rule (see `OperatorRule.cost`).
Here are the base of all models and the analytic one; costs_models.py and costs_profile.py hold the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.remembering import remembered
from dicompiler.ir.devices import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.plan import Share as Share
from dicompiler.ir.regions import Interval, Region, full, shape_of, volume
from dicompiler.ir.rule import Effort
from dicompiler.ir.tasks import ShareTask, Work
from dicompiler.partition.bounds_inference import share_task


@dataclass(frozen=True)
class CostModel(ABC):
    """The base of all cost models. A subclass is a frozen dataclass too: its fields are its options.

    measured: whether what it says rests on measurements, so that it may differ the next time.
    """

    name: ClassVar[str]
    measured: ClassVar[bool] = False

    @abstractmethod
    def seconds(self, layers: LayerGraph, layer: Layer, share: Share, device: Device) -> float:
        """Seconds that `device` computes on a part of `layer`, the waiting and the sending not counted. Endless on a
        compute-less device."""

    def fill(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[Share], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        """`seconds` of every share on every device: an array (shares, devices). A model may have a quicker way."""
        rows = [[self.seconds(layers, layer, share, device) for device in devices] for share in shares]
        return np.array(rows, np.float64).reshape(len(shares), len(devices))


@dataclass(frozen=True)
class Analytic(CostModel):
    """Operations / rate: two FLOP for each multiplication with its addition, one for each element of anything else.

    A pool costs one FLOP for each element of each window; what only moves data (Reshape, Concat, …) costs nothing.
    """

    name: ClassVar[str] = "analytic"
    pools: bool = field(default=True, metadata={"help": "count pools; many papers take them as free"})
    elementwise: bool = field(default=True, metadata={"help": "count activations, additions and the like"})

    def seconds(self, layers: LayerGraph, layer: Layer, share: Share, device: Device) -> float:
        """FLOPs of the part / the device's rate."""
        if not device.computes:
            return math.inf
        return flops(layers, layer, *share, pools=self.pools, elementwise=self.elementwise) / device.rate

    def fill(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[Share], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        """As `CostModel.fill`: the operations of each share are counted once."""
        own = [flops(layers, layer, *share, pools=self.pools, elementwise=self.elementwise) for share in shares]
        return by_rate(own, devices)


def fault_of_seconds(given: Any, layer: Layer, device: Device) -> str:
    """What is wrong with what a model says that a part of `layer` takes; '' where it is at least 0, and finite on a
    device that computes."""
    number = float(given) if isinstance(given, Real) else math.nan
    if number >= 0 and (number < math.inf or not device.computes):
        return ""
    return f"layer {layer.name!r} on {device.name} takes {given!r} s: give a number of at least 0"


def by_rate(operations: Sequence[int], devices: Sequence[Device]) -> NDArray[np.float64]:
    """Seconds (operations, devices) of numbers of FLOP at the devices' rates; endless without compute."""
    counts = np.array(operations, np.float64).reshape(-1, 1)
    rates = np.array([[device.rate for device in devices]], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rates > 0, counts / rates, np.inf)


def macs(layers: LayerGraph, layer: Layer, region: Region | None = None, reduce: Interval | None = None) -> int:
    """Multiplications (each with its addition) of a part of `layer`: convolutions, matrix products and the like.

    What the operator rules compute beyond `region` (a whole group of channels, say) is counted. Nodes whose shapes are
    not static count 0.
    """
    return task_macs(layers, share_task(layers, layer, Share(region, reduce)))


def flops(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
    *,
    pools: bool = True,
    elementwise: bool = True,
) -> int:
    """Floating-point operations of a part of `layer`, counted as `Analytic` says; the arguments are those of
    `CostModel.seconds`."""
    counted = count(layers, layer, region, reduce, merge)
    return counted.multiply + counted.add + pools * counted.pool + elementwise * counted.other


@dataclass(frozen=True)
class Count:
    """What a part of a layer comes to. In FLOP: `multiply` of multiplications, `pool` of pools and reductions, `other`
    of all else, `add` of adding up partial sums. moved: bytes that it reads (weights too) and writes, where what its
    nodes hand to each other stays in caches."""

    multiply: int
    pool: int
    other: int
    add: int
    moved: int

    @property
    def flops(self) -> int:
        return self.multiply + self.pool + self.other + self.add


@remembered
def count(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
) -> Count:
    """The operations and bytes of a part of `layer`; the arguments are those of `CostModel.seconds`."""
    task = share_task(layers, layer, Share(region, reduce, merge))
    efforts = [_effort(layers, work) for work in task.works]
    multiply, pool, other = (sum(kind) for kind in zip(Effort(), *efforts, strict=True))
    ((key, made), *_) = task.outputs.items()
    size = 0 if made is None else volume(made)
    moved = sum(weight_regions(layers, task).values())
    moved += sum(_nbytes(layers, key.tensor, need) for key, need in (*task.needs.items(), *task.outputs.items()))
    moved += merge * _nbytes(layers, key.tensor, made)
    return Count(2 * multiply, pool, other, add=(merge - 1) * size if merge else 0, moved=moved)


def _nbytes(layers: LayerGraph, tensor: str, region: Region | None) -> int:
    return 0 if region is None else raw_nbytes(layers.tensors[tensor].dtype, shape_of(region))


def task_macs(layers: LayerGraph, task: ShareTask) -> int:
    """Multiplications of a task, see `macs`."""
    return sum(_effort(layers, work).multiply for work in task.works)


def weight_regions(layers: LayerGraph, task: ShareTask) -> Mapping[tuple[str, Region], int]:
    """The pieces of constants that a task holds: (tensor, region) → bytes."""
    return _weight_regions(layers, task.works)


@remembered
def _weight_regions(layers: LayerGraph, works: tuple[Work, ...]) -> Mapping[tuple[str, Region], int]:
    found = {}
    for work in works:
        _, needs = _regions(layers, work)
        for name, need in zip(work.node.inputs, needs, strict=True):
            if name and need is not None and layers.tensors[name].constant:
                found[name, need] = raw_nbytes(layers.tensors[name].dtype, shape_of(need))
    return found


def _regions(layers: LayerGraph, work: Work) -> tuple[Region | None, tuple[Region | None, ...]]:
    """(the region of its output that a node computes, the regions of its inputs that it reads); None: unknown."""
    if work.piece is not None:
        return work.piece.out, work.piece.needs
    operation = layers.operation(work.node)
    tensor = next((tensor for tensor in operation.outputs[operation.output :] if tensor is not None), None)
    return None if tensor is None or tensor.shape is None else full(tensor.shape), operation.full_needs()


def _effort(layers: LayerGraph, work: Work) -> Effort:
    """What one node costs, as its rule says; nothing where shapes are not static."""
    operation = layers.operation(work.node)
    out, needs = _regions(layers, work)
    if out is None or any(tensor is not None and tensor.shape is None for tensor in operation.inputs):
        return Effort()
    shapes = [() if need is None else shape_of(need) for need in needs]
    return layers.rule(work.node).cost(operation, shape_of(out), shapes)
