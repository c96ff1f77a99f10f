"""What a search may still do: work that is counted, so that the same is done on a slow machine, and the clock beside.

Searches `spend` what a piece of work takes on a common computer before they begin with it, and stop where it is over.
"""

from __future__ import annotations

import math
import time

BUDGET = 30.0
"""Seconds that a search may take by default."""
STEP, ELEMENT = 2e-5, 5e-9
"""Seconds of a step of a search over tables (some calls of numpy), and of each element that it reads."""


class Spent(Exception):
    """The allowance is over, and what was asked for is not there."""


class Allowance:
    """seconds: what all work may come to, in seconds of a common computer: counted, the same on every machine.
    deadline: of `time.monotonic`, for who cannot wait where the machine is slower."""

    def __init__(self, seconds: float = math.inf, deadline: float = math.inf) -> None:
        self.seconds, self.deadline, self.spent = seconds, deadline, 0.0
        self._over = False

    @staticmethod
    def of(budget: float) -> Allowance:
        """So many seconds, by both."""
        return Allowance(budget, time.monotonic() + budget)

    def spend(self, seconds: float) -> None:
        """Counts work of so many seconds."""
        self.spent += seconds

    def take(self, seconds: float) -> bool:
        """Counts a piece of work if there is so much left; else it is over."""
        if self.over() or seconds > self.left:
            self._over = True
            return False
        self.spend(seconds)
        return True

    def step(self, elements: float = 0, steps: int = 1) -> bool:
        """Counts some steps that read so many elements of tables in all; whether they may still be done: what is begun
        is done to its end."""
        if self.over():
            return False
        self.spend(steps * STEP + elements * ELEMENT)
        return True

    @property
    def left(self) -> float:
        """Seconds of counted work."""
        return max(0.0, self.seconds - self.spent)

    @property
    def late(self) -> bool:
        """Whether it was ever found to be over."""
        return self._over

    def seconds_to_deadline(self) -> float:
        """By the clock; below 0 once it is past."""
        return self.deadline - time.monotonic()

    def over(self) -> bool:
        """Whether the work is done or the deadline is past; it stays so."""
        self._over = self._over or self.spent >= self.seconds or self.seconds_to_deadline() < 0
        return self._over

    def claim(self, seconds: float = 0.0) -> None:
        """Counts a piece of work that has to be done for there to be any result: what is begun is done to its end.
        Raises Spent where it is over already."""
        if self.over():
            raise Spent
        self.spend(seconds)

    def note(self) -> str:
        """What a plan says that came of a search which was cut off; '' of one that was not."""
        return f"the search ended after its budget of {self.seconds:g} s" if self._over else ""
