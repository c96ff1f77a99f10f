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
from dicompiler.driver.asked import asked
from dicompiler.driver.prepare import DEFAULT_COST, pose, prepare
from dicompiler.driver.sending import sending
from dicompiler.ir import plan as plans
from dicompiler.ir.compilation import Compilation, Decision
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.ir.states import states_of
from dicompiler.partition.lowering import split, split_unchecked
from dicompiler.partition.routing import route_on
from dicompiler.partition.tiling import whole_plan
from dicompiler.plugin.registry import registry
from dicompiler.search.losses import loss_metrics
from dicompiler.search.problem import Problem
from dicompiler.target.interface import Service, Target
from dicompiler.target.manifest import MADE, PLAN, PLATFORM, REFERENCE
from dicompiler.target.records import Installed, RunOptions, RunResult
from dicompiler.target.seal import check_files, open_artifact

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Check, Verification

log = logging.getLogger("dicompiler")


WEIGHTS = f"{REFERENCE}.data"


def _open(directory: str | Path, weights: bool = False, runs: bool = False) -> tuple[Path, Target, Model]:
    """An artifact: (its directory, the target that wrote it, the model it was made from), with its files checked that
    are read here. weights: those of the model too. runs: and those that its target does not check when it runs it."""
    path = Path(directory)
    document = open_artifact(path)
    files, target = document["files"], registry().make("targets", document["target"])
    own = {PLAN, PLATFORM, REFERENCE, WEIGHTS, MADE} & files.keys() | {PLAN, PLATFORM, REFERENCE}
    others = files.keys() - own if runs and not target.checks_files else set()
    check_files(path, files, sorted(others | (own if weights else own - {WEIGHTS})))
    if "target" in (made := _made(path)):  # with its options
        target = registry().make("targets", made["target"])
    return path, target, Model.load(path / REFERENCE)


def _made(path: Path) -> dict[str, Any]:
    document = load_json(path / MADE) if (path / MADE).is_file() else {}
    if document:
        validate(document, "made", str(path / MADE))
    return document


def reopen(
    directory: str | Path, cost: str = "", platform: Platform | None = None, runs: bool = False
) -> tuple[Compilation, Target, Problem]:
    """An artifact as the compilation that it was: layers, platform, plan, program and metrics are made again of the
    files in it (in less than a second or two), nothing is run.

    cost: the cost model; by default the one that it was compiled with, which must need no options then. platform: in
    place of the artifact's own. runs: it is to be run, so that all of its files are checked. DicompilerError names the
    file that is missing or broken.
    """
    path, target, model = _open(directory, runs=runs)
    made = _made(path)
    decision = Decision(made["strategy"], made["objective"], made["cost"], made.get("chosen", "")) if made else None
    try:
        costs = registry().make("cost_models", cost or (decision.cost if decision else DEFAULT_COST))
    except UsageError as error:
        if cost or decision is None:
            raise
        raise UsageError(
            f"{path}: it was compiled with cost model {decision.cost!r}: give it (--cost): {error}"
        ) from error
    plan = plans.load_plan(path / PLAN)
    compilation = sending(prepare(model), plan.wire)
    own = Platform.load(path / PLATFORM) if platform is None else platform
    compilation = replace(compilation, plan=plan, platform=own)
    problem = pose(compilation, decision.objective if decision else "latency", costs, target)
    compilation = split_unchecked(compilation)
    single = problem.alone[1]
    metrics, losses = problem.metrics(compilation), loss_metrics(problem, plan)
    compilation = replace(compilation, metrics=metrics, single=single, losses=losses, decision=decision)
    return replace(compilation, written=path), target, problem


@asked
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
    check_count(frames)
    path, target, model = _open(directory, runs=True)
    return play(path, target, model, inputs, frames, (options or RunOptions()).within(timeout))


def check_count(frames: int) -> None:
    """UsageError for frames that cannot be run."""
    if frames < 1:
        raise UsageError(f"run: frames must be 1 or more, not {frames}")


def play(
    path: Path,
    target: Target,
    model: Model,
    inputs: Mapping[str, NDArray[Any]] | None,
    frames: int,
    options: RunOptions,
) -> RunResult:
    """As `run`, of an artifact that was opened to run it: its target, and a model with its inputs."""
    from dicompiler.verify.given import advising, run_frames

    if options.without and not target.survives:
        raise UsageError(f"run: target {target.name!r} cannot begin without a device: leave out --without")
    first, later = run_frames(model, inputs)
    with advising(model, inputs):
        return target.run(path, [first, *[later] * (frames - 1)], options)


def install(directory: str | Path, options: RunOptions, timeout: float | None = None) -> tuple[Installed, ...]:
    """Copies an artifact to `options.hosts`, as far as they lack it, and checks that it can be run there; `run` with
    the same options then starts it there. timeout: as for `run`. RunError names the device, its host and the cause."""
    path, target, _ = _open(directory, runs=True)
    return target.install(path, options.within(timeout))


def service(directory: str | Path, options: RunOptions) -> Service:
    """An artifact's devices as a service that stays between runs: see Target.service."""
    path = Path(directory)
    target: Target = registry().make("targets", open_artifact(path)["target"])
    return target.service(path, options)


@asked
def verify(
    directory: str | Path, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None
) -> Verification:
    """Verifies an artifact on both levels: exact check models in this process, then its real programs, run on this host
    and compared with onnxruntime; what its target checks itself; and that each transfer carried the bytes predicted.
    timeout: seconds for all of that, by default those that a run may take; DicompilerError says what they were not
    enough for."""
    from dicompiler.verify.comparison import Verification, exact, transfers
    from dicompiler.verify.deadline import Deadline, until
    from dicompiler.verify.given import advising, given_frames
    from dicompiler.verify.narrowed import check_held

    deadline = Deadline(RunOptions().within(timeout).timeout_s)
    path, target, model = _open(directory, weights=True, runs=True)
    plan, splits = plans.load_plan(path / PLAN), _Splits(Platform.load(path / PLATFORM))
    frames, geometry = given_frames(model, inputs), replace(plan, wire=plan.wire.exact)
    log.info("check models, split by the same plan")
    with until(deadline, "verify: exact"):
        rules, layers = registry().rules, prepare(model).layers
        checks = [exact(model, lambda variant: splits.program(variant, geometry), rules=rules, layers=layers)]
    log.info("the programs themselves, against onnxruntime")
    count = len(plan.turns)  # a frame of each
    frames = frames if len(frames) > 1 else frames * count
    with advising(model, inputs):
        runs = [_Played(frames, target.run(path, frames, RunOptions(timeout_s=deadline.left)))]
        for loss in plan.losses:
            turns = frames[:1] * len(loss.plan.turns)
            options = RunOptions(timeout_s=deadline.left, without=loss.lost)
            runs.append(_Played(turns, target.run(path, turns, options), loss.lost))
        with until(deadline, "verify: real"):
            program, routing = splits.placed(model, plan)
            checks += [check for played in runs for check in played.checks(model, target, routing)]
            if plan.wire.types:
                checks.append(check_held(splits.program(model, geometry), routing, plan.wire, frames[0]))
    with until(deadline, "verify: real"):
        checks += target.proofs(model, lambda: splits.program(model), frames[0], runs[0].result)
    sent = {index: total for played in runs for index, total in _sent(played.result).items()}
    what = "roles" if plan.losses else "replicas"
    checks.append(transfers(program.all_transfers, sent, len(frames) // count, len(plan.roles), what))
    return Verification(tuple(checks))


@dataclass(frozen=True)
class _Splits:
    """How a model, or one of the same graph, is split on a platform."""

    platform: Platform

    def placed(self, model: Model, plan: Plan) -> tuple[Program, Routing]:
        """Its programs by the plan, and the way of what they send."""
        compilation = split(replace(prepare(model), platform=self.platform, plan=plan))
        assert compilation.program is not None and compilation.routing is not None
        return compilation.program, compilation.routing

    def program(self, model: Model, plan: Plan | None = None) -> Program:
        """Its programs by the plan; None: all of it on the fastest device."""
        layers = prepare(model).layers
        assert layers is not None
        return self.placed(model, plan or whole_plan(layers, self.platform.fastest.name))[0]


@dataclass(frozen=True)
class _Played:
    """What the programs gave for the frames `given` without the devices `lost`."""

    given: Sequence[Mapping[str, NDArray[Any]]]
    result: RunResult
    lost: Sequence[str] = ()

    def checks(self, model: Model, target: Target, routing: Routing) -> list[Check]:
        """Whether it is what onnxruntime gives for them."""
        from dicompiler.verify.narrowed import deviation

        return _compared(model, self.given, self.result, target, deviation(routing), self.lost)


def _sent(result: RunResult) -> dict[int, int]:
    """Bytes by index of transfer."""
    return {index: total for report in result.reports for index, total in report.sent.items()}


def compare_run(
    directory: str | Path, result: RunResult, inputs: Mapping[str, NDArray[Any]] | None = None
) -> Verification:
    """Verifies the first frame (of each replica) of what `run` gave for these inputs: its outputs against those of
    onnxruntime."""
    from dicompiler.verify.comparison import Verification
    from dicompiler.verify.given import run_frames
    from dicompiler.verify.narrowed import deviation

    path, target, model = _open(directory, weights=True)
    (given, _), plan, more = run_frames(model, inputs), plans.load_plan(path / PLAN), 0.0
    if plan.wire.types:
        layers = prepare(model).layers
        assert layers is not None
        more = deviation(route_on(Platform.load(path / PLATFORM), layers, plan))
    return Verification(tuple(_compared(model, [given] * len(plan.turns), result, target, more)))


def _compared(
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
    from dicompiler.ir.drawing import drawn
    from dicompiler.verify import comparison
    from dicompiler.verify.given import references
    from dicompiler.verify.tolerances import allowances

    what = "step" if states_of(model.proto) else "replica"
    wanted = references(model, given, target.level)
    allowed = {**allowances(model), **target.tolerances(model)}
    random = drawn(model.proto, states_of(model.proto) or ())
    frames = result.delivered or tuple({"": outputs} for outputs in result.outputs)

    def check(i: int, device: str, name: str, got: Any) -> Check:
        place = f"{name} on {device}" if device else name
        place += (f", {what} {i}" if len(given) > 1 else "") + (f", without {', '.join(lost)}" if lost else "")
        if name in random:
            return comparison.drawn(place, wanted[i][name], got, random[name])
        return comparison.compare(place, wanted[i][name], got, allowed=allowed.get(name), more=more)

    return [
        check(i, device, name, got)
        for i, delivered in enumerate(frames[: len(given)])
        for device, outputs in delivered.items()
        for name, got in outputs.items()
    ]
