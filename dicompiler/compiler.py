"""The driver: compile() takes a model and a platform through the whole pipeline; run() and verify() use what it wrote.

model ──prepare──► layers ──strategy──► plan ──partition──► placed model ──cut──► program ──target──► directory
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler import plan as plans
from dicompiler.blame import ask, blamed, broken, is_foreign, judged
from dicompiler.compilation import Compilation, Decision
from dicompiler.costs import Analytic, CostModel
from dicompiler.errors import DicompilerError, UsageError
from dicompiler.limits import check, check_program
from dicompiler.lowering import sketch, split
from dicompiler.metrics import Metrics
from dicompiler.model import Model
from dicompiler.outputs import check_place, moved_in_whole
from dicompiler.passes import Instrument, PassManager
from dicompiler.plan import Plan
from dicompiler.platform import Platform, to_toml
from dicompiler.plugins import registry
from dicompiler.problem import Problem, Strategy, evaluate
from dicompiler.program import Program
from dicompiler.schema import load_json, validate
from dicompiler.target import Installed, RunOptions, RunResult, Target
from dicompiler.tiling import whole_plan

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from dicompiler.verify import Check, Verification

log = logging.getLogger("dicompiler")

DEFAULT_STRATEGY = "auto"
DEFAULT_TARGET = "sockets"
DEFAULT_COST = "analytic"
PREPARE = ("normalise", "infer-shapes", "form-layers")
QUANTISE = "quantise"
MANIFEST, PLAN, PLATFORM, REFERENCE = "artifact.json", "plan.json", "platform.toml", "reference/model.onnx"
MADE, MADE_FORMAT = "reference/made.json", "dicompiler.made/1"
KIND = "artifact"
TIMEOUT_S = 600.0


def compile(
    model: str | Path | bytes | onnx.ModelProto | Model,
    platform: str | Path | Platform | None = None,
    strategy: str | Strategy | None = None,
    plan: str | Path | Plan | None = None,
    target: str | Target = DEFAULT_TARGET,
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST,
    output: str | Path | None = None,
    shape: Sequence[str] = (),
    instruments: Sequence[Instrument] = (),
    calibrate: str | Path | None = None,
    executor: Executor | None = None,
) -> Compilation:
    """Splits `model` over `platform` as `plan` says or as `strategy` decides, and writes `output` where it is given.

    strategy, target, cost: specs such as "modnn" or instances. shape: "input=1x3x224x224" for dynamic dimensions.
    calibrate: an .npz file of samples with which the model is quantised first (see the pass `quantise`). executor: whom
    strategies that weigh many plans give that work, a ProcessPoolExecutor for instance. With `output` the memory that
    the target adds counts when plans are chosen.
    Returns the compilation with plan, program, metrics, and artifacts where written. Raises DicompilerError for what
    cannot be compiled, UsageError for unknown names; nothing is written then.
    """
    if strategy is not None and plan is not None:
        raise UsageError("compile: strategy and plan exclude each other: a plan needs no strategy")
    emitter: Target = registry().make("targets", target) if isinstance(target, str) else target
    decider: Strategy | None = None
    if plan is None:
        chosen = DEFAULT_STRATEGY if strategy is None else strategy
        decider = registry().make("strategies", chosen) if isinstance(chosen, str) else chosen
    if output is not None:
        check_place(Path(output), MANIFEST, KIND)  # before the work, and in the end once more
    compilation = prepare(Model.load(model), shape, instruments, calibrate)
    compilation = replace(compilation, platform=_platform(platform, decider))
    costs: CostModel = registry().make("cost_models", cost) if isinstance(cost, str) else cost
    runs = emitter if output is not None else None
    problem = replace(pose(compilation, objective, costs), executor=executor, target=runs)
    chosen_plan = decide(problem, decider, plan)
    log.info("splitting over %d devices", len(chosen_plan.devices))
    compilation = split(replace(compilation, plan=chosen_plan), instruments)
    if output is not None:
        compilation = occupy(compilation, problem)
        check_program(compilation, emitter)
    decision = Decision("" if decider is None else decider.name, objective, costs.name)
    compilation = replace(weigh(compilation, problem), decision=decision)
    return compilation if output is None else emit(compilation, emitter, Path(output))


def prepare(
    model: Model,
    shape: Sequence[str] = (),
    instruments: Sequence[Instrument] = (),
    calibrate: str | Path | None = None,
) -> Compilation:
    """Model → normalised, quantised where there are samples to calibrate it with, with shapes and layers."""
    from dicompiler.specs import Spec

    normalise, infer, form = PREPARE
    shapes = Spec.of(infer, {"shape": tuple(shape)})
    specs = [Spec.of(normalise, {}), shapes, Spec.of(form, {})]
    if calibrate is not None:  # what is quantised has static shapes before, and new tensors afterwards
        specs[1:2] = [shapes, Spec.of(QUANTISE, {"calibrate": str(calibrate)}), Spec.of(infer, {})]
    make = registry().make
    passes = [make("passes", spec) for spec in specs]
    return PassManager(passes, instruments).run(Compilation(model=model))


def load_problem(
    model: str | Path | bytes | onnx.ModelProto | Model,
    platform: str | Path | Platform | None,
    shape: Sequence[str] = (),
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST,
) -> Problem:
    """The problem of splitting `model` over `platform`, for those who call strategies themselves; see `compile`."""
    compilation = prepare(Model.load(model), shape)
    costs: CostModel = registry().make("cost_models", cost) if isinstance(cost, str) else cost
    return pose(replace(compilation, platform=_platform(platform, None)), objective, costs)


def _platform(given: str | Path | Platform | None, strategy: Strategy | None) -> Platform:
    families = [provided.value for provided in registry().platforms.values()]
    own = None
    if strategy is not None and given is None:
        with blamed(strategy):
            own = strategy.own_platform()
    if given is None and own is None:
        raise UsageError("compile: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)")
    return own if own is not None else Platform.load(given, families)  # type: ignore[arg-type]


def pose(compilation: Compilation, objective: str = "latency", cost: CostModel | None = None) -> Problem:
    """The problem that a prepared compilation on a platform is. UsageError for an unknown objective."""
    layers, platform = compilation.layers, compilation.platform
    assert layers is not None and platform is not None
    return Problem(layers, platform, cost or Analytic(), objective, model=compilation.model)


def decide(problem: Problem, strategy: Strategy | None, plan: str | Path | Plan | None) -> Plan:
    """The plan: the strategy's where there is one, else the one given.

    Raises DicompilerError for a plan of another network, with parts on a device without compute, or over a host's
    memory.
    """
    assert problem.model is not None
    digest = problem.model.digest()
    if strategy is not None:
        log.info("%s decides", strategy.name)
        chosen = replace(ask(strategy, problem), network=digest)
        if problem.cost.measured and not chosen.note:
            chosen = replace(chosen, note=f"it rests on the measurements of cost model {problem.cost.name!r}")
    else:
        chosen = plan if isinstance(plan, Plan) else plans.load(plan or "")
        if chosen.network and chosen.network != digest:
            raise DicompilerError(
                "plan: it was made for another network (its structure differs): make it anew with 'dicompiler plan'"
            )
    with nullcontext() if strategy is None else judged(strategy):
        check(problem, chosen)
    return chosen


def occupy(compilation: Compilation, problem: Problem) -> Compilation:
    """Adds what the program takes of RAM and flash by the target's measure, and what the uncut network would take on
    one device; nothing where the target has none."""
    assert problem.target is not None and compilation.program is not None
    if compilation.plan is not None and compilation.plan.replicas:
        return compilation
    occupied = problem.target.occupied(compilation.program)
    if not occupied:
        return compilation
    whole = whole_plan(problem.layers, problem.platform.fastest.name)
    single = problem.sketch(problem.plan(whole.layers)).program
    assert single is not None
    try:
        uncut = problem.target.occupied(single)
    except DicompilerError:  # too large for the target: no figure to compare with
        uncut = ()
    return replace(compilation, occupied=occupied, occupied_single=uncut)


def weigh(compilation: Compilation, problem: Problem) -> Compilation:
    """Adds the metrics of the program, by simulation, and those of the best single device beside them; warns where that
    one would be better."""
    metrics, single = evaluate(compilation, problem.cost, problem.target), single_device(problem)
    objective = problem.objective
    if metrics.value(objective) > single.value(objective):
        log.warning(
            "this plan's predicted %s is worse than that of one device alone (%.3g against %.3g; --strategy single)",
            objective,
            metrics.value(objective),
            single.value(objective),
        )
    return replace(compilation, metrics=metrics, single=single)


def single_device(problem: Problem) -> Metrics:
    """The metrics of the whole network on the fastest device, the candidate that every plan is reported beside. Nothing
    overlaps there: the estimate is what the simulator gives."""
    whole = whole_plan(problem.layers, problem.platform.fastest.name)
    return problem.estimate(problem.plan(whole.layers))


def emit(compilation: Compilation, target: Target, output: Path) -> Compilation:
    """Writes the artifact: the target's files, the plan, the platform, and the model to verify against."""
    assert compilation.plan is not None and compilation.platform is not None and compilation.reference is not None
    log.info("target %s writes %s", target.name, output)
    with moved_in_whole(output, MANIFEST, KIND) as stage:
        with blamed(target):
            target.emit(compilation, stage)
        _check_emitted(target, stage)
        (stage / PLAN).write_text(plans.dumps(compilation.plan), encoding="utf-8")
        (stage / PLATFORM).write_text(to_toml(compilation.platform), encoding="utf-8")
        (stage / REFERENCE).parent.mkdir()
        compilation.reference.save(stage / REFERENCE, external=True)
        if compilation.decision is not None:
            made = {"format": MADE_FORMAT, **asdict(compilation.decision)}
            (stage / MADE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return replace(compilation, artifacts=output)


def _check_emitted(target: Target, stage: Path) -> None:
    """The error of `blame.broken` where a third party's target left no artifact.json, or one of another target."""
    if not is_foreign(target):
        return
    if not (stage / MANIFEST).is_file():
        raise broken(target, f"emit() wrote no {MANIFEST}")
    try:
        document = load_json(stage / MANIFEST)
        validate(document, "artifact", MANIFEST)
    except DicompilerError as error:
        raise broken(target, str(error)) from error
    if document["target"] != target.name:
        raise broken(target, f"{MANIFEST}: target is {document['target']!r}: write {target.name!r} there")


def _started(
    target: Target, path: Path, frames: Sequence[Mapping[str, NDArray[Any]]], timeout: float, options: RunOptions
) -> RunResult:
    """What running an artifact gives."""
    with blamed(target):
        result: Any = target.run(path, frames, timeout, options)
    if not isinstance(result, RunResult):
        raise broken(target, f"run() returned {type(result).__name__} instead of a RunResult")
    kept = len(frames) if options.keep is None else min(options.keep, len(frames))
    if len(result.outputs) != kept:
        raise broken(target, f"run() returned outputs of {len(result.outputs)} frames: {kept} were to be kept")
    return result


def manifest(directory: Path) -> dict[str, Any]:
    """The artifact.json of an artifact. DicompilerError where there is none."""
    if not (directory / MANIFEST).is_file():
        raise DicompilerError(f"{directory}: no artifact of dicompiler: compile a model into it first")
    document: dict[str, Any] = load_json(directory / MANIFEST)
    validate(document, "artifact", str(directory / MANIFEST))
    return document


def _open(directory: str | Path) -> tuple[Path, Target, Model]:
    """An artifact: (its directory, the target that wrote it, the model it was made from)."""
    path = Path(directory)
    document = manifest(path)
    return path, registry().make("targets", document["target"]), Model.load(path / REFERENCE)


def reopen(directory: str | Path, cost: str = "") -> tuple[Compilation, Target, Problem]:
    """An artifact as the compilation that it was: layers, platform, plan, program and metrics are made again of the
    files in it (in less than a second or two), nothing is run.

    cost: the cost model; by default the one that it was compiled with, which must need no options then. DicompilerError
    names the file that is missing or broken.
    """
    path, target, model = _open(directory)
    made = load_json(path / MADE) if (path / MADE).is_file() else None
    if made is not None:
        validate(made, "made", str(path / MADE))
    decision = None if made is None else Decision(made["strategy"], made["objective"], made["cost"])
    try:
        costs = registry().make("cost_models", cost or (decision.cost if decision else DEFAULT_COST))
    except UsageError as error:
        if cost or decision is None:
            raise
        raise UsageError(
            f"{path}: it was compiled with cost model {decision.cost!r}: give it (--cost): {error}"
        ) from error
    compilation = prepare(model)
    compilation = replace(compilation, plan=plans.load(path / PLAN), platform=Platform.load(path / PLATFORM))
    problem = pose(compilation, decision.objective if decision else "latency", costs)
    compilation = sketch(compilation)
    single = single_device(problem)
    metrics = evaluate(compilation, costs)
    return replace(compilation, metrics=metrics, single=single, decision=decision, artifacts=path), target, problem


def run(
    directory: str | Path,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 1,
    timeout: float = TIMEOUT_S,
    options: RunOptions | None = None,
) -> RunResult:
    """Starts every device's program on this host and gives each of `frames` frames the same `inputs` (by name; by
    default seeded random ones), one after another unless `options` says otherwise. Raises RunError naming the device
    that failed."""
    from dicompiler.executor import check_inputs
    from dicompiler.verify import graph_inputs, random_inputs

    path, target, model = _open(directory)
    values = graph_inputs(model)
    given = check_inputs(values, random_inputs(values) if inputs is None else inputs)
    return _started(target, path, [given] * frames, timeout, options or RunOptions())


def install(directory: str | Path, options: RunOptions, timeout: float = TIMEOUT_S) -> tuple[Installed, ...]:
    """Copies an artifact to `options.hosts`, as far as they lack it, and checks that it can be run there; `run` with
    the same options then starts it there. RunError names the device, its host and the cause."""
    path, target, _ = _open(directory)
    with blamed(target):
        return target.install(path, options, timeout)


def verify(directory: str | Path, inputs: Mapping[str, NDArray[Any]] | None = None) -> Verification:
    """Verifies an artifact on both levels: exact check models in this process, then its real programs, run on this host
    and compared with onnxruntime; what its target checks itself; and that each transfer carried the bytes predicted."""
    from dicompiler.executor import check_inputs
    from dicompiler.verify import Verification, exact, graph_inputs, random_inputs, transfers

    path, target, model = _open(directory)
    plan, platform = plans.load(path / PLAN), Platform.load(path / PLATFORM)
    values = graph_inputs(model)
    given = check_inputs(values, random_inputs(values) if inputs is None else inputs)

    def program(variant: Model, whole: bool = False) -> Program:
        base = replace(prepare(variant), platform=platform)
        assert base.layers is not None
        chosen = whole_plan(base.layers, platform.fastest.name) if whole else plan
        result = split(replace(base, plan=chosen)).program
        assert result is not None
        return result

    log.info("check models, split by the same plan")
    checks = [exact(model, program)]
    log.info("the programs themselves, against onnxruntime")
    count = len(plan.roles)  # a frame of each
    result = _started(target, path, [given] * count, TIMEOUT_S, RunOptions())
    checks += _compared(model, given, result, count, target)
    with blamed(target):
        checks += target.proofs(model, lambda: program(model, whole=True), given, result)
    sent = {index: total for report in result.reports for index, total in report.sent.items()}
    checks.append(transfers(program(model).all_transfers, sent, 1, count))
    return Verification(tuple(checks))


def compare_run(
    directory: str | Path, result: RunResult, inputs: Mapping[str, NDArray[Any]] | None = None
) -> Verification:
    """Verifies the first frame (of each replica) of what `run` gave for these inputs: its outputs against those of
    onnxruntime."""
    from dicompiler.executor import check_inputs
    from dicompiler.verify import Verification, graph_inputs, random_inputs

    path, target, model = _open(directory)
    values = graph_inputs(model)
    given = check_inputs(values, random_inputs(values) if inputs is None else inputs)
    return Verification(tuple(_compared(model, given, result, len(plans.load(path / PLAN).roles), target)))


def _compared(
    model: Model, given: Mapping[str, NDArray[Any]], result: RunResult, roles: int, target: Target
) -> list[Check]:
    """A check for each output that a device delivered of the first frame of each role."""
    from dicompiler.executor import run_model
    from dicompiler.verify import compare

    reference, allowed = run_model(model, given), target.tolerances(model)
    frames = result.delivered or tuple({"": outputs} for outputs in result.outputs)
    return [
        compare(
            name + (f" on {device}" if device else "") + (f", replica {i}" if roles > 1 else ""),
            reference[name],
            outputs[name],
            allowed=allowed.get(name),
        )
        for i, delivered in enumerate(frames[:roles])
        for device, outputs in delivered.items()
        for name in outputs
    ]
