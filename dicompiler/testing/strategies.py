"""Check of strategies: their plans for several networks, platforms and objectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dicompiler.ir.plan import plan_to_text
from dicompiler.plugin.plugin_wrappers import describe_plan_error
from dicompiler.plugin_api import DicompilerError, Plan, PluginError, Strategy
from dicompiler.search.constraints import check_memory
from dicompiler.search.pareto_front import FRONT_OBJECTIVES, ParetoFront
from dicompiler.testing.assertions import (
    LIMIT_S,
    as_instance,
    checking,
    describe,
    error_context,
    log,
    require,
    time_limit,
    unchanged,
)
from dicompiler.testing.plans import check_legal, check_plan
from dicompiler.testing.samples import Sample, memory_limited, samples
from dicompiler.testing.subprocess_call import call_with_hash_seeds


def check_strategy(
    strategy: Strategy | type[Strategy],
    on: Iterable[Sample] | None = None,
    memory: bool = True,
    limit_s: float = LIMIT_S,
) -> None:
    """Check the plans of a strategy.

    For each sample (a network, a platform and an objective), the check requires that:

    - the plan is valid, computes the same bits as the whole network, and sends the predicted bytes;
    - the strategy makes an equal plan in a second run, and in processes with three other hash seeds, unless a note
      in the plan says why it cannot be reproduced;
    - the strategy does not change the problem, end the process, or exceed the time limit;
    - if the strategy has its own method `front`, the front for the first sample has valid plans with all objective
      values, and no plan dominates another one.

    The strategy is also run on platforms with less memory than one device needs. It may raise DicompilerError if it
    finds no plan, but not for every sample.

    Args:
        strategy: The strategy, or its class.
        on: The samples to use. Default: `samples()`.
        memory: True if plans must respect the memory limit. If False, plans that exceed it are not checked.
        limit_s: Seconds that the strategy may take for one sample.

    Raises:
        AssertionError: A requirement does not hold. The message names strategy, sample and cause.
    """
    instance: Strategy = as_instance(strategy)
    chosen = list(samples() if on is None else on)
    require(chosen, f"{describe(instance)}: there are no samples")
    tried = [*chosen, *_memory_limited_samples(chosen)]
    plans = []
    for sample in tried:
        log.info("running %s on %s", describe(instance), sample)
        plans.append(plan_or_error(instance, sample, limit_s))
    refused = next((plan for plan in plans if isinstance(plan, str)), "")
    require(any(isinstance(plan, Plan) for plan in plans), f"{describe(instance)} refuses every sample: {refused}")
    seen: list[tuple[str, str, Plan]] = []
    for sample, plan in zip(tried, plans, strict=True):
        with checking(f"{describe(instance)} on {sample}"):
            _check_same_plan(plan, plan_or_error(instance, sample, limit_s), "when it is called again")
            if isinstance(plan, Plan) and (memory or not _exceeds_memory(sample, plan)):
                check_legal(sample.problem, plan)
                key = sample.name, sample.platform.name, plan
                if key not in seen:
                    seen.append(key)
                    check_plan(sample.problem, plan)
    if type(instance).front is not Strategy.front:
        with checking(f"{describe(instance)}: front() on {chosen[0]}"):
            _check_front(instance, chosen[0], limit_s)
    # Other processes take longest, so they are started only when all other requirements hold.
    _check_other_processes(instance, tried, plans, limit_s)


def _check_other_processes(strategy: Strategy, tried: list[Sample], plans: list[Plan | str], limit_s: float) -> None:
    """Require that the strategy makes the same plans in processes with other hash seeds."""
    log.info("running %s on %d samples in other processes", describe(strategy), len(tried))
    with error_context(describe(strategy)):
        for texts in call_with_hash_seeds(plan_texts, strategy, tried, limit_s, limit_s=limit_s * len(tried)):
            for sample, plan, text in zip(tried, plans, texts, strict=True):
                with error_context(f"on {sample}"):
                    _check_same_plan(plan, text, "in another process")


def _check_front(strategy: Strategy, sample: Sample, limit_s: float) -> None:
    problem = sample.problem
    with unchanged(problem=problem), time_limit(limit_s):
        front: Any = strategy.front(problem)
    require(isinstance(front, ParetoFront), f"it returned {type(front).__name__} instead of a ParetoFront")
    require(front.points, "it returned a front without plans: raise DicompilerError instead")
    unknown = sorted({*front.objectives} - {*FRONT_OBJECTIVES})
    require(not unknown, f"unknown objectives {', '.join(unknown)}: use some of {', '.join(FRONT_OBJECTIVES)}")
    for i, point in enumerate(front.points):
        fault = describe_plan_error(point.plan)
        require(not fault, f"plan {i} is {fault}")
        check_legal(problem, point.plan)
        missing = [name for name in front.objectives if name not in point.objectives]
        require(not missing, f"plan {i} has no value of objective {', '.join(missing)}")
    for i, worse in enumerate(front.points):
        for j, better in enumerate(front.points):
            is_dominated = better.dominates(worse, front.objectives)
            require(not is_dominated, f"plan {i} is not better than plan {j} in any objective: omit it")


def _memory_limited_samples(chosen: Iterable[Sample]) -> list[Sample]:
    """Return a sample with less memory for each pair of a network and a platform of several devices."""
    firsts: dict[tuple[str, str], Sample] = {}
    for sample in chosen:
        if len(sample.platform.computing_devices) > 1:
            firsts.setdefault((sample.name, sample.platform.name), sample)
    return [memory_limited(sample) for sample in firsts.values()]


def _exceeds_memory(sample: Sample, plan: Plan) -> bool:
    problem = sample.problem
    try:
        metrics = problem.estimate(plan)
    except DicompilerError:
        # The plan is invalid for another reason, which `check_legal` reports next.
        return False
    try:
        check_memory(problem, plan, metrics)
    except DicompilerError:
        return True
    return False


def plan_or_error(strategy: Strategy, sample: Sample, limit_s: float = LIMIT_S) -> Plan | str:
    with error_context(f"{describe(strategy)} on {sample}"):
        problem = sample.problem
        try:
            with unchanged(problem=problem), time_limit(limit_s):
                plan: Any = strategy.plan(problem)
        except PluginError:
            raise
        except DicompilerError as error:
            return str(error)
        fault = describe_plan_error(plan)
        require(not fault, f"plan() returned {fault}")
    return plan  # type: ignore[no-any-return]


def plan_texts(strategy: Strategy, on: list[Sample], limit_s: float = LIMIT_S) -> list[str]:
    """Return the strategy's plan for each sample as JSON, or its error message."""
    return [_plan_text(plan_or_error(strategy, sample, limit_s)) for sample in on]


def _plan_text(plan: Plan | str) -> str:
    return plan if isinstance(plan, str) else plan_to_text(plan)


def _check_same_plan(plan: Plan | str, other: Plan | str, how: str) -> None:
    """Require equal plans, unless a note in the plan says that it cannot be reproduced.

    `how` says how `other` was made, as in the message: "in another process".
    """
    text, other_text = _plan_text(plan), _plan_text(other)
    if text == other_text or (isinstance(plan, Plan) and plan.note):
        return
    lines = zip(text.splitlines(), other_text.splitlines(), strict=False)
    difference = next((f"{a.strip()} became {b.strip()}" for a, b in lines if a != b), "one plan is longer")
    raise AssertionError(f"{how}, the strategy makes another plan: {difference}")
