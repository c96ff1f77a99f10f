"""What a search may still do: work that is counted, so that the same is done on a slow machine, and the clock beside.

Searches `spend` what a piece of work takes on a common computer before they begin with it, and stop where it is over.
"""

from __future__ import annotations

import math
import time

DEFAULT_BUDGET_S = 30.0
"""Seconds that a search may take by default."""
STEP_S, ELEMENT_S = 2e-5, 5e-9
"""Seconds of a step of a search over tables (some calls of numpy), and of each element that it reads."""


class BudgetExceeded(Exception):
    """The allowance is over, and what was asked for is not there."""


class WorkBudget:
    """seconds: what all work may come to, in seconds of a common computer: counted, the same on every machine.
    deadline: of `time.monotonic`, for who cannot wait where the machine is slower."""

    def __init__(self, limit_s: float = math.inf, deadline: float = math.inf) -> None:
        self.limit_s, self.deadline, self.spent_s = limit_s, deadline, 0.0
        self._exceeded = False

    @staticmethod
    def from_seconds(budget: float) -> WorkBudget:
        """So many seconds, by both."""
        return WorkBudget(budget, time.monotonic() + budget)

    def spend(self, seconds: float) -> None:
        """Counts work of so many seconds."""
        self.spent_s += seconds

    def try_spend(self, seconds: float) -> bool:
        """Counts a piece of work if there is so much left; else it is over."""
        if self.is_exceeded() or seconds > self.remaining_s:
            self._exceeded = True
            return False
        self.spend(seconds)
        return True

    def try_steps(self, elements: float = 0, steps: int = 1) -> bool:
        """Counts some steps that read so many elements of tables in all; whether they may still be done: what is begun
        is done to its end."""
        if self.is_exceeded():
            return False
        self.spend(steps * STEP_S + elements * ELEMENT_S)
        return True

    @property
    def remaining_s(self) -> float:
        """Seconds of counted work."""
        return max(0.0, self.limit_s - self.spent_s)

    @property
    def was_exceeded(self) -> bool:
        """Whether it was ever found to be over."""
        return self._exceeded

    def seconds_to_deadline(self) -> float:
        """By the clock; below 0 once it is past."""
        return self.deadline - time.monotonic()

    def is_exceeded(self) -> bool:
        """Whether the work is done or the deadline is past; it stays so."""
        self._exceeded = self._exceeded or self.spent_s >= self.limit_s or self.seconds_to_deadline() < 0
        return self._exceeded

    def spend_or_raise(self, seconds: float = 0.0) -> None:
        """Counts a piece of work that has to be done for there to be any result: what is begun is done to its end.
        Raises Spent where it is over already."""
        if self.is_exceeded():
            raise BudgetExceeded
        self.spend(seconds)

    def note(self) -> str:
        """What a plan says that came of a search which was cut off; '' of one that was not."""
        return f"the search ended after its budget of {self.limit_s:g} s" if self._exceeded else ""
