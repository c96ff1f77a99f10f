"""A target that writes each segment as an ONNX file, and runs all devices one after another in this process."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dicompiler.plugin_api import DeviceReport, Model, PipelineState, Program, RunOptions, RunResult, Target
from dicompiler.plugin_api.artifacts import describe_artifact, format_json

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Inline(Target):
    """An ONNX file for each segment. One process runs all segments one after another."""

    name: ClassVar[str] = "acme-inline"

    def emit(self, compilation: PipelineState, directory: Path) -> None:
        """Write program.json, a directory of segments for each device, and artifact.json."""
        program = compilation.program
        assert program is not None
        for device in program.devices:
            (directory / device.device).mkdir()
            for i, segment in enumerate(device.segments):
                # segment.model has placeholders instead of large weights. Model.save inserts the weights.
                names = {tensor.name for tensor in segment.model.graph.initializer}
                weights = {name: weight for name, weight in program.weights.items() if name in names}
                Model(segment.model, weights).save(directory / device.device / f"{i}.onnx")
        (directory / "program.json").write_text(format_json(document(program)))
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        (directory / "artifact.json").write_text(format_json(describe_artifact(program, self.name, digest)))

    def run(self, directory: Path, frames: Sequence[Arrays], options: RunOptions) -> RunResult:
        """Run one frame after another. No message can be lost, so `options.timeout_s` is not needed."""
        return Player(directory).run(frames, options)


def document(program: Program) -> dict[str, Any]:
    """Return the content of program.json: sources and sinks of each device, and all steps in a possible order."""
    after: dict[tuple[str, int], list[int]] = {}
    for device in program.devices:
        latest = -1
        for step in device.steps:
            if step.kind == "run":
                latest = step.index
            elif step.kind == "send":
                after.setdefault((device.device, latest), []).append(step.index)
    steps: list[list[Any]] = [["send", i] for d in program.devices for i in after.get((d.device, -1), [])]
    for at, index in program.segment_order:
        device = program.devices[at]
        segment = device.segments[index]
        steps.append(
            ["run", device.device, f"{device.device}/{index}.onnx", list(segment.inputs), list(segment.outputs)]
        )
        steps += [["send", i] for i in after.get((device.device, index), [])]
    return {
        "devices": {
            d.device: {"sources": list(d.model_inputs), "sinks": dict(d.model_outputs)} for d in program.devices
        },
        "steps": steps,
    }


class Player:
    """Runs frames of an artifact. It loads all segments first."""

    def __init__(self, directory: Path) -> None:
        import onnxruntime

        program = json.loads((directory / "program.json").read_text())
        artifact = json.loads((directory / "artifact.json").read_text())
        self.devices, self.steps, self.transfers = program["devices"], program["steps"], artifact["transfers"]
        files = [step[2] for step in self.steps if step[0] == "run"]
        self.sessions = {file: onnxruntime.InferenceSession(directory / file) for file in files}
        self.seconds = dict.fromkeys(files, 0.0)
        self.sent = dict.fromkeys(range(len(self.transfers)), 0)

    def frame(self, inputs: Arrays) -> dict[str, dict[str, Any]]:
        """Run one frame; return the outputs of each sink device by name."""
        tensors = {name: {key: inputs[key] for key in device["sources"]} for name, device in self.devices.items()}
        for kind, *step in self.steps:
            if kind == "send":
                transfer = self.transfers[step[0]]
                array = tensors[transfer["sender"]][transfer["name"]]
                tensors[transfer["receiver"]][transfer["name"]] = array
                self.sent[step[0]] += array.nbytes
            else:
                device, file, input_names, output_names = step
                start = time.perf_counter()
                arrays = self.sessions[file].run(output_names, {name: tensors[device][name] for name in input_names})
                self.seconds[file] += time.perf_counter() - start
                tensors[device].update(zip(output_names, arrays, strict=True))
        return {
            name: {output: tensors[name][tensor] for tensor, output in device["sinks"].items()}
            for name, device in self.devices.items()
            if device["sinks"]
        }

    def run(self, frames: Sequence[Arrays], options: RunOptions) -> RunResult:
        """Run all frames; return their outputs and the measurements of each device."""
        start = time.perf_counter()
        delivered, times = [], []
        for inputs in frames:
            before = time.perf_counter()
            delivered.append(self.frame(inputs))
            times.append(time.perf_counter() - before)
        kept = delivered if options.kept_frames is None else delivered[: options.kept_frames]
        outputs = tuple(next(iter(by_sink.values())) for by_sink in kept)
        return RunResult(outputs, self.reports(), tuple(kept), tuple(times), time.perf_counter() - start)

    def reports(self) -> tuple[DeviceReport, ...]:
        """Return a report for each device. All devices share the memory of this process."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reports = []
        for name in self.devices:
            seconds = tuple(value for file, value in self.seconds.items() if file.startswith(f"{name}/"))
            sent = {i: count for i, count in self.sent.items() if self.transfers[i]["sender"] == name}
            reports.append(DeviceReport(name, sum(seconds), 0.0, 0.0, sent, seconds, peak))
        return tuple(reports)


class Session:
    """The session that `dicompiler.connect` returns."""

    reports: tuple[DeviceReport, ...] = ()

    def __init__(self, directory: Path) -> None:
        self.player = Player(directory)

    def infer(self, inputs: Arrays) -> dict[str, Any]:
        """Run one frame; return its outputs by name."""
        return next(iter(self.player.frame(inputs).values()))

    def stream(self, frames: Iterable[Arrays]) -> Iterator[dict[str, Any]]:
        """Yield the outputs of each frame, in order."""
        return map(self.infer, frames)

    def close(self) -> None:
        """Store the reports. No process needs to be stopped."""
        self.reports = self.player.reports()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(directory: Path, options: RunOptions) -> Session:
    """Return a session. An entry point of group `dicompiler.clients` names this function."""
    return Session(directory)
