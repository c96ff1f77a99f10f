"""Work budgets for searches, which give the same results on every machine.

Before each step, a search adds the predicted work of the step to its budget, in seconds of a reference computer. It
therefore stops at the same step on every machine. A budget can also have a wall-clock deadline for slow machines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT_BUDGET_S = 30.0
"""Default budget of a search, in seconds of the reference computer."""
STEP_S, ELEMENT_S = 2e-5, 5e-9
"""Seconds of the reference computer for a step of a search, and for each element that it reads from cost tables.

Cost tables are arrays with the predicted costs of all ways to split a layer.
"""

MAX_SLOWDOWN = 3.0
"""Factor by which a machine may be slower than the reference computer before the clock ends a search."""
MIN_DEADLINE_S = 20.0
"""The clock never ends a search before this number of seconds, so that small budgets suffice on busy machines too."""

BUDGET_NOTE = "the search ended after its budget"
"""Beginning of the note in a plan if the search has exceeded its budget."""


class BudgetExceeded(Exception):
    """Error of a search that has used up its work budget before it has found any result."""


class WorkBudget:
    """Counter of a search's work, with a limit and optionally a deadline.

    Args:
        limit_s: Limit of the counted work, in seconds of the reference computer.
        deadline: Latest time by `time.monotonic()`, in seconds. If a search stops at the deadline, its plan depends on
            the speed of the machine.

    Attributes:
        limit_s: Limit of the counted work, in seconds of the reference computer.
        deadline: Latest time by `time.monotonic()`, in seconds.
        spent_s: Work counted so far, in seconds of the reference computer.
    """

    limit_s: float
    deadline: float
    spent_s: float

    def __init__(self, limit_s: float = math.inf, deadline: float = math.inf) -> None:
        self.limit_s, self.deadline, self.spent_s = limit_s, deadline, 0.0
        self._exceeded = self._has_clock_ended = False

    @staticmethod
    def from_seconds(seconds: float) -> WorkBudget:
        """Return a budget of counted work, with a deadline for machines that are very slow or busy.

        Args:
            seconds: Limit of the counted work in seconds of the reference computer. The deadline is after MAX_SLOWDOWN
                times as many seconds, but not before MIN_DEADLINE_S.

        Returns:
            The new budget.
        """
        return WorkBudget(seconds, time.monotonic() + _clock_limit_s(seconds))

    def spend(self, seconds: float) -> None:
        """Add work to the counted work, even if the budget is exceeded.

        Args:
            seconds: Work in seconds of the reference computer.
        """
        self.spent_s += seconds

    @contextmanager
    def share(self, fraction: float) -> Iterator[WorkBudget]:
        """Return a context manager with a budget of its own for one step of the search.

        At the end of the context, the work of the step is added to this budget.

        Args:
            fraction: Limit of the step's work, as a fraction of the work that is left.

        Yields:
            The budget of the step, with the same deadline.
        """
        step = WorkBudget(fraction * self.remaining_s, self.deadline)
        yield step
        self.spend(step.spent_s)

    def try_spend(self, seconds: float) -> bool:
        """Count work if it fits into the budget, and return True; otherwise, mark the budget as exceeded.

        Args:
            seconds: Work in seconds of the reference computer.

        Returns:
            True if the work may be done.
        """
        if self.is_exceeded() or seconds > self.remaining_s:
            self._exceeded = True
            return False
        self.spend(seconds)
        return True

    def try_steps(self, elements: float = 0, steps: int = 1) -> bool:
        """Count steps of a search and return True; if the budget is already exceeded, count nothing and return False.

        The counted steps may themselves exceed the budget.

        Args:
            elements: Number of elements that all steps together read from cost tables (arrays with the predicted costs
                of all ways to split a layer).
            steps: Number of steps.

        Returns:
            True if the steps may be done.
        """
        if self.is_exceeded():
            return False
        self.spend(steps * STEP_S + elements * ELEMENT_S)
        return True

    @property
    def remaining_s(self) -> float:
        """Counted work that is left, in seconds of the reference computer."""
        return max(0.0, self.limit_s - self.spent_s)

    @property
    def was_exceeded(self) -> bool:
        """True if an earlier call of `is_exceeded` or a `try_…` method found the budget exceeded."""
        return self._exceeded

    def seconds_to_deadline(self) -> float:
        """Return the seconds until the deadline.

        Returns:
            Seconds by the clock; negative after the deadline.
        """
        return self.deadline - time.monotonic()

    def is_exceeded(self) -> bool:
        """Return True if the counted work has reached the limit, or the deadline has passed; it then stays True.

        Returns:
            True if no more work may be done.
        """
        if not self._exceeded:
            self._has_clock_ended = self.spent_s < self.limit_s and self.seconds_to_deadline() < 0
            self._exceeded = self.spent_s >= self.limit_s or self._has_clock_ended
        return self._exceeded

    def spend_or_raise(self, seconds: float = 0.0) -> None:
        """Count work that the search needs for its first result; raise an error if the budget is exceeded.

        Args:
            seconds: Work in seconds of the reference computer.

        Raises:
            BudgetExceeded: The budget is already exceeded.
        """
        if self.is_exceeded():
            raise BudgetExceeded
        self.spend(seconds)

    def note(self) -> str:
        """Return a note for the plan, which says that the budget has stopped the search.

        Returns:
            The note; "" if the budget was never exceeded.
        """
        if not self._exceeded:
            return ""
        clock = f" (the clock reached {_clock_limit_s(self.limit_s):g} s, because this machine is slow or busy)"
        return f"{BUDGET_NOTE} of {self.limit_s:g} s{clock if self._has_clock_ended else ''}"


def _clock_limit_s(budget_s: float) -> float:
    return max(MIN_DEADLINE_S, MAX_SLOWDOWN * budget_s)
