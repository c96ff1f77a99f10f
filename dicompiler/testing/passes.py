"""Checks passes: the model stays legal and computes the same, and what the pass was given stays as it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from dicompiler.base.option_specs import parse_spec, spec_of
from dicompiler.driver.prepare import prepare
from dicompiler.ir.plan import dumps
from dicompiler.ir.platform import uniform_platform
from dicompiler.plugin_api import Model, Pass, PassManager, PipelineState
from dicompiler.plugin_api.onnx import compare_value, graph_inputs, random_inputs, run_model
from dicompiler.plugin_api.regions import lower, single_device_plan
from dicompiler.testing.assertions import as_instance, describe, error_context, require
from dicompiler.testing.samples import NETWORKS, build_network


def check_pass(step: Pass | type[Pass], on: Iterable[str | Path | onnx.ModelProto] = NETWORKS) -> None:
    """On each network: the pass runs, returns a Compilation with a legal model and all that it `provides`, changes
    nothing of what it was given, and does the same again; the model computes the same (within the tolerance of its
    types; not where `preserves` is False), also split by the plan that the pass makes. Its text names it again.

    on: names (see `samples.network`), ONNX files or models. A pass with `requires` is given normalised networks with
    layers, two nameless devices d0, d1 and a plan that puts everything on d0, as far as it asks for them.
    AssertionError otherwise, with pass, network and what was wrong.
    """
    one = as_instance(step)
    with error_context(describe(one)):
        again = parse_spec(str(spec_of(one)))
        require(again == spec_of(one), f"its text {spec_of(one)} reads as {again}")
    for number, given in enumerate(on):
        model = build_network(given) if isinstance(given, str) else given
        name = given if isinstance(given, str) else getattr(getattr(given, "graph", None), "name", "") or str(number)
        with error_context(f"{describe(one)} on {name}"):
            _check_on_model(one, _make_input(one, Model.load(model)))


def _make_input(step: Pass, model: Model) -> PipelineState:
    """What a pass that requires so much is given."""
    if not step.requires:
        return PipelineState(model)
    prepared = prepare(model)
    assert prepared.layers is not None
    plan = single_device_plan(prepared.layers, "d0") if "plan" in step.requires else None
    return replace(prepared, platform=uniform_platform(2), plan=plan)


def _check_on_model(step: Pass, given: PipelineState) -> None:
    before = given.model.to_bytes()
    result = PassManager([step]).run(given)
    require(given.model.to_bytes() == before, "it changes the model that it was given: make a copy")
    again = PassManager([step]).run(given)
    require(again.model.to_bytes() == result.model.to_bytes(), "run again it makes another model")
    require(_plan_text(again) == _plan_text(result), "run again it makes another plan")
    for name in step.provides:
        require(getattr(result, name) is not None, f"it says that it provides {name}, and leaves it None")
    if step.preserves_outputs:
        _check_outputs(given.model, result.model)
    if result.plan is not None and result.plan is not given.plan and result.routing is None:
        if result.layers is None:
            raise AssertionError("it makes a plan where there are no layers: add 'layers' to requires")
        _check_outputs(given.model, lower(replace(result, platform=given.platform or uniform_platform(2))).model)


def _plan_text(compilation: PipelineState) -> str:
    return "" if compilation.plan is None else dumps(compilation.plan)


def _check_outputs(before: Model, after: Model) -> None:
    """Names, types and values of the outputs; the inputs are those of the first."""
    inputs = random_inputs(graph_inputs(before))
    names = [value.name for value in before.proto.graph.output]
    require([v.name for v in after.proto.graph.output][: len(names)] == names, "the graph's outputs have other names")
    reference: dict[str, Any] = run_model(before, inputs)
    got = run_model(after, inputs)
    for name in names:
        check = compare_value(name, reference[name], got[name])
        require(check.passed, f"output {name!r} {check.detail}")
