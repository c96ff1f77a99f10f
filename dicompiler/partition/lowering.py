"""Lowering: a compilation with a plan becomes a placed model and a program.

Compilation (model, layers, platform, plan) ──partition──► placed Model ──cut──► Program;   with replicas, role by role
LayerGraph + Platform + Plan ──place──► PlacedGraph ──► Outline, the same unwritten, for a plan that is only weighed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from dicompiler.ir.compilation import Compilation
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Outline, Program
from dicompiler.ir.routing import Routing
from dicompiler.partition.placed_graph import Given
from dicompiler.partition.placement import place
from dicompiler.partition.routing import route_on
from dicompiler.partition.segmentation import cut, outline
from dicompiler.plugin.pass_manager import Instrument, PassManager
from dicompiler.plugin.registry import registry

T = TypeVar("T")


def split(compilation: Compilation, instruments: Sequence[Instrument] = ()) -> Compilation:
    """Adds routing, placed model (checked) and program to a compilation with a plan."""
    return _each_role(compilation, PassManager([registry().make("passes", "partition")], instruments).run)


def sketch(compilation: Compilation) -> Compilation:
    """The same where nobody runs the program: the placed model is not checked, and nothing is said about parts that
    nobody reads."""
    return _each_role(compilation, registry().make("passes", "partition{quiet=true}").run)


def outlines(given: Given, layers: LayerGraph, platform: Platform, plan: Plan) -> tuple[Routing, tuple[Outline, ...]]:
    """What `sketch` makes, without writing it as ONNX: the routing, and the outline of each role's program.

    given: of the model that the layers were formed of.
    """
    devices = _devices(platform, plan)

    def one(role: Plan) -> tuple[Routing, Outline]:
        routing = route_on(platform, layers, role)
        return routing, outline(place(given, routing, role), devices, platform.host_of)

    made = _by_role(plan, one)
    (routing, _), *others = made
    return replace(routing, others=tuple(own for own, _ in others)), tuple(drawn for _, drawn in made)


def _each_role(compilation: Compilation, partition: Callable[[Compilation], Compilation]) -> Compilation:
    """The first role's compilation, whose routing and program hold those of the other roles."""
    plan, platform = compilation.plan, compilation.platform
    assert plan is not None and platform is not None
    devices, hosts = _devices(platform, plan), platform.host_of

    def one(role: Plan) -> tuple[Compilation, Routing, Program]:
        placed = partition(replace(compilation, plan=role))
        assert placed.routing is not None
        return placed, placed.routing, cut(placed.model, devices, hosts)

    (placed, routing, program), *others = _by_role(plan, one)
    routing = replace(routing, others=tuple(own for _, own, _ in others))
    program = replace(program, others=tuple(own for _, _, own in others))
    return replace(placed, plan=plan, routing=routing, program=program, reference=compilation.model)


def _devices(platform: Platform, plan: Plan) -> list[str]:
    """Those that the plan names, in platform order."""
    named = set(plan.devices)
    return [device.name for device in platform.devices if device.name in named]


def _by_role(plan: Plan, make: Callable[[Plan], T]) -> list[T]:
    """What `make` gives for each role's plan; equal ones are made once."""
    roles = plan.roles
    made: list[T] = []
    for i, role in enumerate(roles):
        before = roles.index(role)
        made.append(made[before] if before < i else make(role))
    return made
