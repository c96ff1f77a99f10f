"""A Program: per device an ordered list of steps, between devices the transfers. Targets emit it, executors run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx

from dicompiler.ir.onnx.weights import Weight, is_fixed_size, raw_nbytes
from dicompiler.ir.regions import Region, Shape
from dicompiler.ir.tasks import TaskId

NodeMark = tuple[TaskId, str]
"""The part that a node belongs to, and the model's node or the tensor that it is made for."""

NO_MODEL = onnx.ModelProto()
"""The model of the segments of a program that is only evaluated."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor at the program's border or between devices. `dtype` is an onnx.TensorProto.DataType."""

    name: str
    dtype: int
    shape: Shape | None

    @property
    def is_fixed_size(self) -> bool:
        """Whether its bytes are known before it is there."""
        return self.shape is not None and is_fixed_size(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor; it must be sized."""
        assert self.shape is not None
        return raw_nbytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Transfer:
    """One box of a tensor from one device to another. `index` numbers the program's transfers in order of sending."""

    index: int
    sender: str
    receiver: str
    value: TensorSpec


@dataclass(frozen=True)
class Segment:
    """An ONNX sub-model that one device runs once its inputs are there.

    `model` carries no large weights: such an initializer is a hollow (see `weights`) whose data is in the program's
    `weights` under the same name. `inputs` and `outputs` are tensor names on this device. `marks`: of those of its
    nodes that belong to a part, in order.
    """

    name: str
    device: str
    model: onnx.ModelProto = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    node_marks: tuple[NodeMark, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Step:
    """`receive` and `send` name a transfer by its index; `run` names a segment by its index in the device's list."""

    kind: Literal["receive", "run", "send"]
    index: int


@dataclass(frozen=True)
class DeviceState:
    """A piece of a state that a device keeps: what it reads as `value` is what it made as tensor `made` in the frame
    before. past, region: of which graph input it is what; present: its graph output."""

    value: TensorSpec
    written_name: str
    past: str
    present: str
    region: Region


@dataclass(frozen=True)
class DeviceProgram:
    """What one device does for a frame. Receives stand first (they are posted up front), then segments, each followed
    by the sends of what it made. A segment starts once its own inputs are there; sends do not wait.

    `sources`: graph inputs that are given to this device; `sinks`: tensor on this device → graph output it delivers.
    `states`: what it keeps from frame to frame.
    """

    device: str
    host: str
    segments: tuple[Segment, ...]
    steps: tuple[Step, ...]
    sources: tuple[str, ...]
    sinks: Mapping[str, str]
    states: tuple[DeviceState, ...] = ()


@dataclass(frozen=True)
class Program:
    """`order`: (device index, segment index) of all segments, so that each comes after those it depends on.

    `states`: the graph's inputs that are states, whole: they are not among `inputs`, what becomes of them not among
    `outputs`.
    `others`: of a plan with replicas or losses the programs of its further roles, for the same devices in the same
    order; everything else is the first role's. `lost`: the devices without which it is played.
    """

    devices: tuple[DeviceProgram, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: Mapping[str, Weight] = field(repr=False)
    segment_order: tuple[tuple[int, int], ...]
    other_roles: tuple[Program, ...] = field(default=(), repr=False)
    failed: tuple[str, ...] = ()
    states: tuple[TensorSpec, ...] = ()

    @property
    def roles(self) -> tuple[Program, ...]:
        """The program of each role, those for losses last."""
        return (replace(self, other_roles=()), *self.other_roles)

    @property
    def replica_roles(self) -> tuple[Program, ...]:
        """Those that are played while nothing is lost: frame i by entry i mod n."""
        return tuple(role for role in self.roles if not role.failed)

    @property
    def all_transfers(self) -> tuple[Transfer, ...]:
        """The transfers of all roles one after another, numbered through: so artifacts and reports number them."""
        every = [transfer for role in self.roles for transfer in role.transfers]
        return tuple(replace(transfer, index=i) for i, transfer in enumerate(every))
