"""Checks a plan: it fits, keeps to the memory, computes the same bits, and sends the bytes that it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dicompiler.base.errors import describe_exception
from dicompiler.driver.prepare import prepare
from dicompiler.plugin_api import Model, PipelineState, Plan, Problem, Program, registry
from dicompiler.plugin_api.onnx import Check, ProgramExecutor, compare_value, run_model
from dicompiler.plugin_api.regions import lower
from dicompiler.plugin_api.search import check_constraints
from dicompiler.testing.assertions import require
from dicompiler.verify.comparison import check_exact, check_transfers
from dicompiler.verify.run_inputs import prepare_inputs


def check_legal(problem: Problem, plan: Plan) -> None:
    """AssertionError where the plan does not fit the layers, names other devices, asks a device without compute, or
    leaves out what is read; where it is over a host's memory; and where source or sink are not the problem's."""
    expected = problem.build_plan({layer.name: () for layer in problem.layers.layers})
    for end in ("source", "sink"):
        actual, wanted = getattr(plan, end), getattr(expected, end)
        require(actual == wanted, f"the plan's {end} is {actual}, the problem's {wanted}: make it by problem.plan()")
    try:
        check_constraints(problem, plan)
    except Exception as error:
        raise AssertionError(f"an illegal plan: {describe_exception(error)}") from error


def check_plan(problem: Problem, plan: Plan, seeds: Sequence[int] = (0, 1)) -> tuple[Check, ...]:
    """What is checked of a legal plan, see `verified`. AssertionError where something does not hold; all checks
    otherwise, the exact one first."""
    assert problem.model is not None
    inputs = prepare_inputs(problem.model)
    base = PipelineState(problem.model, problem.layers, problem.platform)
    checks = verify_plan(base, plan, inputs, run_model(problem.model, inputs), seeds)
    for check in checks:
        require(check.passed, f"{check.name}: {check.detail}")
    return checks


def verify_plan(
    prepared: PipelineState,
    plan: Plan,
    inputs: Mapping[str, Any],
    reference: Mapping[str, Any],
    seeds: Sequence[int] | None = None,
) -> tuple[Check, ...]:
    """(exact, an output of a sink …, bytes), all in this process: check models of `seeds` (None: as many as it takes to
    read everything) are bit-equal; every output for `inputs` is within the tolerance of `reference`, the whole model's;
    every transfer is as long as predicted, and their sum is the routing's.

    prepared: model, layers and platform.
    """

    def program(model: Model) -> Program:
        lowered = lower(replace(prepare(model), plan=plan, platform=prepared.platform)).program
        assert lowered is not None
        return lowered

    result = lower(replace(prepared, plan=plan))
    assert result.program is not None and result.routing is not None
    checks = [check_exact(prepared.model, program, seeds, registry().operator_rules, prepared.layers)]
    sent: list[int] = []
    for role in result.program.roles:
        execution = ProgramExecutor(role).run(inputs)
        sent += execution.sent
        checks += [
            compare_value(f"output {name!r} on {device}", reference[name], value)
            for device, outputs in execution.delivered.items()
            for name, value in outputs.items()
        ]
    check = check_transfers(result.program.all_transfers, dict(enumerate(sent)), 1, len(plan.roles))
    routed = sum(routing.total_bytes for routing in result.routing.roles)
    if check.passed and sum(sent) != routed:
        check = Check("bytes", False, f"{sum(sent)} sent, {routed} routed")
    return (*checks, check)
