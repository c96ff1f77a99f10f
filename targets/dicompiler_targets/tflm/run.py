"""Execution of an artifact on this host: all devices in one process, each model in TFLite-micro."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DeviceReport, DicompilerError, RunError, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import check_files, load_artifact
from dicompiler.plugin_api.utilities import ALLOW_MORE_TIME, load_json
from dicompiler_targets.tflm.arena_size import RUNTIME_MODULE
from dicompiler_targets.tflm.emit import MANIFEST_FILE, MANIFEST_FORMAT
from dicompiler_targets.tflm.flatbuffer import import_optional
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, NHWC_TO_NCHW

ByteArray = NDArray[np.uint8]


@dataclass
class TflmDevice:
    """The state of a device during a run.

    Attributes:
        manifest: Content of the device's manifest.json.
        models: TFLite-micro's interpreters, by the name of the model's file.
        steps: Steps of the device without receives, because senders write directly to the receiver's `tensors`.
        next_step: Index of the next step.
        tensors: Bytes of the tensors in the device's memory, by name.
        sent_bytes: Number of sent bytes by index of the transfer.
        segments_s: Seconds that each segment has taken in all frames.
    """

    manifest: Mapping[str, Any]
    models: Mapping[str, Any]
    steps: Sequence[Sequence[Any]]
    next_step: int = 0
    tensors: dict[str, bytes] = field(default_factory=dict)
    sent_bytes: dict[int, int] = field(default_factory=dict)
    segments_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.manifest["device"])


def run_artifact(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    """Run an artifact in this process, for `Target.run`, one frame (inference request) after another."""
    if options.keys is not None or options.start_manually or options.hosts is not None:
        raise UsageError("run: target 'tflm' runs all devices in this process: omit --keys, --start-manually and hosts")
    document = load_artifact(directory)
    try:
        device_states = [_load_device(directory, document, name) for name in document["devices"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DicompilerError(
            f"{directory}: not an artifact of this version ({error}): compile the model again"
        ) from None
    deadline, begin = time.monotonic() + options.timeout_s, time.perf_counter()
    delivered, frame_seconds = [], []
    keep = len(frames) if options.kept_frames is None else options.kept_frames
    for number, frame in enumerate(frames):
        start = time.perf_counter()
        outputs = _run_frame(document, device_states, frame, deadline, options.timeout_s)
        frame_seconds.append(time.perf_counter() - start)
        if number < keep:
            delivered.append(outputs)
    names = [value["name"] for value in document["outputs"]]
    first = tuple({n: next(o[n] for o in each.values() if n in o) for n in names} for each in delivered)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    reports = tuple(
        DeviceReport(p.name, sum(p.segments_s), 0.0, 0.0, dict(p.sent_bytes), tuple(p.segments_s), peak)
        for p in device_states
    )
    return RunResult(first, reports, tuple(delivered), tuple(frame_seconds), time.perf_counter() - begin)


def _load_device(directory: Path, document: Mapping[str, Any], device: str) -> TflmDevice:
    path = directory / device / MANIFEST_FILE
    check_files(directory, document["files"], [f"{device}/{MANIFEST_FILE}"])
    manifest = load_json(path)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise DicompilerError(f"{path}: format: expected {MANIFEST_FORMAT!r}: compile the model again")
    models: dict[str, Any] = {}
    for segment in manifest["segments"]:
        if segment["model"] is not None and segment["model"] not in models:
            check_files(directory, document["files"], [f"{device}/{segment['model']}"])
            models[segment["model"]] = _make_interpreter(
                directory / device / segment["model"], segment["arena"], device
            )
    steps = [step for step in manifest["steps"] if step[0] != "receive"]
    return TflmDevice(manifest, models, steps, segments_s=[0.0] * len(manifest["segments"]))


def _make_interpreter(path: Path, arena: int, device: str) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DicompilerError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return import_optional(RUNTIME_MODULE).Interpreter.from_bytes(data, arena_size=arena)
    except DicompilerError:
        raise
    except Exception as error:  # TFLite-micro raises errors of many types for damaged files.
        cause = f"TFLite-micro cannot run it ({error})"
        raise RunError(f"device {device!r}: {path.name}: {cause}: compile the model again") from None


def _run_frame(
    document: Mapping[str, Any],
    device_states: Sequence[TflmDevice],
    frame: Mapping[str, NDArray[Any]],
    deadline: float,
    timeout: float,
) -> dict[str, dict[str, NDArray[Any]]]:
    """Compute one frame (inference request), and return the outputs by device and name.

    The devices take turns: each executes steps until it needs a tensor that has not been sent yet.
    """
    by_name = {device_state.name: device_state for device_state in device_states}
    for device_state in device_states:
        device_state.next_step = 0
        device_state.tensors = {v["name"]: _to_wire(frame[v["name"]]) for v in device_state.manifest["inputs"]}
    while any(device_state.next_step < len(device_state.steps) for device_state in device_states):
        moved = False
        for device_state in device_states:
            while device_state.next_step < len(device_state.steps) and _run_step(
                device_state, document["transfers"], by_name
            ):
                moved = True
                if time.monotonic() > deadline:
                    raise RunError(
                        f"device {device_state.name!r} did not finish within {timeout:g} s: {ALLOW_MORE_TIME}"
                    )
        if not moved:
            waiting = next(
                device_state for device_state in device_states if device_state.next_step < len(device_state.steps)
            )
            raise RunError(
                f"device {waiting.name!r}: it waits for a tensor that is never sent: compile the model again"
            )
    values = {value["name"]: value for value in document["outputs"]}
    return {
        device_state.name: {
            v["name"]: _from_wire(device_state.tensors[v["tensor"]], v, values[v["name"]]) for v in outputs
        }
        for device_state in device_states
        if (outputs := device_state.manifest["outputs"])
    }


def _run_step(
    device_state: TflmDevice, transfers: Sequence[Mapping[str, Any]], device_states: Mapping[str, TflmDevice]
) -> bool:
    """Execute the next step of a device; return False if it needs a tensor that has not been sent yet."""
    kind, index = device_state.steps[device_state.next_step]
    if kind == "run":
        if any(name not in device_state.tensors for name in device_state.manifest["segments"][index]["inputs"]):
            return False
        _run_segment(device_state, index)
    else:
        transfer = transfers[index]
        payload = device_state.tensors[transfer["name"]]
        if len(payload) != transfer["bytes"]:
            raise RunError(
                f"device {device_state.name!r}: {transfer['name']!r} has {len(payload)} bytes instead of "
                f"{transfer['bytes']}: compile the model again"
            )
        device_states[transfer["receiver"]].tensors[transfer["name"]] = payload
        device_state.sent_bytes[index] = device_state.sent_bytes.get(index, 0) + len(payload)
    device_state.next_step += 1
    return True


def _run_segment(device_state: TflmDevice, index: int) -> None:
    """Run a segment (ONNX submodel): copy tensors to its model's inputs, run the model, and copy its outputs."""
    segment = device_state.manifest["segments"][index]
    start = time.perf_counter()
    sizes = {tensor["name"]: tensor["bytes"] for tensor in device_state.manifest["tensors"]}
    results = {name: np.zeros(sizes[name], np.uint8) for name in segment["outputs"]}
    input_bytes = {name: np.frombuffer(device_state.tensors[name], np.uint8) for name in segment["inputs"]}
    if segment["model"] is not None:
        outputs = _run_model(device_state, segment, input_bytes)
        for copy in segment["output_copies"]:
            copy_strided(copy, outputs[copy["source"]], results[copy["target"]])
    for copy in segment["tensor_copies"]:
        copy_strided(copy, input_bytes[copy["source"]], results[copy["target"]])
    device_state.tensors |= {name: array.tobytes() for name, array in results.items()}
    device_state.segments_s[index] += time.perf_counter() - start


def _run_model(
    device_state: TflmDevice, segment: Mapping[str, Any], input_bytes: Mapping[str, ByteArray]
) -> dict[int, ByteArray]:
    """Run the model of a segment, and return the bytes of its outputs, by index of the output.

    `input_bytes` has the bytes of the segment's inputs by name. Outputs that are not copied to a tensor are omitted.
    """
    interpreter = device_state.models[segment["model"]]
    for port in sorted({copy["target"] for copy in segment["input_copies"]}):
        details = interpreter.get_input_details(port)
        input_array = np.zeros(details["shape"], details["dtype"])
        for copy in segment["input_copies"]:
            if copy["target"] == port:
                copy_strided(copy, input_bytes[copy["source"]], input_array.reshape(-1).view(np.uint8))
        interpreter.set_input(input_array, port)
    try:
        interpreter.invoke()
    except RuntimeError as error:
        raise RunError(f"device {device_state.name!r}: segment {segment['name']!r}: TFLite-micro: {error}") from None
    ports = sorted({copy["source"] for copy in segment["output_copies"]})
    return {port: np.frombuffer(interpreter.get_output(port).tobytes(), np.uint8) for port in ports}


def copy_strided(copy: Mapping[str, Any], source: ByteArray, target: ByteArray) -> None:
    """Copy strided blocks of bytes from one array to another, as the function MakeCopy in main.cc does.

    `copy` is the description of the copy in a manifest.
    """
    counts, source_strides, target_strides = zip(*copy["loops"], strict=True) if copy["loops"] else ((), (), ())
    shape = (*counts, copy["run_bytes"])
    view = np.lib.stride_tricks.as_strided
    view(target[copy["target_offset"] :], shape, (*target_strides, 1))[...] = view(
        source[copy["source_offset"] :], shape, (*source_strides, 1)
    )


def _to_wire(array: NDArray[Any]) -> bytes:
    return (array.transpose(NCHW_TO_NHWC) if array.ndim == 4 else array).tobytes()


def _from_wire(data: bytes, stored: Mapping[str, Any], value: Mapping[str, Any]) -> NDArray[Any]:
    """Convert the bytes of a tensor, as devices send it, to an array in ONNX's order of axes.

    `stored` describes the tensor with channels last, and `value` in ONNX's order.
    """
    array: NDArray[Any] = np.frombuffer(data, stored["dtype"]).reshape(stored["shape"])
    plain = array.transpose(NHWC_TO_NCHW) if array.ndim == 4 else array
    return np.ascontiguousarray(plain).reshape(value["shape"])
