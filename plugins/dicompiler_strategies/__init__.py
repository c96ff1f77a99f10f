"""The built-in strategies, registered through the same hooks as those of third parties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dicompiler.plugin_api import API_VERSION, hookimpl

if TYPE_CHECKING:
    from dicompiler.plugin_api import PlatformFamily, Strategy

dicompiler_api = API_VERSION


@hookimpl
def dicompiler_strategies() -> Iterable[type[Strategy]]:
    """Return the classes of the built-in strategies, without those of `dicompiler_strategies.papers`."""
    from dicompiler_strategies.auto import Auto
    from dicompiler_strategies.cpsat import CpSat
    from dicompiler_strategies.dp import Dp
    from dicompiler_strategies.fit import Fit
    from dicompiler_strategies.genetic.strategy import Genetic
    from dicompiler_strategies.gradient.strategy import Gradient
    from dicompiler_strategies.manual import Manual
    from dicompiler_strategies.modnn import Modnn
    from dicompiler_strategies.pipeline import Pipeline
    from dicompiler_strategies.replicate import Replicate
    from dicompiler_strategies.single import Single
    from dicompiler_strategies.teams.strategy import Teams
    from dicompiler_strategies.transformer_heads import Heads

    return [Auto, CpSat, Dp, Fit, Genetic, Gradient, Heads, Manual, Modnn, Pipeline, Replicate, Single, Teams]


@hookimpl
def dicompiler_platforms() -> Iterable[PlatformFamily]:
    """Return the format of AutoDiCE's platform.txt, so that `--platform` accepts such files."""
    from dicompiler.plugin_api import PlatformFormat
    from dicompiler_strategies.autodice import platform_from_hosts

    return [PlatformFormat("*.txt", "An AutoDiCE platform.txt with one line for each host.", platform_from_hosts)]
