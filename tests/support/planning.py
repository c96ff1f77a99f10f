"""For tests of strategies: clusters by rates, and a plan's whole verification inside this process."""

from __future__ import annotations

import onnx

from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.strategy import Strategy
from dicompiler.testing import check_plan, make_cluster

__all__ = ["FREE", "make_cluster", "verify"]

FREE = AnalyticModel(pools=False, elementwise=False, weights=False)


def verify(source: onnx.ModelProto, platform: Platform, strategy: Strategy, objective: str = "latency") -> Plan:
    """The strategy's plan, after these checks: check models of two seeds are bit-equal, and every transfer is as long
    as the plan predicts."""
    problem = load_problem(source, platform, objective=objective)
    plan = strategy.plan(problem)
    exact, *_ = check_plan(problem, plan)
    assert exact.applies, exact.detail
    return plan
