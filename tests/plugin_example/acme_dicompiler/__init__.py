"""A complete plugin with items of each kind. Hooks import the items when they are called, to load quickly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dicompiler.plugin_api import hookimpl

if TYPE_CHECKING:
    from dicompiler.plugin_api import CostModel, Engine, OperatorRule, Pass, PlatformFamily, Strategy, Target

dicompiler_api = 2


@hookimpl
def dicompiler_strategies() -> Iterable[type[Strategy]]:
    from acme_dicompiler.strategy import RoundRobin
    from acme_dicompiler.tiles import Tiles

    yield from (RoundRobin, Tiles)


@hookimpl
def dicompiler_targets() -> Iterable[type[Target]]:
    from acme_dicompiler.target import Inline

    yield Inline


@hookimpl
def dicompiler_engines() -> Iterable[type[Engine]]:
    from acme_dicompiler.engine import NumpyEngine

    yield NumpyEngine


@hookimpl
def dicompiler_operators() -> Iterable[OperatorRule]:
    from acme_dicompiler.operators import RULES

    return RULES


@hookimpl
def dicompiler_cost_models() -> Iterable[type[CostModel]]:
    from acme_dicompiler.costs import PerCall

    yield PerCall


@hookimpl
def dicompiler_passes() -> Iterable[type[Pass]]:
    from acme_dicompiler.move import Move
    from acme_dicompiler.passes import DropDropout

    yield from (DropDropout, Move)


@hookimpl
def dicompiler_platforms() -> Iterable[PlatformFamily]:
    from acme_dicompiler.platforms import BOARDS

    yield BOARDS
