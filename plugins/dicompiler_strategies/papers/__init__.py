"""The published algorithms in their original form, each as a strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dicompiler.plugin_api import API_VERSION, hookimpl

if TYPE_CHECKING:
    from dicompiler.plugin_api import Strategy

dicompiler_api = API_VERSION


@hookimpl
def dicompiler_strategies() -> Iterable[type[Strategy]]:
    """Return the strategies of AutoDiCE, CoopAI, DIAPASON and Stahl et al."""
    from dicompiler_strategies.papers.autodice import Autodice
    from dicompiler_strategies.papers.coopai_plan import Coopai
    from dicompiler_strategies.papers.diapason import Diapason
    from dicompiler_strategies.papers.stahl import Stahl

    return [Autodice, Coopai, Diapason, Stahl]
