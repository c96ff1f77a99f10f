"""Local search that moves runs of consecutive layers to other devices or teams, so that the largest load falls.

A selection has one choice for each layer. A move gives all layers of a run the choice with the same label, such as
"height 2 on pi02 pi03". Layers without such a choice keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.choices import Choice
from dicompiler_strategies.tables.cost_tables import LayerEdge
from dicompiler_strategies.teams.load_models import LoadModel, Selections

NORM = 12
"""Exponent p of the norm (Σ load^p)^(1/p) that is minimised.

The norm is close to the largest load. Unlike the largest load, it also falls if a move reduces other large loads.
"""
MIN_GAIN = 1e-6
"""Smallest relative gain for which a move is taken."""
MAX_BATCH_ENTRIES = 1 << 19
"""Table entries that are read for one batch of moves. The best move of a batch is taken before the next batch."""
ENTRY_S, LAYER_S = 6e-9, 3e-5
"""Seconds of the reference computer to read one table entry, and to evaluate one layer for a whole batch."""
PENALTY = 1e6
"""Penalty on the value of a selection that exceeds a host's memory, or that sends a state to another device."""


@dataclass(frozen=True, eq=False)
class RunObjective:
    """The value of selections, which the search minimises. A selection has one way to split each layer.

    Attributes:
        model: The loads of which the largest is minimised.
        memory: The loads that are limited: the bytes of each host; None if the hosts' memory is not checked.
        memory_limits: Bytes that each host has.
        sent_states: For each pair of layers that compute and read a state (an output that is an input of the next
            frame): True for the pairs of choices that would send the state to another device, of shape (choices,
            choices).
    """

    model: LoadModel
    memory: LoadModel | None = None
    memory_limits: Floats = field(default_factory=lambda: np.zeros(0))
    sent_states: Mapping[LayerEdge, NDArray[np.bool_]] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        """Number of table entries that the evaluation of a selection reads."""
        return self.model.entries + (0 if self.memory is None else self.memory.entries)

    @cached_property
    def scale(self) -> float:
        """The largest load if every layer has its first choice (way to split it).

        Loads are divided by it, so that their powers stay small.
        """
        return float(self.model.loads(np.zeros((1, self.model.layers), np.intp)).max()) or 1.0

    def values(self, selections: Selections) -> Floats:
        """Return the value of each selection (plan), plus a penalty if it exceeds memory or sends a state.

        A state is an output that is an input of the next frame; it must stay on its device.
        """
        loads = self.model.loads(selections) / self.scale
        values: Floats = np.sum(loads**NORM, axis=1) ** (1 / NORM)
        if self.memory is not None:
            excess = (self.memory.loads(selections) / self.memory_limits).max(axis=1) - 1
            values = values + np.where(excess > 0, PENALTY * (1 + excess), 0.0)
        for (i, j), is_sent in self.sent_states.items():
            values = values + PENALTY * is_sent[selections[:, i], selections[:, j]]
        return values

    def value(self, selection: Selections) -> float:
        """Return the value of one selection, given as an array of shape (layers)."""
        return float(self.values(selection[None])[0])


class RunSearch:
    """Improves selections (one choice per layer) by moves of runs of consecutive layers.

    A move gives all layers of a run the choice with the same label, such as "height 2 on pi02 pi03".

    Args:
        choices: The choices of each layer.
        objective: The value of selections.
        budget: The work that the search may do.
    """

    def __init__(self, choices: Sequence[Sequence[Choice]], objective: RunObjective, budget: WorkBudget) -> None:
        self.choices, self.objective, self.budget = choices, objective, budget

    @cached_property
    def labels(self) -> dict[str, int]:
        """The labels of all choices, each with its row in `numbers`."""
        labels = dict.fromkeys(choice.label for choices in self.choices for choice in choices)
        return {label: row for row, label in enumerate(labels)}

    @cached_property
    def numbers(self) -> Selections:
        """For each label ("height 2 on pi02 pi03"), the number of each layer's choice with that label; −1 for none."""
        numbers = np.full((len(self.labels), len(self.choices)), -1)
        for layer, choices in enumerate(self.choices):
            for number, choice in enumerate(choices):
                numbers[self.labels[choice.label], layer] = number
        return numbers

    def uniform_selection(self, label: str) -> Selections:
        """Return the selection (one choice per layer) in which each layer has the choice with this label.

        Layers without such a choice have their first choice.
        """
        selection: Selections = np.maximum(self.numbers[self.labels[label]], 0)
        return selection

    def improve(self, selection: Selections) -> Selections:
        """Return the best selection that moves find, beginning with `selection`.

        A move changes how a run (sequence of consecutive layers) is split. First a run of all layers is moved, then
        shorter and shorter runs. All lengths are tried again until no move improves the selection or the budget is
        exceeded.
        """
        current, value, improved = selection, self.objective.value(selection), True
        while improved:
            improved = False
            for length in run_lengths(len(selection)):
                for starts in self._batches_of_starts(length):
                    moved = self._moved(current, starts, length)
                    if not self._try_spend(len(moved)):
                        return current
                    values = self.objective.values(moved)
                    place = int(values.argmin())
                    if values[place] < value * (1 - MIN_GAIN):
                        current, value, improved = moved[place], float(values[place]), True
        return current

    def perturb(self, selection: Selections, random: np.random.Generator) -> Selections:
        """Return the selection with random changes: two runs of consecutive layers are split in another way.

        Each run gets the choices with a random label, such as "height 2 on pi02 pi03".
        """
        changed = selection.copy()
        for _ in range(2):
            length = int(random.choice(run_lengths(len(selection))))
            start = int(random.integers(len(selection) - length + 1))
            run = slice(start, start + length)
            label = self.numbers[int(random.integers(len(self.numbers))), run]
            changed[run] = np.where(label >= 0, label, changed[run])
        return changed

    def _try_spend(self, selections: int) -> bool:
        """Return True if the budget allows the evaluation of so many selections at once."""
        return self.budget.try_spend(selections * self.objective.entries * ENTRY_S + len(self.choices) * LAYER_S)

    def _batches_of_starts(self, length: int) -> Iterator[Sequence[int]]:
        """Yield the first layers of runs, in batches that are tried together; neighbouring runs overlap by half."""
        starts = range(0, len(self.choices) - length + 1, max(1, length // 2))
        size = max(1, MAX_BATCH_ENTRIES // (self.objective.entries * len(self.labels)))
        yield from (starts[i : i + size] for i in range(0, len(starts), size))

    def _moved(self, current: Selections, starts: Sequence[int], length: int) -> Selections:
        """Return a selection for each start and each label, changed from `current`.

        The run of `length` consecutive layers that begins at the start gets the choices with this label. A label, such
        as "height 2 on pi02 pi03", names a way to split a layer.
        """
        moved = np.repeat(current[None], len(starts) * len(self.labels), axis=0)
        for place, start in enumerate(starts):
            rows, run = slice(place * len(self.labels), (place + 1) * len(self.labels)), slice(start, start + length)
            moved[rows, run] = np.where(self.numbers[:, run] >= 0, self.numbers[:, run], current[run])
        return moved


def run_lengths(layers: int) -> list[int]:
    """Return the lengths of runs: all layers, two thirds of them, and so on down to one."""
    lengths = [layers]
    while lengths[-1] > 1:
        lengths.append(max(1, lengths[-1] * 2 // 3))
    return lengths
