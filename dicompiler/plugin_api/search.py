"""Work budgets, memory constraints, objectives and Pareto fronts.

This module is part of the public API for plugin authors. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicompiler.base.lazy_module import lazy_module

if TYPE_CHECKING:
    from dicompiler.base.objectives import OBJECTIVES, objective_terms
    from dicompiler.ir.pipeline_state import Decision
    from dicompiler.search.constraints import (
        check_constraints,
        check_measured_memory,
        check_plan_devices,
        describe_missing_memory,
        describe_plan_memory,
        fits_constraints,
        free_memory,
        missing_memory,
        needed_memory,
        used_memory,
    )
    from dicompiler.search.lower_bounds import objective_bound
    from dicompiler.search.pareto_front import (
        AUTODICE_OBJECTIVES,
        MeasuredMetrics,
        ParetoFront,
        ParetoPoint,
        ProgressCallback,
        check_objectives,
        objective_values,
    )
    from dicompiler.search.problem import MIN_SPLIT_GAIN
    from dicompiler.search.strategy import INTERRUPTED_NOTE
    from dicompiler.search.work_budget import DEFAULT_BUDGET_S, BudgetExceeded, WorkBudget

__all__ = [
    "AUTODICE_OBJECTIVES", "DEFAULT_BUDGET_S", "INTERRUPTED_NOTE", "MIN_SPLIT_GAIN", "OBJECTIVES", "BudgetExceeded",
    "Decision", "MeasuredMetrics", "ParetoFront", "ParetoPoint", "ProgressCallback", "WorkBudget",
    "check_constraints", "check_measured_memory", "check_objectives", "check_plan_devices",
    "describe_missing_memory", "describe_plan_memory", "fits_constraints", "free_memory", "missing_memory",
    "needed_memory", "objective_bound", "objective_terms", "objective_values", "used_memory",
]  # fmt: skip

if not TYPE_CHECKING:  # Type checkers must not see `__getattr__`, because they would then accept unknown names.
    __getattr__, __dir__ = lazy_module(__name__)
