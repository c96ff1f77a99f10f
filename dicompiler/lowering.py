"""Lowering: a compilation with a plan becomes a placed model and a program.

Compilation (model, layers, platform, plan) ──partition──► placed Model ──cut──► Program
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dicompiler.compilation import Compilation
from dicompiler.cutting import cut
from dicompiler.passes import Instrument, PassManager
from dicompiler.plugins import registry


def split(compilation: Compilation, instruments: Sequence[Instrument] = ()) -> Compilation:
    """Adds routing, placed model (checked) and program to a compilation with a plan."""
    return _cut(compilation, PassManager([registry().make("passes", "partition")], instruments).run(compilation))


def sketch(compilation: Compilation) -> Compilation:
    """The same for a plan that is only weighed: the placed model is not checked, and nothing is said about parts that
    nobody reads."""
    return _cut(compilation, registry().make("passes", "partition{quiet=true}").run(compilation))


def _cut(compilation: Compilation, placed: Compilation) -> Compilation:
    assert compilation.plan is not None and compilation.platform is not None
    named = compilation.plan.devices
    devices = [device.name for device in compilation.platform.devices if device.name in named]
    program = cut(placed.model, devices, compilation.platform.host_of)
    return replace(placed, program=program, reference=compilation.model)
