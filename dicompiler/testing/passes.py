"""Check of passes: the model stays valid and computes the same outputs, and the input stays unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from dicompiler.base.option_specs import parse_spec, spec_of
from dicompiler.driver.prepare import prepare
from dicompiler.ir.plan import plan_to_text
from dicompiler.ir.platform import uniform_platform
from dicompiler.plugin_api import Model, Pass, PassManager, PipelineState
from dicompiler.plugin_api.onnx import compare_value, graph_inputs, random_inputs, run_model
from dicompiler.plugin_api.regions import lower, single_device_plan
from dicompiler.testing.assertions import (
    LIMIT_S,
    as_instance,
    checking,
    describe,
    error_context,
    require,
    time_limit,
    unchanged,
)
from dicompiler.testing.samples import NETWORKS, build_network


def check_pass(
    step: Pass | type[Pass], on: Iterable[str | Path | onnx.ModelProto] = NETWORKS, limit_s: float = LIMIT_S
) -> None:
    """Check a pass on each network.

    The check requires that the pass:

    - returns a PipelineState with a valid model and the fields in `provides`;
    - does not change the PipelineState that it receives;
    - returns an equal result in a second run;
    - does not end the process or exceed the time limit;
    - keeps the model's outputs within the tolerance of their types (unless `preserves_outputs` is False), also after
      the model is partitioned by a plan from the pass;
    - has a text form that is parsed to an equal pass.

    If the pass `requires` layers, a platform or a plan, its input has the network's layers, two devices d0 and d1, and
    a plan with everything on d0.

    Args:
        step: The pass, or its class.
        on: Names such as "lenet" (those that `build_network` accepts), paths of ONNX files, or models.
        limit_s: Seconds that one run of the pass may take.

    Raises:
        AssertionError: A requirement does not hold. The message names pass, network and cause.
    """
    instance: Pass = as_instance(step)
    with error_context(describe(instance)):
        parsed = parse_spec(str(spec_of(instance)))
        require(parsed == spec_of(instance), f"its text form {spec_of(instance)} is parsed as {parsed}")
    for number, source in enumerate(on):
        model = build_network(source) if isinstance(source, str) else source
        name = source if isinstance(source, str) else getattr(getattr(source, "graph", None), "name", "") or str(number)
        with checking(f"{describe(instance)} on {name}"):
            _check_on_model(instance, _make_input(instance, Model.load(model)), limit_s)


def _make_input(step: Pass, model: Model) -> PipelineState:
    if not step.requires:
        return PipelineState(model)
    prepared = prepare(model)
    assert prepared.layers is not None
    plan = single_device_plan(prepared.layers, "d0") if "plan" in step.requires else None
    return replace(prepared, platform=uniform_platform(2), plan=plan)


def _check_on_model(step: Pass, state: PipelineState, limit_s: float) -> None:
    with unchanged(state=state), time_limit(limit_s):
        result = PassManager([step]).run(state)
    with time_limit(limit_s):
        repeated = PassManager([step]).run(state)
    require(repeated.model.to_bytes() == result.model.to_bytes(), "a second run makes another model")
    require(_plan_text(repeated) == _plan_text(result), "a second run makes another plan")
    for name in step.provides:
        require(getattr(result, name) is not None, f"it declares that it provides {name}, but leaves it None")
    if step.preserves_outputs:
        _check_outputs(state.model, result.model)
    if result.plan is not None and result.plan is not state.plan and result.routing is None:
        if result.layers is None:
            raise AssertionError("it makes a plan although there are no layers: add 'layers' to requires")
        _check_outputs(state.model, lower(replace(result, platform=state.platform or uniform_platform(2))).model)


def _plan_text(state: PipelineState) -> str:
    return "" if state.plan is None else plan_to_text(state.plan)


def _check_outputs(before: Model, after: Model) -> None:
    """Require that both models have equal output names and values for random inputs."""
    inputs = random_inputs(graph_inputs(before))
    names = [value.name for value in before.proto.graph.output]
    require([v.name for v in after.proto.graph.output][: len(names)] == names, "the graph's outputs have other names")
    reference: dict[str, Any] = run_model(before, inputs)
    outputs = run_model(after, inputs)
    for name in names:
        check = compare_value(name, reference[name], outputs[name])
        require(check.passed, f"output {name!r} {check.detail}")
