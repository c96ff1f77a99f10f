"""Random networks and plans on devices of different rates, for property tests of predictions."""

from __future__ import annotations

from functools import cache
from random import Random

import onnx
from support.generators import DEVICES, random_model, random_plan
from support.layer_graphs import formed

from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem

BOARDS = Platform(
    "boards",
    tuple(Host(name, 2**30) for name in DEVICES),
    tuple(Device(name, name, 1e6 * rate, 1, 5.0, 2.0) for rate, name in enumerate(DEVICES, 1)),
    Network("switch", 1e6, 1e-3, (), 1e-4),
)
"""Each device is faster than the one before, on a host of its own."""


@cache
def random_problem(seed: int, objective: str = "latency") -> Problem:
    """Return the problem of a random network on BOARDS."""
    proto = onnx.shape_inference.infer_shapes(random_model(Random(seed)))
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type.lower()}{index}"
    return Problem(formed(proto), BOARDS, objective=objective, model=Model.load(proto))


def any_plan(seed: int, problem: Problem) -> Plan:
    """Return a random valid plan of the problem."""
    return random_plan(Random(seed), problem.layers, DEVICES)
