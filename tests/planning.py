"""For tests of strategies: clusters by rates, and a plan's whole verification inside this process."""

from __future__ import annotations

from dataclasses import replace

import onnx

from dicompiler import compiler
from dicompiler.compiler import prepare
from dicompiler.costs import Analytic
from dicompiler.executor import Executor
from dicompiler.model import Model
from dicompiler.plan import Plan
from dicompiler.platform import Device, Host, Network, NetworkKind, Platform
from dicompiler.problem import Problem, Strategy
from dicompiler.program import Program, Value
from dicompiler.verify import exact, random_inputs, transfers

FREE = Analytic(pools=False, elementwise=False)


def cluster(
    kind: NetworkKind,
    *rates: float,
    bandwidth: float = 1e8,
    memory: int = 2**30,
    power: tuple[float, float] = (0.0, 0.0),
) -> Platform:
    """Devices d0, d1, … of these rates (GFLOP/s), each on a host of its own; `power`: W active and idle."""
    names = [f"d{i}" for i in range(len(rates))]
    devices = tuple(
        Device(name, name, rate * 1e9, power_active=power[0], power_idle=power[1])
        for name, rate in zip(names, rates, strict=True)
    )
    return Platform("test", tuple(Host(name, memory) for name in names), devices, Network(kind, bandwidth))


def verify(source: onnx.ModelProto, platform: Platform, strategy: Strategy, objective: str = "latency") -> Plan:
    """The strategy's plan, after these checks: check models of two seeds are bit-equal, and every transfer is as long
    as the plan predicts."""
    model = Model.load(source)
    base = replace(prepare(model), platform=platform)
    assert base.layers is not None
    problem = Problem(base.layers, platform, objective=objective, model=base.model)
    plan = strategy.plan(problem)

    def program(made: Model) -> Program:
        found = compiler.split(replace(prepare(made), plan=plan, platform=platform)).program
        assert found is not None
        return found

    check = exact(base.model, program, seeds=(0, 1))
    assert check.passed and check.applies, check.detail
    result = compiler.split(replace(base, plan=plan))
    assert result.program is not None and result.routing is not None
    values = [
        Value(name, base.layers.tensors[name].dtype, base.layers.tensors[name].shape) for name in base.layers.inputs
    ]
    execution = Executor(result.program).run(random_inputs(values))
    sent = transfers(result.program.transfers, dict(enumerate(execution.sent)), 1)
    assert sent.passed, sent.detail
    assert sum(execution.sent) == result.routing.total_bytes == problem.estimate(plan).total_bytes
    return plan
