"""Functions that use an artifact (the directory that `dicompiler.compile` writes): run, install, verify, reopen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import UsageError, check_type
from dicompiler.base.schema import load_json, validate
from dicompiler.driver.compile_options import DEFAULT_COST_MODEL
from dicompiler.driver.engines import engine_tolerances, split_program
from dicompiler.driver.prepare import apply_wire_types, prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir import plan as plans
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.recurrent_states import read_states
from dicompiler.ir.routing import Routing
from dicompiler.partition.lowering import lower, lower_unchecked
from dicompiler.partition.routing import route_on_platform
from dicompiler.partition.tiling import single_device_plan
from dicompiler.plugin.registry import registry
from dicompiler.search.failure_cases import failure_metrics
from dicompiler.search.problem import Problem
from dicompiler.target.artifact_lock import mark_as_used
from dicompiler.target.manifest import (
    PLAN_FILE,
    PLATFORM_FILE,
    PROVENANCE_FILE,
    REFERENCE_FILE,
    check_files,
    load_artifact,
)
from dicompiler.target.run_records import InstalledDevice, RunOptions, RunResult
from dicompiler.target.target_base import Service, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Check, Verification
    from dicompiler.verify.deadline import Deadline

log = logging.getLogger("dicompiler")

WEIGHTS_FILE = f"{REFERENCE_FILE}.data"
_GIVE_INPUTS = "give inputs like your samples (--inputs X.npz)"
"""Remedy if random inputs are outside of the value ranges of an artifact that sends int8."""


def _open_artifact(
    directory: str | Path, with_weights: bool = False, will_run: bool = False
) -> tuple[Path, Target, Model]:
    """Return an artifact's directory, target and reference model (the unsplit model), after checking its files.

    Args:
        directory: The artifact.
        with_weights: True to check the weights of the reference model too.
        will_run: True to check the devices' files too, unless the target checks them in a run.
    """
    path = Path(directory)
    document = load_artifact(path)
    files, target = document["files"], registry().make("targets", document["target"])
    required = {PLAN_FILE, PLATFORM_FILE, REFERENCE_FILE}
    shared = required | ({WEIGHTS_FILE, PROVENANCE_FILE} & files.keys())
    checked = set(shared) if with_weights else shared - {WEIGHTS_FILE}
    if will_run and not target.can_check_files:
        checked |= files.keys() - shared
    check_files(path, files, sorted(checked))
    if "target" in (provenance := _load_provenance(path)):
        # artifact.json names the target without its options, but provenance.json states them.
        target = registry().make("targets", provenance["target"])
    return path, target, Model.load(path / REFERENCE_FILE)


def _load_provenance(path: Path) -> dict[str, Any]:
    document = load_json(path / PROVENANCE_FILE) if (path / PROVENANCE_FILE).is_file() else {}
    if document:
        validate(document, "provenance", str(path / PROVENANCE_FILE))
    return document


def memory_by_host(directory: str | Path) -> Mapping[str, int]:
    """Return the bytes of memory that the devices of each host need, by host; empty if `compile` did not write them.

    Raises:
        DicompilerError: A file of the artifact is missing or broken.
    """
    path = Path(directory)
    files = load_artifact(path)["files"]
    check_files(path, files, sorted({PROVENANCE_FILE} & files.keys()))
    needs: Mapping[str, int] = _load_provenance(path).get("memory_bytes", {})
    return needs


def reopen_artifact(
    directory: str | Path, cost: str = "", platform: Platform | None = None, will_run: bool = False
) -> tuple[PipelineState, Target, Problem]:
    """Recreate what `compile` returned for an artifact: the pipeline state, the target and the problem.

    The problem is what the strategy solved: layers, platform, cost model and objective.

    Args:
        directory: The artifact.
        cost: The cost model. Default: the one that the artifact was compiled with.
        platform: A platform to use instead of the artifact's.
        will_run: True if the artifact will be run: the files of its devices are checked too.

    Raises:
        DicompilerError: A file is missing or broken.
        UsageError: `cost` is empty, and the artifact's cost model needs options, which artifacts do not store.
    """
    path, target, model = _open_artifact(directory, will_run=will_run)
    decision, objective, cost_spec = None, "latency", cost or DEFAULT_COST_MODEL
    if provenance := _load_provenance(path):
        chosen = provenance.get("chosen_strategy", "")
        objective, used_cost_model = provenance["objective"], provenance["cost_model"]
        decision = Decision(provenance["strategy"], objective, used_cost_model, chosen)
        cost_spec = cost or used_cost_model
    try:
        cost_model = registry().make("cost_models", cost_spec)
    except UsageError as error:
        if cost or decision is None:
            raise
        raise UsageError(
            f"{path}: the artifact was compiled with cost model {decision.cost_model!r}: select a cost model with its "
            f"options (--cost): {error}"
        ) from error
    plan = plans.load_plan(path / PLAN_FILE)
    compilation = apply_wire_types(prepare(model), plan.wire_format)
    engines_platform = (platform or Platform.load(path / PLATFORM_FILE)).with_engines(plan.engines)
    compilation = replace(compilation, plan=plan, platform=engines_platform)
    problem = make_problem(compilation, objective, cost_model, target)
    compilation = split_program(lower_unchecked(compilation))
    compilation = replace(
        compilation,
        metrics=problem.program_metrics(compilation),
        single_device_metrics=problem.best_single_device[1],
        failure_metrics=failure_metrics(problem, plan),
        decision=decision,
        artifact_directory=path,
    )
    return compilation, target, problem


def run(
    directory: str | Path,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 1,
    timeout: float | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Run an artifact on this host, with one process for each device.

    Args:
        directory: The artifact.
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays. Arrays for states (inputs that
            are outputs of the previous frame) are used in the first frame only.
        frames: Number of frames. All get the same inputs.
        timeout: Seconds for the whole run. Default: the timeout in `options`.
        options: Options of the run, such as the hosts to run on.

    Returns:
        The outputs, and the measurements of each device.

    Raises:
        DicompilerError: The directory is not an artifact, or the inputs do not fit the model.
        RunError: A device failed; the message names it.
    """
    _check_arguments("run", directory, inputs, timeout)
    check_type(frames, (int,), "run: frames", "a number")
    check_frame_count(frames)
    path, target, model = _open_artifact(directory, will_run=True)
    return run_opened(path, target, model, inputs, frames, (options or RunOptions()).with_timeout(timeout))


def _check_arguments(
    function: str, directory: str | Path, inputs: Mapping[str, NDArray[Any]] | None, timeout: float | None
) -> None:
    check_type(directory, (str, Path), f"{function}: directory", "a path")
    check_type(inputs, (Mapping, NoneType), f"{function}: inputs", "arrays by the names of inputs")
    check_type(timeout, (int, float, NoneType), f"{function}: timeout", "seconds")


def check_frame_count(frames: int) -> None:
    if frames < 1:
        raise UsageError(f"run: frames must be 1 or more, not {frames}")


def run_opened(
    path: Path,
    target: Target,
    model: Model,
    inputs: Mapping[str, NDArray[Any]] | None,
    frames: int,
    options: RunOptions,
) -> RunResult:
    """Run an artifact whose files are already checked, and give every frame the same inputs.

    Args:
        path: The artifact's directory.
        target: The artifact's target.
        model: The unsplit model, or another model with the same inputs.
        inputs: Arrays by the names of the graph inputs; None for seeded random arrays.
        frames: Number of frames.
        options: Options of the run.
    """
    from dicompiler.verify.run_inputs import first_and_later_inputs, hint_on_input_error

    if options.start_without and not target.can_tolerate_failures:
        raise UsageError(f"run: target {target.name!r} needs all of its devices: omit --start-without")
    first, later = first_and_later_inputs(model, inputs)
    with hint_on_input_error(model, inputs), mark_as_used(path):
        return target.run(path, [first, *[later] * (frames - 1)], options)


def install(directory: str | Path, options: RunOptions, timeout: float | None = None) -> tuple[InstalledDevice, ...]:
    """Copy an artifact to the hosts that lack it, and check that it can run there.

    Args:
        directory: The artifact.
        options: Options of the later run. `options.hosts` are the hosts.
        timeout: Seconds for all hosts together. Default: the timeout in `options`.

    Returns:
        For each device, its directory on the host, the copied bytes, and the versions of the installed software.

    Raises:
        RunError: A host cannot be used; the message names the device, its host and the cause.
    """
    path, target, _ = _open_artifact(directory, will_run=True)
    return target.install(path, options.with_timeout(timeout))


def uninstall(directory: str | Path, options: RunOptions) -> Mapping[str, bool]:
    """End an artifact's devices that keep running between runs, and remove its files and keys from the hosts.

    Args:
        directory: The artifact.
        options: Options whose `hosts` are the hosts.

    Returns:
        For each device, by name, whether something was removed.

    Raises:
        RunError: A host cannot be reached; the message names the device, its host and the cause.
    """
    path = Path(directory)
    target: Target = registry().make("targets", load_artifact(path)["target"])
    return target.uninstall(path, options)


def open_service(directory: str | Path, options: RunOptions) -> Service:
    """Return an object that starts, stops and queries devices that keep running between runs."""
    path = Path(directory)
    target: Target = registry().make("targets", load_artifact(path)["target"])
    return target.service(path, options)


def verify(
    directory: str | Path, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None
) -> Verification:
    """Verify that an artifact computes what onnxruntime computes.

    The checks are:

    1. The exact check: models with integer weights give the same bits, whether the plan splits them or not.
    2. The programs of the artifact, run on this host, give the outputs of onnxruntime within a tolerance.
    3. The target's own checks pass.
    4. Every transfer has the predicted number of bytes.

    Args:
        directory: The artifact.
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
        timeout: Seconds for all checks together. Default: the timeout of `RunOptions`.

    Returns:
        All checks, passed or failed.

    Raises:
        DicompilerError: The directory is not an artifact, or the time was too short.
        RunError: A device failed; the message names it.
    """
    from dicompiler.verify.comparison import Verification, check_exact, check_transfers
    from dicompiler.verify.deadline import Deadline, deadline_scope
    from dicompiler.verify.run_inputs import hint_on_input_error, verification_frames
    from dicompiler.verify.wire_error import check_wire_range, hint_at_clipping

    _check_arguments("verify", directory, inputs, timeout)
    deadline = Deadline(RunOptions().with_timeout(timeout).timeout_s)
    path, target, model = _open_artifact(directory, with_weights=True, will_run=True)
    plan = plans.load_plan(path / PLAN_FILE)
    partitioner = _ModelPartitioner(Platform.load(path / PLATFORM_FILE))
    frames = verification_frames(model, inputs)
    log.info("verifying models with integer weights, split by the same plan")

    def make_exact_program(exact_model: Model) -> Program:
        return partitioner.make_exact_program(exact_model, plan)

    with deadline_scope(deadline, "verify: exact"):
        layers = prepare(model).layers
        checks = [check_exact(model, make_exact_program, rules=registry().operator_rules, layers=layers)]
    log.info("verifying the programs against onnxruntime")
    replica_count = len(plan.replica_roles)
    if len(frames) == 1:
        frames = frames * replica_count
    with hint_on_input_error(model, inputs), mark_as_used(path):
        runs = _run_all_plans(path, target, plan, frames, deadline)
        with deadline_scope(deadline, "verify: real"):
            program, routing = partitioner.partition(model, plan)
            output_checks = [
                check for verified_run in runs for check in verified_run.checks(model, target, routing, plan.engines)
            ]
            if plan.wire_format.dtypes:
                remedy = _GIVE_INPUTS if inputs is None else ""
                wire_check = check_wire_range(make_exact_program(model), routing, plan.wire_format, frames[0])
                output_checks = [*hint_at_clipping(output_checks, wire_check, remedy), wire_check]
            checks += output_checks
    with deadline_scope(deadline, "verify: real"):
        checks += target.extra_checks(model, lambda: partitioner.make_program(model), frames[0], runs[0].result)
    sent: dict[int, int] = {}
    for report in (report for verified_run in runs for report in verified_run.result.reports):
        sent |= report.sent_bytes
    role_noun = "roles" if plan.failures else "replicas"
    frames_per_replica = len(frames) // replica_count
    checks.append(check_transfers(program.all_transfers, sent, frames_per_replica, len(plan.roles), role_noun))
    return Verification(tuple(checks))


def _run_all_plans(
    path: Path, target: Target, plan: Plan, frames: list[dict[str, Any]], deadline: Deadline
) -> list[_VerifiedRun]:
    """Run an artifact with all devices, and once for each failure plan without the failed devices."""
    options = RunOptions(in_flight=1, timeout_s=deadline.remaining_s)
    runs = [_VerifiedRun(frames, target.run(path, frames, options))]
    for failure in plan.failures:
        failure_frames = frames[:1] * len(failure.plan.replica_roles)
        options = replace(options, timeout_s=deadline.remaining_s, start_without=failure.failed)
        runs.append(_VerifiedRun(failure_frames, target.run(path, failure_frames, options), failure.failed))
    return runs


@dataclass(frozen=True)
class _ModelPartitioner:
    """A builder of programs for the devices of one platform."""

    platform: Platform

    def partition(self, model: Model, plan: Plan) -> tuple[Program, Routing]:
        compilation = lower(replace(prepare(model), platform=self.platform, plan=plan))
        assert compilation.program is not None and compilation.routing is not None
        return compilation.program, compilation.routing

    def make_program(self, model: Model, plan: Plan | None = None) -> Program:
        """Return the program of a model, split by `plan`. Default: the whole model on the fastest device."""
        layers = prepare(model).layers
        assert layers is not None
        return self.partition(model, plan or single_device_plan(layers, self.platform.fastest_device.name))[0]

    def make_exact_program(self, model: Model, plan: Plan) -> Program:
        """Return the program of a model, split by `plan`, with wire types that keep integers exact."""
        return self.make_program(model, replace(plan, wire_format=plan.wire_format.with_exact_stand_ins))


@dataclass(frozen=True)
class _VerifiedRun:
    """A run of an artifact, with the inputs that it got.

    Attributes:
        frames: For each frame, its inputs: arrays by the names of the graph inputs.
        result: The result of the run.
        failed: Names of the devices that were regarded as down at the start of the run.
    """

    frames: Sequence[Mapping[str, NDArray[Any]]]
    result: RunResult
    failed: Sequence[str] = ()

    def checks(self, model: Model, target: Target, routing: Routing, engines: Mapping[str, str]) -> list[Check]:
        """Compare each output with that of onnxruntime.

        Args:
            model: The unsplit model.
            target: The artifact's target.
            routing: The transfers between devices. The tolerance is larger if they use narrower types.
            engines: Engines other than onnxruntime, by device name.
        """
        from dicompiler.verify.wire_error import wire_error_bound

        extra = wire_error_bound(routing)
        return _compare_outputs(model, self.frames, self.result, target, engines, extra, self.failed)


def verify_run(
    directory: str | Path, result: RunResult, inputs: Mapping[str, NDArray[Any]] | None = None
) -> Verification:
    """Compare the outputs of a run's first frame with those of onnxruntime.

    Plans may have replicas, i.e. copies on other devices that compute frames in turn. Each replica's first frame is
    compared. If the result has no outputs of some replicas, a check that does not apply names these replicas.

    Args:
        directory: The artifact that was run.
        result: The result of `run`.
        inputs: The inputs of the run, by the names of the graph inputs.
    """
    return _verify_frames(directory, lambda _inputs, _count: result, inputs)


def verify_session(
    directory: str | Path,
    stream: Callable[[Sequence[Mapping[str, NDArray[Any]]]], Iterable[Mapping[str, NDArray[Any]]]],
    inputs: Mapping[str, Any] | None = None,
) -> Verification:
    """Compute frames with the same inputs in a session, and compare their outputs with those of onnxruntime.

    Args:
        directory: The artifact of the session.
        stream: The method `stream` of the session. It gets one frame, or one for each replica (copy of the plan on
            other devices).
        inputs: Inputs of the frames. Default: seeded random arrays.

    Raises:
        DicompilerError: The directory is not an artifact, or the inputs do not fit its model.
        RunError: A device failed; the message names it.
    """
    return _verify_frames(
        directory,
        lambda first, count: RunResult(tuple(map(dict, stream([first] * count))), ()),
        inputs,
        "compute a frame before the swap, or omit the verification (verify=False)",
    )


def _verify_frames(
    directory: str | Path,
    compute: Callable[[Mapping[str, NDArray[Any]], int], RunResult],
    inputs: Mapping[str, NDArray[Any]] | None,
    random_inputs_remedy: str = _GIVE_INPUTS,
) -> Verification:
    """Compare computed frames with onnxruntime.

    Args:
        directory: The artifact.
        compute: Function that computes frames, given the inputs of each frame and the number of frames.
        inputs: Arrays by the names of the graph inputs; None for seeded random arrays.
        random_inputs_remedy: Remedy in errors if random inputs are outside of the value ranges for int8.
    """
    from dicompiler.verify.comparison import Verification
    from dicompiler.verify.run_inputs import first_and_later_inputs
    from dicompiler.verify.wire_error import check_wire_range, hint_at_clipping, wire_error_bound

    path, target, model = _open_artifact(directory, with_weights=True)
    first, _ = first_and_later_inputs(model, inputs)
    plan, platform = plans.load_plan(path / PLAN_FILE), Platform.load(path / PLATFORM_FILE)
    routing, extra_tolerance = None, 0.0
    if plan.wire_format.dtypes:
        layers = prepare(model).layers
        assert layers is not None
        routing = route_on_platform(platform, layers, plan)
        extra_tolerance = wire_error_bound(routing)
    frames = [first] * len(plan.replica_roles)
    result = compute(first, len(frames))
    checks = _compare_outputs(model, frames, result, target, plan.engines, extra_tolerance)
    if routing is not None and not all(check.passed for check in checks):
        exact_program = _ModelPartitioner(platform).make_exact_program(model, plan)
        wire_check = check_wire_range(exact_program, routing, plan.wire_format, first)
        checks = hint_at_clipping(checks, wire_check, random_inputs_remedy if inputs is None else "")
    return Verification((*checks, *_uncompared_replicas(len(result.outputs), len(frames))))


def _uncompared_replicas(frames: int, replicas: int) -> list[Check]:
    from dicompiler.verify.comparison import Check

    if frames >= replicas:
        return []
    names = f"replica {frames}" if frames == replicas - 1 else f"replicas {frames} to {replicas - 1}"
    return [Check(names, True, f"not compared: run {replicas} frames, one for each replica", applies=False)]


def _compare_outputs(
    model: Model,
    inputs: Sequence[Mapping[str, NDArray[Any]]],
    result: RunResult,
    target: Target,
    engines: Mapping[str, str],
    extra_tolerance: float,
    failed: Sequence[str] = (),
) -> list[Check]:
    """Compare the outputs that devices delivered with those of onnxruntime.

    Return one check for each output and device. It covers the frames of all replicas, unless one of them is wrong.

    Args:
        model: The unsplit model.
        inputs: The inputs of each frame to compare, by the names of the graph inputs.
        result: The result of the run.
        target: The target, which may define tolerances of its own.
        engines: Engines other than onnxruntime by device name, which may define tolerances too.
        extra_tolerance: Additional tolerance for tensors sent in narrower types, as a fraction of max|reference|.
        failed: Names of the devices that were regarded as down at the start of the run.
    """
    import numpy as np

    from dicompiler.ir.random_ops import random_tensors
    from dicompiler.verify import comparison
    from dicompiler.verify.run_inputs import reference_outputs
    from dicompiler.verify.tolerances import output_tolerances

    states = read_states(model.proto)
    frame_noun = "step" if states else "replica"
    expected = reference_outputs(model, inputs, target.reference_optimization)
    tolerances = {**output_tolerances(model), **engine_tolerances(model, engines), **target.tolerances(model)}
    random = random_tensors(model.proto, states or ())
    frames = result.outputs_by_device or tuple({"": outputs} for outputs in result.outputs)

    def compare(device: str, name: str, frame_text: str, reference: Any, actual: Any) -> Check:
        title = f"{name} on {device}" if device else name
        title += f", {frame_text}" if len(inputs) > 1 else ""
        title += f", without {', '.join(failed)}" if failed else ""
        if name in random:
            return comparison.compare_type_only(title, reference, actual, random[name])
        return comparison.compare_value(
            title, reference, actual, tolerance=tolerances.get(name), extra_tolerance=extra_tolerance
        )

    values: dict[tuple[str, str], dict[int, Any]] = {}
    for i, delivered in enumerate(frames[: len(inputs)]):
        for device, outputs in delivered.items():
            for name, value in outputs.items():
                values.setdefault((device, name), {})[i] = value

    def compare_frames(device: str, name: str, value_by_frame: Mapping[int, Any]) -> list[Check]:
        references = {i: expected[i][name] for i in value_by_frame}
        checks = [
            compare(device, name, f"{frame_noun} {i}", references[i], value) for i, value in value_by_frame.items()
        ]
        is_mergeable = all(isinstance(value, np.ndarray) for value in value_by_frame.values()) and name not in random
        if states or not is_mergeable or not 1 < len(checks) == len(inputs) or not all(c.passed for c in checks):
            return checks
        # All replicas have the same reference, so that one check of all values has their largest difference.
        stacks = np.stack([*references.values()]), np.stack([*value_by_frame.values()])
        return [compare(device, name, f"{len(inputs)} replicas", *stacks)]

    return [check for (device, name), value in values.items() for check in compare_frames(device, name, value)]
