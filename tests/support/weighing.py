"""Checks that the evaluation of a plan without writing ONNX models agrees with the written program."""

from __future__ import annotations

from dataclasses import replace

from dicompiler.cost.simulator import SimulationResult, simulate
from dicompiler.cost.workload import build_workload
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.program import NO_MODEL, Program
from dicompiler.ir.routing import Routing
from dicompiler.partition.placed_graph import ModelFacts
from dicompiler.partition.placement import place_parts
from dicompiler.partition.segmentation import build_program
from dicompiler.search.problem import Problem, plan_workload


def check_unwritten(model: Model, routing: Routing, plan: Plan, program: Program) -> None:
    """Check that the program built without ONNX models equals `program`, except for its models and weights."""
    hosts = {device.device: device.host for device in program.devices}
    devices = tuple(
        replace(device, segments=tuple(replace(segment, model=NO_MODEL) for segment in device.segments))
        for device in program.devices
    )
    expected = replace(program, devices=devices, weights={})
    assert build_program(place_parts(ModelFacts.from_model(model), routing, plan), list(hosts), hosts) == expected


def check_weighed(problem: Problem, plan: Plan) -> SimulationResult:
    """Check that both ways give equal routings, workloads and metrics; return the equal simulation of three frames."""
    sketched = problem.draft_program(plan)
    assert sketched.program is not None and sketched.routing is not None
    written = build_workload(sketched.program, sketched.routing, problem.platform, problem.cost_model)
    routing, work = plan_workload(problem, plan)
    assert routing == sketched.routing
    assert work == written
    assert repr(problem.evaluate(plan)) == repr(problem.program_metrics(sketched))
    played = problem.simulate(plan, 3, 2)
    assert played == simulate(written, problem.platform, 3, 2)
    return played
