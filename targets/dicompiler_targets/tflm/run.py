"""Runs an artifact on this host: every device's models in TFLite-micro, tensors passed on as bytes, as on a wire.

In: an artifact's directory, frames. Out: outputs in ONNX's order of axes, and what each device measured.
"""

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
from dicompiler.plugin_api.utilities import load_json
from dicompiler_targets.tflm.arena_size import RUNTIME_MODULE
from dicompiler_targets.tflm.emit import MANIFEST_FILE, MANIFEST_FORMAT
from dicompiler_targets.tflm.flatbuffer import import_optional
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, NHWC_TO_NCHW

ByteArray = NDArray[np.uint8]


@dataclass
class TflmDevice:
    """A device while it runs: `at` is the next of its steps, `held` the raw bytes of the tensors that it has."""

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
    """Runs the artifact for `frames`: see Target.run. The devices take turns; a frame ends before the next begins."""
    if options.keys is not None or options.start_manually or options.hosts is not None:
        raise UsageError("run: target 'tflm' runs all devices in this process: leave out --keys, --elsewhere and hosts")
    document = load_artifact(directory)
    try:
        players = [_load_device(directory, document, name) for name in document["devices"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DicompilerError(f"{directory}: no artifact of this version ({error}): compile it again") from None
    deadline, begin = time.monotonic() + options.timeout_s, time.perf_counter()
    delivered, times = [], []
    keep = len(frames) if options.kept_frames is None else options.kept_frames
    for number, frame in enumerate(frames):
        start = time.perf_counter()
        outputs = _run_frame(document, players, frame, deadline, options.timeout_s)
        times.append(time.perf_counter() - start)
        if number < keep:
            delivered.append(outputs)
    names = [value["name"] for value in document["outputs"]]
    first = tuple({n: next(o[n] for o in each.values() if n in o) for n in names} for each in delivered)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    reports = tuple(
        DeviceReport(p.name, sum(p.segments_s), 0.0, 0.0, dict(p.sent_bytes), tuple(p.segments_s), peak)
        for p in players
    )
    return RunResult(first, reports, tuple(delivered), tuple(times), time.perf_counter() - begin)


def _load_device(directory: Path, document: Mapping[str, Any], device: str) -> TflmDevice:
    path = directory / device / MANIFEST_FILE
    check_files(directory, document["files"], [f"{device}/{MANIFEST_FILE}"])
    manifest = load_json(path)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise DicompilerError(f"{path}: format: expected {MANIFEST_FORMAT!r}: compile it again")
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
    except Exception as error:  # its reading of a damaged file breaks in any way
        raise RunError(f"device {device!r}: {path.name}: TFLite-micro cannot run it: {error}") from None


def _run_frame(
    document: Mapping[str, Any],
    players: Sequence[TflmDevice],
    frame: Mapping[str, NDArray[Any]],
    deadline: float,
    timeout: float,
) -> dict[str, dict[str, NDArray[Any]]]:
    """One frame; every device goes on as far as it can, until all are done."""
    by_name = {player.name: player for player in players}
    for player in players:
        player.next_step = 0
        player.tensors = {v["name"]: _to_wire(frame[v["name"]]) for v in player.manifest["inputs"]}
    while any(player.next_step < len(player.steps) for player in players):
        moved = False
        for player in players:
            while player.next_step < len(player.steps) and _run_step(player, document["transfers"], by_name):
                moved = True
                if time.monotonic() > deadline:
                    raise RunError(
                        f"device {player.name!r} did not finish within {timeout:g} s: allow more (--timeout)"
                    )
        if not moved:
            waiting = next(player for player in players if player.next_step < len(player.steps))
            raise RunError(f"device {waiting.name!r}: it waits for a tensor that nobody sends: compile it again")
    values = {value["name"]: value for value in document["outputs"]}
    return {
        player.name: {v["name"]: _from_wire(player.tensors[v["tensor"]], v, values[v["name"]]) for v in outputs}
        for player in players
        if (outputs := player.manifest["outputs"])
    }


def _run_step(player: TflmDevice, transfers: Sequence[Mapping[str, Any]], players: Mapping[str, TflmDevice]) -> bool:
    """Does the next step; False where its inputs are not there yet."""
    kind, index = player.steps[player.next_step]
    if kind == "run":
        if any(name not in player.tensors for name in player.manifest["segments"][index]["inputs"]):
            return False
        _run_segment(player, index)
    else:
        transfer = transfers[index]
        payload = player.tensors[transfer["name"]]
        if len(payload) != transfer["bytes"]:
            raise RunError(
                f"device {player.name!r}: {transfer['name']!r}: {len(payload)} bytes, not {transfer['bytes']}"
            )
        players[transfer["receiver"]].tensors[transfer["name"]] = payload
        player.sent_bytes[index] = player.sent_bytes.get(index, 0) + len(payload)
    player.next_step += 1
    return True


def _run_segment(player: TflmDevice, index: int) -> None:
    """Copies its inputs together, runs its model, and copies what that made to where it belongs."""
    segment = player.manifest["segments"][index]
    start = time.perf_counter()
    sizes = {tensor["name"]: tensor["bytes"] for tensor in player.manifest["tensors"]}
    results = {name: np.zeros(sizes[name], np.uint8) for name in segment["outputs"]}
    held = {name: np.frombuffer(player.tensors[name], np.uint8) for name in segment["inputs"]}
    if segment["model"] is not None:
        outputs = _run_model(player, segment, held)
        for one in segment["output_copies"]:
            copy_strided(one, outputs[one["source"]], results[one["target"]])
    for one in segment["tensor_copies"]:
        copy_strided(one, held[one["source"]], results[one["target"]])
    player.tensors |= {name: array.tobytes() for name, array in results.items()}
    player.segments_s[index] += time.perf_counter() - start


def _run_model(player: TflmDevice, segment: Mapping[str, Any], held: Mapping[str, ByteArray]) -> dict[int, ByteArray]:
    """Runs the segment's model on parts of what is held; the outputs that are read, by number."""
    interpreter = player.models[segment["model"]]
    for port in sorted({one["target"] for one in segment["input_copies"]}):
        about = interpreter.get_input_details(port)
        given = np.zeros(about["shape"], about["dtype"])
        for one in segment["input_copies"]:
            if one["target"] == port:
                copy_strided(one, held[one["source"]], given.reshape(-1).view(np.uint8))
        interpreter.set_input(given, port)
    try:
        interpreter.invoke()
    except RuntimeError as error:
        raise RunError(f"device {player.name!r}: segment {segment['name']!r}: TFLite-micro: {error}") from None
    ports = sorted({one["source"] for one in segment["output_copies"]})
    return {port: np.frombuffer(interpreter.get_output(port).tobytes(), np.uint8) for port in ports}


def copy_strided(one: Mapping[str, Any], source: ByteArray, target: ByteArray) -> None:
    """Does a copy of a manifest, as Move of main.cc does."""
    times, steps, further = zip(*one["loops"], strict=True) if one["loops"] else ((), (), ())
    shape = (*times, one["run_bytes"])
    view = np.lib.stride_tricks.as_strided
    view(target[one["target_offset"] :], shape, (*further, 1))[...] = view(
        source[one["source_offset"] :], shape, (*steps, 1)
    )


def _to_wire(array: NDArray[Any]) -> bytes:
    return (array.transpose(NCHW_TO_NHWC) if array.ndim == 4 else array).tobytes()


def _from_wire(data: bytes, held: Mapping[str, Any], value: Mapping[str, Any]) -> NDArray[Any]:
    """The array in ONNX's order of axes."""
    array: NDArray[Any] = np.frombuffer(data, held["dtype"]).reshape(held["shape"])
    plain = array.transpose(NHWC_TO_NCHW) if array.ndim == 4 else array
    return np.ascontiguousarray(plain).reshape(value["shape"])
