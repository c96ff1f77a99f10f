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

from dicompiler.base.atomic_output import atomic_directory, check_output_directory
from dicompiler.base.collecting import gc_paused
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.memory import MemoryUse
from dicompiler.driver.compile_result import CompileResult
from dicompiler.driver.compile_summary import summarize
from dicompiler.driver.prepare import (
    DEFAULT_COST_MODEL,
    DEFAULT_TARGET,
    make_problem,
    prepare,
    resolve_platform,
    resolve_states,
)
from dicompiler.driver.validate_args import Shapes, check_instruments, format_shapes, validate_arguments
from dicompiler.driver.wire_types import apply_wire_types, measure_wire_ranges, resolve_wire_types, warn_not_narrowed
from dicompiler.ir import plan as plans
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.partition.lowering import lower
from dicompiler.partition.routing import route_on_platform
from dicompiler.plugin.pass_base import Instrument
from dicompiler.plugin.pass_manager import PassManager
from dicompiler.plugin.registry import registry
from dicompiler.search.constraints import check_constraints, check_program_memory, check_target_support
from dicompiler.search.failover_planning import add_failover_plans
from dicompiler.search.failure_cases import FailureSelection, failure_metrics
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.target.integrity import write_integrity
from dicompiler.target.manifest import (
    ARTIFACT_FILE,
    ARTIFACT_NOUN,
    PLAN_FILE,
    PLATFORM_FILE,
    PROVENANCE_FILE,
    PROVENANCE_FORMAT,
    REFERENCE_FILE,
)
from dicompiler.target.target_base import Target

if TYPE_CHECKING:
    import onnx


log = logging.getLogger("dicompiler")

DEFAULT_STRATEGY = "auto"
MIN_WARNED_SLOWDOWN = 1.001
"""How many times what one device takes a plan takes that is warned of: less would read the same."""


@dataclass(frozen=True)
class CompileOptions:
    """What is asked of a compilation beside its model: the arguments of `compile`, by their names and defaults."""

    platform: str | Path | Platform | None = None
    strategy: str | Strategy | None = None
    plan: str | Path | Plan | None = None
    target: str | Target = DEFAULT_TARGET
    objective: str = "latency"
    cost: str | CostModel = DEFAULT_COST_MODEL
    output: str | Path | None = None
    shape: Shapes = ()
    instruments: Sequence[Instrument] = ()
    quantize_samples: str | Path | None = None
    executor: Executor | None = None
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None
    wire_samples: str | Path | None = None
    tolerate_failures: int | str | FailureSelection = 0
    state: str | Sequence[str] = "auto"

    @cached_property
    def resolved_target(self) -> Target:
        """The target. UsageError for an unknown one."""
        target: Target = registry().resolve("targets", self.target)
        return target

    @cached_property
    def resolved_strategy(self) -> Strategy | None:
        """Who decides; None where the plan is given. UsageError for an unknown strategy."""
        if self.plan is not None:
            return None
        strategy: Strategy = registry().resolve(
            "strategies", DEFAULT_STRATEGY if self.strategy is None else self.strategy
        )
        return strategy

    @cached_property
    def failure_selection(self) -> FailureSelection:
        """Which losses of devices are to be survived."""
        return FailureSelection.parse(self.tolerate_failures)

    @cached_property
    def plan_and_wire(self) -> tuple[Plan | None, WireFormat]:
        """The plan that is given, and how tensors travel: see `sending.agreed`."""
        return resolve_wire_types(self.plan, self.wire_dtype, self.wire_samples)

    def check(self) -> None:
        """UsageError for what excludes each other, unknown names and values that cannot be, DicompilerError for a place
        that cannot be written: before the work."""
        if self.strategy is not None and self.plan is not None:
            raise UsageError("compile: strategy and plan exclude each other: a plan needs no strategy")
        check_instruments(self.instruments)
        _ = self.failure_selection, self.resolved_target, self.resolved_strategy
        if self.output is not None:
            check_output_directory(Path(self.output), ARTIFACT_FILE, ARTIFACT_NOUN)  # and in the end once more
        given, _ = self.plan_and_wire
        if given is not None and given.failures and self.failure_selection:
            raise UsageError("compile: the plan has plans for losses: leave out survive, or its 'losses'")


@validate_arguments
def compile(
    model: str | Path | bytes | onnx.ModelProto | Model,
    platform: str | Path | Platform | None = None,
    strategy: str | Strategy | None = None,
    plan: str | Path | Plan | None = None,
    target: str | Target = DEFAULT_TARGET,
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST_MODEL,
    output: str | Path | None = None,
    shape: Shapes = (),
    instruments: Sequence[Instrument] = (),
    quantize_samples: str | Path | None = None,
    executor: Executor | None = None,
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None,
    wire_samples: str | Path | None = None,
    tolerate_failures: int | str | FailureSelection = 0,
    state: str | Sequence[str] = "auto",
    progress: Callable[[str], object] | None = None,  # noqa: ARG001 (`asked` calls it)
) -> CompileResult:
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
    options = CompileOptions(
        platform, strategy, plan, target, objective, cost, output, shape, instruments, quantize_samples
    )
    options = replace(
        options,
        executor=executor,
        wire_dtype=wire_dtype,
        wire_samples=wire_samples,
        tolerate_failures=tolerate_failures,
        state=state,
    )
    return run_pipeline(model, options)


def run_pipeline(model: str | Path | bytes | onnx.ModelProto | Model, options: CompileOptions) -> CompileResult:
    """What `compile` gives."""
    options.check()
    compilation, problem = build_problem(Model.load(model), options)
    plan = make_plan(compilation, problem, options)
    compilation = partition_model(replace(compilation, plan=plan), options)
    memory: Mapping[str, MemoryUse] | None = None
    if options.output is not None:
        check_target_support(plan, options.resolved_target)
        compilation, memory = measure_memory(compilation, problem), problem.program_memory_use(compilation)
        check_program_memory(compilation, memory, options.resolved_target)
    compilation = add_metrics(compilation, problem, options, memory)
    if options.output is not None:
        compilation = write_artifact(compilation, options.resolved_target, Path(options.output))
    return CompileResult.from_state(compilation, problem)


def build_problem(model: Model, options: CompileOptions) -> tuple[PipelineState, Problem]:
    """The model with its layers, on the platform, and what is to be decided."""
    shapes, states = format_shapes(options.shape), resolve_states(options.state, options.resolved_target)
    compilation = prepare(model, shapes, options.instruments, options.quantize_samples, states)
    compilation = apply_wire_types(compilation, options.plan_and_wire[1])
    compilation = replace(compilation, platform=resolve_platform(options.platform, options.resolved_strategy))
    costs: CostModel = registry().resolve("cost_models", options.cost)
    problem = make_problem(compilation, options.objective, costs, options.resolved_target)
    runs = None if options.output is None else options.resolved_target
    problem = replace(problem, executor=options.executor, target=runs)
    options.failure_selection.check_platform(problem.platform)
    return compilation, problem


def make_plan(compilation: PipelineState, problem: Problem, options: CompileOptions) -> Plan:
    """The plan, with plans for losses and ranges of what travels where they are asked for."""
    decider = options.resolved_strategy
    plan = choose_plan(problem, decider, options.plan_and_wire[0])
    if options.failure_selection:
        others = decider or registry().make("strategies", DEFAULT_STRATEGY)
        plan = add_failover_plans(problem, others, plan, options.failure_selection, plan_is_fixed=decider is None)
    if decider is not None:
        plan = drop_unread_parts(problem, plan)
    if options.wire_samples is not None:
        plan = measure_wire_ranges(replace(compilation, plan=plan), Path(options.wire_samples))
    return plan


def partition_model(compilation: PipelineState, options: CompileOptions) -> PipelineState:
    """The compilation with the program of its plan, under the eyes of the instruments; tells what devices keep."""
    assert compilation.plan is not None
    log.info("splitting over %d devices", len(compilation.plan.devices))
    partition = registry().make("passes", "partition" if options.resolved_strategy is None else "partition{quiet=true}")
    watched = PassManager([partition], options.instruments)
    with gc_paused():
        compilation = lower(compilation, watched.run)
    warn_not_narrowed(compilation)
    return compilation


def choose_plan(problem: Problem, strategy: Strategy | None, plan: Plan | None) -> Plan:
    """The plan: the strategy's where there is one, else the one given.

    Raises DicompilerError for a plan of another network, with parts on a device without compute, or over a host's
    memory.
    """
    assert problem.model is not None
    digest = problem.model.digest()
    if strategy is not None:
        log.info("%s decides", strategy.name)
        chosen = replace(
            strategy.plan(problem), model_digest=digest, wire_format=WireFormat(problem.layers.wire_dtypes)
        )
        if problem.cost_model.is_measured and not chosen.note:
            chosen = replace(chosen, note=f"it rests on the measurements of cost model {problem.cost_model.name!r}")
        strategy.check_feasible(problem, chosen)
        return chosen
    assert plan is not None
    if plan.model_digest and plan.model_digest != digest:
        raise DicompilerError(
            "plan: it was made for another network (its structure differs): make it anew with 'dicompiler plan'"
        )
    check_constraints(problem, plan)
    return plan


def drop_unread_parts(problem: Problem, plan: Plan) -> Plan:
    """The plan, and its plans for losses, without the parts that nobody reads; those of partial sums stay."""
    dropped = set(route_on_platform(problem.platform, problem.layers, replace(plan, failures=())).dropped_tasks)
    layers = {
        name: parts
        if any(part.reduce for part in parts)
        else tuple(part for i, part in enumerate(parts) if (name, i) not in dropped) or parts
        for name, parts in plan.layers.items()
    }
    losses = tuple(replace(loss, plan=drop_unread_parts(problem, loss.plan)) for loss in plan.failures)
    return replace(plan, layers=layers, failures=losses)


def measure_memory(compilation: PipelineState, problem: Problem) -> PipelineState:
    """Adds what the program takes of RAM and flash by the target's measure, and what the uncut network would take on
    one device; nothing where the target has none."""
    assert problem.target is not None and compilation.program is not None
    if compilation.plan is not None and compilation.plan.replicas:
        return compilation
    occupied = problem.target.device_footprints(compilation.program)
    if not occupied:
        return compilation
    single = problem.draft_program(problem.best_single_device[0]).program
    assert single is not None
    try:
        alone = problem.target.device_footprints(single)
    except DicompilerError:  # too large for the target: no figure to compare with
        alone = ()
    return replace(compilation, footprints=occupied, single_device_footprints=alone)


def add_metrics(
    compilation: PipelineState, problem: Problem, options: CompileOptions, memory: Mapping[str, MemoryUse] | None
) -> PipelineState:
    """Adds who decided, the metrics of the program by simulation (memory: see `Problem.metrics`), of the plans for
    losses, and those of the best single device beside them; warns where that one would be better."""
    assert compilation.plan is not None
    with gc_paused():
        metrics, single = problem.program_metrics(compilation, memory), problem.best_single_device[1]
    objective, decider = problem.objective, options.resolved_strategy
    if metrics.objective_value(objective) > MIN_WARNED_SLOWDOWN * single.objective_value(objective):
        log.warning(
            "this plan's predicted %s is worse than that of one device alone (%.3g against %.3g; --strategy single)",
            objective,
            metrics.objective_value(objective),
            single.objective_value(objective),
        )
    if doubt := metrics.describe_implausible_gain(single, objective):
        log.warning("this plan is predicted to be %s", doubt)
    name, origin = ("", "") if decider is None else (decider.name, compilation.plan.chosen_strategy)
    decision = Decision(name, objective, problem.cost_model.name, origin)
    losses = failure_metrics(problem, compilation.plan)
    return replace(
        compilation, metrics=metrics, single_device_metrics=single, decision=decision, failure_metrics=losses
    )


def write_artifact(compilation: PipelineState, target: Target, output: Path) -> PipelineState:
    """Writes the artifact: the target's files, the plan, the platform, and the model to verify against."""
    assert compilation.plan is not None and compilation.platform is not None and compilation.reference is not None
    from dicompiler.verify.lookup_tables import find_lookup_tables

    log.info("target %s writes %s", target.name, output)
    with atomic_directory(output, ARTIFACT_FILE, ARTIFACT_NOUN) as stage:
        target.emit(compilation, stage)
        (stage / PLAN_FILE).write_text(plans.dumps(compilation.plan), encoding="utf-8")
        (stage / PLATFORM_FILE).write_text(platform_to_toml(compilation.platform), encoding="utf-8")
        (stage / REFERENCE_FILE).parent.mkdir()
        compilation.reference.save(stage / REFERENCE_FILE, external=True)
        (stage / PROVENANCE_FILE).write_text(
            json.dumps(provenance_document(compilation, target), indent=1) + "\n", encoding="utf-8"
        )
        rows = find_lookup_tables(
            compilation.reference, [value.name for value in compilation.reference.proto.graph.input]
        )
        write_integrity(stage, {"rows": rows} if rows else {})
    return replace(compilation, artifact_directory=output)


def provenance_document(compilation: PipelineState, target: Target) -> dict[str, Any]:
    """How the plan came about, and what it is predicted to come to; see the schema made."""
    decision, metrics, single = compilation.decision, compilation.metrics, compilation.single_device_metrics
    assert decision is not None and metrics is not None and single is not None
    document = {"format": PROVENANCE_FORMAT, **asdict(decision), "target": str(target.spec)}
    if not decision.chosen_strategy:
        del document["chosen_strategy"]
    return {**document, "summary": summarize(compilation, decision, metrics, single).document()}
