"""Data of a report: the compilation of an artifact, its simulation and memory, and optional files.

No program is run. Data that the artifact does not contain is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dicompiler.analysis.explore import FRONT_FILE as FRONT
from dicompiler.analysis.prediction_error import on_emulation_host
from dicompiler.base.errors import DicompilerError, describe_wrong_path
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.memory import MemoryTimeline, memory_timeline
from dicompiler.cost.simulator import SimulationResult
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.ir.metrics import DeviceMetrics, Metrics
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing, Task, TaskId, assembly_leaves, task_id
from dicompiler.search.lower_bounds import objective_bound, unrefuted_bound
from dicompiler.search.problem import Problem
from dicompiler.target.manifest import ARTIFACT_FILE, load_artifact
from dicompiler.target.target_base import Target


@dataclass(frozen=True)
class ReportData:
    """Everything that the report of an artifact shows.

    Attributes:
        name: Name of the artifact's directory.
        compilation: State of the compilation that wrote the artifact.
        platform: The platform of the artifact.
        program: The program of each device.
        routing: The tasks (computations of parts of layers), and the regions of tensors that they exchange.
        metrics: Predicted metrics of the plan.
        single: Predicted metrics of the best single device.
        target: The target that wrote the artifact.
        problem: The problem that the strategy solved.
        simulation: Simulation of one frame.
        memory_timelines: Memory over the steps of a frame, by device name.
        target_memory: Bytes that the target adds, by device name.
        lower_bound: Value of the objective that no plan can beat; None if unknown.
        run_log: Log of a run (schema `run`).
        comparison: Output of `dicompiler compare --json`.
        front: Content of a front.json.
    """

    name: str
    compilation: PipelineState = field(repr=False)
    platform: Platform = field(repr=False)
    program: Program = field(repr=False)
    routing: Routing = field(repr=False)
    metrics: Metrics
    single: Metrics
    target: Target
    problem: Problem = field(repr=False)
    simulation: SimulationResult = field(repr=False)
    memory_timelines: Mapping[str, MemoryTimeline]
    target_memory: Mapping[str, int]
    lower_bound: float | None
    run_log: Mapping[str, Any] | None = field(default=None, repr=False)
    comparison: Mapping[str, Any] | None = field(default=None, repr=False)
    front: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def is_emulated(self) -> bool:
        """Whether the logged run was emulated, so that the simulation uses the message costs of the emulating host."""
        return self.run_log is not None and self.run_log["location"] == "emulated"

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the program's devices. Their order determines their numbers and colours in the report."""
        return tuple(device.device for device in self.program.devices)

    @cached_property
    def device_number(self) -> Mapping[str, int]:
        """Index of each device in `devices`, by device name."""
        return {name: i for i, name in enumerate(self.devices)}

    def device(self, name: str) -> DeviceMetrics:
        """Return the metrics of a device; all are zero if the plan does not use the device."""
        return self.metrics.device(name) or DeviceMetrics(name, 0, 0.0, 0, 0, 0, 0)

    @cached_property
    def tasks(self) -> Mapping[str, Sequence[Task]]:
        """The tasks (computations of a part on a device) of each layer, by layer name.

        If the plan has replicas (copies on other devices), these are the tasks of the first one.
        """
        by_layer: dict[str, list[Task]] = {layer.name: [] for layer in self.routing.layers.layers}
        for task in self.routing.tasks:
            by_layer[task.layer].append(task)
        return by_layer

    @cached_property
    def received_bytes(self) -> Mapping[tuple[TaskId, str], int]:
        """Bytes of a tensor that other devices send to a task (the computation of a part), by (task, tensor)."""
        sizes: dict[tuple[TaskId, str], int] = {}
        seen = set()
        for task in self.routing.tasks:
            for key, tree in self.routing.reads.get(task_id(task), {}).items():
                for leaf in assembly_leaves(tree):
                    # A device receives a box (region of a tensor) once, even if several of its tasks read it.
                    if leaf.box.origin is not None and leaf.box not in seen:
                        seen.add(leaf.box)
                        place = task_id(task), key.tensor
                        sizes[place] = sizes.get(place, 0) + self.routing.nbytes(leaf.box)
        return sizes

    @cached_property
    def received_bytes_by_part(self) -> Mapping[TaskId, int]:
        """Bytes of all tensors that other devices send to a task (the computation of a part), by task."""
        sizes: dict[TaskId, int] = {}
        for (part, _), size in self.received_bytes.items():
            sizes[part] = sizes.get(part, 0) + size
        return sizes

    @cached_property
    def remote_reads(self) -> frozenset[tuple[str, str]]:
        """Pairs (tensor, layer) for which a part of the layer reads a piece of the tensor from another device."""
        return frozenset((tensor, layer) for (layer, _), tensor in self.received_bytes)

    @cached_property
    def segment_layers(self) -> Mapping[str, str]:
        """Text with the layers that a segment (submodel) computes, whole or in part, by segment name."""
        texts = {}
        for device in self.program.devices:
            for segment in device.segments:
                names = list(dict.fromkeys(layer for (layer, _), _ in segment.node_marks))
                many = f"{names[0]} … {names[-1]} ({len(names)} layers)" if len(names) > 2 else ", ".join(names)
                texts[segment.name] = many or "only copies data"
        return texts


def load_report_data(
    artifact: Path,
    cost: str = "",
    run_log: Path | None = None,
    comparison: Path | Mapping[str, Any] | None = None,
    front: Path | None = None,
) -> ReportData:
    """Read an artifact and further files, and return the data of the artifact's report.

    Args:
        artifact: Directory of the artifact.
        cost: Cost model; empty means the one that the artifact was compiled with.
        run_log: File with the log of a run.
        comparison: Output of `dicompiler compare --json`, as a file or as its content.
        front: A front.json, or its directory.

    Raises:
        DicompilerError: A file is missing or invalid, or belongs to another network or artifact.
    """
    from dicompiler.driver import run_log as runlog

    if not (artifact / ARTIFACT_FILE).is_file():
        raise DicompilerError(
            f"{artifact}: neither an artifact ('dicompiler compile') nor a front ('dicompiler explore')"
            + (describe_wrong_path(artifact) or ": compile a model to this directory first")
        )
    compilation, target, problem = reopen_artifact(artifact, cost)
    ran = None if run_log is None else runlog.load_log(run_log, artifact, load_artifact(artifact))
    program, routing, metrics = compilation.program, compilation.routing, compilation.metrics
    assert (
        program is not None
        and routing is not None
        and metrics is not None
        and compilation.single_device_metrics is not None
    )
    assert compilation.platform is not None and compilation.plan is not None and problem.model is not None
    emulated = None if ran is None else runlog.emulation_host(ran, target)
    digest = compilation.plan.model_digest or problem.model.digest()
    if isinstance(comparison, Path):
        comparison = load_comparison(comparison, digest, compilation.platform.name)
    return ReportData(
        artifact.resolve().name,
        compilation,
        compilation.platform,
        program,
        routing,
        metrics,
        compilation.single_device_metrics,
        target,
        problem,
        (on_emulation_host(problem, emulated[0], program, emulated[1]) if emulated else problem).simulate_compilation(
            compilation
        ),
        _memory_timelines(program),
        target.memory_overhead(program),
        unrefuted_bound(objective_bound(problem), metrics.objective_value(problem.objective)),
        ran,
        comparison,
        None if front is None else load_front(front, digest),
    )


def _memory_timelines(program: Program) -> dict[str, MemoryTimeline]:
    """Return the memory of each device over the steps of a frame without failures, by device name.

    If the plan has replicas (copies on other devices), the frame is one of the first replica.
    """
    timelines, *others = (memory_timeline(role) for role in program.roles)
    # Devices store the weights of all replicas and failure plans.
    for role_timelines in others:
        timelines = {
            name: replace(timeline, constants={**timeline.constants, **role_timelines[name].constants})
            for name, timeline in timelines.items()
        }
    return timelines


def load_comparison(path: Path, model_digest: str, platform: str) -> dict[str, Any]:
    """Return the comparison of a model on a platform from the output of `dicompiler compare --json`.

    Args:
        path: The file.
        model_digest: Digest of the model.
        platform: Name of the platform. If the file has a single comparison, its platform may differ.
    """
    document = load_json(path)
    if not isinstance(document, list):
        return _check_document(document, path, "comparison", model_digest, "compare")
    for i, entry in enumerate(document):
        validate(entry, "comparison", f"{path}: entry {i}")
    for entry in document:
        if (entry["model_digest"], entry["platform"]) == (model_digest, platform):
            found: dict[str, Any] = entry
            return found
    raise DicompilerError(
        f"{path}: none of its {len(document)} comparisons is of this network on platform {platform!r}: run "
        "'dicompiler compare' with this network and platform"
    )


def load_front(path: Path, model_digest: str = "") -> dict[str, Any]:
    """Load and check a front.json.

    Args:
        path: The file, or its directory.
        model_digest: The expected digest of the model; empty for any.
    """
    file = path / FRONT if path.is_dir() else path
    return _check_document(load_json(file), file, "front", model_digest, "explore")


def _check_document(document: Any, path: Path, schema: str, model_digest: str, command: str) -> dict[str, Any]:
    validate(document, schema, str(path))
    checked: dict[str, Any] = document
    if model_digest and checked.get("model_digest", model_digest) != model_digest:
        raise DicompilerError(
            f"{path}: the {schema} is of another network: run 'dicompiler {command}' for the compiled network"
        )
    return checked
