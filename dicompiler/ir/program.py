"""Program: steps of each device, and transfers between devices.

Targets emit it, and executors and simulators run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx

from dicompiler.ir.onnx.weights import Weight, is_fixed_size, raw_nbytes
from dicompiler.ir.regions import Region, Shape
from dicompiler.ir.tasks import TaskId

NodeMark = tuple[TaskId, str]
"""Part to which a node belongs, and the model's node or the tensor for which it was made."""

NO_MODEL = onnx.ModelProto()
"""Model of the segments of a program that is only simulated."""


@dataclass(frozen=True)
class TensorSpec:
    """Tensor that is an input or output of the program or of a segment, or that is sent.

    Attributes:
        name: Name of the tensor.
        dtype: Element type, an onnx.TensorProto.DataType; 0 if it is not a tensor.
        shape: Static shape; None if it is unknown.
    """

    name: str
    dtype: int
    shape: Shape | None

    @property
    def is_fixed_size(self) -> bool:
        """True if its size in bytes is known before the run."""
        return self.shape is not None and is_fixed_size(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor, which must have a fixed size."""
        assert self.shape is not None
        return raw_nbytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Transfer:
    """One box of a tensor that one device sends to another.

    Attributes:
        index: Index in the program's `transfers`, in the order of sending.
        sender: Name of the device that sends it.
        receiver: Name of the device that receives it.
        value: The tensor.
    """

    index: int
    sender: str
    receiver: str
    value: TensorSpec


@dataclass(frozen=True)
class Segment:
    """ONNX sub-model that one device runs as soon as its inputs are available.

    Attributes:
        name: Name of the segment.
        device: Name of the device.
        model: The sub-model. Large weights are placeholders (see `ir.onnx.weights`); the program's `weights` have their
            data under the same name.
        inputs: Names of its input tensors on this device.
        outputs: Names of its output tensors on this device.
        node_marks: Marks of those nodes that belong to a part, in order.
    """

    name: str
    device: str
    model: onnx.ModelProto = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    node_marks: tuple[NodeMark, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Step:
    """Step of a device.

    Attributes:
        kind: `receive`, `run` or `send`.
        index: Index of a transfer (`receive`, `send`), or of a segment of the device (`run`).
    """

    kind: Literal["receive", "run", "send"]
    index: int


@dataclass(frozen=True)
class DeviceState:
    """Piece of a state that a device keeps between frames.

    Attributes:
        value: Tensor that it reads.
        written_name: Tensor of the previous frame that it reads.
        past: Model input of the state.
        present: Model output of the state.
        region: Region of `past` that the piece contains.
    """

    value: TensorSpec
    written_name: str
    past: str
    present: str
    region: Region


@dataclass(frozen=True)
class DeviceProgram:
    """Steps of one device for a frame.

    Receives come first, because they are posted early. Then come the segments, each followed by the sends of its
    outputs. A run waits for the inputs of its segment; a send does not wait.

    Attributes:
        device: Name of the device.
        host: Name of its host.
        segments: Its segments.
        steps: Its steps.
        sources: Model inputs that are given to this device.
        sinks: Model outputs that it delivers, by name of the tensor on this device.
        states: Pieces of states that it keeps.
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
    """Programs of all devices, and the transfers between them.

    Attributes:
        devices: Programs of the devices, in platform order.
        transfers: All transfers.
        inputs: Model inputs, without states.
        outputs: Model outputs, without states.
        weights: Data of large weights, by name.
        segment_order: (device index, segment index) of all segments, in an order that respects dependencies.
        other_roles: Programs of further roles of a plan with replicas or failure plans, for the same devices in the
            same order. All other attributes are those of the first role.
        failed: Failed devices for which this role is used.
        states: Model inputs that are states.
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
        """Program of each role; roles of failure plans come last."""
        return (replace(self, other_roles=()), *self.other_roles)

    @property
    def replica_roles(self) -> tuple[Program, ...]:
        """Programs that are used while no device is down: frame i uses entry i mod n."""
        return tuple(role for role in self.roles if not role.failed)

    @property
    def all_transfers(self) -> tuple[Transfer, ...]:
        """Transfers of all roles with consecutive indices, as in artifacts and reports."""
        every = [transfer for role in self.roles for transfer in role.transfers]
        return tuple(replace(transfer, index=i) for i, transfer in enumerate(every))
