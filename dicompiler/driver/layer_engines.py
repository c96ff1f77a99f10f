"""The choice of an engine for each layer of a plan, with the option `engine=auto`.

PipelineState with plan + Problem + measured times of layers ⇒ PipelineState + Problem, some engines with `layers=…`

An engine is the library that computes segments (ONNX submodels) on a device. A network may have layers that ncnn
computes faster than onnxruntime, and others that it computes slower or not at all. Each change of the engine costs a
call and copies of tensors. Dynamic programming over the layers of a device finds the cheapest choice. This choice is
used only if the objective of the simulated plan becomes better by at least 10 %.
"""

from __future__ import annotations

import glob
import logging
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dicompiler.base.errors import DicompilerError
from dicompiler.base.process import gc_paused
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.workload import count_local_reads, local_input_nbytes, seconds_after
from dicompiler.driver.engines import (
    WORTHWHILE_OPERATORS,
    find_fastest_engine,
    list_cpu_devices,
    list_known_engines,
    make_engine,
    plan_with_engines,
    split_program,
    warn_not_installed,
    with_possible_precision,
)
from dicompiler.driver.problem_setup import find_runtime_costs, on_platform
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing, Task, TaskId, task_id
from dicompiler.partition.lowering import build_program_only, lower_unchecked
from dicompiler.partition.placed_graph import ModelFacts
from dicompiler.search.constraints import check_program_memory
from dicompiler.search.problem import Problem
from dicompiler.target.engine import Engine

log = logging.getLogger("dicompiler")

MIN_GAIN = 0.1
"""Fraction by which the objective must become better, so that engines by layer replace one engine per device.

Times of single layers deviate by several percent from run to run, and the choice prefers times that happen to be short.
"""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer on a device, by the index of the engine that computes it.

    Attributes:
        continued_s: Seconds if the same engine computes the previous layer of the device.
        switched_s: Seconds if another engine computes the previous layer. A call and copies of tensors are included.
    """

    continued_s: tuple[float, ...]
    switched_s: tuple[float, ...]

    def seconds(self, previous: int, engine: int) -> float:
        return (self.continued_s if engine == previous else self.switched_s)[engine]

    def __add__(self, other: LayerTimes) -> LayerTimes:
        pairs = (self.continued_s, other.continued_s), (self.switched_s, other.switched_s)
        return LayerTimes(*(tuple(map(operator.add, first, second)) for first, second in pairs))


def find_cheapest_engines(layers: Sequence[LayerTimes]) -> tuple[int, ...]:
    """Return the index of the engine of each layer for which all layers together take the shortest time.

    Args:
        layers: Times of the layers, in the order of execution.

    Returns:
        The indices. Among equally fast choices, lower indices are preferred.
    """
    if not layers:
        return ()
    engines = range(len(layers[0].switched_s))
    totals, previous_of = list(layers[0].switched_s), list[list[int]]()
    for layer in layers[1:]:
        steps = [
            min((totals[previous] + layer.seconds(previous, engine), previous) for previous in engines)
            for engine in engines
        ]
        totals = [seconds for seconds, _ in steps]
        previous_of.append([previous for _, previous in steps])
    choices = [min(engines, key=lambda engine: totals[engine])]
    for previous in reversed(previous_of):
        choices.append(previous[choices[-1]])
    return tuple(reversed(choices))


def sum_times(layers: Sequence[LayerTimes], engines: Sequence[int]) -> float:
    """Return the seconds of layers, if the engines with these indices compute them."""
    # No engine computes a layer before the first one.
    pairs = zip((-1, *engines), engines, strict=False)
    return sum(layer.seconds(*pair) for layer, pair in zip(layers, pairs, strict=True))


def improve_engines(
    compilation: PipelineState, problem: Problem, precision: str | None = None
) -> tuple[PipelineState, Problem]:
    """Choose the engine of each layer of a plan, if the objective then becomes better by the fraction MIN_GAIN.

    Args:
        compilation: A pipeline state with a plan, whose devices have one engine each.
        problem: The problem that the plan solves, with a target.
        precision: The precision of engines that can compute with it; None: fp32.

    Returns:
        The pipeline state and the problem with the engines that are best by a simulation of the program. They are
        unchanged if the gain is too small, or if the cost model has no times of single layers in several engines.
    """
    choices = _choose_by_layer(compilation, problem, precision)
    if not choices:
        return compilation, problem
    candidates = [{}, choices, *([{name: choices[name]} for name in choices] if len(choices) > 1 else [])]
    with gc_paused():
        values = [_simulate_objective(compilation, problem, engines) for engines in candidates]
    best = min(range(len(values)), key=lambda i: values[i])
    if values[best] > (1 - MIN_GAIN) * values[0]:
        return compilation, problem
    return _with_engines(compilation, problem, candidates[best])


def _with_engines(
    compilation: PipelineState, problem: Problem, engines: Mapping[str, str]
) -> tuple[PipelineState, Problem]:
    """Return the pipeline state and the problem with other engines on some devices."""
    assert compilation.plan is not None and problem.target is not None
    if not engines:
        return compilation, problem
    platform = problem.platform.with_engines(engines)
    plan = plan_with_engines(compilation.plan, platform)
    return replace(compilation, platform=platform, plan=plan), on_platform(problem, platform, problem.target)


def _simulate_objective(compilation: PipelineState, problem: Problem, engines: Mapping[str, str]) -> float:
    """Return the objective of the plan with other engines; infinity if the program then exceeds the memory."""
    compilation, problem = _with_engines(compilation, problem, engines)
    assert problem.target is not None
    compilation = split_program(lower_unchecked(compilation))
    memory = problem.program_memory_use(compilation)
    try:
        check_program_memory(compilation, memory, problem.target)
    except DicompilerError:
        return math.inf
    return problem.program_metrics(compilation, memory).objective_value(problem.objective)


def _choose_by_layer(compilation: PipelineState, problem: Problem, precision: str | None) -> dict[str, str]:
    """Return, by device name, the new engine of each device that is predicted to be faster with it.

    The new engine may compute only some of the device's layers; onnxruntime computes the others.
    """
    assert compilation.plan is not None
    used = [device for device in list_cpu_devices(problem.platform) if device.name in compilation.plan.devices]
    choices = [
        _EngineChoice(device, with_possible_precision(name, precision), layers)
        for device in used
        for name in list_known_engines(device, problem.cost_model, problem.target)
        if (layers := _find_comparable_layers(problem, device, make_engine(name)))
    ]
    if not choices:
        return {}
    facts = ModelFacts.from_model(compilation.model)
    roles = _build_roles(problem, facts, compilation.plan)
    options: dict[str, list[tuple[float, str]]] = {}
    for choice in choices:
        # Layers that the plan does not place on the device may be placed there after a change of the plan.
        single = _build_roles(problem, facts, problem.single_device_plan(choice.device.name))
        options.setdefault(choice.device.name, []).append(choice.choose(problem, [*roles, *single]))
    best = {name: min(found)[1] for name, found in options.items()}
    changed = {
        device.name: best[device.name] for device in used if best.get(device.name, device.engine) != device.engine
    }
    return {name: engine for name, engine in changed.items() if _is_usable(problem, name, engine)}


def _find_comparable_layers(problem: Problem, device: Device, engine: Engine) -> frozenset[str]:
    """Return the layers whose times in onnxruntime and in another engine are both known to the cost model."""
    layers, cost = problem.layers, problem.cost_model
    return frozenset(
        layer.name
        for layer in layers.layers
        if not engine.operators or engine.operators.issuperset(node.op for node in layer.nodes)
        if all(cost.knows_layer(layers, layer, device, name) for name in (DEFAULT_ENGINE, engine.name))
    )


def _build_roles(problem: Problem, facts: ModelFacts, plan: Plan) -> list[tuple[Routing, Program]]:
    """Return the routing and the program of each role: the plan, its replicas and its failure plans."""
    routing, program = build_program_only(facts, problem.layers, problem.platform, plan)
    return list(zip(routing.roles, program.roles, strict=True))


def _is_usable(problem: Problem, device: str, engine: str) -> bool:
    """Return True if this host has the packages of an engine. Otherwise, log a warning.

    There is no warning if `choose_engines` has already logged it.
    """
    try:
        make_engine(engine).check_installed()
    except DicompilerError as error:
        fastest = find_fastest_engine(
            problem.layers, problem.platform.device(device), problem.cost_model, problem.target
        )
        if fastest == DEFAULT_ENGINE:
            warn_not_installed(device, error)
        return False
    return True


@dataclass(frozen=True)
class _EngineChoice:
    """The choice between onnxruntime and another engine for each layer of a device.

    Attributes:
        device: The device.
        engine: The other engine, without the option `layers`.
        layers: Names of the layers that both engines compute, and for which both times are known. onnxruntime computes
            all other layers.
    """

    device: Device
    engine: Engine
    layers: frozenset[str]

    def choose(self, problem: Problem, roles: Sequence[tuple[Routing, Program]]) -> tuple[float, str]:
        """Return the seconds of the device's layers, summed over the roles, and the engine with its option `layers`.

        If several roles place a layer on the device, the first one decides.
        """
        seconds, is_chosen = 0.0, dict[str, bool]()
        for routing, program in roles:
            times = self._list_times(problem, routing, program)
            chosen = find_cheapest_engines(list(times.values()))
            seconds += sum_times(list(times.values()), chosen)
            for name in self._find_worthwhile(problem, list(times), chosen):
                is_chosen.setdefault(name, True)
            for name in times:
                is_chosen.setdefault(name, False)
        return seconds, self._with_layers(problem, {name for name, chosen in is_chosen.items() if chosen})

    def _list_times(self, problem: Problem, routing: Routing, program: Program) -> dict[str, LayerTimes]:
        """Return the times of the device's layers in onnxruntime and in the other engine, in the order of execution.

        A layer may have several tasks (parts) on the device. Their times are added.
        """
        assert problem.target is not None
        engines = [replace(self.device, engine=name) for name in (DEFAULT_ENGINE, str(self.engine.spec))]
        costs = find_runtime_costs(engines[1], problem.cost_model, problem.target)
        tasks, times = {task_id(task): task for task in routing.tasks}, dict[str, LayerTimes]()
        for key, is_first in _list_tasks(program, self.device.name):
            task = tasks[key]
            possible = engines if task.layer in self.layers else engines[:1]
            own = _task_times(problem, routing, task, possible, costs, is_first)
            times[task.layer] = own if task.layer not in times else times[task.layer] + own
        return times

    def _find_worthwhile(self, problem: Problem, names: Sequence[str], chosen: Sequence[int]) -> Iterator[str]:
        """Yield the layers for which the other engine is chosen, without sequences that are not worth its call.

        `split_program` leaves these sequences to onnxruntime.
        """
        layers = problem.layers.layer_by_name
        for engine, group in groupby(zip(names, chosen, strict=True), key=lambda pair: pair[1]):
            sequence = [name for name, _ in group]
            nodes = (node for name in sequence for node in layers[name].nodes)
            if engine and any(node.op in WORTHWHILE_OPERATORS for node in nodes):
                yield from sequence

    def _with_layers(self, problem: Problem, names: Collection[str]) -> str:
        """Return the engine that computes the layers with these names, as text."""
        if not names:
            return DEFAULT_ENGINE
        if self.layers <= set(names):
            return str(self.engine.spec)
        listed = tuple(glob.escape(layer.name) for layer in problem.layers.layers if layer.name in names)
        return str(replace(self.engine, layers=listed).spec)


def _list_tasks(program: Program, device: str) -> Iterator[tuple[TaskId, bool]]:
    """Yield the tasks of a device in the order of execution. The flag is True for the first task of a segment."""
    known = set[TaskId]()
    for segment in next(entry for entry in program.devices if entry.device == device).segments:
        keys = [key for key in dict.fromkeys(key for key, _ in segment.node_marks) if key not in known]
        known.update(keys)
        yield from ((key, i == 0) for i, key in enumerate(keys))


def _task_times(
    problem: Problem, routing: Routing, task: Task, engines: Sequence[Device], costs: RuntimeCosts, is_first: bool
) -> LayerTimes:
    """Return the times of a task in onnxruntime and another engine; infinity if the other one is not in `engines`.

    Args:
        problem: The problem.
        routing: The routing of the plan.
        task: The task (one device's share of a layer).
        engines: The device with each of the engines that can compute the task.
        costs: Costs of calls and copies on the device.
        is_first: Whether the task is the first one of a segment, so that each engine needs a call.
    """
    call_s, cost = costs.segment_call_s, problem.cost_model
    copies_s = costs.copy_seconds(*count_local_reads(routing, task, lambda _: True))
    continued_s, switched_s = [math.inf, math.inf], [math.inf, math.inf]
    for i, device in enumerate(engines):
        local_bytes = local_input_nbytes(routing, task, device)
        continued_s[i] = seconds_after(routing, cost, task, device, local_bytes) + (call_s if is_first else 0.0)
        switched_s[i] = seconds_after(routing, cost, task, device, 0) + call_s + copies_s
    return LayerTimes(tuple(continued_s), tuple(switched_s))
