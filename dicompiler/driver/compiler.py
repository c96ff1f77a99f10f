"""The driver: compile() takes a model and a platform through the whole pipeline; `driver.artifact` uses what it wrote.

model ──prepare──► layers ──strategy──► plan ──partition──► placed model ──cut──► program ──target──► directory
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.atomic import check_place, moved_in_whole
from dicompiler.base.collecting import no_collection
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.memory import MemoryUse
from dicompiler.cost.model import CostModel
from dicompiler.driver.asked import Shapes, asked, shape_texts
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
    "input=1x3x224x224", for dynamic dimensions.
    calibrate: an .npz file of samples with which the model is quantised first (see the pass `quantise`). executor: whom
    strategies that evaluate many plans give that work, see `open_executor`. wire: the type in which
    tensors travel, "float16" or {"*": "float16", "conv1": "float32"} (see `ir.wire`); by default the plan's, and as
    they are. samples: an .npz file of inputs, as for calibrate, that gives int8 on the wire its ranges. With `output`
    the memory that the target adds counts when plans are chosen. survive: which losses of devices the plan is to have
    plans for: of so many at most, "hosts" for each host's together, or "pi02,pi03"; beside a given plan, by the default
    strategy. state: "past*=present*", or several: graph inputs and outputs that devices keep from frame to frame;
    "auto": those of the usual names, "none": none (see the pass `keep-states`). progress: is told, a line
    each, what is being done; what it raises ends the compilation.
    Returns the compilation with plan, program, metrics, and artifacts where written. Raises DicompilerError for what
    cannot be compiled, UsageError for unknown names and values of other types; nothing is written then.
    """
    if strategy is not None and plan is not None:
        raise UsageError("compile: strategy and plan exclude each other: a plan needs no strategy")
    wanted = Survive.of(survive)
    known = registry()
    emitter: Target = known.adopt("targets", target)
    decider: Strategy | None = None
    if plan is None:
        decider = known.adopt("strategies", DEFAULT_STRATEGY if strategy is None else strategy)
    if output is not None:
        check_place(Path(output), MANIFEST, KIND)  # before the work, and in the end once more
    given, sent = agreed(plan, wire, samples)
    if given is not None and given.losses and wanted:
        raise UsageError("compile: the plan has plans for losses: leave out survive, or its 'losses'")
    given_shapes, wanted_states = shape_texts(shape), sought(state, emitter)
    compilation = sending(prepare(Model.load(model), given_shapes, instruments, calibrate, wanted_states), sent)
    compilation = replace(compilation, platform=platform_of(platform, decider))
    costs: CostModel = known.adopt("cost_models", cost)
    runs = emitter if output is not None else None
    problem = replace(pose(compilation, objective, costs, emitter), executor=executor, target=runs)
    wanted.check(problem.platform)
    chosen_plan = decide(problem, decider, given)
    if wanted:
        others = decider or known.make("strategies", DEFAULT_STRATEGY)
        chosen_plan = surviving(problem, others, chosen_plan, wanted, fixed=decider is None)
    if decider is not None:
        chosen_plan = read_alone(problem, chosen_plan)
    if samples is not None:
        chosen_plan = calibrated(replace(compilation, plan=chosen_plan), Path(samples))
    log.info("splitting over %d devices", len(chosen_plan.devices))
    watched = PassManager([known.make("passes", "partition{quiet=true}" if decider else "partition")], instruments)
    with no_collection():
        compilation = split(replace(compilation, plan=chosen_plan), watched.run)
    tell_kept(compilation)
    memory: Mapping[str, MemoryUse] | None = None
    if output is not None:
        check_dealing(chosen_plan, emitter)
        compilation, memory = occupy(compilation, problem), problem.memory(compilation)
        check_program(compilation, memory, emitter)
    name, origin = ("", "") if decider is None else (decider.name, chosen_plan.chosen)
    decision = Decision(name, objective, costs.name, origin)
    compilation = replace(predicted(compilation, problem, memory), decision=decision)
    compilation = replace(compilation, losses=loss_metrics(problem, chosen_plan))
    return Compiled.of(compilation if output is None else emit(compilation, emitter, Path(output)), problem)


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


def predicted(compilation: Compilation, problem: Problem, memory: Mapping[str, MemoryUse] | None) -> Compilation:
    """Adds the metrics of the program, by simulation (memory: see `Problem.metrics`), and those of the best single
    device beside them; warns where that one would be better."""
    with no_collection():
        metrics, single = problem.metrics(compilation, memory), problem.alone[1]
    objective = problem.objective
    if metrics.value(objective) > NOTABLY * single.value(objective):
        log.warning(
            "this plan's predicted %s is worse than that of one device alone (%.3g against %.3g; --strategy single)",
            objective,
            metrics.value(objective),
            single.value(objective),
        )
    if doubt := metrics.doubt(single, objective):
        log.warning("this plan is predicted to be %s", doubt)
    return replace(compilation, metrics=metrics, single=single)


def emit(compilation: Compilation, target: Target, output: Path) -> Compilation:
    """Writes the artifact: the target's files, the plan, the platform, and the model to verify against."""
    assert compilation.plan is not None and compilation.platform is not None and compilation.reference is not None
    log.info("target %s writes %s", target.name, output)
    with moved_in_whole(output, MANIFEST, KIND) as stage:
        target.emit(compilation, stage)
        (stage / PLAN).write_text(plans.dumps(compilation.plan), encoding="utf-8")
        (stage / PLATFORM).write_text(to_toml(compilation.platform), encoding="utf-8")
        (stage / REFERENCE).parent.mkdir()
        compilation.reference.save(stage / REFERENCE, external=True)
        (stage / MADE).write_text(json.dumps(made(compilation, target), indent=1) + "\n", encoding="utf-8")
        seal(stage)
    return replace(compilation, written=output)


def made(compilation: Compilation, target: Target) -> dict[str, Any]:
    """How the plan came about, and what it is predicted to come to; see the schema made."""
    decision, metrics, single = compilation.decision, compilation.metrics, compilation.single
    assert decision is not None and metrics is not None and single is not None
    document = {"format": MADE_FORMAT, **asdict(decision), "target": str(target.spec)}
    if not decision.chosen:
        del document["chosen"]
    return {**document, "summary": summarise(compilation, decision, metrics, single).document()}
