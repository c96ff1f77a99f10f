"""What the core itself provides, through the same hooks as any plugin: operator rules, cost models and platforms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dicompiler.hookspecs import API_VERSION, hookimpl

if TYPE_CHECKING:
    from dicompiler.costs import CostModel
    from dicompiler.operators.rule import OperatorRule
    from dicompiler.platform import PlatformFamily

dicompiler_api = API_VERSION


@hookimpl
def dicompiler_operators() -> Iterable[OperatorRule]:
    """The rules of the standard operators that can be cut."""
    from dicompiler.operators import builtin_rules

    return builtin_rules()


@hookimpl
def dicompiler_cost_models() -> Iterable[type[CostModel]]:
    """The analytic cost model, the roofline, the fit for each layer kind, and what was measured."""
    from dicompiler.costs import Analytic
    from dicompiler.costs_models import Linear, Roofline
    from dicompiler.costs_profile import Measured

    return [Analytic, Roofline, Linear, Measured]


@hookimpl
def dicompiler_platforms() -> Iterable[PlatformFamily]:
    """The platform families whose figures come with dicompiler."""
    from dicompiler.platform import families

    return families()
