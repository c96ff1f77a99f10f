"""`dicompiler.compile`: the steps from a model and a platform to programs for the devices.

Each step is a function of this module:

1. `resolve_options` checks the options, and creates the strategy, cost model and target that strings describe.
2. `prepare_model` loads the model and forms its layers.
3. `build_problem` combines the layers, the platform and the cost model.
4. `plan_and_choose_engines` assigns regions of each layer's output to devices, and layers to engines.
5. `lower_plan` splits the model by the plan.
6. `check_program` checks that the target supports the program, and that the memory of each device suffices.
7. `add_metrics` predicts times.
8. `write_artifact` writes the programs to a directory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from dicompiler.base.atomic_output import atomic_directory, check_output_directory
from dicompiler.base.errors import DicompilerError, UsageError, check_type
from dicompiler.base.objectives import format_objective
from dicompiler.base.process import forward_progress, gc_paused
from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.memory import MemoryUse
from dicompiler.driver.compile_options import (
    DEFAULT_STRATEGY,
    CompileOptions,
    ModelSource,
    check_instruments,
    format_shapes,
    takes_fields_of,
)
from dicompiler.driver.compile_result import CompileResult, summarize
from dicompiler.driver.engine_choice import PlannedProblem, choose_plan_and_engines, with_layer_engines
from dicompiler.driver.engines import (
    AUTO_ENGINE,
    check_engine,
    check_precision,
    choose_engines,
    plan_with_engines,
    split_program,
)
from dicompiler.driver.prepare import (
    apply_wire_types,
    check_loadable,
    measure_wire_ranges,
    prepare,
    resolve_platform,
    resolve_states,
    resolve_wire_types,
    warn_not_narrowed,
)
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir import plan as plans
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.partition.lowering import build_programs, role_states
from dicompiler.partition.routing import route_on_platform
from dicompiler.plugin.pass_manager import PassManager
from dicompiler.plugin.registry import registry
from dicompiler.search.constraints import (
    check_constraints,
    check_plan_devices,
    check_program_memory,
    check_target_support,
    used_memory,
)
from dicompiler.search.failover_planning import add_failover_plans
from dicompiler.search.failure_cases import FailureSelection, failure_metrics
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import INTERRUPTED_NOTE, Strategy
from dicompiler.search.work_budget import BUDGET_NOTE
from dicompiler.target.artifact_lock import is_used
from dicompiler.target.manifest import (
    ARTIFACT_FILE,
    ARTIFACT_NOUN,
    PLAN_FILE,
    PLATFORM_FILE,
    PROVENANCE_FILE,
    PROVENANCE_FORMAT,
    REFERENCE_FILE,
    write_digests_and_checksum,
)
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

MIN_WARNED_SLOWDOWN = 1.001
"""A warning is logged if a plan is worse than one device by more than this factor.

The rounded numbers in the warning would not show smaller differences.
"""


@takes_fields_of(CompileOptions)
def compile(model: ModelSource, options: CompileOptions) -> CompileResult:
    """Compile a model into programs for the devices of a platform.

    Give the options as arguments, one for each field of `CompileOptions`:

        result = dicompiler.compile("model.onnx", platform="rpi4x4", strategy="dp", output="build")

    Args:
        model: The path of an ONNX file, its bytes, a ModelProto or a Model.
        options: The fields of `CompileOptions` as keyword arguments; platform and strategy may be positional.

    Returns:
        The plan, the programs and their predicted metrics. If `output` is given, the artifact has been written.

    Raises:
        DicompilerError: The model cannot be compiled for the platform. Nothing is written.
        UsageError: An option is not valid. Nothing is written.
    """
    return compile_with_options(model, options)


@takes_fields_of(CompileOptions)
def plan(model: ModelSource, options: CompileOptions) -> CompileResult:
    """Make a plan for a model and predict its metrics, without writing an artifact.

    The options are those of `compile`, except `output`. `result.plan` is the plan; `compile` can use it.

    Args:
        model: The path of an ONNX file, its bytes, a ModelProto or a Model.
        options: The fields of `CompileOptions` as keyword arguments; platform and strategy may be positional.

    Returns:
        The plan, the programs and their predicted metrics.

    Raises:
        DicompilerError: The strategy finds no plan for the platform.
        UsageError: An option is not valid.
    """
    if options.output is not None:
        raise UsageError("plan: output: plan() writes no artifact: call compile(), or omit output")
    return compile_with_options(model, options)


def compile_with_options(model: ModelSource, options: CompileOptions) -> CompileResult:
    """Compile a model as `compile` and `plan` do. Without the option `output`, no artifact is written."""
    with forward_progress(options.progress), plans.plan_file_in_errors(options.plan):
        setup = resolve_options(model, options)
        compilation = prepare_model(setup)
        problem = build_problem(compilation, setup)
        compilation, problem = plan_and_choose_engines(compilation, problem, setup)
        compilation = lower_plan(compilation, setup)
        compilation, memory = check_program(compilation, problem, setup)
        compilation = add_metrics(compilation, problem, memory, setup)
        if setup.output is not None:
            compilation = write_artifact(compilation, setup.target, setup.output)
    return CompileResult.from_state(compilation, problem, memory)


@dataclass(frozen=True)
class CompileSetup:
    """The options of a compilation, with the objects that they describe.

    Attributes:
        options: The options as the caller gave them.
        model: The path or the content of the model.
        strategy: The strategy that makes the plan; None if the caller gave a plan.
        given_plan: The plan that the caller gave; None if a strategy makes it.
        wire_format: Element types in which tensors are sent.
        failures: Device failures for which plans for the remaining devices are made.
        shapes: Shapes of inputs, such as "input=1x3x224x224".
        states: Graph inputs and outputs that devices keep between frames, such as "past*=present*", "auto" or "none".
        output: Directory to write the artifact to; None to write nothing.
    """

    options: CompileOptions
    model: ModelSource
    platform: Platform
    strategy: Strategy | None
    given_plan: Plan | None
    target: Target
    cost_model: CostModel
    wire_format: WireFormat
    failures: FailureSelection
    shapes: tuple[str, ...]
    states: tuple[str, ...]
    output: Path | None


def resolve_options(model: ModelSource, options: CompileOptions) -> CompileSetup:
    """Check all options of a compilation before any work is done, and create the objects that they describe."""
    expected = "the path of an ONNX file, its bytes or a ModelProto"
    check_type(model, (str, Path, bytes, onnx.ModelProto, Model), "compile: model", expected)
    if options.strategy is not None and options.plan is not None:
        raise UsageError("compile: strategy and plan are both given: remove one of them")
    check_instruments(options.instruments)
    failures = FailureSelection.parse(options.tolerate_failures)
    target: Target = registry().resolve("targets", options.target)
    check_engine(options.engine, target)
    check_precision(options.precision, options.engine)
    strategy: Strategy | None = None
    if options.plan is None:
        given = DEFAULT_STRATEGY if options.strategy is None else options.strategy
        strategy = registry().resolve("strategies", given)
    output = None if options.output is None else Path(options.output)
    if output is not None:
        check_output_directory(output, ARTIFACT_FILE, ARTIFACT_NOUN)
    given_plan, wire_format = resolve_wire_types(options.plan, options.wire_dtype, options.wire_samples)
    if given_plan is not None and given_plan.failures and failures:
        raise UsageError(
            "compile: the plan already contains failure plans: omit tolerate_failures, or delete the plan's 'failures'"
        )
    platform = resolve_platform(options.platform, strategy)
    failures.check_platform(platform)
    if given_plan is not None:
        check_plan_devices(platform, given_plan)
        for name, engine in given_plan.engines.items():
            check_engine(engine, target, f"plan: engines.{name}")
    return CompileSetup(
        options,
        model,
        platform,
        strategy,
        given_plan,
        target,
        registry().resolve("cost_models", options.cost),
        wire_format,
        failures,
        format_shapes(options.shape),
        resolve_states(options.state, target),
        output,
    )


def prepare_model(setup: CompileSetup) -> PipelineState:
    """Load the model, form its layers, and choose the engine of each device.

    Raises:
        DicompilerError: The model is not valid, or the installed onnxruntime cannot load it.
        PluginError: A third party's operator rule does not compute parts of its nodes correctly.
    """
    # It imports onnxruntime, which loads slowly.
    from dicompiler.driver.rule_check import check_plugin_rules

    options = setup.options
    compilation = prepare(
        Model.load(setup.model), setup.shapes, options.instruments, options.quantize_samples, setup.states
    )
    check_loadable(compilation.reference or compilation.model)
    place = "plan: wire_dtype" if setup.given_plan is not None and options.wire_dtype is None else "wire"
    compilation = apply_wire_types(compilation, setup.wire_format, place)
    assert compilation.layers is not None
    check_plugin_rules(compilation.model, compilation.layers)
    given = None if setup.given_plan is None else setup.given_plan.engines
    platform = choose_engines(
        compilation.layers,
        setup.platform,
        setup.cost_model,
        setup.target,
        options.engine,
        given,
        options.precision,
    )
    return replace(compilation, platform=platform)


def build_problem(compilation: PipelineState, setup: CompileSetup) -> Problem:
    problem = make_problem(compilation, setup.options.objective, setup.cost_model, setup.target)
    return replace(problem, executor=setup.options.executor)


def plan_and_choose_engines(
    compilation: PipelineState, problem: Problem, setup: CompileSetup
) -> tuple[PipelineState, Problem]:
    """Return the compilation with a plan, and the problem with the engines that compute the plan.

    With the engine "auto" and times of layers in several engines, the strategy searches twice: with the fastest engine
    of each device, and with the fastest engine of each layer. The plan with the better objective is returned.

    Raises:
        DicompilerError: The strategy finds no plan, or the option `require_complete_search` is given and a search was
            not complete.
    """
    is_auto = setup.options.engine == AUTO_ENGINE
    planned = [PlannedProblem(make_plan(compilation, problem, setup), problem)]
    if is_auto:
        planned += plan_with_layer_engines(compilation, planned[0], setup)
    if setup.options.require_complete_search:
        for entry in planned:
            check_search_is_complete(entry.plan)
    best = choose_plan_and_engines(planned, setup.options.precision) if is_auto else planned[0]
    return replace(compilation, plan=best.plan, platform=best.problem.platform), best.problem


def plan_with_layer_engines(
    compilation: PipelineState, first: PlannedProblem, setup: CompileSetup
) -> list[PlannedProblem]:
    """Return the strategy's plan for the problem with the fastest engine of each layer.

    Args:
        compilation: The compilation without a plan.
        first: The plan for the problem with the fastest engine of each device.
        setup: The options of the compilation.

    Returns:
        One plan, or none: no times of layers are known, the layers gain too little, the first search was interrupted,
        or the strategy finds no plan, because other engines need more memory.
    """
    if setup.strategy is None or INTERRUPTED_NOTE in first.plan.note:
        return []
    problem = with_layer_engines(first.problem, setup.options.precision)
    if problem is first.problem:
        return []
    log.info("engine auto: searching again with the engine of each layer")
    try:
        return [PlannedProblem(make_plan(compilation, problem, setup), problem)]
    except DicompilerError as error:
        log.info("engine auto: no plan with the engine of each layer: %s", error)
        return []


def make_plan(compilation: PipelineState, problem: Problem, setup: CompileSetup) -> Plan:
    """Return the strategy's plan for a problem, or the plan that the caller gave.

    If the options request them, plans for failures and value ranges for sending as int8 are added too.
    """
    if setup.strategy is not None:
        plan = run_strategy(problem, setup.strategy)
    else:
        assert setup.given_plan is not None
        plan = check_given_plan(problem, setup.given_plan)
    if setup.failures:
        planner = setup.strategy or registry().make("strategies", DEFAULT_STRATEGY)
        plan = add_failover_plans(problem, planner, plan, setup.failures, is_plan_fixed=setup.strategy is None)
    if setup.strategy is not None:
        plan = drop_unread_parts(problem, plan)
    plan = plan_with_engines(plan, problem.platform)
    if setup.options.wire_samples is not None:
        planned = replace(compilation, plan=plan, platform=problem.platform)
        plan = measure_wire_ranges(planned, Path(setup.options.wire_samples))
    return plan


def run_strategy(problem: Problem, strategy: Strategy) -> Plan:
    """Run a strategy, check its plan, and return it with the digest of the model.

    Raises:
        DicompilerError: The strategy finds no plan, or its plan is not feasible.
    """
    assert problem.model is not None
    log.info("strategy %s: making the plan", strategy.name)
    wire_format = WireFormat(problem.layers.wire_dtypes)
    plan = replace(strategy.plan(problem), model_digest=problem.model.digest(), wire_format=wire_format)
    if problem.cost_model.is_measured and not plan.note:
        plan = replace(plan, note=f"based on the measurements of cost model {problem.cost_model.name!r}")
    strategy.check_feasible(problem, plan)
    return plan


def check_search_is_complete(plan: Plan) -> None:
    """Raise DicompilerError if the plan's note says that a budget or an interrupt ended its search early."""
    remedies = {
        BUDGET_NOTE: "use a larger budget, as in auto{budget=120}, a strategy without budget, or omit",
        INTERRUPTED_NOTE: "let the search end by itself, or omit",
    }
    for note, remedy in remedies.items():
        if note in plan.note:
            raise DicompilerError(
                f"plan: {plan.note}, so that another run may give another plan: {remedy} --require-complete-search"
            )


def check_given_plan(problem: Problem, plan: Plan) -> Plan:
    """Return the plan that the caller gave, if it was made for the model and fits the platform.

    Raises:
        DicompilerError: The plan was made for another model, uses a device that cannot compute, or exceeds the memory
            of a host.
    """
    assert problem.model is not None
    if plan.model_digest and plan.model_digest != problem.model.digest():
        raise DicompilerError(
            "plan: the plan was made for a network with another structure: create a plan with 'dicompiler plan'"
        )
    check_constraints(problem, plan)
    return plan


def drop_unread_parts(problem: Problem, plan: Plan) -> Plan:
    """Return the plan without parts of layers of which nothing needs the result.

    A layer keeps all of its parts if it has partial sums, or if none of its parts is read.
    """
    routing = route_on_platform(problem.platform, problem.layers, replace(plan, failures=()))
    dropped = set(routing.dropped_tasks)
    layers = {}
    for name, parts in plan.layers.items():
        read = tuple(part for i, part in enumerate(parts) if (name, i) not in dropped)
        has_partial_sums = any(part.reduce for part in parts)
        layers[name] = parts if has_partial_sums or not read else read
    failures = tuple(replace(failure, plan=drop_unread_parts(problem, failure.plan)) for failure in plan.failures)
    return replace(plan, layers=layers, failures=failures)


def lower_plan(compilation: PipelineState, setup: CompileSetup) -> PipelineState:
    """Split the model by the plan: add a model in which every node has a device, and a program for each device."""
    assert compilation.plan is not None
    log.info("building programs for %d devices", len(compilation.plan.devices))
    # The pass warns about unread parts of a plan. Only users need this warning, because `drop_unread_parts` has removed
    # these parts from the plans of strategies.
    partition = registry().make("passes", "partition" if setup.strategy is None else "partition{quiet=true}")
    pass_manager = PassManager([partition], setup.options.instruments)
    with gc_paused():
        placed = [pass_manager.run(role) for role in role_states(compilation)]
        compilation = split_program(build_programs(compilation, placed))
    warn_not_narrowed(compilation)
    return compilation


def check_program(
    compilation: PipelineState, problem: Problem, setup: CompileSetup
) -> tuple[PipelineState, Mapping[str, MemoryUse] | None]:
    """Check that the target supports the program, and that each device has enough memory for it.

    Returns:
        The compilation, and the memory use by device name; None instead of it if no artifact is written.
    """
    assert compilation.plan is not None
    check_target_support(compilation.plan, setup.target)
    memory = problem.program_memory_use(compilation)
    if setup.output is not None:
        # The target may build the program to measure it, which takes seconds. `plan` has no output and omits this.
        compilation = measure_footprints(compilation, problem)
    elif any(host.flash for host in setup.platform.hosts):
        return compilation, None
    check_program_memory(compilation, memory, setup.target)
    return compilation, None if setup.output is None else memory


def measure_footprints(compilation: PipelineState, problem: Problem) -> PipelineState:
    """Add the RAM and flash that the target measures for each device, and for one device with the whole model.

    Nothing is added if the target measures neither, or if copies of the plan on other devices compute frames in turn.
    """
    assert problem.target is not None and compilation.program is not None
    if compilation.plan is not None and compilation.plan.replicas:
        return compilation
    footprints = problem.target.device_footprints(compilation.program)
    if not footprints:
        return compilation
    single_device_program = problem.draft_program(problem.best_single_device[0]).program
    assert single_device_program is not None
    try:
        single_device_footprints = problem.target.device_footprints(single_device_program)
    except DicompilerError:
        # The whole model is too large for one device, so the plan cannot be compared with one device.
        single_device_footprints = ()
    return replace(compilation, footprints=footprints, single_device_footprints=single_device_footprints)


def add_metrics(
    compilation: PipelineState, problem: Problem, memory: Mapping[str, MemoryUse] | None, setup: CompileSetup
) -> PipelineState:
    """Add the predicted metrics of the plan, of its failure plans and of the best single device.

    A warning is logged if the plan is worse than one device, or if the predicted gain is implausible.

    Args:
        compilation: The compilation after `check_program`.
        problem: The problem that the strategy solved.
        memory: Memory use by device name; None if it is not yet known.
        setup: The options of the compilation.
    """
    assert compilation.plan is not None
    with gc_paused():
        metrics, single = problem.program_metrics(compilation, memory), problem.best_single_device[1]
    objective = problem.objective
    is_worse = metrics.objective_value(objective) > MIN_WARNED_SLOWDOWN * single.objective_value(objective)
    if is_worse and not setup.options.allow_worse:
        log.warning(
            "this plan's predicted %s is worse than that of one device (%s instead of %s; --strategy single)",
            objective,
            format_objective(objective, metrics.objective_value(objective)),
            format_objective(objective, single.objective_value(objective)),
        )
    if doubt := metrics.describe_implausible_gain(single, objective):
        log.warning("this plan is predicted to be %s", doubt)
    name, chosen = ("", "") if setup.strategy is None else (setup.strategy.name, compilation.plan.chosen_strategy)
    return replace(
        compilation,
        metrics=metrics,
        single_device_metrics=single,
        failure_metrics=failure_metrics(problem, compilation.plan),
        decision=Decision(name, objective, problem.cost_model.name, chosen),
    )


def write_artifact(compilation: PipelineState, target: Target, output: Path) -> PipelineState:
    """Write the artifact: the target's files, the plan, the platform and the unsplit model.

    The directory appears as a whole or not at all. The result is the compilation with the artifact's path.
    """
    assert compilation.plan is not None and compilation.platform is not None and compilation.reference is not None
    from dicompiler.verify.lookup_tables import find_lookup_tables

    log.info("target %s: writing %s", target.name, output)
    used = output.stat() if is_used(output) else None
    with atomic_directory(output, ARTIFACT_FILE, ARTIFACT_NOUN) as stage:
        target.emit(compilation, stage)
        (stage / PLAN_FILE).write_text(plans.plan_to_text(compilation.plan), encoding="utf-8")
        (stage / PLATFORM_FILE).write_text(platform_to_toml(compilation.platform), encoding="utf-8")
        (stage / REFERENCE_FILE).parent.mkdir()
        compilation.reference.save(stage / REFERENCE_FILE, external=True)
        provenance = json.dumps(provenance_document(compilation, target), indent=1)
        (stage / PROVENANCE_FILE).write_text(f"{provenance}\n", encoding="utf-8")
        inputs = [value.name for value in compilation.reference.proto.graph.input]
        # Clients use the sizes of lookup tables (Gather) to reject a frame with an index beyond the table.
        tables = find_lookup_tables(compilation.reference, inputs)
        write_digests_and_checksum(stage, {"lookup_tables": tables} if tables else {})
    # An artifact with the same bytes is not replaced.
    if used is not None and not os.path.samestat(used, output.stat()):
        log.warning(
            "%s: a run, a session or a device on this host still uses the artifact that was replaced: start it again "
            "to use the new one",
            output,
        )
    return replace(compilation, artifact_directory=output)


def provenance_document(compilation: PipelineState, target: Target) -> dict[str, Any]:
    """Return the content of provenance.json: how the plan was made, the memory that hosts need, and a summary."""
    decision, metrics, single = compilation.decision, compilation.metrics, compilation.single_device_metrics
    assert decision is not None and metrics is not None and single is not None and compilation.platform is not None
    document: dict[str, Any] = {"format": PROVENANCE_FORMAT, **asdict(decision), "target": str(target.spec)}
    if not decision.chosen_strategy:
        del document["chosen_strategy"]
    summary = summarize(compilation, decision, metrics, single).document()
    return {**document, "memory_bytes": used_memory(compilation.platform, metrics), "summary": summary}
