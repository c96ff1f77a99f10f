"""Hook specifications: one hook for each kind of thing that a plugin can provide.

A plugin is a module that an entry point of the group `dicompiler` names. It implements hooks: functions with the names
below, marked with `hookimpl`, that yield classes or records. Import these classes inside the hooks, because loading
plugins must be fast.

    [project.entry-points.dicompiler]
    mine = "my_module"

A module may set `dicompiler_api = 2`, the version of the hooks that it was written for. The default is the current
version. Plugins for newer versions are not loaded. Names must be unique within their kind: if an earlier plugin uses a
name, the later thing is left out, with a warning.

Declare an option that names an input file with `field(default="", metadata={"file": True})`, so that `--depfile` lists
the file. The documentation has a page for each hook, and `dicompiler.testing` has a check for each hook.
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
    from dicompiler.target.engine import Engine
    from dicompiler.target.target_base import Target

API_VERSION = 2
PLUGGY_PROJECT = "dicompiler"

hookspec = pluggy.HookspecMarker(PLUGGY_PROJECT)
hookimpl = pluggy.HookimplMarker(PLUGGY_PROJECT)


@hookspec
def dicompiler_passes() -> Iterable[type[Pass]]:  # type: ignore[empty-body]
    """Yield passes for pipelines: frozen dataclasses derived from `Pass`.

    @hookimpl
    def dicompiler_passes():
        from my_module.passes import DropDropout

        yield DropDropout
    """


@hookspec
def dicompiler_strategies() -> Iterable[type[Strategy]]:  # type: ignore[empty-body]
    """Yield strategies, which find a Plan (a split) for a Problem: frozen dataclasses derived from `Strategy`.

    @hookimpl
    def dicompiler_strategies():
        from my_module.strategies import RoundRobin

        yield RoundRobin
    """


@hookspec
def dicompiler_targets() -> Iterable[type[Target]]:  # type: ignore[empty-body]
    """Yield targets, which write a Program (steps of each device) to files: frozen dataclasses derived from `Target`.

    @hookimpl
    def dicompiler_targets():
        from my_module.targets import Tarballs

        yield Tarballs
    """


@hookspec
def dicompiler_engines() -> Iterable[type[Engine]]:  # type: ignore[empty-body]
    """Yield engines, which compute segments (submodels) on devices: frozen dataclasses derived from `Engine`.

    @hookimpl
    def dicompiler_engines():
        from my_module.engines import Tensile

        yield Tensile
    """


@hookspec
def dicompiler_operators() -> Iterable[OperatorRule]:  # type: ignore[empty-body]
    """Yield operator rules, which map a region of the output to the needed regions of the inputs.

    @hookimpl
    def dicompiler_operators():
        from my_module.operators import elementwise
        from dicompiler.plugin_api import OperatorRule

        yield OperatorRule("FusedGelu", elementwise, domain="com.example", is_elementwise=True)
    """


@hookspec
def dicompiler_cost_models() -> Iterable[type[CostModel]]:  # type: ignore[empty-body]
    """Yield cost models, which predict the seconds of computing: frozen dataclasses derived from `CostModel`.

    @hookimpl
    def dicompiler_cost_models():
        from my_module.costs import Measured

        yield Measured
    """


@hookspec
def dicompiler_platforms() -> Iterable[PlatformFamily]:  # type: ignore[empty-body]
    """Yield families of platforms, each found by a name (`rpi4xN`) or, as a `PlatformFormat`, by a file (`*.txt`).

    @hookimpl
    def dicompiler_platforms():
        from my_module.boards import make_odroids
        from dicompiler.plugin_api import PlatformFamily

        yield PlatformFamily("odroidxN", "N Odroid boards on a switch", make_odroids)
    """
