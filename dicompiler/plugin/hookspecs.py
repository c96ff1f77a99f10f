"""The doors that plugins come in by: one hook for each kind of thing that dicompiler can be given.

A plugin is a module that an entry point of group `dicompiler` names; its functions of these names bear `hookimpl` and
yield classes or records. Import what they yield inside them: looking for plugins must stay quick.

    [project.entry-points.dicompiler]
    mine = "my_module"

A module may state `dicompiler_api = 2`, the version of these hooks that it was written for; without that it is taken to
be written for this one. A plugin for a newer version is not loaded. Names must differ from all others of their kind.

An option that names a file to read says so: `field(default="", metadata={"file": True})`. `--depfile` then lists it.
docs/plugins has a page for each hook, and dicompiler.testing a check.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from dicompiler.cost.cost_model import CostModel
    from dicompiler.ir.operator_rule import OperatorRule
    from dicompiler.ir.platform import PlatformFamily
    from dicompiler.plugin.pass_base import Pass
    from dicompiler.search.strategy import Strategy
    from dicompiler.target.target_base import Target

API_VERSION = 2
PLUGGY_PROJECT = "dicompiler"

hookspec = pluggy.HookspecMarker(PLUGGY_PROJECT)
hookimpl = pluggy.HookimplMarker(PLUGGY_PROJECT)


@hookspec
def dicompiler_passes() -> Iterable[type[Pass]]:  # type: ignore[empty-body]
    """Passes for pipelines: frozen dataclasses derived from `Pass`.

    @hookimpl
    def dicompiler_passes():
        from my_module.passes import DropDropout

        yield DropDropout
    """


@hookspec
def dicompiler_strategies() -> Iterable[type[Strategy]]:  # type: ignore[empty-body]
    """Strategies, which turn a Problem into a Plan: frozen dataclasses derived from `Strategy`.

    @hookimpl
    def dicompiler_strategies():
        from my_module.strategies import RoundRobin

        yield RoundRobin
    """


@hookspec
def dicompiler_targets() -> Iterable[type[Target]]:  # type: ignore[empty-body]
    """Targets, which write a Program as files: frozen dataclasses derived from `Target`.

    @hookimpl
    def dicompiler_targets():
        from my_module.targets import Tarballs

        yield Tarballs
    """


@hookspec
def dicompiler_operators() -> Iterable[OperatorRule]:  # type: ignore[empty-body]
    """Operator rules, which say what region of each input a region of the output needs.

    @hookimpl
    def dicompiler_operators():
        from my_module.operators import elementwise
        from dicompiler.plugin_api import OperatorRule

        yield OperatorRule("FusedGelu", elementwise, domain="com.example", elementwise=True)
    """


@hookspec
def dicompiler_cost_models() -> Iterable[type[CostModel]]:  # type: ignore[empty-body]
    """Cost models, which say how long a piece of a layer takes: frozen dataclasses derived from `CostModel`.

    @hookimpl
    def dicompiler_cost_models():
        from my_module.costs import Measured

        yield Measured
    """


@hookspec
def dicompiler_platforms() -> Iterable[PlatformFamily]:  # type: ignore[empty-body]
    """Platforms that can be named instead of described in a file (`rpi4xN`), and further file formats of platforms.

    @hookimpl
    def dicompiler_platforms():
        from my_module.boards import make_odroids
        from dicompiler.plugin_api import PlatformFamily

        yield PlatformFamily("odroidxN", "N Odroid boards on a switch", make_odroids)
    """
