"""The choice between one engine for each device and one for each layer, with the option `engine=auto`.

The engines by layer that `find_layer_engines` finds are used if a simulation shows a sufficient gain. There are two of
these choices:

1. Before the search, for the plan that computes the whole network on one device, for each device. The strategy then
   searches with the time of each layer in its best engine (`with_layer_engines`).
2. After the search, for the plans that the strategy found (`choose_plan_and_engines`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dicompiler.base.errors import DicompilerError
from dicompiler.base.process import gc_paused
from dicompiler.driver.engines import (
    list_cpu_devices,
    list_known_engines,
    plan_with_engines,
    split_program,
    warn_not_installed,
)
from dicompiler.driver.layer_engines import find_layer_engines, has_times_in_several_engines
from dicompiler.driver.problem_setup import find_runtime_costs, on_platform
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device
from dicompiler.ir.plan import Plan
from dicompiler.search.constraints import host_memory_needs
from dicompiler.search.problem import Problem, whole_layer_seconds

MIN_GAIN = 0.1
"""Fraction by which the objective must become better, so that engines by layer replace one engine per device.

Times of single layers deviate by several percent from run to run, and the choice prefers times that happen to be short.
"""


@dataclass(frozen=True)
class PlannedProblem:
    """A plan, and the problem that it solves, with the engines of the plan."""

    plan: Plan
    problem: Problem

    def with_engines(self, engines: Mapping[str, str]) -> PlannedProblem:
        """Return the plan and its problem with other engines on some devices, by device name."""
        if not engines:
            return self
        platform = self.problem.platform.with_engines(engines)
        return PlannedProblem(
            plan_with_engines(self.plan, platform), on_platform(self.problem, platform, self.problem.target)
        )


def with_layer_engines(problem: Problem, precision: str | None = None) -> Problem:
    """Return the problem with the engines of each device that are best if it computes the whole network alone.

    Args:
        problem: A problem whose devices have one engine each.
        precision: The precision of engines that can compute with it; None: fp32.

    Returns:
        The problem, in which the engines of a device are by layer if its objective then becomes better by the fraction
        MIN_GAIN. It is the same object if this is so for no device.
    """
    chosen: dict[str, str] = {}
    engine_of_kind: dict[object, str] = {}
    for device in list_cpu_devices(problem.platform):
        if not has_times_in_several_engines(problem, device):
            continue
        kind = _find_device_kind(problem, device)
        if kind not in engine_of_kind:
            engine_of_kind[kind] = _choose_for_single_device(problem, device, precision)
        if engine_of_kind[kind] != device.engine:
            chosen[device.name] = engine_of_kind[kind]
    return on_platform(problem, problem.platform.with_engines(chosen), problem.target) if chosen else problem


def _find_device_kind(problem: Problem, device: Device) -> object:
    """Return a key that is equal for two devices if all engines take equally long on them for each layer."""
    engines = (DEFAULT_ENGINE, *list_known_engines(device, problem.cost_model, problem.target))
    with_engines = [replace(device, engine=engine) for engine in engines]
    costs = tuple(find_runtime_costs(entry, problem.cost_model, problem.target) for entry in with_engines)
    seconds = tuple(whole_layer_seconds(problem, entry) for entry in with_engines)
    return replace(device, name="", host=""), costs, seconds


def _choose_for_single_device(problem: Problem, device: Device, precision: str | None) -> str:
    """Return the engine, possibly by layer, with which a device computes the whole network best.

    The inputs and outputs are on the device, so that only computing counts. Its memory is not checked, because the plan
    that is searched need not fit one device.
    """
    plan = replace(problem.single_device_plan(device.name), source=(device.name,), sink=(device.name,))
    engines, _ = find_layer_engines(problem, plan, precision)
    best = _find_best(_list_candidates(PlannedProblem(plan, problem), engines), has_memory_limit=False)
    return best.problem.platform.device(device.name).engine


def choose_plan_and_engines(planned: Sequence[PlannedProblem], precision: str | None = None) -> PlannedProblem:
    """Return the plan with the engines that are best by a simulation of the program.

    Args:
        planned: Plans of the same network. The devices of the first one have one engine each.
        precision: The precision of engines that can compute with it; None: fp32.

    Returns:
        A plan with engines by layer, if its objective is better than that of the first plan by the fraction MIN_GAIN;
        otherwise the first plan. It is the first plan too if the cost model has no times of layers in several engines.
    """
    candidates, errors = list[PlannedProblem](), dict[str, DicompilerError]()
    for entry in planned:
        engines, new_errors = find_layer_engines(entry.problem, entry.plan, precision)
        candidates += _list_candidates(entry, engines)
        errors |= new_errors
    best = _find_best(candidates)
    for name, error in errors.items():
        warn_not_installed(name, error, best.problem.platform.device(name).engine)
    return best


def _list_candidates(planned: PlannedProblem, engines: Mapping[str, str]) -> list[PlannedProblem]:
    """Return a plan with its own engines, with other engines, and with another engine on one device only."""
    single = [{name: engines[name]} for name in engines] if len(engines) > 1 else []
    return [planned.with_engines(chosen) for chosen in ({}, *([engines] if engines else []), *single)]


def _find_best(candidates: Sequence[PlannedProblem], has_memory_limit: bool = True) -> PlannedProblem:
    """Return the candidate with the best objective; the first one if no other is better by the fraction MIN_GAIN."""
    if len(candidates) == 1:
        return candidates[0]
    with gc_paused():
        values = [_simulate_objective(candidate, has_memory_limit) for candidate in candidates]
    best = min(range(len(values)), key=lambda i: values[i])
    return candidates[best if values[best] <= (1 - MIN_GAIN) * values[0] else 0]


def _simulate_objective(planned: PlannedProblem, has_memory_limit: bool) -> float:
    """Return the objective of a plan; infinity if there is a limit and the program exceeds the memory of a host."""
    problem = planned.problem
    compilation = split_program(problem.draft_program(planned.plan))
    memory = problem.program_memory_use(compilation)
    needs = host_memory_needs(problem.platform, memory, include_sum=True)
    if has_memory_limit and any(need.is_exceeded for need in needs):
        return math.inf
    return problem.program_metrics(compilation, memory).objective_value(problem.objective)
