"""Check of targets: the artifacts that they write, and the results of runs on this host."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.driver import compiler
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import FailurePlan
from dicompiler.plugin.registry import temporarily_registered
from dicompiler.plugin_api import (
    DicompilerError,
    PipelineState,
    Plan,
    Platform,
    RunOptions,
    RunResult,
    Target,
    registry,
)
from dicompiler.plugin_api.onnx import compare_value, graph_inputs, random_inputs, run_model
from dicompiler.plugin_api.regions import single_device_plan, tile_layer
from dicompiler.target.manifest import ARTIFACT_FILE
from dicompiler.testing.assertions import LIMIT_S, as_instance, checking, describe, require, time_limit, unchanged
from dicompiler.testing.left_processes import no_processes_left
from dicompiler.testing.samples import Sample, make_cluster, samples
from dicompiler.testing.subprocess_call import call_in_subprocess
from dicompiler.verify.comparison import check_transfers
from dicompiler.verify.run_inputs import reference_outputs, verification_frames
from dicompiler.verify.tolerances import output_tolerances

_WRITTEN_PATHS: ContextVar[set[Path] | None] = ContextVar("written_paths", default=None)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TARGET_ARGUMENT = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""For each audit event of Python, the index of the argument with the written path."""


@contextmanager
def writes_inside(directory: Path, function: str) -> Iterator[None]:
    """Raise AssertionError if Python code in the `with` block leaves new or changed files outside a directory.

    Deleted files, device files (below /dev) and compiled Python files (in `__pycache__`) are ignored.

    Args:
        directory: The directory in which files may be written.
        function: Name of the function that writes, for the message.
    """
    _add_audit_hook()
    paths: set[Path] = set()
    token = _WRITTEN_PATHS.set(paths)
    try:
        yield
    finally:
        _WRITTEN_PATHS.reset(token)
    root = Path(os.path.realpath(directory))
    outside = sorted(path for path in paths if root not in (path, *path.parents) and path.exists())
    message = f"{function} writes outside of its directory: {', '.join(map(str, outside[:3]))}: write below {directory}"
    require(not outside, message)


@cache
def _add_audit_hook() -> None:
    """Record written paths in _WRITTEN_PATHS from now on. Cached, because audit hooks cannot be removed."""
    sys.addaudithook(_record_write)


def _record_write(event: str, arguments: tuple[Any, ...]) -> None:
    paths = _WRITTEN_PATHS.get()
    if paths is None:
        return
    path: Any = None
    if event == "open":
        opened, mode, flags = arguments
        is_write = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & _WRITE_FLAGS)
        path = opened if is_write else None
    elif event in _TARGET_ARGUMENT:
        path = arguments[_TARGET_ARGUMENT[event]]
    if isinstance(path, str | bytes | os.PathLike):
        written = Path(os.path.realpath(os.fsdecode(path)))
        if written.parts[:2] != ("/", "dev") and "__pycache__" not in written.parts:
            paths.add(written)


SPLIT_STRATEGIES = ("single", "modnn", "pipeline")
"""Strategies that split the samples: one device, tiles with halos, and a pipeline of whole layers."""
FRAME_COUNT = 2
STATE_FRAME_COUNT = 3
"""Number of frames for the network with a state (a tensor that one frame passes to the next)."""
_STATEFUL_GRAPH = """<ir_version: 8, opset_import: ["": 17]>
keeping (float[1, 2, 8, 6] x, float[1, 2, 8, 6] past) => (float[1, 2, 8, 6] y, float[1, 2, 8, 6] present) {
  [sum] present = Add (x, past)
  [max] y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (present)
}"""
RUN_TIMEOUT_S = 120.0
TARGET_LIMIT_S = 2 * LIMIT_S
"""Default limit in seconds for the calls of a target with one sample (test problem)."""


def default_target_samples() -> tuple[Sample, ...]:
    """Return the default networks on three devices of different speed, for the objective latency."""
    return tuple(samples(platforms=[make_cluster("switch", 2.0, 1.0, 0.5)], objectives=["latency"]))


def check_target(
    target: Target | type[Target],
    on: Iterable[Sample] | None = None,
    splits: Sequence[str] = SPLIT_STRATEGIES,
    runs: bool = True,
    limit_s: float = TARGET_LIMIT_S,
) -> None:
    """Check the artifacts of a target.

    Each sample (a network on a platform) is split by each strategy and written as an artifact. The check requires
    that:

    - a second artifact has the same bytes, also in another process with another hash seed;
    - artifact.json names this target, and no file is written outside of the artifact's directory;
    - no call changes its arguments, ends the process, or exceeds the time limit;
    - `memory_overhead` returns a number of bytes for every device;
    - a run of two frames gives outputs within the tolerance of onnxruntime's, sends the predicted bytes, and returns a
      report for every device;
    - no process that the run has started still runs after it.

    Three more plans are run. A target must refuse those that its attributes do not allow:

    - replicas: two devices compute alternate frames;
    - a failure plan, which is used if a device fails: run with and without this device;
    - a state (a tensor that one frame passes to the next), of which two devices keep one half each.

    Args:
        target: The target, or its class.
        on: The samples to use. Default: two networks on three devices of different speed.
        splits: Names of the strategies that split the samples.
        runs: True to run the artifacts. Use False for targets that cannot run on this host.
        limit_s: Seconds that the calls of the target for one sample may take.

    Raises:
        AssertionError: A requirement does not hold. The message names target, sample and cause.
    """
    emitter = as_instance(target)
    chosen = list(default_target_samples() if on is None else on)
    require(chosen, f"{describe(emitter)}: there are no samples")
    with temporarily_registered(type(emitter)) as plugins:
        emitter = plugins.resolve("targets", emitter)
        for sample in chosen:
            for strategy in splits:
                with checking(f"{describe(emitter)} on {sample}, split by {strategy}"), time_limit(limit_s):
                    plan = registry().make("strategies", strategy).plan(sample.problem)
                    _check_sample(emitter, sample, plan, runs, limit_s)
        first = chosen[0]
        if len(first.platform.computing_devices) > 1:
            with checking(f"{describe(emitter)} on {first}, with replicas"), time_limit(limit_s):
                _check_replicas(emitter, first, runs)
            with checking(f"{describe(emitter)} on {first}, with a failure plan"), time_limit(limit_s):
                _check_failures(emitter, first, runs)
        with checking(f"{describe(emitter)} on {first.platform.name}, with a state"), time_limit(limit_s):
            _check_states(emitter, first.platform, runs)


def _compile_plan(sample: Sample, plan: Plan) -> PipelineState:
    return compiler.compile(sample.model, platform=sample.platform, plan=plan)


def _check_sample(target: Target, sample: Sample, plan: Plan, runs: bool, limit_s: float) -> None:
    compilation = _compile_plan(sample, plan)
    assert compilation.program is not None
    with unchanged(program=compilation.program):
        # The registry's wrapper of the target checks the returned numbers.
        target.memory_overhead(compilation.program)
    _check_emission(target, compilation)
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as directory:
        first, second = Path(directory, "first"), Path(directory, "a longer name")
        compiler.write_artifact(compilation, target, first)
        emitted = file_digests(first)
        compiler.write_artifact(_compile_plan(sample, plan), target, second)
        _check_same_files(emitted, file_digests(second), "again")
        if runs:
            _check_run(target, compilation, first)
        other = call_in_subprocess(emitted_digests, target, sample, plan, limit_s=limit_s)
        _check_same_files(emitted, other, "in another process")


def _check_emission(target: Target, compilation: PipelineState) -> None:
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as parent:
        directory = Path(parent, "out")
        directory.mkdir()
        with unchanged(compilation=compilation), writes_inside(directory, "emit()"):
            target.emit(compilation, directory)


def emitted_digests(target: Target, sample: Sample, plan: Plan) -> dict[str, str]:
    """Write the artifact of a plan to a temporary directory. Return the digests of its files by path."""
    with tempfile.TemporaryDirectory() as directory, temporarily_registered(type(target)):
        compiler.write_artifact(_compile_plan(sample, plan), target, Path(directory, "out"))
        return file_digests(Path(directory, "out"))


def file_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 digest of each file below a directory, by relative path."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _check_same_files(emitted: dict[str, str], other: dict[str, str], how: str) -> None:
    differing = sorted(name for name in {*emitted, *other} if emitted.get(name) != other.get(name))
    # artifact.json has the digests of all other files. Name it only if no other file differs.
    shown = [name for name in differing if name != ARTIFACT_FILE] or differing
    names = ", ".join(shown[:3])
    require(not differing, f"when the artifact is emitted {how}, other bytes are in the files {names}")


def _check_run(
    target: Target, compilation: PipelineState, artifact: Path, frames: int = FRAME_COUNT, without: tuple[str, ...] = ()
) -> None:
    program, model = compilation.program, compilation.reference
    assert program is not None and model is not None
    frames_in = [random_inputs(graph_inputs(model), seed) for seed in range(frames)]
    with unchanged(frames=frames_in):
        result = _run_target(target, artifact, frames_in, without)
    allowed = {**output_tolerances(model), **target.tolerances(model)}
    for i, inputs in enumerate(frames_in):
        reference = run_model(model, inputs, optimization=target.reference_optimization)
        by_device = dict(result.outputs_by_device[i]) if result.outputs_by_device else {}
        for device, outputs in {"the first sink": result.outputs[i], **by_device}.items():
            require(set(outputs) == set(reference), f"frame {i}: {device} has outputs {sorted(outputs)}")
            for name, value in outputs.items():
                check = compare_value(name, reference[name], value, tolerance=allowed.get(name))
                require(check.passed, f"frame {i}: output {name!r} of {device} {check.detail}")
    reported = [report.device for report in result.reports]
    require(reported == [d.device for d in program.devices], f"run() returns reports of the devices {reported}")
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    roles = sum(not role.failed for role in program.roles)
    check = check_transfers(program.all_transfers, sent, frames // roles, roles)
    require(check.passed, check.detail)


def _run_target(
    target: Target, artifact: Path, frames: Sequence[Mapping[str, NDArray[Any]]], without: tuple[str, ...] = ()
) -> RunResult:
    """Run an artifact without some devices, and require that no process is left."""
    with no_processes_left("run()"):
        return target.run(artifact, frames, RunOptions(timeout_s=RUN_TIMEOUT_S, start_without=without))


def _check_replicas(target: Target, sample: Sample, runs: bool) -> None:
    """Check a plan with two replicas: one device computes the even frames, another the odd frames."""
    first, second = (device.name for device in sample.platform.computing_devices[:2])
    plan = replace(_single_device_plan(sample, first), replicas=({}, {first: second}))
    _check_accepted(target, sample, plan, target.can_run_replicas, "replicas", [()] if runs else [])


def _check_failures(target: Target, sample: Sample, runs: bool) -> None:
    """Check a plan with all layers on one device, and a failure plan that replaces it by another device."""
    first, second = (device.name for device in sample.platform.computing_devices[:2])
    failure = FailurePlan((first,), _single_device_plan(sample, second))
    plan = replace(_single_device_plan(sample, first), failures=(failure,))
    without = [(), (first,)] if runs else []
    _check_accepted(target, sample, plan, target.can_tolerate_failures, "failure plans", without)


def _check_states(target: Target, platform: Platform, runs: bool) -> None:
    """Check a network with a state (a running sum over frames), of which two devices keep half of the rows each."""
    names = [device.name for device in platform.computing_devices][:2]
    model, states = onnx.parser.parse_model(_STATEFUL_GRAPH), ["past=present"]
    problem = load_problem(model, platform, state=states)
    layers = problem.layers
    tiles = {layer.name: tile_layer(layers, layer, "height", [1.0] * len(names), names) for layer in layers.layers}
    plan = problem.build_plan(tiles)
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as directory:
        artifact = Path(directory, "out")
        try:
            compilation = compiler.compile(
                model, platform=platform, plan=plan, target=target, state=states, output=artifact
            )
        except DicompilerError as error:
            require(not target.can_keep_states, f"it declares that it keeps states, but refuses them: {error}")
            return
        require(target.can_keep_states, "it declares that it keeps no states, but does not refuse them")
        if not runs:
            return
        frames = verification_frames(compilation.reference, None)[:STATE_FRAME_COUNT]
        result = _run_target(target, artifact, frames)
        for i, reference in enumerate(reference_outputs(compilation.reference, frames)):
            check = compare_value("y", reference["y"], result.outputs[i]["y"])
            require(check.passed, f"frame {i}: output 'y' {check.detail}")


def _single_device_plan(sample: Sample, device: str) -> Plan:
    plan = sample.problem.build_plan(single_device_plan(sample.problem.layers, device).layers)
    return replace(plan, source=(device,), sink=(device,))


def _check_accepted(
    target: Target, sample: Sample, plan: Plan, is_supported: bool, feature: str, runs: Sequence[tuple[str, ...]]
) -> None:
    """Require that the target refuses an unsupported plan, and that runs of a supported plan are right.

    Args:
        target: The target.
        sample: The network and the platform.
        plan: The plan.
        is_supported: True if the target must accept the plan.
        feature: Name of the feature in messages, such as "replicas".
        runs: For each run, the names of the devices that are absent.
    """
    with tempfile.TemporaryDirectory(prefix="dicompiler-") as directory:
        out = Path(directory, "out")
        try:
            compilation = compiler.compile(sample.model, platform=sample.platform, plan=plan, target=target, output=out)
        except DicompilerError as error:
            require(not is_supported, f"it declares that it supports {feature}, but refuses them: {error}")
            return
        require(is_supported, f"it declares that it does not support {feature}, but does not refuse them")
        for without in runs:
            _check_run(target, compilation, out, FRAME_COUNT * len(plan.replica_roles), without)
