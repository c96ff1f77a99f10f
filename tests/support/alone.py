"""All of LeNet on one device, with frames dealt out or not: for tests of what is predicted of it."""

from __future__ import annotations

from dataclasses import replace

from support.planning import FREE

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem


def posed(platform: Platform, objective: str = "throughput") -> Problem:
    """LeNet on a platform; only multiplications take time."""
    return load_problem(networks.build("lenet", 0), platform, objective=objective, cost=FREE)


def alone(problem: Problem, replicas: tuple[dict[str, str], ...] = ()) -> Plan:
    """All on d0."""
    plan = problem.build_plan({layer.name: (Part("d0"),) for layer in problem.layers.layers})
    return replace(plan, replicas=replicas)
