"""Chromosomes: integer genes that encode plans, with crossover and mutation.

A decoded plan is a row (L,) of integers: for each layer the platform position of its device, or the number of a choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Genes = NDArray[np.intp]
"""A chromosome (P, G) or a decoded plan (P, L) in each row."""


START_STEP_SIZES = 4
"""Number of step sizes by which a mutation moves the start of a group: 1, 2, 4, … layers."""


@dataclass(frozen=True)
class Encoding(ABC):
    """A kind of chromosome."""

    layers: int

    @abstractmethod
    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        """Return `count` random chromosomes."""

    @abstractmethod
    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        """Return each chromosome with one or a few genes changed."""

    def decode(self, genes: Genes) -> Genes:
        """Return the plans (P, L) of chromosomes; by default the genes are the plan."""
        return genes

    def encode(self, rows: Genes) -> Genes:
        """Return chromosomes of plans (P, L), or similar ones if the encoding cannot express a plan."""
        return rows

    def cross(self, rng: np.random.Generator, mothers: Genes, fathers: Genes) -> Genes:
        """Return children with the father's genes between two random positions, and the mother's elsewhere."""
        inside = _random_spans(rng, len(mothers), mothers.shape[1])
        return np.where(inside, fathers, mothers)


def _random_spans(rng: np.random.Generator, count: int, length: int) -> NDArray[np.bool_]:
    """Return a mask (count, length) that is True between two random positions of each row."""
    ends = np.sort(rng.integers(0, length + 1, (count, 2)), axis=1)
    at = np.arange(length)
    return (at >= ends[:, :1]) & (at < ends[:, 1:])


def _random_mask(rng: np.random.Generator, count: int, length: int) -> NDArray[np.bool_]:
    """Return a mask, True at one random position of each row and elsewhere with probability 1 / length."""
    chosen = rng.random((count, length)) < 1 / length
    chosen[np.arange(count), rng.integers(0, length, count)] = True
    return chosen


@dataclass(frozen=True)
class NaiveEncoding(Encoding):
    """AutoDiCE's naive encoding: the device of every layer.

    1 1 2 2 3 4 4 4     eight layers on four devices
    """

    devices: tuple[int, ...]

    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        return np.asarray(self.devices, np.intp)[rng.integers(0, len(self.devices), (count, self.layers))]

    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        return np.where(_random_mask(rng, *genes.shape), self.sample(rng, len(genes)), genes)


@dataclass(frozen=True)
class SplitPointEncoding(Encoding):
    """AutoDiCE's split-point encoding: the first layer and the device of each group of layers.

        starts 0 2 4 5 | devices 1 2 3 4   means   1 1 2 2 3 4 4 4

    A group keeps its device when its start moves. A new start therefore takes the end of one group and leaves all
    others unchanged. Starts are sorted and the first is 0; a group that starts where the next one starts is empty.
    """

    devices: tuple[int, ...]
    groups: int

    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        """Return random starts, with the devices in random order, each as often as there are groups for it."""
        starts = rng.integers(0, self.layers, (count, self.groups))
        turns = -(-self.groups // len(self.devices))
        devices = np.tile(np.asarray(self.devices, np.intp), (count, turns))
        return self._sort_groups(starts, rng.permuted(devices, axis=1)[:, : self.groups])

    def cross(self, rng: np.random.Generator, mothers: Genes, fathers: Genes) -> Genes:
        """Return children with the father's layers between two random positions, and the mother's elsewhere."""
        inside = _random_spans(rng, len(mothers), self.layers)
        return self.encode(np.where(inside, self.decode(fathers), self.decode(mothers)))

    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        """Change one or a few groups.

        A start moves a little or anywhere, a device changes, or two groups swap devices.
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

    def decode(self, genes: Genes) -> Genes:
        """Return each layer on the device of the last group that has started."""
        starts, devices = self._split_genes(genes)
        group = (starts[:, :, None] <= np.arange(self.layers)).sum(axis=1) - 1
        return np.take_along_axis(devices, group, axis=1)

    def encode(self, rows: Genes) -> Genes:
        """Return the runs of each plan; if there are more runs than groups, the shortest join the run before.

        Unused groups are empty at the front, with devices that have no layer yet, so that one mutation activates them.
        """
        genes = np.empty((len(rows), 2 * self.groups), np.intp)
        for i, row in enumerate(rows):
            starts = np.concatenate(([0], np.flatnonzero(np.diff(row)) + 1))
            while len(starts) > self.groups:
                lengths = np.diff(starts, append=self.layers)
                starts = np.delete(starts, 1 + lengths[1:].argmin())
            idle = self.groups - len(starts)
            free = [device for device in self.devices if device not in row] or list(self.devices)
            spare = np.resize(np.asarray(free, np.intp), idle)
            genes[i] = np.concatenate((np.zeros(idle, np.intp), starts, spare, row[starts]))
        return genes

    def _split_genes(self, genes: Genes) -> tuple[Genes, Genes]:
        return genes[:, : self.groups], genes[:, self.groups :]

    def _sort_groups(self, starts: Genes, devices: Genes) -> Genes:
        order = np.argsort(starts, axis=1, kind="stable")
        starts, devices = (np.take_along_axis(array, order, axis=1) for array in (starts, devices))
        starts[:, 0] = 0
        return np.concatenate((starts, devices), axis=1)


@dataclass(frozen=True)
class ChoiceEncoding(Encoding):
    """Tiled plans: for every layer the number of one of its choices.

    Equal labels in consecutive layers save transfers. Random plans and mutations therefore give runs of layers choices
    with the same label.

    Attributes:
        labels: Labels of all choices of each layer.
        allowed: Numbers of the choices that may be used, for each layer.
    """

    labels: tuple[tuple[str, ...], ...]
    allowed: tuple[tuple[int, ...], ...]

    def sample(self, rng: np.random.Generator, count: int) -> Genes:
        """Return plans with up to four runs of layers with one label each.

        Layers without the label use their first choice.
        """
        genes = np.tile(np.array([allowed[0] for allowed in self.allowed], np.intp), (count, 1))
        for row in genes:
            cuts = np.sort(rng.integers(0, self.layers, rng.integers(0, 4)))
            for start, stop in zip((0, *cuts), (*cuts, self.layers), strict=True):
                self._apply_label(rng, row, int(start), int(stop))
        return genes

    def mutate(self, rng: np.random.Generator, genes: Genes) -> Genes:
        """Change one layer's choice, or in half of the cases give a short run of layers one label."""
        genes = genes.copy()
        for row in genes:
            start = int(rng.integers(0, self.layers))
            length = 1 if rng.random() < 0.5 else 1 + int(rng.integers(1, max(2, self.layers // 4) + 1))
            self._apply_label(rng, row, start, min(self.layers, start + length))
        return genes

    def uniform_plans(self) -> Genes:
        """Return for each label the plan (labels, L) in which every layer uses it if it can.

        Labels are in order of appearance.
        """
        names = dict.fromkeys(
            labels[number] for labels, allowed in zip(self.labels, self.allowed, strict=True) for number in allowed
        )
        pairs = list(zip(self.labels, self.allowed, strict=True))
        rows = [[_find_label(labels, allowed, name) for labels, allowed in pairs] for name in names]
        return np.array([[self.allowed[i][0] if n is None else n for i, n in enumerate(row)] for row in rows], np.intp)

    def _apply_label(self, rng: np.random.Generator, row: Genes, start: int, stop: int) -> None:
        """Give the layers start..stop choices with the label of a random choice of one of them."""
        if start == stop:
            return
        model = int(rng.integers(start, stop))
        label = self.labels[model][self.allowed[model][rng.integers(0, len(self.allowed[model]))]]
        for layer in range(start, stop):
            number = _find_label(self.labels[layer], self.allowed[layer], label)
            if number is not None:
                row[layer] = number


def _find_label(labels: Sequence[str], allowed: Sequence[int], label: str) -> int | None:
    return next((number for number in allowed if labels[number] == label), None)
