"""Chromosomes: arrays of integers (genes) that encode plans, with crossover and mutation.

A decoded plan is a row with one integer for each layer: the platform position of its device if layers stay whole,
otherwise the index of one of the layer's choices (ways to split it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Genes = NDArray[np.intp]
"""An array with a chromosome in each row."""
PlanRows = NDArray[np.intp]
"""An array with a decoded plan in each row."""
START_STEP_SIZES = 4
"""Number of distances (1, 2, 4, … layers) by which a mutation may move the first layer of a group."""


@dataclass(frozen=True)
class Encoding(ABC):
    """A way of encoding plans as chromosomes.

    Attributes:
        layers: Number of layers of the network.
    """

    layers: int

    @abstractmethod
    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        """Return `count` random chromosomes (encoded plans)."""

    @abstractmethod
    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        """Return the chromosomes, each with one or a few genes changed."""

    def decode(self, genes: Genes) -> PlanRows:
        """Return the plan of each chromosome. By default, the genes are the plan."""
        return genes

    def encode(self, rows: PlanRows) -> Genes:
        """Return a chromosome for each plan, or for a similar plan if the encoding cannot express it."""
        return rows

    def cross(self, rng: np.random.Generator, mothers: Genes, fathers: Genes) -> Genes:
        """Return children with the father's genes between two random positions, and otherwise the mother's."""
        inside = _random_spans(rng, len(mothers), mothers.shape[1])
        return np.where(inside, fathers, mothers)


def _random_spans(rng: np.random.Generator, count: int, length: int) -> NDArray[np.bool_]:
    """Return a mask of shape (count, length): True between two random positions of each row."""
    ends = np.sort(rng.integers(0, length + 1, (count, 2)), axis=1)
    positions = np.arange(length)
    return (positions >= ends[:, :1]) & (positions < ends[:, 1:])


def _random_mask(rng: np.random.Generator, count: int, length: int) -> NDArray[np.bool_]:
    """Return a mask of shape (count, length): True with probability 1 / length, and at least once in each row."""
    chosen = rng.random((count, length)) < 1 / length
    chosen[np.arange(count), rng.integers(0, length, count)] = True
    return chosen


@dataclass(frozen=True)
class NaiveEncoding(Encoding):
    """AutoDiCE's naive encoding: the device of every layer.

        1 1 2 2 3 4 4 4     eight layers on four devices

    Attributes:
        devices: Platform positions of the devices that may be used.
    """

    devices: tuple[int, ...]

    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        return np.asarray(self.devices, np.intp)[rng.integers(0, len(self.devices), (count, self.layers))]

    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        return np.where(_random_mask(rng, *genes.shape), self.sample(rng, len(genes)), genes)


@dataclass(frozen=True)
class SplitPointEncoding(Encoding):
    """AutoDiCE's split-point encoding: the first layer (start) and the device of each group of consecutive layers.

        starts 0 2 4 5 | devices 1 2 3 4   means   1 1 2 2 3 4 4 4

    Starts are sorted, and the first one is 0. A group that starts with the same layer as the next group is empty.

    Attributes:
        devices: Platform positions of the devices that may be used.
        groups: Number of groups, empty ones included.
    """

    devices: tuple[int, ...]
    groups: int

    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        """Return random chromosomes, in which every device has the same number of groups, or one group fewer."""
        starts = rng.integers(0, self.layers, (count, self.groups))
        turns = -(-self.groups // len(self.devices))
        devices = np.tile(np.asarray(self.devices, np.intp), (count, turns))
        return self._sort_groups(starts, rng.permuted(devices, axis=1)[:, : self.groups])

    def cross(self, rng: np.random.Generator, mothers: Genes, fathers: Genes) -> Genes:
        """Return children with the father's devices in a random span of layers, and otherwise the mother's."""
        inside = _random_spans(rng, len(mothers), self.layers)
        return self.encode(np.where(inside, self.decode(fathers), self.decode(mothers)))

    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        """Return the chromosomes, each with one or a few groups of layers changed.

        A change moves the start of a group by a small or a random distance, gives a group another device, or swaps the
        devices of two groups.
        """
        starts, devices = (array.copy() for array in self._split_genes(genes))
        count = len(genes)
        chosen = _random_mask(rng, count, self.groups)
        kind = rng.integers(0, 4, (count, 1))
        step = 2 ** rng.integers(0, START_STEP_SIZES, starts.shape) * rng.choice((-1, 1), starts.shape)
        near = np.clip(starts + step, 0, self.layers - 1)
        starts = np.where(chosen & (kind == 0), near, starts)
        starts = np.where(chosen & (kind == 1), rng.integers(0, self.layers, starts.shape), starts)
        others = np.asarray(self.devices, np.intp)[rng.integers(0, len(self.devices), devices.shape)]
        devices = np.where(chosen & (kind == 2), others, devices)
        row, pair = np.arange(count), rng.integers(0, self.groups, (2, count))
        swapped = devices.copy()
        swapped[row, pair[0]], swapped[row, pair[1]] = devices[row, pair[1]], devices[row, pair[0]]
        return self._sort_groups(starts, np.where(kind == 3, swapped, devices))

    def decode(self, genes: Genes) -> PlanRows:
        """Return the device of each layer: that of the last group that starts at or before the layer."""
        starts, devices = self._split_genes(genes)
        group = (starts[:, :, None] <= np.arange(self.layers)).sum(axis=1) - 1
        return np.take_along_axis(devices, group, axis=1)

    def encode(self, rows: PlanRows) -> Genes:
        """Return a chromosome for each plan, with a group for each run of consecutive layers on one device.

        If there are too many runs, the shortest are joined to the runs before them. Unused groups come first, empty,
        with devices that have no layers. A single mutation can then give layers to such a device.
        """
        is_start = np.diff(rows, axis=1, prepend=-1) != 0
        self._join_shortest_runs(is_start)
        count = is_start.sum(axis=1)
        plan, layer = np.nonzero(is_start)
        group = (self.groups - count)[plan] + (is_start.cumsum(axis=1) - 1)[plan, layer]
        starts, devices = np.zeros((len(rows), self.groups), np.intp), self._unused_devices(rows)
        starts[plan, group], devices[plan, group] = layer, rows[plan, layer]
        return np.concatenate((starts, devices), axis=1)

    def _join_shortest_runs(self, is_start: NDArray[np.bool_]) -> None:
        """Join the shortest runs to the runs before them, until no plan has more runs than groups.

        `is_start` has the shape (plans, layers). It is True where a run starts, and is changed in place.
        """
        layers = np.arange(self.layers)
        while len(plans := np.flatnonzero(is_start.sum(axis=1) > self.groups)):
            starts = np.where(is_start[plans], layers, self.layers)
            next_starts = np.full_like(starts, self.layers)
            next_starts[:, :-1] = np.minimum.accumulate(starts[:, :0:-1], axis=1)[:, ::-1]
            lengths = np.where(is_start[plans], next_starts - layers, self.layers)
            is_start[plans, 1 + lengths[:, 1:].argmin(axis=1)] = False

    def _unused_devices(self, rows: PlanRows) -> Genes:
        """Return the devices without layers of each plan, repeated cyclically, shape (plans, groups).

        If all devices have layers, all are returned.
        """
        devices = np.asarray(self.devices, np.intp)
        is_unused = (rows[:, :, None] != devices).all(axis=1)
        is_unused[~is_unused.any(axis=1)] = True
        unused_first = np.argsort(~is_unused, axis=1, kind="stable")
        indices = np.arange(self.groups) % is_unused.sum(axis=1, keepdims=True)
        return devices[np.take_along_axis(unused_first, indices, axis=1)]

    def _split_genes(self, genes: Genes) -> tuple[Genes, Genes]:
        return genes[:, : self.groups], genes[:, self.groups :]

    def _sort_groups(self, starts: Genes, devices: Genes) -> Genes:
        order = np.argsort(starts, axis=1, kind="stable")
        starts, devices = (np.take_along_axis(array, order, axis=1) for array in (starts, devices))
        starts[:, 0] = 0
        return np.concatenate((starts, devices), axis=1)


@dataclass(frozen=True)
class ChoiceEncoding(Encoding):
    """The encoding of tiled plans: for every layer, the index of one of its choices (ways to split it).

    The label of a choice names the kind of split and the number of devices, such as "height 4". Random plans and
    mutations use the same label for consecutive layers, because fewer bytes are then sent between them.

    Attributes:
        labels: Labels of all choices of each layer.
        allowed: For each layer, the indices of the choices that may be used.
    """

    labels: tuple[tuple[str, ...], ...]
    allowed: tuple[tuple[int, ...], ...]

    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        """Return `count` random plans of up to four runs, in each of which the layers are split in the same way.

        A layer that cannot be split in this way uses its first allowed choice.
        """
        genes = np.tile(np.array([allowed[0] for allowed in self.allowed], np.intp), (count, 1))
        for row in genes:
            cuts = np.sort(rng.integers(0, self.layers, rng.integers(0, 4)))
            for start, stop in zip((0, *cuts), (*cuts, self.layers), strict=True):
                self._apply_label(rng, row, int(start), int(stop))
        return genes

    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        """Return the plans, each with a new choice (way to split) for one layer or for a short run of layers."""
        genes = genes.copy()
        for row in genes:
            start = int(rng.integers(0, self.layers))
            length = 1 if rng.random() < 0.5 else 1 + int(rng.integers(1, max(2, self.layers // 4) + 1))
            self._apply_label(rng, row, start, min(self.layers, start + length))
        return genes

    def uniform_plans(self) -> PlanRows:
        """Return one plan for each label such as "height 4", in which every layer with such a choice uses it.

        The other layers use their first allowed choice.
        """
        pairs = list(zip(self.labels, self.allowed, strict=True))
        names = dict.fromkeys(labels[number] for labels, allowed in pairs for number in allowed)
        rows = [[_find_label(labels, allowed, name) for labels, allowed in pairs] for name in names]
        return np.array([[self.allowed[i][0] if n is None else n for i, n in enumerate(row)] for row in rows], np.intp)

    def _apply_label(self, rng: np.random.Generator, row: Genes, start: int, stop: int) -> None:
        """Set layers `start` to `stop` − 1 of a plan to choices with the same random label, such as "height 4".

        Layers without such a choice stay as they are.
        """
        if start == stop:
            return
        example = int(rng.integers(start, stop))
        label = self.labels[example][self.allowed[example][rng.integers(0, len(self.allowed[example]))]]
        for layer in range(start, stop):
            number = _find_label(self.labels[layer], self.allowed[layer], label)
            if number is not None:
                row[layer] = number


def _find_label(labels: Sequence[str], allowed: Sequence[int], label: str) -> int | None:
    return next((number for number in allowed if labels[number] == label), None)
