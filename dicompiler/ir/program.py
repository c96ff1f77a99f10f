"""Program: the steps of each device, and the transfers between devices.

Targets write a program as an artifact. Executors run it, and the simulator predicts its times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx

from dicompiler.ir.cluster import DEFAULT_ENGINE
from dicompiler.ir.onnx.weights import Weight, is_fixed_size, raw_nbytes
from dicompiler.ir.regions import Region, Shape
from dicompiler.ir.routing import TaskId

NodeMark = tuple[TaskId, str]
"""Mark of a node in a segment (submodel of one device), by which reports and the simulator find the node's layer.

It is the part that the node computes (layer name, index of the part in the layer), and the name of the model's node or
tensor for which the node was added.
"""

NO_MODEL = onnx.ModelProto()
"""Empty model of every segment (submodel of one device) in a program that is only simulated."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape of a tensor that is sent, or that is an input or output of a submodel or a program.

    Attributes:
        name: Name of the tensor.
        dtype: Element type, an onnx.TensorProto.DataType; 0 if the value is not a tensor.
        shape: Static shape; None if it is unknown.
    """

    name: str
    dtype: int
    shape: Shape | None

    @property
    def is_fixed_size(self) -> bool:
        """True if the size of the tensor in bytes is known before the run."""
        return self.shape is not None and is_fixed_size(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor, which must have a fixed size."""
        assert self.shape is not None
        return raw_nbytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Transfer:
    """One box (region of a tensor) that one device sends to another.

    Attributes:
        index: Index in the program's `transfers`, which are in the order in which the boxes are computed.
        sender: Name of the device that sends the box.
        receiver: Name of the device that receives the box.
        value: Name, element type and shape of the box.
    """

    index: int
    sender: str
    receiver: str
    value: TensorSpec


@dataclass(frozen=True)
class Segment:
    """ONNX submodel that one device runs as soon as its inputs are available.

    Attributes:
        name: Name of the segment.
        device: Name of the device.
        model: The submodel. Large weights are placeholders without data; `Program.weights` has their data under the
            same name.
        inputs: Names of the input tensors on this device.
        outputs: Names of the output tensors on this device.
        node_marks: For each node that computes a part of a layer: the part (layer name, index of the part), and the
            name of the model's node or tensor for which the node was added.
        calls: Number of calls of engines in a frame. It is above 1 if the engine of the device computes only some
            layers of the segment, and the segment has not been split yet.
    """

    name: str
    device: str
    model: onnx.ModelProto = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    node_marks: tuple[NodeMark, ...] = field(default=(), repr=False)
    calls: int = 1


@dataclass(frozen=True)
class Step:
    """One step of a device: a receive, a run of a segment (ONNX submodel), or a send.

    Attributes:
        kind: `receive`, `run` or `send`.
        index: For `receive` and `send`, the index of the transfer. For `run`, the index of the segment in the device's
            segments.
    """

    kind: Literal["receive", "run", "send"]
    index: int


@dataclass(frozen=True)
class DeviceState:
    """Piece of a state (a model output that becomes an input of the next frame) that a device keeps.

    Attributes:
        value: Tensor that the device reads: its piece of the state after the previous frame.
        written_name: Name of the tensor that the device computes. In the next frame, `value` has its content.
        past: Name of the model input of the state.
        present: Name of the model output of the state.
        region: Region of the model's tensors `past` and `present` that the piece contains.
    """

    value: TensorSpec
    written_name: str
    past: str
    present: str
    region: Region


@dataclass(frozen=True)
class DeviceProgram:
    """Steps of one device for a frame.

    All receives come first, because a target such as `mpi` starts them before it computes. The sends of the model's
    inputs follow, then the segments (ONNX submodels), each followed by the sends of its outputs.

    Attributes:
        device: Name of the device.
        host: Name of the device's host.
        segments: Segments that the device runs.
        steps: Steps of the device, in the order in which it executes them. A segment waits for its inputs; a send does
            not wait.
        model_inputs: Names of the model inputs that this device gets from the coordinator, which supplies the frames.
        model_outputs: Names of the model outputs that this device delivers to the coordinator, by the name of the
            tensor that contains the output on this device.
        states: Pieces of states (outputs that are inputs of the next frame) that this device keeps.
        engine: Name of the engine that computes the segments.
    """

    device: str
    host: str
    segments: tuple[Segment, ...]
    steps: tuple[Step, ...]
    model_inputs: tuple[str, ...]
    model_outputs: Mapping[str, str]
    states: tuple[DeviceState, ...] = ()
    engine: str = DEFAULT_ENGINE


@dataclass(frozen=True)
class Program:
    """Programs of all devices, and the transfers between them.

    Attributes:
        devices: Programs of the devices, in platform order.
        transfers: All boxes (regions of tensors) that devices send to each other.
        inputs: Model inputs, without states (outputs that are inputs of the next frame).
        outputs: Model outputs, without states.
        weights: Data of large weights, by name.
        segment_order: Pairs (device index, segment index) of all segments, in an order that respects dependencies.
        other_roles: Programs of further roles (replicas and failure plans), for the same devices in the same order. All
            other attributes belong to the first role (the plan itself, or its first replica).
        failed: Names of the failed devices for which this program is used; () if it is used while no device is down.
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
        """Program of each role (way to compute a frame): of the plan or its replicas, then of the failure plans."""
        return (replace(self, other_roles=()), *self.other_roles)

    @property
    def replica_roles(self) -> tuple[Program, ...]:
        """Programs of the plan's n replicas (copies on other devices), or of the plan itself.

        While no device is down, frame i uses entry i mod n.
        """
        return tuple(role for role in self.roles if not role.failed)

    @property
    def all_transfers(self) -> tuple[Transfer, ...]:
        """Transfers of the plan, its replicas (copies on other devices) and its failure plans, in this order.

        They are numbered consecutively, as in the files of artifacts and in reports of runs.
        """
        every = [transfer for role in self.roles for transfer in role.transfers]
        return tuple(replace(transfer, index=i) for i, transfer in enumerate(every))
