"""Local search that moves runs of consecutive layers to other devices or teams, so that the largest load falls.

A team is a set of devices that split a layer. A selection has one choice (way to split the layer) for each layer. A
move gives all layers of a run the choice with the same label, such as "height 2 on pi02 pi03". Layers without a choice
of this label keep their choice.
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

NORM_EXPONENT = 12
"""Exponent p of the norm (Σ load^p)^(1/p) that the search minimises.

A load is the seconds or bytes of a device or link. The norm is close to the largest load. Unlike the largest load, it
also falls if a move reduces other large loads.
"""
MIN_GAIN = 1e-6
"""Smallest relative gain for which the search moves a run of layers to other devices."""
MAX_BATCH_ENTRIES, MIN_BATCH_RUNS = 1 << 19, 8
"""Limits of a batch of moves: the most table entries that it may read, and the fewest runs of layers in it.

A batch is evaluated at once, and its best move is taken before the next batch. The entries are counted as if each move
read the tables of all layers.
"""
ENTRY_S, BATCH_S = 6e-9, 4e-4
"""Seconds of the reference computer to read a table entry, and to prepare a batch of moves (changes of a plan)."""
EXCESS_PENALTY = 1e6
"""Penalty on the value of a selection (plan) that exceeds a host's memory, or that sends a state to another device."""


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

    @cached_property
    def models(self) -> Sequence[LoadModel]:
        """The load models that are evaluated: the loads to minimise, and the hosts' memory if it is checked."""
        return (self.model,) if self.memory is None else (self.model, self.memory)

    @cached_property
    def entries(self) -> int:
        """Number of table entries that the evaluation of a selection (plan) reads."""
        return sum(model.entries((range(model.layers),)) for model in self.models)

    def work_s(self, runs: Sequence[range], moves: int) -> float:
        """Return the seconds that the reference computer needs to evaluate `moves` moves of each run of layers.

        A move splits all layers of a run (consecutive layers) in another way.
        """
        return sum(model.entries(runs) * moves * ENTRY_S + BATCH_S for model in self.models)

    @cached_property
    def scale(self) -> float:
        """The largest load (seconds or bytes) if every layer has its first choice (way to split it).

        Loads are divided by it, so that their powers stay small.
        """
        return float(self.model.loads(np.zeros((1, self.model.layers), np.intp)).max()) or 1.0

    def values(self, selections: Selections) -> Floats:
        """Return the value of each selection (plan): a norm of its loads, which is close to the largest load.

        A penalty is added if the selection exceeds a host's memory, or if it sends a state to another device. A state
        is an output that is an input of the next frame.
        """
        return self._values(selections, [model.loads(selections) for model in self.models])

    def moved_values(self, current: Selections, moved: Selections, runs: Sequence[range]) -> Floats:
        """Return the values of selections (plans) that differ from `current` in runs of layers, as `values` does.

        The value of a plan is close to its largest load: the seconds of a device or link, or the bytes of a host.

        Args:
            current: One selection, of shape (layers).
            moved: The changed selections, of shape (selections, layers), for each run the same number.
            runs: The runs (ranges of consecutive layers) in which the selections differ.

        Returns:
            An array of shape (selections).
        """
        by_run = moved.reshape(len(runs), -1, len(current))
        return self._values(moved, [model.moved_loads(current, by_run, runs) for model in self.models])

    def _values(self, selections: Selections, loads_by_model: Sequence[Floats]) -> Floats:
        """Return the values of selections (plans), given the loads (seconds or bytes) that each model predicts."""
        loads, *memory = loads_by_model
        values: Floats = np.sum((loads / self.scale) ** NORM_EXPONENT, axis=1) ** (1 / NORM_EXPONENT)
        for used in memory:
            excess = (used / self.memory_limits).max(axis=1) - 1
            values = values + np.where(excess > 0, EXCESS_PENALTY * (1 + excess), 0.0)
        for (i, j), is_sent in self.sent_states.items():
            values = values + EXCESS_PENALTY * is_sent[selections[:, i], selections[:, j]]
        return values

    def value(self, selection: Selections) -> float:
        """Return the value of one selection (plan), given as an array of shape (layers)."""
        return float(self.values(selection[None])[0])


class RunSearch:
    """A local search that improves selections (one way to split each layer) by moves of runs of consecutive layers.

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
        """The labels of all ways to split a layer, such as "height 2 on pi02 pi03", each with its row in `numbers`."""
        labels = dict.fromkeys(choice.label for choices in self.choices for choice in choices)
        return {label: row for row, label in enumerate(labels)}

    @cached_property
    def numbers(self) -> Selections:
        """For each label ("height 2 on pi02 pi03"), the number of each layer's choice with that label.

        A choice is one way to split a layer. The number is −1 if the layer has no such choice.
        """
        numbers = np.full((len(self.labels), len(self.choices)), -1)
        for layer, choices in enumerate(self.choices):
            for number, choice in enumerate(choices):
                numbers[self.labels[choice.label], layer] = number
        return numbers

    def uniform_selection(self, label: str) -> Selections:
        """Return the selection (plan) in which each layer is split as the label says, such as "height 2 on pi02 pi03".

        Layers without a choice of this label have their first choice.
        """
        selection: Selections = np.maximum(self.numbers[self.labels[label]], 0)
        return selection

    def improve(self, selection: Selections) -> Selections:
        """Return the best selection (plan) that moves find, beginning with `selection`.

        A move changes how a run (sequence of consecutive layers) is split. First a run of all layers is moved, then
        shorter and shorter runs. All lengths are tried again until no move improves the selection or the budget is
        exceeded.
        """
        current, value, improved = selection, self.objective.value(selection), True
        while improved:
            improved = False
            for length in run_lengths(len(selection)):
                for runs in self._batches_of_runs(length):
                    if not self.budget.try_spend(self.objective.work_s(runs, len(self.labels))):
                        return current
                    moved = self._moved(current, runs)
                    values = self.objective.moved_values(current, moved, runs)
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

    def _batches_of_runs(self, length: int) -> Iterator[Sequence[range]]:
        """Yield runs of `length` consecutive layers that overlap by half, in batches that are tried together."""
        starts = range(0, len(self.choices) - length + 1, max(1, length // 2))
        runs = [range(start, start + length) for start in starts]
        size = max(MIN_BATCH_RUNS, MAX_BATCH_ENTRIES // (self.objective.entries * len(self.labels)))
        yield from (runs[i : i + size] for i in range(0, len(runs), size))

    def _moved(self, current: Selections, runs: Sequence[range]) -> Selections:
        """Return selections (plans) that each differ from `current` in one run of layers, split as one label says.

        There is one for each run and each label. A label, such as "height 2 on pi02 pi03", names a way to split a
        layer. Layers without this way to split are not changed.
        """
        moved = np.repeat(current[None], len(runs) * len(self.labels), axis=0)
        for place, run in enumerate(runs):
            rows, layers = slice(place * len(self.labels), (place + 1) * len(self.labels)), slice(run.start, run.stop)
            numbers = self.numbers[:, layers]
            moved[rows, layers] = np.where(numbers >= 0, numbers, current[layers])
        return moved


def run_lengths(layers: int) -> list[int]:
    """Return the lengths of the runs (consecutive layers) to move: all layers, two thirds of them, and so on to one."""
    lengths = [layers]
    while lengths[-1] > 1:
        lengths.append(max(1, lengths[-1] * 2 // 3))
    return lengths
