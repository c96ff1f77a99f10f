"""Lowering: a compilation with a plan becomes a placed model and a program.

Compilation (model, layers, platform, plan) ──partition──► placed Model ──cut──► Program;   with replicas, role by role
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dicompiler.compilation import Compilation
from dicompiler.cutting import cut
from dicompiler.passes import Instrument, PassManager
from dicompiler.plugins import registry
from dicompiler.program import Program
from dicompiler.routing import Routing


def split(compilation: Compilation, instruments: Sequence[Instrument] = ()) -> Compilation:
    """Adds routing, placed model (checked) and program to a compilation with a plan."""
    return _each_role(compilation, PassManager([registry().make("passes", "partition")], instruments).run)


def sketch(compilation: Compilation) -> Compilation:
    """The same for a plan that is only weighed: the placed model is not checked, and nothing is said about parts that
    nobody reads."""
    return _each_role(compilation, registry().make("passes", "partition{quiet=true}").run)


def _each_role(compilation: Compilation, partition: Callable[[Compilation], Compilation]) -> Compilation:
    """The first role's compilation, whose routing and program hold those of the other roles."""
    plan, platform = compilation.plan, compilation.platform
    assert plan is not None and platform is not None
    devices = [device.name for device in platform.devices if device.name in plan.devices]
    roles = plan.roles
    made: list[tuple[Compilation, Routing, Program]] = []
    for i, role in enumerate(roles):
        before = roles.index(role)
        if before < i:
            made.append(made[before])
            continue
        placed = partition(replace(compilation, plan=role))
        assert placed.routing is not None
        made.append((placed, placed.routing, cut(placed.model, devices, platform.host_of)))
    (placed, routing, program), *others = made
    routing = replace(routing, others=tuple(own for _, own, _ in others))
    program = replace(program, others=tuple(own for _, _, own in others))
    return replace(placed, plan=plan, routing=routing, program=program, reference=compilation.model)
