"""The choice of an engine for each layer of a plan.

Problem + Plan + times of layers in several engines ⇒ engines with the option `layers`, by device name

An engine is the library that computes segments (ONNX submodels). A network may have layers that ncnn computes faster
than onnxruntime, and others that it computes slower or not at all. Each change of the engine costs a call and copies of
tensors. Dynamic programming over the layers of a device finds the cheapest choice.
"""

from __future__ import annotations

import glob
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dicompiler.base.errors import DicompilerError
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.workload import count_local_bytes, count_local_reads, seconds_in_call
from dicompiler.driver.engines import (
    WORTHWHILE_OPERATORS,
    find_installed,
    list_cpu_devices,
    list_known_engines,
    make_engine,
    rank_engines,
    with_possible_precision,
)
from dicompiler.driver.problem_setup import find_runtime_costs
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device, engine_name
from dicompiler.ir.plan import Plan
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing, Task, TaskId, task_id
from dicompiler.partition.lowering import build_program_only
from dicompiler.partition.placed_graph import ModelFacts
from dicompiler.search.problem import Problem
from dicompiler.target.engine import Engine


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


def find_layer_engines(
    problem: Problem, plan: Plan, precision: str | None
) -> tuple[dict[str, str], dict[str, DicompilerError]]:
    """Return, by device name, the new engine of each device that is predicted to be faster with it.

    The new engine may compute only some of the device's layers; onnxruntime computes the others.

    Args:
        problem: The problem.
        plan: The plan, which places layers on devices.
        precision: The precision of engines that can compute with it; None: fp32.

    Returns:
        The best installed engines by device name, and an error for each device whose best engine is not installed.
        There is no error if `choose_engines` has already warned about the engine.
    """
    chosen, errors = dict[str, str](), dict[str, DicompilerError]()
    for device, engines in _rank_layer_engines(problem, plan, precision):
        installed, error = find_installed([*engines, device.engine])
        if installed != device.engine:
            chosen[device.name] = installed
        if error is not None and engine_name(engines[0]) != engine_name(_find_fastest_engine(problem, device)):
            errors[device.name] = error
    return chosen, errors


def _find_fastest_engine(problem: Problem, device: Device) -> str:
    return rank_engines(problem.layers, device, problem.cost_model, problem.target)[0]


def _rank_layer_engines(problem: Problem, plan: Plan, precision: str | None) -> Iterator[tuple[Device, list[str]]]:
    """Yield the devices of a plan with their best engines by layer, the fastest one first."""
    used = set(plan.devices)
    devices = [device for device in list_cpu_devices(problem.platform) if device.name in used]
    choices = [choice for device in devices for choice in _list_choices(problem, device, precision)]
    if not choices:
        return
    assert problem.model is not None
    facts = ModelFacts.from_model(problem.model)
    roles = _build_roles(problem, facts, plan)
    for device, own in groupby(choices, key=lambda choice: choice.device):
        # Layers that the plan does not place on the device may be placed there after a change of the plan.
        is_alone = used == {device.name}
        single = [] if is_alone else _build_roles(problem, facts, problem.single_device_plan(device.name))
        yield device, [engine for _, engine in sorted(choice.choose(problem, [*roles, *single]) for choice in own)]


def has_times_in_several_engines(problem: Problem, device: Device) -> bool:
    """Return True if times of at least one layer are known in onnxruntime and in another engine of a device."""
    return bool(_list_choices(problem, device, None))


def _list_choices(problem: Problem, device: Device, precision: str | None) -> list[_EngineChoice]:
    names = list_known_engines(device, problem.cost_model, problem.target)
    choices = [
        _EngineChoice(
            device,
            with_possible_precision(name, precision),
            _find_comparable_layers(problem, device, make_engine(name)),
        )
        for name in names
    ]
    return [choice for choice in choices if choice.layers]


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

    def choose(self, problem: Problem, roles: Sequence[tuple[Routing, Program]]) -> tuple[list[float], str]:
        """Return the seconds of the device's layers in each role, and the engine with its option `layers`.

        If several roles place a layer on the device, the first one decides.
        """
        seconds, is_chosen = list[float](), dict[str, bool]()
        for routing, program in roles:
            times = self._list_times(problem, routing, program)
            chosen = find_cheapest_engines(list(times.values()))
            seconds.append(sum_times(list(times.values()), chosen))
            for name in self._find_worthwhile(problem, list(times), chosen):
                is_chosen.setdefault(name, True)
            for name in times:
                is_chosen.setdefault(name, False)
        return seconds, self._with_layers(problem, {name for name, chosen in is_chosen.items() if chosen})

    def _list_times(self, problem: Problem, routing: Routing, program: Program) -> dict[str, LayerTimes]:
        """Return the times of the device's layers in onnxruntime and in the other engine, in the order of execution.

        A layer may have several tasks (parts) on the device. Their times are added.
        """
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
        local = count_local_bytes(routing, task, device)
        same_call_s = seconds_in_call(routing, cost, task, device, local)
        new_call_s = seconds_in_call(routing, cost, task, device, local._replace(inputs=0))
        continued_s[i] = same_call_s + (call_s if is_first else 0.0)
        switched_s[i] = new_call_s + call_s + copies_s
        if i > 0:
            # Before onnxruntime can read these inputs, the other engine converts them from its own layout. This takes
            # as long as the conversion to this layout.
            switched_s[0] += max(0.0, new_call_s - same_call_s)
    return LayerTimes(tuple(continued_s), tuple(switched_s))
