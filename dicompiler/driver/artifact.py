"""Using an artifact that was compiled: run it, install it on boards, verify it, read it back.

directory → RunResult, Verification, Compilation.   Its target does the running; what is compared with is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import UsageError
from dicompiler.base.schema import load_json, validate
from dicompiler.driver.prepare import DEFAULT_COST_MODEL, make_problem, prepare
from dicompiler.driver.validate_args import validate_arguments
from dicompiler.driver.wire_types import apply_wire_types
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
from dicompiler.target.integrity import check_files, load_artifact
from dicompiler.target.manifest import PLAN_FILE, PLATFORM_FILE, PROVENANCE_FILE, REFERENCE_FILE
from dicompiler.target.run_records import InstalledDevice, RunOptions, RunResult
from dicompiler.target.target_base import Service, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Check, Verification

log = logging.getLogger("dicompiler")


WEIGHTS_FILE = f"{REFERENCE_FILE}.data"


def _open_artifact(directory: str | Path, weights: bool = False, runs: bool = False) -> tuple[Path, Target, Model]:
    """An artifact: (its directory, the target that wrote it, the model it was made from), with its files checked that
    are read here. weights: those of the model too. runs: and those that its target does not check when it runs it."""
    path = Path(directory)
    document = load_artifact(path)
    files, target = document["files"], registry().make("targets", document["target"])
    own = {PLAN_FILE, PLATFORM_FILE, REFERENCE_FILE, WEIGHTS_FILE, PROVENANCE_FILE} & files.keys() | {
        PLAN_FILE,
        PLATFORM_FILE,
        REFERENCE_FILE,
    }
    others = files.keys() - own if runs and not target.can_check_files else set()
    check_files(path, files, sorted(others | (own if weights else own - {WEIGHTS_FILE})))
    if "target" in (made := _load_provenance(path)):  # with its options
        target = registry().make("targets", made["target"])
    return path, target, Model.load(path / REFERENCE_FILE)


def _load_provenance(path: Path) -> dict[str, Any]:
    document = load_json(path / PROVENANCE_FILE) if (path / PROVENANCE_FILE).is_file() else {}
    if document:
        validate(document, "provenance", str(path / PROVENANCE_FILE))
    return document


def reopen_artifact(
    directory: str | Path, cost: str = "", platform: Platform | None = None, runs: bool = False
) -> tuple[PipelineState, Target, Problem]:
    """An artifact as the compilation that it was: layers, platform, plan, program and metrics are made again of the
    files in it (in less than a second or two), nothing is run.

    cost: the cost model; by default the one that it was compiled with, which must need no options then. platform: in
    place of the artifact's own. runs: it is to be run, so that all of its files are checked. DicompilerError names the
    file that is missing or broken.
    """
    path, target, model = _open_artifact(directory, runs=runs)
    made = _load_provenance(path)
    decision = (
        Decision(made["strategy"], made["objective"], made["cost_model"], made.get("chosen_strategy", ""))
        if made
        else None
    )
    try:
        costs = registry().make("cost_models", cost or (decision.cost_model if decision else DEFAULT_COST_MODEL))
    except UsageError as error:
        if cost or decision is None:
            raise
        raise UsageError(
            f"{path}: it was compiled with cost model {decision.cost_model!r}: give it (--cost): {error}"
        ) from error
    plan = plans.load_plan(path / PLAN_FILE)
    compilation = apply_wire_types(prepare(model), plan.wire_format)
    own = Platform.load(path / PLATFORM_FILE) if platform is None else platform
    compilation = replace(compilation, plan=plan, platform=own)
    problem = make_problem(compilation, decision.objective if decision else "latency", costs, target)
    compilation = lower_unchecked(compilation)
    single = problem.best_single_device[1]
    metrics, losses = problem.program_metrics(compilation), failure_metrics(problem, plan)
    compilation = replace(
        compilation, metrics=metrics, single_device_metrics=single, failure_metrics=losses, decision=decision
    )
    return replace(compilation, artifact_directory=path), target, problem


@validate_arguments
def run(
    directory: str | Path,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 1,
    timeout: float | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Starts every device's program on this host and gives each of `frames` frames the same `inputs` (by name; by
    default seeded random ones; states, where they are given, in the first alone), one after another unless `options`
    says otherwise. timeout: seconds for all of it, by default those of `options`. Raises RunError naming the device
    that failed."""
    check_frame_count(frames)
    path, target, model = _open_artifact(directory, runs=True)
    return run_opened(path, target, model, inputs, frames, (options or RunOptions()).with_timeout(timeout))


def check_frame_count(frames: int) -> None:
    """UsageError for frames that cannot be run."""
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
    """As `run`, of an artifact that was opened to run it: its target, and a model with its inputs."""
    from dicompiler.verify.run_inputs import first_and_later_inputs, hint_on_input_error

    if options.start_without and not target.can_tolerate_failures:
        raise UsageError(f"run: target {target.name!r} cannot begin without a device: leave out --without")
    first, later = first_and_later_inputs(model, inputs)
    with hint_on_input_error(model, inputs):
        return target.run(path, [first, *[later] * (frames - 1)], options)


def install(directory: str | Path, options: RunOptions, timeout: float | None = None) -> tuple[InstalledDevice, ...]:
    """Copies an artifact to `options.hosts`, as far as they lack it, and checks that it can be run there; `run` with
    the same options then starts it there. timeout: as for `run`. RunError names the device, its host and the cause."""
    path, target, _ = _open_artifact(directory, runs=True)
    return target.install(path, options.with_timeout(timeout))


def open_service(directory: str | Path, options: RunOptions) -> Service:
    """An artifact's devices as a service that stays between runs: see Target.service."""
    path = Path(directory)
    target: Target = registry().make("targets", load_artifact(path)["target"])
    return target.service(path, options)


@validate_arguments
def verify(
    directory: str | Path, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None
) -> Verification:
    """Verifies an artifact on both levels: exact check models in this process, then its real programs, run on this host
    and compared with onnxruntime; what its target checks itself; and that each transfer carried the bytes predicted.
    timeout: seconds for all of that, by default those that a run may take; DicompilerError says what they were not
    enough for."""
    from dicompiler.verify.comparison import Verification, check_exact, check_transfers
    from dicompiler.verify.deadline import Deadline, deadline_scope
    from dicompiler.verify.run_inputs import hint_on_input_error, verification_frames
    from dicompiler.verify.wire_error import check_wire_range

    deadline = Deadline(RunOptions().with_timeout(timeout).timeout_s)
    path, target, model = _open_artifact(directory, weights=True, runs=True)
    plan, splits = plans.load_plan(path / PLAN_FILE), _ModelPartitioner(Platform.load(path / PLATFORM_FILE))
    frames, geometry = (
        verification_frames(model, inputs),
        replace(plan, wire_format=plan.wire_format.with_exact_stand_ins),
    )
    log.info("check models, split by the same plan")
    with deadline_scope(deadline, "verify: exact"):
        rules, layers = registry().operator_rules, prepare(model).layers
        checks = [
            check_exact(model, lambda variant: splits.make_program(variant, geometry), rules=rules, layers=layers)
        ]
    log.info("the programs themselves, against onnxruntime")
    count = len(plan.replica_roles)  # a frame of each
    frames = frames if len(frames) > 1 else frames * count
    with hint_on_input_error(model, inputs):
        runs = [_VerifiedRun(frames, target.run(path, frames, RunOptions(timeout_s=deadline.remaining_s)))]
        for loss in plan.failures:
            turns = frames[:1] * len(loss.plan.replica_roles)
            options = RunOptions(timeout_s=deadline.remaining_s, start_without=loss.failed)
            runs.append(_VerifiedRun(turns, target.run(path, turns, options), loss.failed))
        with deadline_scope(deadline, "verify: real"):
            program, routing = splits.place(model, plan)
            checks += [check for played in runs for check in played.checks(model, target, routing)]
            if plan.wire_format.dtypes:
                checks.append(
                    check_wire_range(splits.make_program(model, geometry), routing, plan.wire_format, frames[0])
                )
    with deadline_scope(deadline, "verify: real"):
        checks += target.extra_checks(model, lambda: splits.make_program(model), frames[0], runs[0].result)
    sent = {index: total for played in runs for index, total in _bytes_by_transfer(played.result).items()}
    what = "roles" if plan.failures else "replicas"
    checks.append(check_transfers(program.all_transfers, sent, len(frames) // count, len(plan.roles), what))
    return Verification(tuple(checks))


@dataclass(frozen=True)
class _ModelPartitioner:
    """How a model, or one of the same graph, is split on a platform."""

    platform: Platform

    def place(self, model: Model, plan: Plan) -> tuple[Program, Routing]:
        """Its programs by the plan, and the way of what they send."""
        compilation = lower(replace(prepare(model), platform=self.platform, plan=plan))
        assert compilation.program is not None and compilation.routing is not None
        return compilation.program, compilation.routing

    def make_program(self, model: Model, plan: Plan | None = None) -> Program:
        """Its programs by the plan; None: all of it on the fastest device."""
        layers = prepare(model).layers
        assert layers is not None
        return self.place(model, plan or single_device_plan(layers, self.platform.fastest_device.name))[0]


@dataclass(frozen=True)
class _VerifiedRun:
    """What the programs gave for the frames `given` without the devices `lost`."""

    frames: Sequence[Mapping[str, NDArray[Any]]]
    result: RunResult
    failed: Sequence[str] = ()

    def checks(self, model: Model, target: Target, routing: Routing) -> list[Check]:
        """Whether it is what onnxruntime gives for them."""
        from dicompiler.verify.wire_error import wire_error_bound

        return _compare_outputs(model, self.frames, self.result, target, wire_error_bound(routing), self.failed)


def _bytes_by_transfer(result: RunResult) -> dict[int, int]:
    """Bytes by index of transfer."""
    return {index: total for report in result.reports for index, total in report.sent_bytes.items()}


def verify_run(
    directory: str | Path, result: RunResult, inputs: Mapping[str, NDArray[Any]] | None = None
) -> Verification:
    """Verifies the first frame (of each replica) of what `run` gave for these inputs: its outputs against those of
    onnxruntime."""
    from dicompiler.verify.comparison import Verification
    from dicompiler.verify.run_inputs import first_and_later_inputs
    from dicompiler.verify.wire_error import wire_error_bound

    path, target, model = _open_artifact(directory, weights=True)
    (given, _), plan, more = first_and_later_inputs(model, inputs), plans.load_plan(path / PLAN_FILE), 0.0
    if plan.wire_format.dtypes:
        layers = prepare(model).layers
        assert layers is not None
        more = wire_error_bound(route_on_platform(Platform.load(path / PLATFORM_FILE), layers, plan))
    return Verification(tuple(_compare_outputs(model, [given] * len(plan.replica_roles), result, target, more)))


def _compare_outputs(
    model: Model,
    given: Sequence[Mapping[str, NDArray[Any]]],
    result: RunResult,
    target: Target,
    more: float,
    lost: Sequence[str] = (),
) -> list[Check]:
    """A check for each output that a device delivered of the frames `given`: one for each role, or several in a row
    where there are states. more: the share of max|reference| that is allowed beside what the target and the type allow.
    lost: without whom it ran."""
    from dicompiler.ir.random_ops import random_tensors
    from dicompiler.verify import comparison
    from dicompiler.verify.run_inputs import reference_outputs
    from dicompiler.verify.tolerances import output_tolerances

    what = "step" if read_states(model.proto) else "replica"
    wanted = reference_outputs(model, given, target.reference_optimization)
    allowed = {**output_tolerances(model), **target.tolerances(model)}
    random = random_tensors(model.proto, read_states(model.proto) or ())
    frames = result.outputs_by_device or tuple({"": outputs} for outputs in result.outputs)

    def check(i: int, device: str, name: str, got: Any) -> Check:
        place = f"{name} on {device}" if device else name
        place += (f", {what} {i}" if len(given) > 1 else "") + (f", without {', '.join(lost)}" if lost else "")
        if name in random:
            return comparison.compare_type_only(place, wanted[i][name], got, random[name])
        return comparison.compare_value(place, wanted[i][name], got, tolerance=allowed.get(name), extra_tolerance=more)

    return [
        check(i, device, name, got)
        for i, delivered in enumerate(frames[: len(given)])
        for device, outputs in delivered.items()
        for name, got in outputs.items()
    ]
