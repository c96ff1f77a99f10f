"""Hook implementations of the core: operator rules, cost models and platforms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dicompiler.plugin.hookspecs import API_VERSION, hookimpl

if TYPE_CHECKING:
    from dicompiler.cost.cost_model import CostModel
    from dicompiler.ir.operator_rule import OperatorRule
    from dicompiler.ir.platform import PlatformFamily

dicompiler_api = API_VERSION


@hookimpl
def dicompiler_operators() -> Iterable[OperatorRule]:
    from dicompiler.partition.operators import builtin_rules

    return builtin_rules()


@hookimpl
def dicompiler_cost_models() -> Iterable[type[CostModel]]:
    from dicompiler.cost.cost_model import AnalyticModel
    from dicompiler.cost.linear_model import LinearModel
    from dicompiler.cost.profile_model import ProfileModel
    from dicompiler.cost.roofline_model import RooflineModel

    return [AnalyticModel, RooflineModel, LinearModel, ProfileModel]


@hookimpl
def dicompiler_platforms() -> Iterable[PlatformFamily]:
    from dicompiler.ir.platform import builtin_families

    return builtin_families()
