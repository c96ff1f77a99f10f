"""Runs a Program, or a whole Model, in this process with onnxruntime: the reference of tests and of `verify`.

In: a Program and the graph's inputs. Out: its outputs, and the bytes that each transfer carried, which are checked
against what the program predicts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.base.input_arrays import coerce_input
from dicompiler.base.ort_session import create_session
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight, array_dtype, dtype_name, is_placeholder
from dicompiler.ir.program import DeviceProgram, DeviceState, Program, Segment, TensorSpec, Transfer
from dicompiler.ir.recurrent_states import inputs_with_states, read_state_pieces
from dicompiler.ir.regions import to_slices
from dicompiler.verify.deadline import run_interruptibly
from dicompiler.verify.levels import Optimization

_LEVELS = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL"}
# Types that onnxruntime computes with but does not exchange with numpy.
_NON_NUMPY_TYPES = ("bfloat16", "float8", "float4", "int4", "int2")


class SegmentRunner(Protocol):
    """A model in a runtime."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Every output by name."""


class OrtSession:
    """One ONNX model in onnxruntime, on one thread. Initializers that are hollows take their data from `weights`.

    The data goes to onnxruntime by itself and never into a protobuf message, so that it may be over 2 GB.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        weights: Mapping[str, Weight],
        place: str,
        optimization: Optimization = "extended",
        is_single_use: bool = False,
    ) -> None:
        """`place` opens the errors: DicompilerError where onnxruntime refuses the model. once: it is run once: a
        second copy of the weights in another order would not pay."""
        self.place = place
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{_LEVELS[optimization]}")
        if optimization != "all":  # what is fused differs from a whole network to its parts, and rounds otherwise
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if is_single_use:
            options.add_session_config_entry("session.disable_prepacking", "1")
        names = [tensor.name for tensor in proto.graph.initializer if is_placeholder(tensor)]
        # onnxruntime promises no copy: the values stay alive as long as the session.
        self._values = [to_ort(np.asarray(weights[name].array(), order="C")) for name in names]
        options.add_external_initializers(names, self._values)
        try:
            self._session = run_interruptibly(place, lambda _: create_session(proto.SerializeToString(), options))
        except DicompilerError:
            raise
        except Exception as error:  # onnxruntime's errors share no other base
            raise DicompilerError(f"{place}: onnxruntime cannot load it: {_line(error)}") from error
        self.outputs = tuple(value.name for value in self._session.get_outputs())
        kinds = [value.type for value in (*self._session.get_inputs(), *self._session.get_outputs())]
        self._has_non_numpy_types = any(name in kind for kind in kinds for name in _NON_NUMPY_TYPES)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Every output by name, as arrays (lists and dicts for values that are not tensors)."""
        feeds = {name: _in_c_order(value) for name, value in inputs.items()}
        with self._ort_errors_translated():
            if not self._has_non_numpy_types:
                results = run_interruptibly(self.place, lambda options: self._session.run(None, feeds, options))
                return dict(zip(self.outputs, results, strict=True))
            values = {name: to_ort(array) for name, array in feeds.items()}
            results = run_interruptibly(
                self.place, lambda options: self._session.run_with_ort_values(self.outputs, values, options)
            )
            return {name: from_ort(value) for name, value in zip(self.outputs, results, strict=True)}

    @contextmanager
    def _ort_errors_translated(self) -> Iterator[None]:
        """DicompilerError where onnxruntime cannot run it."""
        try:
            yield
        except DicompilerError:
            raise
        except Exception as error:  # see above
            raise DicompilerError(f"{self.place}: onnxruntime cannot run it: {_line(error)}") from error

    def bind(self, memory: Mapping[str, Any]) -> Callable[[], object]:
        """Runs it on what lies in `memory`, again and again: it reads its inputs there, in C order (of types below a
        byte a copy), and writes those of its outputs there that are tensors of numbers and of a fixed shape. Where
        an input is none, it is run on what `memory` holds then."""
        names = [one.name for one in self._session.get_inputs()]
        if not all(_is_numeric_array(memory[name]) for name in names):
            return lambda: self.run({name: memory[name] for name in names})
        binding, others = self._session.io_binding(), list[str]()
        with self._ort_errors_translated():
            for name in names:
                binding.bind_ortvalue_input(name, to_ort(memory[name]))
            for one in self._session.get_outputs():
                name, fixed = one.name, all(isinstance(size, int) for size in one.shape)
                if fixed and _is_numeric_array(memory.get(name)):
                    binding.bind_ortvalue_output(name, to_ort(memory[name]))
                else:
                    others.append(name)

        def call() -> None:
            with self._ort_errors_translated():
                for name in others:  # anew: what it made of the last inputs would be taken for its place
                    binding.bind_output(name)
                self._session.run_with_iobinding(binding)

        return call


def _is_numeric_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype != object


def _in_c_order(value: Any) -> Any:
    """Arrays in C order, which onnxruntime requires; numpy scalars as arrays of rank 0."""
    return np.asarray(value, order="C") if isinstance(value, (np.ndarray, np.generic)) else value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def to_ort(array: NDArray[Any]) -> ort.OrtValue:
    """An onnxruntime value on the array's own memory (types below a byte: on a packed copy)."""
    if array.dtype.isbuiltin != 2:  # 2: a type that another package has added to numpy
        return ort.OrtValue.ortvalue_from_numpy(array)
    storage = array.view(f"u{array.dtype.itemsize}")
    packed = Weight.from_array(array)
    if packed.nbytes < array.nbytes:
        # onnxruntime takes the shape from the array and reads as many packed bytes as that shape needs.
        storage = np.zeros(array.shape, np.uint8)
        storage.reshape(-1)[: packed.nbytes] = np.frombuffer(packed.data, np.uint8)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(storage, packed.dtype)


def from_ort(value: ort.OrtValue) -> Any:
    """The value as an array of its own; also for types that onnxruntime does not give to numpy."""
    if not value.is_tensor() or not any(name in value.data_type() for name in _NON_NUMPY_TYPES):
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return Weight(value.element_type(), tuple(value.shape()), memoryview(raw)).array().copy()


def with_initial_states(
    states: Sequence[TensorSpec], inputs: Mapping[str, Any], is_first_frame: bool = False
) -> Mapping[str, Any]:
    """`inputs` with all states, those that are not there as zeros, if one is there or it is the first frame."""
    if not is_first_frame and not any(state.name in inputs for state in states):
        return inputs
    types = {state.name: onnx.helper.tensor_dtype_to_np_dtype(state.dtype) for state in states}
    return {s.name: np.zeros(s.shape or (), types[s.name]) for s in states if s.name not in inputs} | dict(inputs)


def check_inputs(values: Sequence[TensorSpec], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`inputs` in the order of `values` and contiguous. DicompilerError for a missing, unknown or unfitting one."""
    known = [value.name for value in values]
    for name in inputs:
        if name not in known:
            raise DicompilerError(f"the network has no input {name!r}{did_you_mean(name, known)}")
    return {value.name: _check_input(value, inputs) for value in values}


def _check_input(value: TensorSpec, inputs: Mapping[str, Any]) -> Any:
    if value.name not in inputs:
        raise DicompilerError(f"input {value.name!r} is missing: give all of the network's inputs")
    given = inputs[value.name]
    if value.dtype == onnx.TensorProto.UNDEFINED:  # a sequence or an optional value
        return given
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype))
    return coerce_input(given, dtype, value.shape, f"input {value.name!r}")


def run_model(
    model: Model,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    optimization: Optimization = "extended",
    is_single_use: bool = False,
) -> dict[str, Any]:
    """The outputs of the whole model from one session: what every split is compared with.

    `outputs`: names of tensors, also inner ones, to return in place of the graph's outputs. Of states a placed model
    reads its pieces. once: see `Session`.
    """
    proto = model.proto
    if outputs is not None:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        known = {value.name: value for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
        del proto.graph.output[:]
        proto.graph.output.extend(known.get(name) or onnx.ValueInfoProto(name=name) for name in outputs)
    session = OrtSession(proto, model.weights, "the whole model", optimization, is_single_use)
    return session.run(inputs_with_states(read_state_pieces(proto)[0], inputs))


@dataclass(frozen=True)
class Execution:
    """What a program computed for one frame. outputs: by name, of the first device that delivers each.

    delivered: every sink device's outputs. sent: bytes by transfer index. values: every tensor on every device, where
    that was asked for. kept: what is kept of states for the next frame, of each device's program.
    """

    outputs: dict[str, Any]
    sent: tuple[int, ...]
    delivered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    kept_states: Sequence[tuple[DeviceState, Any]] = ()


@dataclass(frozen=True)
class _SingleUseSession:
    """A model whose session is made where it runs, and is given back."""

    make_session: Callable[[], OrtSession]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.make_session().run(inputs)


class ProgramExecutor:
    """A program with its sessions made, to be run for many frames. States are kept from one to the next."""

    def __init__(
        self,
        program: Program,
        optimization: Optimization = "extended",
        make_runner: Callable[[Segment], SegmentRunner] | None = None,
        is_single_use: bool = False,
    ) -> None:
        """`make`: what runs a segment in place of onnxruntime. once: it is run for one frame: each session is made when
        its turn comes, so that one of them holds weights at a time."""
        self.program = program
        self._functions: dict[str, Any] = {}
        self._sends = [_sends_by_segment(device) for device in program.devices]

        def session(s: Segment) -> SegmentRunner:
            about = s.model, program.weights, f"segment {s.name!r} of device {s.device!r}", optimization, is_single_use
            return _SingleUseSession(lambda: OrtSession(*about)) if is_single_use else OrtSession(*about)

        self._sessions = [
            [(make_runner or session)(segment) for segment in device.segments] for device in program.devices
        ]

    def run(self, inputs: Mapping[str, Any], keep_values: bool = False) -> Execution:
        """Plays the program for one frame; where `inputs` has states, those begin anew, and zeros are what they begin
        with. DicompilerError where a transfer or an order is not as predicted."""
        program = self.program
        feed = with_initial_states(program.states, inputs, not self._functions)
        anew = any(state.name in feed for state in program.states)
        given = check_inputs((*program.inputs, *(program.states if anew else ())), feed)
        held = {d.device: {name: given[name] for name in d.sources} for d in program.devices}
        for device in program.devices:
            for state in device.states:
                held[device.device][state.value.name] = (
                    given[state.past][to_slices(state.region)] if anew else self._functions[state.value.name]
                )
        sent = [0] * len(program.transfers)
        for sends in self._sends:
            self._send(sends[0], held, sent)
        for device_index, index in program.segment_order:
            device = program.devices[device_index]
            segment, local = device.segments[index], held[device.device]
            missing = [name for name in segment.inputs if name not in local]
            if missing:
                raise DicompilerError(
                    f"segment {segment.name!r} of device {device.device!r} reads {missing[0]!r} before it is there"
                )
            local.update(self._sessions[device_index][index].run({name: local[name] for name in segment.inputs}))
            self._send(self._sends[device_index][index + 1], held, sent)
        delivered = {
            d.device: {output: held[d.device][name] for name, output in d.sinks.items()}
            for d in program.devices
            if d.sinks
        }
        first = {name: value for outputs in reversed(delivered.values()) for name, value in outputs.items()}
        outputs = {value.name: first[value.name] for value in program.outputs}
        kept = [
            (state, held[device.device][state.written_name]) for device in program.devices for state in device.states
        ]
        self._functions = {state.value.name: array for state, array in kept}
        return Execution(outputs, tuple(sent), delivered, held if keep_values else {}, kept)

    def _send(self, indices: Sequence[int], held: Mapping[str, dict[str, Any]], sent: list[int]) -> None:
        for index in indices:
            transfer = self.program.transfers[index]
            name, to = transfer.value.name, held[transfer.receiver]
            if name not in held[transfer.sender]:
                raise DicompilerError(f"{_describe_transfer(transfer)}: the sender does not have it yet")
            if name in to:
                raise DicompilerError(f"{_describe_transfer(transfer)}: the receiver has it already")
            to[name] = _check_sent_array(transfer, held[transfer.sender][name])
            sent[index] += to[name].nbytes


def _sends_by_segment(device: DeviceProgram) -> list[list[int]]:
    """The transfers that the device sends before its first segment, after its first, after its second, …"""
    sends: list[list[int]] = [[]]
    for step in device.steps:
        if step.kind == "run":
            sends.append([])
        elif step.kind == "send":
            sends[-1].append(step.index)
    return sends


def _describe_transfer(transfer: Transfer) -> str:
    return f"transfer {transfer.index} ({transfer.value.name!r} from {transfer.sender!r} to {transfer.receiver!r})"


def _check_sent_array(transfer: Transfer, array: NDArray[Any]) -> NDArray[Any]:
    value = transfer.value
    if array_dtype(array) != value.dtype or array.shape != value.shape or array.nbytes != value.nbytes:
        raise DicompilerError(
            f"{_describe_transfer(transfer)}: {array.dtype} {array.shape} is sent, "
            f"{dtype_name(value.dtype)} {value.shape} was predicted"
        )
    return array
