"""Clusters, a simple cost model, and the verification of a strategy's plan within this process."""

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
    """Return the strategy's plan, after `check_plan` has compared its outputs and sent bytes with the expected ones."""
    problem = load_problem(source, platform, objective=objective)
    plan = strategy.plan(problem)
    exact, *_ = check_plan(problem, plan)
    assert exact.applies, exact.detail
    return plan
