"""Problems and plans that compute all of LeNet on one device, with or without replicas."""

from __future__ import annotations

from dataclasses import replace

from support.planning import FREE

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem


def posed(platform: Platform, objective: str = "throughput") -> Problem:
    """Return the problem of LeNet on a platform; only convolutions and matrix products take time."""
    return load_problem(networks.build("lenet", 0), platform, objective=objective, cost=FREE)


def alone(problem: Problem, replicas: tuple[dict[str, str], ...] = ()) -> Plan:
    """Return the plan that computes all layers on device d0, with these replicas."""
    plan = problem.build_plan({layer.name: (Part("d0"),) for layer in problem.layers.layers})
    return replace(plan, replicas=replicas)
