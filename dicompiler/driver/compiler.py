"""The driver: compile() takes a model and a platform through the whole pipeline; `driver.artifact` uses what it wrote.

model ──prepare──► layers ──strategy──► plan ──partition──► placed model ──cut──► program ──target──► directory
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.atomic import check_place, moved_in_whole
from dicompiler.base.collecting import no_collection
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.memory import MemoryUse
from dicompiler.cost.model import CostModel
from dicompiler.driver.asked import Shapes, asked, check_instruments, shape_texts
from dicompiler.driver.compiled import Compiled
from dicompiler.driver.prepare import DEFAULT_COST, DEFAULT_TARGET, platform_of, pose, prepare, sought
from dicompiler.driver.sending import agreed, calibrated, sending, tell_kept
from dicompiler.driver.summary import summarise
from dicompiler.ir import plan as plans
from dicompiler.ir.compilation import Compilation, Decision
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform, to_toml
from dicompiler.ir.wire import Wire
from dicompiler.partition.lowering import split
from dicompiler.partition.routing import route_on
from dicompiler.plugin.pass_manager import PassManager
from dicompiler.plugin.passes import Instrument
from dicompiler.plugin.registry import registry
from dicompiler.search.constraints import check_constraints, check_dealing, check_program
from dicompiler.search.losses import Survive, loss_metrics
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.search.survival import surviving
from dicompiler.target.interface import Target
from dicompiler.target.manifest import KIND, MADE, MADE_FORMAT, MANIFEST, PLAN, PLATFORM, REFERENCE
from dicompiler.target.seal import seal

if TYPE_CHECKING:
    import onnx


log = logging.getLogger("dicompiler")

DEFAULT_STRATEGY = "auto"
NOTABLY = 1.001
"""How many times what one device takes a plan takes that is warned of: less would read the same."""


@dataclass(frozen=True)
class Options:
    """What is asked of a compilation beside its model: the arguments of `compile`, by their names and defaults."""

    platform: str | Path | Platform | None = None
    strategy: str | Strategy | None = None
    plan: str | Path | Plan | None = None
    target: str | Target = DEFAULT_TARGET
    objective: str = "latency"
    cost: str | CostModel = DEFAULT_COST
    output: str | Path | None = None
    shape: Shapes = ()
    instruments: Sequence[Instrument] = ()
    calibrate: str | Path | None = None
    executor: Executor | None = None
    wire: str | Mapping[str, str] | Wire | None = None
    samples: str | Path | None = None
    survive: int | str | Survive = 0
    state: str | Sequence[str] = "auto"

    @cached_property
    def emitter(self) -> Target:
        """The target. UsageError for an unknown one."""
        target: Target = registry().adopt("targets", self.target)
        return target

    @cached_property
    def decider(self) -> Strategy | None:
        """Who decides; None where the plan is given. UsageError for an unknown strategy."""
        if self.plan is not None:
            return None
        strategy: Strategy = registry().adopt(
            "strategies", DEFAULT_STRATEGY if self.strategy is None else self.strategy
        )
        return strategy

    @cached_property
    def losses(self) -> Survive:
        """Which losses of devices are to be survived."""
        return Survive.of(self.survive)

    @cached_property
    def agreed(self) -> tuple[Plan | None, Wire]:
        """The plan that is given, and how tensors travel: see `sending.agreed`."""
        return agreed(self.plan, self.wire, self.samples)

    def check(self) -> None:
        """UsageError for what excludes each other, unknown names and values that cannot be, DicompilerError for a place
        that cannot be written: before the work."""
        if self.strategy is not None and self.plan is not None:
            raise UsageError("compile: strategy and plan exclude each other: a plan needs no strategy")
        check_instruments(self.instruments)
        _ = self.losses, self.emitter, self.decider
        if self.output is not None:
            check_place(Path(self.output), MANIFEST, KIND)  # and in the end once more
        given, _ = self.agreed
        if given is not None and given.losses and self.losses:
            raise UsageError("compile: the plan has plans for losses: leave out survive, or its 'losses'")


@asked
def compile(
    model: str | Path | bytes | onnx.ModelProto | Model,
    platform: str | Path | Platform | None = None,
    strategy: str | Strategy | None = None,
    plan: str | Path | Plan | None = None,
    target: str | Target = DEFAULT_TARGET,
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST,
    output: str | Path | None = None,
    shape: Shapes = (),
    instruments: Sequence[Instrument] = (),
    calibrate: str | Path | None = None,
    executor: Executor | None = None,
    wire: str | Mapping[str, str] | Wire | None = None,
    samples: str | Path | None = None,
    survive: int | str | Survive = 0,
    state: str | Sequence[str] = "auto",
    progress: Callable[[str], object] | None = None,  # noqa: ARG001 (`asked` calls it)
) -> Compiled:
    """Splits `model` over `platform` as `plan` says or as `strategy` decides, and writes `output` where it is given.

    strategy, target, cost: specs such as "modnn" or instances. shape: {"input": (1, 3, 224, 224)}, or as text
    "input=1x3x224x224", for dynamic dimensions. calibrate: an .npz file of samples with which the model is quantised
    first (see the pass `quantise`). executor: whom strategies that evaluate many plans give that work, see
    `open_executor`. wire: the type in which tensors travel, "float16" or {"*": "float16", "conv1": "float32"} (see
    `ir.wire`); by default the plan's, and as they are. samples: an .npz file of inputs, as for calibrate, that gives
    int8 on the wire its ranges. With `output` the memory that the target adds counts when plans are chosen. survive:
    which losses of devices the plan is to have plans for: of so many at most, "hosts" for each host's together, or
    "pi02,pi03"; beside a given plan, by the default strategy. state: "past*=present*", or several: graph inputs and
    outputs that devices keep from frame to frame; "auto": those of the usual names, "none": none (see the pass
    `keep-states`). progress: is told, a line each, what is being done; what it raises ends the compilation.
    Returns the compilation with plan, program, metrics, and artifacts where written. Raises DicompilerError for what
    cannot be compiled, UsageError for unknown names and values of other types; nothing is written then.
    """
    options = Options(platform, strategy, plan, target, objective, cost, output, shape, instruments, calibrate)
    options = replace(options, executor=executor, wire=wire, samples=samples, survive=survive, state=state)
    return compiled(model, options)


def compiled(model: str | Path | bytes | onnx.ModelProto | Model, options: Options) -> Compiled:
    """What `compile` gives."""
    options.check()
    compilation, problem = posed(Model.load(model), options)
    plan = planned(compilation, problem, options)
    compilation = divided(replace(compilation, plan=plan), options)
    memory: Mapping[str, MemoryUse] | None = None
    if options.output is not None:
        check_dealing(plan, options.emitter)
        compilation, memory = occupy(compilation, problem), problem.memory(compilation)
        check_program(compilation, memory, options.emitter)
    compilation = predicted(compilation, problem, options, memory)
    if options.output is not None:
        compilation = emit(compilation, options.emitter, Path(options.output))
    return Compiled.of(compilation, problem)


def posed(model: Model, options: Options) -> tuple[Compilation, Problem]:
    """The model with its layers, on the platform, and what is to be decided."""
    shapes, states = shape_texts(options.shape), sought(options.state, options.emitter)
    compilation = prepare(model, shapes, options.instruments, options.calibrate, states)
    compilation = sending(compilation, options.agreed[1])
    compilation = replace(compilation, platform=platform_of(options.platform, options.decider))
    costs: CostModel = registry().adopt("cost_models", options.cost)
    problem = pose(compilation, options.objective, costs, options.emitter)
    runs = None if options.output is None else options.emitter
    problem = replace(problem, executor=options.executor, target=runs)
    options.losses.check(problem.platform)
    return compilation, problem


def planned(compilation: Compilation, problem: Problem, options: Options) -> Plan:
    """The plan, with plans for losses and ranges of what travels where they are asked for."""
    decider = options.decider
    plan = decide(problem, decider, options.agreed[0])
    if options.losses:
        others = decider or registry().make("strategies", DEFAULT_STRATEGY)
        plan = surviving(problem, others, plan, options.losses, fixed=decider is None)
    if decider is not None:
        plan = read_alone(problem, plan)
    if options.samples is not None:
        plan = calibrated(replace(compilation, plan=plan), Path(options.samples))
    return plan


def divided(compilation: Compilation, options: Options) -> Compilation:
    """The compilation with the program of its plan, under the eyes of the instruments; tells what devices keep."""
    assert compilation.plan is not None
    log.info("splitting over %d devices", len(compilation.plan.devices))
    partition = registry().make("passes", "partition" if options.decider is None else "partition{quiet=true}")
    watched = PassManager([partition], options.instruments)
    with no_collection():
        compilation = split(compilation, watched.run)
    tell_kept(compilation)
    return compilation


def decide(problem: Problem, strategy: Strategy | None, plan: Plan | None) -> Plan:
    """The plan: the strategy's where there is one, else the one given.

    Raises DicompilerError for a plan of another network, with parts on a device without compute, or over a host's
    memory.
    """
    assert problem.model is not None
    digest = problem.model.digest()
    if strategy is not None:
        log.info("%s decides", strategy.name)
        chosen = replace(strategy.plan(problem), network=digest, wire=Wire(problem.layers.wire))
        if problem.cost.measured and not chosen.note:
            chosen = replace(chosen, note=f"it rests on the measurements of cost model {problem.cost.name!r}")
        strategy.check_feasible(problem, chosen)
        return chosen
    assert plan is not None
    if plan.network and plan.network != digest:
        raise DicompilerError(
            "plan: it was made for another network (its structure differs): make it anew with 'dicompiler plan'"
        )
    check_constraints(problem, plan)
    return plan


def read_alone(problem: Problem, plan: Plan) -> Plan:
    """The plan, and its plans for losses, without the parts that nobody reads; those of partial sums stay."""
    dropped = set(route_on(problem.platform, problem.layers, replace(plan, losses=())).dropped)
    layers = {
        name: parts
        if any(part.reduce for part in parts)
        else tuple(part for i, part in enumerate(parts) if (name, i) not in dropped) or parts
        for name, parts in plan.layers.items()
    }
    losses = tuple(replace(loss, plan=read_alone(problem, loss.plan)) for loss in plan.losses)
    return replace(plan, layers=layers, losses=losses)


def occupy(compilation: Compilation, problem: Problem) -> Compilation:
    """Adds what the program takes of RAM and flash by the target's measure, and what the uncut network would take on
    one device; nothing where the target has none."""
    assert problem.target is not None and compilation.program is not None
    if compilation.plan is not None and compilation.plan.replicas:
        return compilation
    occupied = problem.target.occupied(compilation.program)
    if not occupied:
        return compilation
    single = problem.sketch(problem.alone[0]).program
    assert single is not None
    try:
        alone = problem.target.occupied(single)
    except DicompilerError:  # too large for the target: no figure to compare with
        alone = ()
    return replace(compilation, occupied=occupied, occupied_single=alone)


def predicted(
    compilation: Compilation, problem: Problem, options: Options, memory: Mapping[str, MemoryUse] | None
) -> Compilation:
    """Adds who decided, the metrics of the program by simulation (memory: see `Problem.metrics`), of the plans for
    losses, and those of the best single device beside them; warns where that one would be better."""
    assert compilation.plan is not None
    with no_collection():
        metrics, single = problem.metrics(compilation, memory), problem.alone[1]
    objective, decider = problem.objective, options.decider
    if metrics.value(objective) > NOTABLY * single.value(objective):
        log.warning(
            "this plan's predicted %s is worse than that of one device alone (%.3g against %.3g; --strategy single)",
            objective,
            metrics.value(objective),
            single.value(objective),
        )
    if doubt := metrics.doubt(single, objective):
        log.warning("this plan is predicted to be %s", doubt)
    name, origin = ("", "") if decider is None else (decider.name, compilation.plan.chosen)
    decision = Decision(name, objective, problem.cost.name, origin)
    losses = loss_metrics(problem, compilation.plan)
    return replace(compilation, metrics=metrics, single=single, decision=decision, losses=losses)


def emit(compilation: Compilation, target: Target, output: Path) -> Compilation:
    """Writes the artifact: the target's files, the plan, the platform, and the model to verify against."""
    assert compilation.plan is not None and compilation.platform is not None and compilation.reference is not None
    from dicompiler.verify.tables import looked_up

    log.info("target %s writes %s", target.name, output)
    with moved_in_whole(output, MANIFEST, KIND) as stage:
        target.emit(compilation, stage)
        (stage / PLAN).write_text(plans.dumps(compilation.plan), encoding="utf-8")
        (stage / PLATFORM).write_text(to_toml(compilation.platform), encoding="utf-8")
        (stage / REFERENCE).parent.mkdir()
        compilation.reference.save(stage / REFERENCE, external=True)
        (stage / MADE).write_text(json.dumps(made(compilation, target), indent=1) + "\n", encoding="utf-8")
        rows = looked_up(compilation.reference, [value.name for value in compilation.reference.proto.graph.input])
        seal(stage, {"rows": rows} if rows else {})
    return replace(compilation, written=output)


def made(compilation: Compilation, target: Target) -> dict[str, Any]:
    """How the plan came about, and what it is predicted to come to; see the schema made."""
    decision, metrics, single = compilation.decision, compilation.metrics, compilation.single
    assert decision is not None and metrics is not None and single is not None
    document = {"format": MADE_FORMAT, **asdict(decision), "target": str(target.spec)}
    if not decision.chosen:
        del document["chosen"]
    return {**document, "summary": summarise(compilation, decision, metrics, single).document()}
