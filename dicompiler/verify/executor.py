"""Execution of programs and whole models in this process with onnxruntime.

Tests and `verify` use the results as the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError, did_you_mean, one_line
from dicompiler.base.input_arrays import coerce_input
from dicompiler.base.ort_session import Optimization, create_session
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight, array_dtype, dtype_name, is_placeholder
from dicompiler.ir.output_names import read_output_names
from dicompiler.ir.program import DeviceProgram, DeviceState, Program, Segment, TensorSpec, Transfer
from dicompiler.ir.recurrent_states import inputs_with_states, read_state_pieces
from dicompiler.ir.regions import to_slices
from dicompiler.verify.deadline import run_interruptibly

_LEVELS = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL"}
_NON_NUMPY_TYPES = ("bfloat16", "float8", "float4", "int4", "int2")
"""Types with which onnxruntime computes, but which it cannot convert to NumPy arrays."""


class SegmentRunner(Protocol):
    """A segment (ONNX submodel) that is loaded into a runtime such as onnxruntime."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the segment on the inputs, and return every output by name.

        Args:
            inputs: Arrays by name of the segment's inputs.

        Returns:
            Arrays by name of the segment's outputs.
        """


class OrtSession:
    """One ONNX model in onnxruntime, on one thread.

    Args:
        proto: The model. Large initializers are placeholders without data, because a protobuf message cannot exceed 2
            GB.
        weights: Data of the placeholders, by name.
        place: The model's name at the start of error messages.
        optimization: Graph optimization level of onnxruntime.
        is_single_use: True if the model is run once. onnxruntime then makes no second, reordered copy of the weights.
        log_severity: Lowest severity of the messages that onnxruntime logs, from 0 (verbose) to 4 (fatal).

    Raises:
        DicompilerError: onnxruntime refuses the model.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        weights: Mapping[str, Weight],
        place: str,
        optimization: Optimization = "extended",
        is_single_use: bool = False,
        log_severity: int = 3,
    ) -> None:
        self.place = place
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = log_severity
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{_LEVELS[optimization]}")
        # onnxruntime can fuse float operators between DequantizeLinear and QuantizeLinear to integer operators, which
        # round differently. A split would change which operators are fused, and thus the results.
        if optimization != "all":
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if is_single_use:
            options.add_session_config_entry("session.disable_prepacking", "1")
        names = [tensor.name for tensor in proto.graph.initializer if is_placeholder(tensor)]
        # This attribute keeps the weights in memory as long as the session, because onnxruntime may use them without a
        # copy.
        self._values = [to_ort(np.asarray(weights[name].array(), order="C")) for name in names]
        options.add_external_initializers(names, self._values)
        try:
            self._session = run_interruptibly(place, lambda _: create_session(proto.SerializeToString(), options))
        except DicompilerError:
            raise
        except Exception as error:  # onnxruntime's errors have no narrower common base class.
            raise DicompilerError(f"{place}: onnxruntime cannot load it: {one_line(str(error))}") from error
        self.outputs = tuple(value.name for value in self._session.get_outputs())
        types = [value.type for value in (*self._session.get_inputs(), *self._session.get_outputs())]
        self._has_non_numpy_types = any(name in kind for kind in types for name in _NON_NUMPY_TYPES)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model, and return every output by name: arrays, or lists and dicts for sequences and maps."""
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
        try:
            yield
        except DicompilerError:
            raise
        except Exception as error:
            raise DicompilerError(f"{self.place}: onnxruntime cannot run it: {one_line(str(error))}") from error

    def bind(self, memory: Mapping[str, Any]) -> Callable[[], object]:
        """Return a function that runs the model on the arrays in `memory`, which are inputs and outputs by name.

        Each call reads the inputs from these arrays and writes the numeric outputs of static shape to them. If any
        input is not a numeric array, no outputs are written.
        """
        names = [value.name for value in self._session.get_inputs()]
        if not all(_is_numeric_array(memory[name]) for name in names):
            return lambda: self.run({name: memory[name] for name in names})
        binding, unbound_outputs = self._session.io_binding(), list[str]()
        with self._ort_errors_translated():
            for name in names:
                binding.bind_ortvalue_input(name, to_ort(memory[name]))
            for value in self._session.get_outputs():
                name, is_static = value.name, all(isinstance(size, int) for size in value.shape)
                if is_static and _is_numeric_array(memory.get(name)):
                    binding.bind_ortvalue_output(name, to_ort(memory[name]))
                else:
                    unbound_outputs.append(name)

        def call() -> None:
            with self._ort_errors_translated():
                # Outputs for which the caller gave no array are bound again before each call, so that onnxruntime
                # allocates new memory for them and does not overwrite the outputs of the previous call.
                for name in unbound_outputs:
                    binding.bind_output(name)
                self._session.run_with_iobinding(binding)

        return call


def _is_numeric_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype != object


def _in_c_order(value: Any) -> Any:
    return np.asarray(value, order="C") if isinstance(value, (np.ndarray, np.generic)) else value


def to_ort(array: NDArray[Any]) -> ort.OrtValue:
    """Return an onnxruntime value that shares the memory of an array.

    For element types smaller than a byte (such as int4), the value is a packed copy instead.
    """
    if array.dtype.isbuiltin != 2:  # `isbuiltin` is 2 for types that another package has added to NumPy (bfloat16, …).
        return ort.OrtValue.ortvalue_from_numpy(array)
    storage = array.view(f"u{array.dtype.itemsize}")
    packed = Weight.from_array(array)
    if packed.nbytes < array.nbytes:
        # onnxruntime takes the shape from the array, which therefore has a byte for each element. It reads only the
        # packed bytes at the start of the memory.
        storage = np.zeros(array.shape, np.uint8)
        storage.reshape(-1)[: packed.nbytes] = np.frombuffer(packed.data, np.uint8)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(storage, packed.dtype)


def from_ort(value: ort.OrtValue) -> Any:
    """Return a copy of an onnxruntime value as an array, also for types that onnxruntime cannot convert to NumPy."""
    if not value.is_tensor() or not any(name in value.data_type() for name in _NON_NUMPY_TYPES):
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return Weight(value.element_type(), tuple(value.shape()), memoryview(raw)).array().copy()


def with_initial_states(
    states: Sequence[TensorSpec], inputs: Mapping[str, Any], is_first_frame: bool = False
) -> Mapping[str, Any]:
    """Return the inputs with zeros for missing states, i.e. outputs of one frame that are inputs of the next.

    Args:
        states: Name, type and shape of all states.
        inputs: Arrays by input name. Without any state, the inputs of a later frame are returned unchanged.
        is_first_frame: True if there is no previous frame.
    """
    if not is_first_frame and not any(state.name in inputs for state in states):
        return inputs
    types = {state.name: onnx.helper.tensor_dtype_to_np_dtype(state.dtype) for state in states}
    return {s.name: np.zeros(s.shape or (), types[s.name]) for s in states if s.name not in inputs} | dict(inputs)


def check_inputs(values: Sequence[TensorSpec], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs in the order of `values`, as arrays in C order.

    Raises:
        DicompilerError: An input is missing, unknown, or of another type or shape.
    """
    names = [value.name for value in values]
    for name in inputs:
        if name not in names:
            raise DicompilerError(f"the network has no input {name!r}{did_you_mean(name, names)}")
    return {value.name: _check_input(value, inputs) for value in values}


def _check_input(value: TensorSpec, inputs: Mapping[str, Any]) -> Any:
    if value.name not in inputs:
        raise DicompilerError(f"input {value.name!r} is missing: give all of the network's inputs")
    # A sequence or an optional value has the type UNDEFINED, so there is no type and shape to check.
    if value.dtype == onnx.TensorProto.UNDEFINED:
        return inputs[value.name]
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype))
    return coerce_input(inputs[value.name], dtype, value.shape, f"input {value.name!r}")


def run_model(
    model: Model,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    optimization: Optimization = "extended",
    is_single_use: bool = False,
) -> dict[str, Any]:
    """Run a whole model in one onnxruntime session, for example as the reference for a split network.

    Args:
        model: The network.
        inputs: An array for each graph input, by name. States (tensors that one frame passes to the next) are whole
            arrays, even if the pass `partition` has cut them.
        outputs: Names of tensors to return instead of the graph outputs; inner tensors are allowed.
        optimization: Graph optimization level of onnxruntime.
        is_single_use: True to save memory: onnxruntime then makes no second, reordered copy of the weights.

    Returns:
        The outputs by name.

    Raises:
        DicompilerError: onnxruntime cannot load or run the model.
    """
    proto = model.proto
    if outputs is not None:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        infos = {value.name: value for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
        del proto.graph.output[:]
        proto.graph.output.extend(infos.get(name) or onnx.ValueInfoProto(name=name) for name in outputs)
    session = OrtSession(proto, model.weights, "the whole model", optimization, is_single_use)
    results = session.run(inputs_with_states(read_state_pieces(proto)[0], inputs))
    user_names = read_output_names(proto) if outputs is None else {}
    return {user_names.get(name, name): value for name, value in results.items()}


@dataclass(frozen=True)
class Execution:
    """The results of a program for one frame.

    Attributes:
        outputs: Graph outputs by name, each from the first device that has it.
        sent: Sent bytes by transfer index.
        delivered: By device, the outputs that it received, by name.
        values: By device, every tensor by name. It is empty unless the caller asked for it.
        kept_states: Pieces of states (tensors that one frame passes to the next) that devices keep, with their values.
    """

    outputs: dict[str, Any]
    sent: tuple[int, ...]
    delivered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    kept_states: Sequence[tuple[DeviceState, Any]] = ()


@dataclass(frozen=True)
class _SingleUseSession:
    """A runner of a segment (submodel) that saves memory: it creates a session for each run and then frees it."""

    make_session: Callable[[], OrtSession]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.make_session().run(inputs)


class ProgramExecutor:
    """A program with loaded sessions, which runs many frames and keeps the states that one frame passes to the next.

    Args:
        program: The program.
        optimization: Graph optimization level of onnxruntime.
        make_runner: Function that loads a segment. Default: it creates an onnxruntime session.
        is_single_use: True if one frame is run. Only the session of the running segment is then in memory.
    """

    def __init__(
        self,
        program: Program,
        optimization: Optimization = "extended",
        make_runner: Callable[[Segment], SegmentRunner] | None = None,
        is_single_use: bool = False,
    ) -> None:
        self.program = program
        self._kept_states: dict[str, Any] = {}
        self._sends = [_sends_by_segment(device) for device in program.devices]

        def make_session(segment: Segment) -> SegmentRunner:
            place = f"segment {segment.name!r} of device {segment.device!r}"
            create = partial(OrtSession, segment.model, program.weights, place, optimization, is_single_use)
            return _SingleUseSession(create) if is_single_use else create()

        make_runner = make_runner or make_session
        self._sessions = [[make_runner(segment) for segment in device.segments] for device in program.devices]

    def run(self, inputs: Mapping[str, Any], keep_values: bool = False) -> Execution:
        """Run the program for one frame.

        Args:
            inputs: Arrays by input name. If any state (a tensor that one frame passes to the next) is among them, all
                other states restart from zeros.
            keep_values: True to return every tensor of every device in `Execution.values`.

        Returns:
            The results of the frame.

        Raises:
            DicompilerError: An input has another type or shape, or a tensor is read or sent before it is available, or
                sent with another type or shape than predicted.
        """
        program = self.program
        feed = with_initial_states(program.states, inputs, not self._kept_states)
        restarts = any(state.name in feed for state in program.states)
        arrays = check_inputs((*program.inputs, *(program.states if restarts else ())), feed)
        memory = {d.device: {name: arrays[name] for name in d.model_inputs} for d in program.devices}
        for device in program.devices:
            for state in device.states:
                name, region = state.value.name, to_slices(state.region)
                memory[device.device][name] = arrays[state.past][region] if restarts else self._kept_states[name]
        sent = [0] * len(program.transfers)
        for sends in self._sends:
            self._send(sends[0], memory, sent)
        for device_index, index in program.segment_order:
            device = program.devices[device_index]
            segment, local = device.segments[index], memory[device.device]
            missing = [name for name in segment.inputs if name not in local]
            if missing:
                raise DicompilerError(
                    f"segment {segment.name!r} of device {device.device!r} reads {missing[0]!r} before it is available"
                )
            local.update(self._sessions[device_index][index].run({name: local[name] for name in segment.inputs}))
            self._send(self._sends[device_index][index + 1], memory, sent)
        delivered = {
            d.device: {output: memory[d.device][name] for name, output in d.model_outputs.items()}
            for d in program.devices
            if d.model_outputs
        }
        first = {name: value for outputs in reversed(delivered.values()) for name, value in outputs.items()}
        outputs = {value.name: first[value.name] for value in program.outputs}
        kept_states = [(s, memory[d.device][s.written_name]) for d in program.devices for s in d.states]
        self._kept_states = {state.value.name: array for state, array in kept_states}
        return Execution(outputs, tuple(sent), delivered, memory if keep_values else {}, kept_states)

    def _send(self, indices: Sequence[int], memory: Mapping[str, dict[str, Any]], sent: list[int]) -> None:
        for index in indices:
            transfer = self.program.transfers[index]
            name, received = transfer.value.name, memory[transfer.receiver]
            if name not in memory[transfer.sender]:
                raise DicompilerError(f"{_describe_transfer(transfer)}: the sender does not have the tensor yet")
            if name in received:
                raise DicompilerError(f"{_describe_transfer(transfer)}: the receiver has the tensor already")
            received[name] = _check_sent_array(transfer, memory[transfer.sender][name])
            sent[index] += received[name].nbytes


def _sends_by_segment(device: DeviceProgram) -> list[list[int]]:
    """Return the indices of the transfers that a device sends before its first segment, then after each segment."""
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
        cause = "" if array.shape == value.shape else ": its node computes another shape than its operator rule's `out`"
        raise DicompilerError(
            f"{_describe_transfer(transfer)}: {array.dtype} {array.shape} is sent, "
            f"{dtype_name(value.dtype)} {value.shape} was predicted{cause}"
        )
    return array
