"""Checks of plans: memory limits, exact results, and the number of bytes sent."""

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
    """Check that a plan is valid for a problem.

    Args:
        problem: The problem that the plan solves.
        plan: The plan to check.

    Raises:
        AssertionError: The plan does not match the layers, uses unknown devices or devices without compute, omits
            elements that are read, exceeds a host's memory, or has other sources (devices with the graph's inputs) or
            sinks (devices that receive the outputs) than the problem.
    """
    expected = problem.build_plan({layer.name: () for layer in problem.layers.layers})
    for end, actual, wanted in (("source", plan.source, expected.source), ("sink", plan.sink, expected.sink)):
        require(
            actual == wanted,
            f"the plan's {end} is {actual}, the problem's {wanted}: make the plan by problem.build_plan()",
        )
    try:
        check_constraints(problem, plan)
    except Exception as error:
        raise AssertionError(f"an invalid plan: {describe_exception(error)}") from error


def check_plan(problem: Problem, plan: Plan, seeds: Sequence[int] = (0, 1)) -> tuple[Check, ...]:
    """Check that a valid plan computes the right outputs and sends the predicted bytes.

    Args:
        problem: The problem that the plan solves.
        plan: A plan that passes `check_legal`.
        seeds: Seeds of the exact check, which compares results on small integers bit by bit.

    Returns:
        The passed checks: the exact check, one for each output on each sink (device that receives the outputs), and the
        check of the sent bytes.

    Raises:
        AssertionError: A result or a number of sent bytes is wrong.
    """
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
    """Run all checks of a plan in this process, without an artifact.

    - exact: models with small integers as weights must give the same bits with and without the split;
    - outputs: on each device that receives outputs, they must be within the tolerance of `reference`;
    - bytes: every transfer, and their sum, must have the predicted number of bytes.

    Args:
        prepared: State of the pipeline with model, layers and platform.
        plan: The plan.
        inputs: Inputs of one frame by name.
        reference: Outputs of the unsplit model for these inputs, by name.
        seeds: Seeds of the exact check. Default: enough to read every kernel position and every input channel.
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
        check = Check("bytes", False, f"{sum(sent)} bytes are sent, but the routing has {routed}")
    return (*checks, check)
