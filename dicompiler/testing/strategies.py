"""Checks strategies: what their plans must keep to, on networks × platforms × objectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dicompiler.ir.plan import dumps
from dicompiler.plugin_api import DicompilerError, Plan, PluginError, Strategy
from dicompiler.search.constraints import check_memory
from dicompiler.testing.assertions import as_instance, describe, error_context, require
from dicompiler.testing.plans import check_legal, check_plan
from dicompiler.testing.samples import Sample, memory_limited, samples
from dicompiler.testing.subprocess_call import call_in_subprocess


def check_strategy(
    strategy: Strategy | type[Strategy], on: Iterable[Sample] | None = None, memory: bool = True
) -> None:
    """On each sample (by default those of `samples()`): the plan is legal, computes the same bits as the whole, sends
    the bytes predicted, and comes again: here and in a process with another hash seed, unless its note says why not.

    On each platform of several devices also with less memory than one device needs: the plan keeps to it (with
    memory=False it need not: then it is the compiler that refuses it). A strategy may answer with a DicompilerError (it
    has no plan), but not to every sample. AssertionError otherwise, with strategy, sample and what was wrong.
    """
    decider = as_instance(strategy)
    chosen = list(samples() if on is None else on)
    require(chosen, f"{describe(decider)}: there are no samples")
    tried = [*chosen, *_memory_limited_samples(chosen)]
    plans = [plan_or_error(decider, sample) for sample in tried]
    refused = next((plan for plan in plans if isinstance(plan, str)), "")
    require(any(isinstance(plan, Plan) for plan in plans), f"{describe(decider)} refuses every sample: {refused}")
    with error_context(describe(decider)):
        others = call_in_subprocess(plan_texts, decider, tried)
    seen: list[tuple[str, str, Plan]] = []
    for sample, plan, other in zip(tried, plans, others, strict=True):
        with error_context(f"{describe(decider)} on {sample}"):
            _check_same_plan(plan, plan_or_error(decider, sample), "asked again")
            _check_same_plan(plan, other, "in another process")
            if isinstance(plan, Plan) and (memory or _fits_memory(sample, plan)):
                check_legal(sample.problem, plan)
                key = sample.name, sample.platform.name, plan
                if key not in seen:
                    seen.append(key)
                    check_plan(sample.problem, plan)


def _memory_limited_samples(chosen: Iterable[Sample]) -> list[Sample]:
    """One sample of each network on each platform of several devices, with less memory."""
    firsts: dict[tuple[str, str], Sample] = {}
    for sample in chosen:
        if len(sample.platform.computing_devices) > 1:
            firsts.setdefault((sample.name, sample.platform.name), sample)
    return [memory_limited(sample) for sample in firsts.values()]


def _fits_memory(sample: Sample, plan: Plan) -> bool:
    problem = sample.problem
    try:
        check_memory(problem, plan, problem.estimate(plan))
    except DicompilerError:
        return False
    return True


def plan_or_error(strategy: Strategy, sample: Sample) -> Plan | str:
    """The plan, or the error of a strategy that has none."""
    with error_context(f"{describe(strategy)} on {sample}"):
        try:
            plan: Any = strategy.plan(sample.problem)
        except PluginError:
            raise
        except DicompilerError as error:
            return str(error)
        require(isinstance(plan, Plan), f"plan() returned {type(plan).__name__} instead of a Plan")
    return plan  # type: ignore[no-any-return]


def plan_texts(strategy: Strategy, on: list[Sample]) -> list[str]:
    """The plans as text: what another process sends back."""
    return [_plan_text(plan_or_error(strategy, sample)) for sample in on]


def _plan_text(plan: Plan | str) -> str:
    return plan if isinstance(plan, str) else dumps(plan)


def _check_same_plan(plan: Plan | str, other: Plan | str, how: str) -> None:
    """A plan whose note says that it cannot be made again need not be."""
    if not (isinstance(plan, Plan) and plan.note):
        require(
            _plan_text(plan) == _plan_text(other),
            f"{how} it makes another plan: {_first_difference(_plan_text(plan), _plan_text(other))}",
        )


def _first_difference(a: str, b: str) -> str:
    """The first line that differs."""
    for one, other in zip(a.splitlines(), b.splitlines(), strict=False):
        if one != other:
            return f"{one.strip()} became {other.strip()}"
    return "one is longer"
