"""Local search that moves runs of consecutive layers to other devices or teams, so that the largest load falls.

A team is a set of devices that split a layer. A selection has one choice (way to split it) for each layer. Each choice
has a label. The label "height 2 on pi02 pi03" means that the layer is split by rows into 2 parts, for pi02 and pi03.

A move takes one label and gives each layer of a run its choice with that label. A layer without such a choice stays as
it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.choices import Choice
from dicompiler_strategies.tables.cost_tables import LayerEdge
from dicompiler_strategies.teams.load_models import LoadModel, Selections

NORM_EXPONENT = 12
"""Exponent p of the norm (Σ load^p)^(1/p) that the search minimises.

The norm is close to the largest load: seconds of a device or link, or bytes of a host. It also falls if a move reduces
other large loads.
"""
MIN_GAIN = 1e-6
"""Smallest relative gain for which the search moves a run of layers to other devices."""
MAX_BATCH_ENTRIES, MIN_BATCH_RUNS = 1 << 19, 8
"""Size of a batch of moves.

A full batch has MIN_BATCH_RUNS runs, or more if they read at most MAX_BATCH_ENTRIES array entries by estimate. A batch
is evaluated at once, and its best move is taken before the next batch.
"""
ENTRY_S, BATCH_S = 7e-9, 1.6e-4
"""Seconds of the reference computer to read an array entry, and to prepare a batch of moves (changes of a plan)."""
EXCESS_PENALTY = 1e6
"""Penalty on a plan that exceeds a host's memory, or that sends a state to another device."""


@dataclass(frozen=True, eq=False)
class RunObjective:
    """The value of plans, which the search minimises.

    Attributes:
        model: The loads of which the largest is minimised.
        memory: The bytes of each host; None if the hosts' memory is not checked.
        memory_limits: Free bytes of each host; at least 1, because they are divisors.
        sent_states: For each pair of layers that compute and read a state (an output that is an input of the next
            frame): True for the pairs of choices that would send the state to another device, shape (choices, choices).
    """

    model: LoadModel
    memory: LoadModel | None = None
    memory_limits: Floats = field(default_factory=lambda: np.zeros(0))
    sent_states: Mapping[LayerEdge, NDArray[np.bool_]] = field(default_factory=dict)

    @cached_property
    def models(self) -> Sequence[LoadModel]:
        return (self.model,) if self.memory is None else (self.model, self.memory)

    @cached_property
    def entries_per_plan(self) -> int:
        """Number of array entries that are read to evaluate a plan."""
        return sum(model.count_entries((range(model.layer_count),)) for model in self.models)

    def work_s(self, runs: Sequence[range], moves: int) -> float:
        """Return the seconds of the reference computer to evaluate `moves` other splits of each run of layers."""
        return sum(model.count_entries(runs) * moves * ENTRY_S + BATCH_S for model in self.models)

    @cached_property
    def scale(self) -> float:
        """The largest load (seconds or bytes) if every layer has its first choice. Loads are divided by it."""
        return float(self.model.loads(np.zeros((1, self.model.layer_count), np.intp)).max()) or 1.0

    def values(self, selections: Selections) -> Floats:
        """Return the value of each plan: a norm of its loads, plus penalties for forbidden plans."""
        return self._values(selections, [model.loads(selections) for model in self.models])

    def moved_values(self, current: Selections, moved: Selections, runs: Sequence[range]) -> Floats:
        """Return the values of plans that each differ from `current` in one run of layers, shape (plans,).

        Args:
            current: One plan as choice indices, shape (layers,).
            moved: The changed plans, shape (plans, layers): first all plans of the first run, then as many of the
                second, and so on.
            runs: The ranges of consecutive layers in which the plans differ.
        """
        by_run = moved.reshape(len(runs), -1, len(current))
        return self._values(moved, [model.moved_loads(current, by_run, runs) for model in self.models])

    def _values(self, selections: Selections, loads_by_model: Sequence[Floats]) -> Floats:
        loads, *memory = loads_by_model
        values: Floats = np.sum((loads / self.scale) ** NORM_EXPONENT, axis=1) ** (1 / NORM_EXPONENT)
        for used in memory:
            excess = (used / self.memory_limits).max(axis=1) - 1
            values = values + np.where(excess > 0, EXCESS_PENALTY * (1 + excess), 0.0)
        for (i, j), is_sent in self.sent_states.items():
            values = values + EXCESS_PENALTY * is_sent[selections[:, i], selections[:, j]]
        return values

    def value(self, selection: Selections) -> float:
        return float(self.values(selection[None])[0])


class RunSearch:
    """A local search that improves plans by moves of runs of consecutive layers.

    The docstring of the module explains moves and labels.

    Args:
        choices: The ways to split each layer.
        objective: The value of plans.
        budget: The work that the search may do.
    """

    def __init__(self, choices: Sequence[Sequence[Choice]], objective: RunObjective, budget: WorkBudget) -> None:
        self.choices, self.objective, self.budget = choices, objective, budget

    @cached_property
    def labels(self) -> dict[str, int]:
        """The labels of all ways to split a layer, each with its row in `choice_by_label`."""
        labels = dict.fromkeys(choice.label for choices in self.choices for choice in choices)
        return {label: row for row, label in enumerate(labels)}

    @cached_property
    def choice_by_label(self) -> Selections:
        """Index of each layer's choice with each label; −1 if the layer has none. Shape (labels, layers)."""
        choice_by_label = np.full((len(self.labels), len(self.choices)), -1)
        for layer, choices in enumerate(self.choices):
            for index, choice in enumerate(choices):
                choice_by_label[self.labels[choice.label], layer] = index
        return choice_by_label

    @cached_property
    def batches(self) -> list[Sequence[range]]:
        """The runs that the search tries, longest first, in batches of runs of equal length.

        Each run begins half a length (rounded down, at least one layer) after the one before it. Runs of some lengths
        may leave out the last layers.
        """
        size = max(MIN_BATCH_RUNS, MAX_BATCH_ENTRIES // (self.objective.entries_per_plan * len(self.labels)))
        batches = list[Sequence[range]]()
        for length in run_lengths(len(self.choices)):
            starts = range(0, len(self.choices) - length + 1, max(1, length // 2))
            runs = [range(start, start + length) for start in starts]
            batches += [runs[i : i + size] for i in range(0, len(runs), size)]
        return batches

    def uniform_selection(self, label: str) -> Selections:
        """Return the plan in which each layer is split as the label says.

        Layers without a choice with this label have their first choice.
        """
        selection: Selections = np.maximum(self.choice_by_label[self.labels[label]], 0)
        return selection

    def improve(self, selection: Selections) -> Selections:
        """Return `selection`, improved by moves of runs until no move helps or the budget is spent.

        The search first tries a run of all layers, then shorter and shorter runs, and then all layers again.
        """
        current, value, batches_in_vain = selection, self.objective.value(selection), 0
        for runs in itertools.cycle(self.batches):
            if batches_in_vain == len(self.batches):
                break
            if not self.budget.try_spend(self.objective.work_s(runs, len(self.labels))):
                break
            moved = self._moved(current, runs)
            values = self.objective.moved_values(current, moved, runs)
            place = int(values.argmin())
            batches_in_vain += 1
            if values[place] < value * (1 - MIN_GAIN):
                current, value, batches_in_vain = moved[place], float(values[place]), 0
        return current

    def change_randomly(self, selection: Selections, random: np.random.Generator) -> Selections:
        """Return the plan after a random change: two moves of random runs, each with a random label."""
        changed = selection.copy()
        for _ in range(2):
            length = int(random.choice(run_lengths(len(selection))))
            start = int(random.integers(len(selection) - length + 1))
            run = slice(start, start + length)
            choice_indices = self.choice_by_label[int(random.integers(len(self.choice_by_label))), run]
            changed[run] = np.where(choice_indices >= 0, choice_indices, changed[run])
        return changed

    def _moved(self, current: Selections, runs: Sequence[range]) -> Selections:
        """Return plans that each differ from `current` in one run of layers, one plan for each run and each label."""
        moved = np.repeat(current[None], len(runs) * len(self.labels), axis=0)
        for place, run in enumerate(runs):
            plan_slice = slice(place * len(self.labels), (place + 1) * len(self.labels))
            layer_slice = slice(run.start, run.stop)
            choice_indices = self.choice_by_label[:, layer_slice]
            moved[plan_slice, layer_slice] = np.where(choice_indices >= 0, choice_indices, current[layer_slice])
        return moved


def run_lengths(layer_count: int) -> list[int]:
    """Return the lengths of the runs (consecutive layers) to move: all layers, two thirds of them, and so on to one."""
    lengths = [layer_count]
    while lengths[-1] > 1:
        lengths.append(max(1, lengths[-1] * 2 // 3))
    return lengths
